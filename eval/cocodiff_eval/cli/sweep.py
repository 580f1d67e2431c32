"""The command `cocodiff sweep`: `inpaint` with the presets of a grid, and their figures in common tables.

Ranks start once and load the model once. A sweep that was killed continues if it is started again.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.config.config import load_chunk_table
from cocodiff.config.errors import UserError
from cocodiff.jobs.options import Option, check_counts, check_strength, parse, with_settings
from cocodiff.jobs.ranks import settle
from cocodiff.jobs.terminal import say
from cocodiff.models.family import INPAINT
from cocodiff.topology import Topology
from cocodiff_eval.cli.inpaint import OPTIONS as OF_INPAINT
from cocodiff_eval.cli.inpaint import SHOWN, SLICE_BY_SLICE
from cocodiff_eval.harness.grid import SECTIONS, Point, SweepGrid, read_grid
from cocodiff_eval.harness.pipelines import Request
from cocodiff_eval.harness.quality import BOUND_OPTIONS
from cocodiff_eval.harness.replicas import topology_of_replica
from cocodiff_eval.harness.session import Prepared, start_job

ABOUT = "Run a grid of settings (base, grid and points of the --config file) and compare each with the exact run."
# Options of inpaint that a sweep fixes: it restores each slice once along z, and compares all with the exact run.
FIXED = {**SLICE_BY_SLICE, "exact": True, "exact_slices": 10**9}
LEFT_AWAY = (*FIXED, "preset", "fresh_noise", *(one.name for one in BOUND_OPTIONS))
CHANGED: dict[str, dict[str, Any]] = {
    "input": {"required": False},  # --report_only needs none
    "mask": {"help": "block, center or mask files; by default the file's", "default": None},
    "steps": {"help": "steps that run; one or more numbers; by default the file's", "default": None, "many": True},
    "parallel": {"default": "off"},  # by default bytes and seconds are those of a preset on all ranks
    "resume": {"default": True},
    "out": {"default": "sweep"},
    "overwrite": {"help": "start afresh where a sweep has been"},
}
OPTIONS = (
    *(replace(one, **CHANGED.get(one.name, {})) for one in OF_INPAINT if one.name not in LEFT_AWAY),
    Option("report_only", "compare what --out holds already (and run nothing)", False, type=bool),
)


def start(words: Sequence[str], launch: Launch) -> int:
    """Run the command `cocodiff sweep` on this rank. Return its exit code.

    Args:
        words: the words of the command line after `sweep`.
        launch: the start of this process, alone or as one of a launcher's ranks.
    """
    started = time.monotonic()
    # Settings that a sweep varies come from the grid's points, so they are no options of the command.
    options = with_settings(OPTIONS, lambda one: one.given != "sweep")
    values = parse("sweep", ABOUT, options, words, (*SECTIONS, *FIXED), SHOWN)
    if values["report_only"]:
        if launch.speaks:
            report(Path(values["out"]))
        return 0
    launch, ranks = settle(values, launch)
    check_request(values)
    grid = read_grid(values)
    values |= {**FIXED, "steps": grid.steps, "mask": grid.masks, "resume": values["resume"] and not values["overwrite"]}
    if launch.speaks:
        what = f"sweep of {len(grid.points)} point(s) on {ranks} rank(s) into {values['out']}"
        say(f"cocodiff {__version__}: {what}; reading {len(values['input'])} input(s)")
    from cocodiff_eval.harness.tasks import values_to_compare  # imports the libraries that read files

    prepared, tasks = prepare(values, grid, ranks, started)
    job, given = "cocodiff_eval.harness.sweep:SweepJob", (tasks, grid)
    return start_job(prepared, launch, "slices", job, given, values_to_compare(tasks))


def check_request(values: dict[str, Any]) -> None:
    """Raise UserError if the options of a sweep are wrong whatever its grid, machine and model are.

    Args:
        values: the options' values by name.
    """
    for name, value in FIXED.items():
        if values[name] not in (None, value):
            raise UserError(f"{name}: a sweep has {value}, and not {reprlib.repr(values[name])}: leave it away")
    if not any(values[section] for section in SECTIONS):
        raise UserError("nothing to sweep: name a file with base, grid or points: --config configs/sweeps/quality.yaml")
    if not values["input"]:
        raise UserError("--input is missing: slices; see cocodiff sweep --help")
    check_counts(values, "batch", "ranks")


def prepare(values: dict[str, Any], grid: SweepGrid, ranks: int, started: float) -> tuple[Prepared, list[Any]]:
    """Check the request of a sweep. Return the job, which is not started, and its tasks.

    A task is an input, a mask and a number of steps. Raise UserError if the job cannot be run. Nothing is written.

    Args:
        values: the options' values by name.
        grid: the sweep's points, masks and numbers of steps.
        ranks: number of ranks.
        started: time at which the command began, as of `time.monotonic`.
    """
    check_counts(values, "steps")
    check_strength(values["strength"], grid.steps)
    request = Request(values["model"], INPAINT, (values["prompt"],), values["guidance"])
    prepared = Prepared.checked(values, ranks, request, started, presets=grid.presets)
    lossy = [point.name for point in grid.points if point.lossy]
    if ranks == 1 and lossy:
        raise UserError(
            f"V-Major selects nothing on one rank and a codec codes nothing, so {len(lossy)} point(s) ({lossy[0]}, "
            f"...) would be exact: start 2 ranks or more for each replica with --ranks, mpiexec or torchrun"
        )
    from cocodiff_eval.harness.tasks import describe_inputs, find_tasks

    once = find_tasks(values)
    images = sum(sum(task.mask.masked) for task in once)
    prepared = prepared.partitioned(images=images, batch=values["batch"] or 1, steps=sum(grid.steps))
    topology = topology_of_replica(values, ranks, prepared.partition.replicas)
    for point in grid.points:
        check_point(point, topology)
    tasks = [replace(task, steps=steps) for task in once for steps in grid.steps]
    return replace(prepared, inputs=partial(describe_inputs, tasks, values)), tasks


def check_point(point: Point, topology: Topology) -> None:
    """Raise UserError for a point of a sweep that cannot run on a replica's ranks.

    That is a ring that does not divide the ranks, or `chunks: auto` on a machine without a table for it.

    Args:
        point: a named set of settings of the engine.
        topology: the ranks of a replica.
    """
    from cocodiff.topology.axes import Mesh

    try:
        if point.config.ring != "auto":
            Mesh.build(topology, int(point.config.ring))
        if point.config.chunks == "auto":
            load_chunk_table(topology.machine.name, topology.nodes)
    except UserError as error:
        raise UserError(f"point {point.name}: {error}") from error


def report(folder: Path) -> None:
    """Draw the picture of a finished sweep again, and print its tables: the command with `--report_only`.

    Raise UserError if there are no results.

    Args:
        folder: the sweep's folder of results.
    """
    from cocodiff.jobs.folder import storage_faults
    from cocodiff_eval.report.sweeps import PARETO, read_rows, save_pareto, told

    rows = read_rows(folder)
    with storage_faults(f"the picture of {folder}"):
        save_pareto(folder / PARETO, rows)
    say(f"\n{told(rows)}\n\npicture: {folder / PARETO}")

"""`cocodiff sweep`: a grid of settings over slices, a result line for each run, and what they say together.

Ranks start once and load the model once. A killed sweep, started again, goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cocodiff import __version__
from cocodiff.cli.inpaint import OPTIONS as OF_INPAINT
from cocodiff.cli.inpaint import SHOWN, find_tasks
from cocodiff.comm.launch import Launch
from cocodiff.config import load_chunk_table
from cocodiff.console.options import Option, check_counts, check_strength, parse, with_settings
from cocodiff.console.terminal import note, say
from cocodiff.errors import UserError
from cocodiff.jobs.deal import deal_of
from cocodiff.jobs.quality import BOUND_OPTIONS
from cocodiff.jobs.record import REMEMBERED, as_read, described_inputs, lasting
from cocodiff.jobs.replicas import topology_of_replica
from cocodiff.jobs.session import import_before_fork, settle
from cocodiff.jobs.sweep.lines import REPORTS, check_folder, check_reportable, read_results
from cocodiff.jobs.sweep.points import SECTIONS, Grid, Point, Sweep, read_grid
from cocodiff.loading.pipelines import Request, check_model
from cocodiff.models.family import INPAINT
from cocodiff.outputs.folder import storage_faults
from cocodiff.processes.ranks import run_ranks
from cocodiff.topology.machine import Topology

ABOUT = "Run a grid of settings (base, grid and points of the --config file) and compare each with the exact run."
OF_VOLUMES = ("samples", "axes", "hidden_test", "method", "keep_samples")
LEFT_AWAY = ("exact", "exact_slices", "preset", "resume", *OF_VOLUMES, *(one.name for one in BOUND_OPTIONS))
CHANGED: dict[str, dict[str, Any]] = {
    "input": {"required": False},  # --report_only needs none
    "mask": {"help": "block, center or mask files; by default the file's", "default": None},
    "steps": {"help": "steps that run; one or more numbers; by default the file's", "default": None, "many": True},
    "parallel": {"default": "off"},  # a point's bytes and seconds are those of its preset on all ranks, unless told
    "out": {"default": "sweep"},
    "overwrite": {"help": "start afresh where a sweep has been"},
}
OPTIONS = (
    *(replace(one, **CHANGED.get(one.name, {})) for one in OF_INPAINT if one.name not in LEFT_AWAY),
    Option("report_only", "compare what --out holds already (and run nothing)", False, type=bool),
)


def start(words: Sequence[str], launch: Launch) -> int:
    started = time.monotonic()
    # what a sweep varies is the points' business
    options = with_settings(OPTIONS, lambda one: one.given != "sweep")
    values = parse("sweep", ABOUT, options, words, SECTIONS, SHOWN)
    if values["report_only"]:
        if launch.speaks:
            report(Path(values["out"]))
        return 0
    ranks = settle(values, launch)
    check_request(values)
    grid = read_grid(values)
    if launch.speaks:
        what = f"sweep of {len(grid.points)} point(s) on {ranks} rank(s) into {values['out']}"
        say(f"cocodiff {__version__}: {what}; reading {len(values['input'])} input(s)")
    sweep = prepare(values, grid, ranks, started)
    if values["dry_run"]:
        return 0
    if launch.speaks and not values["quiet"]:
        note(f"{sweep.settings['lines']} runs; importing torch and diffusers, loading the model: {values['model']}")
    if launch.kind == "alone":
        import_before_fork(sweep.request)
    alike = {name: str(value) for name, value in values.items() if name != "ranks"} | {"sweep": str(sweep.settings)}
    config = sweep.grid.points[0].config
    left = "finished runs are kept: start again to go on"
    code = run_ranks(values["ranks"], launch, config, alike, partial(work, sweep), lambda: left)
    if code == 0 and launch.speaks:
        report(Path(values["out"]))
    return code


def check_request(values: dict[str, Any]) -> None:
    """Raises UserError for what no grid, machine or model need be known for."""
    if not any(values[section] for section in SECTIONS):
        raise UserError("nothing to sweep: name a file with base, grid or points: --config configs/sweeps/quality.yaml")
    if not values["input"]:
        raise UserError("--input is missing: slices; see cocodiff sweep --help")
    check_counts(values, "batch", "ranks")


def prepare(values: dict[str, Any], grid: Grid, ranks: int, started: float) -> Sweep:
    """Checks the request against machine, model and output. Raises UserError; writes nothing."""
    check_counts({"steps": grid.steps}, "steps")
    check_strength(values["strength"], grid.steps)
    request = Request(values["model"], INPAINT, (values["prompt"],), values["guidance"])
    check_model(request, 1, weights=not values["dry_run"])
    tasks = find_tasks({**values, "mask": grid.masks})
    lossy = [point.name for point in grid.points if point.lossy]
    if ranks == 1 and lossy:
        raise UserError(
            f"V-Major selects nothing on one rank and a codec codes nothing, so {len(lossy)} point(s) ({lossy[0]}, "
            f"...) would be exact: start 2 ranks or more for each replica with --ranks, mpiexec or torchrun"
        )
    deal = deal_of(
        values,
        request,
        [point.config for point in grid.points],
        ranks,
        images=sum(task.mask.masked for task in tasks),
        batch=values["batch"] or 1,
        steps=sum(grid.steps),
    )
    topology = topology_of_replica(values, ranks, deal.replicas)
    for point in grid.points:
        check_point(point, topology)
    check_model(request, topology.size, weights=not values["dry_run"])
    settings = describe(values, topology.size, grid, tasks)
    check_folder(values["out"], settings, values["overwrite"])
    return Sweep(values, request, grid, tasks, settings, started, deal)


def check_point(point: Point, topology: Topology) -> None:
    """Raises UserError for a ring that does not divide the ranks, and `chunks: auto` on a machine without a table."""
    from cocodiff.topology.axes import Mesh

    try:
        if point.config.ring != "auto":
            Mesh.build(topology, int(point.config.ring))
        if point.config.chunks == "auto":
            load_chunk_table(topology.machine.name, topology.nodes)
    except UserError as error:
        raise UserError(f"point {point.name}: {error}") from error


def describe(values: dict[str, Any], ranks: int, grid: Grid, tasks: list[Any]) -> dict[str, Any]:
    """A sweep as plain data: all that its results depend on, and how many lines it will have. ranks: of a replica."""
    described = {
        "cocodiff": __version__,
        "ranks": ranks,
        **{name: values[name] for name in REMEMBERED if name in values},
        "steps": grid.steps,
        "points": [{"name": p.name, **lasting(p.config)} for p in grid.points],
        "inputs": described_inputs(tasks),
        "lines": sum(task.mask.masked for task in tasks) * len(grid.steps) * len(grid.points),
    }
    return as_read(described)


def work(sweep: Sweep, transport: Any) -> None:
    from cocodiff.jobs.sweep.runs import run_sweep

    run_sweep(sweep, transport)


def report(folder: Path) -> None:
    """Writes the reports of the lines that a folder holds, and prints their tables. Raises UserError for no lines."""
    results = read_results(folder)
    if not results.lines:
        raise UserError(f"{folder} holds no results yet: start the sweep without --report-only")
    from cocodiff_eval.sweep_report import FACTS, write_page
    from cocodiff_eval.sweep_summary import cost_table, quality_table, summarise

    check_reportable(folder, results, FACTS)
    rows = summarise(results.lines)
    with storage_faults(f"the reports of {folder}"):
        write_page(folder, rows, results.settings, len(results.lines))
    say()
    say(quality_table(rows))
    say()
    say(cost_table(rows))
    missing = results.settings["lines"] - len(results.lines)
    if missing:
        say(f"\n{missing} of {results.settings['lines']} runs are not done yet")
    say(f"\nreport: {', '.join(str(folder / name) for name in REPORTS)}")

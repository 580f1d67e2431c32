"""`cocodiff plan --paper`: the CoCoDiff paper's cases, planned on a machine that is fitted to its Figure 11.

Three constants are fitted to Figure 11 alone: a message's latency, and the parts of their nominal rates that links on a
card and all slower links reach. Everything else is predicted with them. Nothing is fitted to the predicted figures,
which `cocodiff papers` makes from these rows (configs/papers/cocodiff.yaml).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from cocodiff.config.config import Config, load_machine
from cocodiff.config.machine import Machine
from cocodiff.config.text_table import aligned
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.terminal import say
from cocodiff.planner.case import Case, ModelShape
from cocodiff.planner.layers import plan_step
from cocodiff.planner.memory import fullest, largest_batch
from cocodiff.planner.traffic import Constants, PlannedAllToAll
from cocodiff.topology import Topology

START = (15.0, 1.0, 1.0)  # latency in us, parts of the rates of siblings and of slower links, where a fit begins
BASELINES = ("flat_serial", "flat")  # one peer at a time, and all at once
LARGEST_BATCH = 32  # the paper's largest batch
VARIANTS = (*BASELINES, "tapa", "v_first", "cocodiff")
FIXED = tuple(f"{tenths / 10:g}" for tenths in range(1, 10))  # fixed parts of the tokens that stay, in Figure 10


@dataclass(frozen=True)
class PaperTime:
    """A time of an all-to-all that the paper gives, or a ratio of two, which a fit has to reproduce."""

    variant: str  # name of an exchange, or "flat_serial": to one peer at a time
    size_mb: float  # MB per rank, including its block for itself
    value: float  # seconds; a ratio if `over` is given
    part: str = "whole"  # "whole", or "phase1" or "phase2" of tapa
    over: PaperTime | None = None  # the measurement to which `value` is the ratio


def figure_11(baseline: str) -> dict[str, PaperTime]:
    """Return the measurements that the paper's text gives for Figure 11, by name.

    A message size is read as a rank's whole tensor: 14 MB in the paper's running example, where each of q, k and v has
    14.2 MB. Phase 1 "stays at 0.3-0.5 ms" from 3 to 48 MB; phase 2 takes 6.0 and oneCCL 25.5 ms at 48 MB; oneCCL over
    TAPA is 3.0 at 24 MB and 1 at 6 MB.

    Args:
        baseline: the exchange of ours that oneCCL is taken to be: "flat", or "flat_serial", to one peer at a time.
    """
    return {
        "TAPA, phase 1, 3 MB": PaperTime("tapa", 3, 0.3e-3, "phase1"),
        "TAPA, phase 1, 48 MB": PaperTime("tapa", 48, 0.5e-3, "phase1"),
        "TAPA, phase 2, 48 MB": PaperTime("tapa", 48, 6.0e-3, "phase2"),
        "oneCCL, 48 MB": PaperTime(baseline, 48, 25.5e-3),
        "oneCCL over TAPA, 24 MB": PaperTime(baseline, 24, 3.0, over=PaperTime("tapa", 24, 0.0)),
        "oneCCL over TAPA, 6 MB": PaperTime(baseline, 6, 1.0, over=PaperTime("tapa", 6, 0.0)),
    }


class Fit(NamedTuple):
    """A machine's constants that reproduce Figure 11 best, and how well they do."""

    constants: Constants  # fitted latency, and parts of nominal rates that links reach
    predicted: list[float]  # seconds, or a ratio, for every measurement of `figure_11`
    rms: float  # the root mean square of the relative errors, as logarithms


def fit_figure_11(machine: Machine, baseline: str = "flat_serial") -> Fit:
    """Fit the constants of one of the machine's nodes to Figure 11, by least squares of logarithms.

    As the figure is of one node, NICs are assumed to reach the same part of their rate as Xe Links.

    Args:
        machine: the machine, with nominal rates.
        baseline: the exchange that oneCCL is taken to be, as for `figure_11`.
    """
    topology = Topology.build(replace(machine, nodes=None), machine.tiles_per_node or 12)
    measured, exchange = figure_11(baseline).values(), cache(partial(PlannedAllToAll, topology))

    def constants_of(x: np.ndarray) -> Constants:
        latency_us, sibling, slower = np.exp(x).tolist()
        return Constants(latency_us, 0.0, sibling, slower, slower)

    def seconds(one: PaperTime, machine: Machine) -> float:
        found = exchange(one.variant, one.size_mb).seconds(machine, one.part)
        return found / seconds(one.over, machine) if one.over is not None else found

    def predicted(x: np.ndarray) -> list[float]:
        of_machine = constants_of(x).machine(topology.machine)
        return [seconds(one, of_machine) for one in measured]

    target = np.log([one.value for one in measured])
    found = least_squares(lambda x: np.log(predicted(x)) - target, np.log(START))
    return Fit(constants_of(found.x), predicted(found.x), float(np.sqrt(np.mean(found.fun**2))))


class PaperCase(NamedTuple):
    """A case of the CoCoDiff paper: a model that makes images of one size on some nodes."""

    model: str  # a name in configs/models
    size: int  # pixels of the image's side
    nodes: int  # number of nodes
    batch: int | None = 1  # images in a call; None: as many as the planned memory holds, at most LARGEST_BATCH


MODELS = ("sd3.5-paper", "qwen-image", "flux.1", "flux.2")
SIZES = (768, 1536, 2304)
FIGURE_10 = "figure 10"
CASES = {
    "one node": [PaperCase(model, size, 1, batch) for model in MODELS for size in SIZES for batch in (1, 2, 4)],
    # Of 8 nodes the paper has one size: its rows of tokens do not divide otherwise.
    "several nodes": [
        PaperCase(model, size, nodes, None)
        for model in MODELS
        for nodes, sizes in ((2, SIZES), (4, SIZES), (8, (1536,)))
        for size in sizes
    ],
    "besides": [
        PaperCase("qwen-image", 768, 2),
        PaperCase("qwen-image", 2304, 2),
        PaperCase("sd3.5-paper", 1536, 1, None),
    ],
    FIGURE_10: [PaperCase("sd3.5-paper", 768, 1)],
}
DEGREES = {1: 12, 2: 24, 4: 48, 8: 48}  # the paper's degree of Ulysses, by nodes


class Planned:
    """The predicted step times of the paper's cases on one machine."""

    def __init__(self, machine: Machine, shape_of: Callable[[str], ModelShape] = load_shape) -> None:
        self.machine, self._shape_of = replace(machine, nodes=None), cache(shape_of)

    def rows(self, where: str, run: PaperCase) -> Iterator[dict[str, Any]]:
        """Yield one row for each variant of a case; none if CoCoDiff's caches do not fit a tile beside the rest.

        A row has the case's fields, the variant, the seconds of a step and communication's share of it.

        Args:
            where: the kind of cases, a key of CASES.
            run: the case.
        """
        memory, case = self.machine.device.memory or 0, self._case(run, "cocodiff")
        if run.batch is None:
            run = run._replace(batch=min(LARGEST_BATCH, largest_batch(case, memory)))
            case = self._case(run, "cocodiff")
        if not run.batch or fullest(case).total > memory:
            return
        for variant in (*VARIANTS, *(FIXED if where == FIGURE_10 else ())):
            plan = plan_step(self._case(run, variant))
            times = {"step_s": plan.step_s, "communication_share": plan.communication_share}
            yield {"cases": where} | run._asdict() | {"variant": variant} | times

    def _case(self, run: PaperCase, variant: str) -> Case:
        """Return the planner's description of a case. Ranks beyond the paper's degree of Ulysses, or beyond the heads,
        form rings.

        Args:
            run: the paper's case.
            variant: a preset, "flat_serial", or as text the part of the tokens that stays in each step of V-Major.
        """
        shape = self._shape_of(run.model)
        topology = Topology.build(self.machine, run.nodes * (self.machine.tiles_per_node or 12))
        most = min(shape.heads, DEGREES.get(run.nodes, 48))
        degree = max(n for n in range(1, most + 1) if topology.size % n == 0)
        settings: dict[str, Any] = {"ring": topology.size // degree, "image_tokens": shape.image_tokens(run.size)}
        if variant in FIXED:
            settings |= {"schedule": "fixed", "ratio": float(variant)}
        preset = "cocodiff" if variant in FIXED else variant.removesuffix("_serial")
        config = Config.preset(preset, machine=self.machine.name, placement="usp", **settings)
        rows = (run.batch or 1) * shape.rows_per_image
        call = shape.segments(run.size), rows, 2, shape.branches
        return Case(shape, topology, config, *call, one_peer=variant == "flat_serial")


def run_paper(values: dict[str, Any]) -> dict[str, Any]:
    """Fit a machine to Figure 11 of the CoCoDiff paper and plan the paper's cases on it. Print both.

    Return the constants that were fitted, the rows of the cases and the quality of the fits, for plan.json.

    Args:
        values: the command's options, of which only `machine` is used.
    """
    machine = load_machine(values["machine"])
    fits = {baseline: fit_figure_11(machine, baseline) for baseline in BASELINES}
    say("\n".join(lines_of(fits)))
    constants = fits["flat_serial"].constants
    # Figure 11 does not give the cost of launches and of the host's waits, nor the library's memory on a tile.
    free = replace(machine, device=replace(machine.device, launch_us=0, wait_us=0, library_mib=0, across_mib=0))
    planned = Planned(constants.machine(free))
    rows = [row for where, runs in CASES.items() for run in runs for row in planned.rows(where, run)]
    say("\nplanned with these constants: ms a step, and in % what the all-to-all takes of it")
    table = [["model", "size", "nodes", "batch", *VARIANTS]]
    shown = [row for row in rows if row["variant"] in VARIANTS]
    for first in range(0, len(shown), len(VARIANTS)):
        of_case = shown[first : first + len(VARIANTS)]
        times = [f"{row['step_s'] * 1e3:.1f} {row['communication_share']:4.0%}" for row in of_case]
        table.append([str(of_case[0][key]) for key in ("model", "size", "nodes", "batch")] + times)
    say("\n".join(aligned(table, "<" + ">" * (len(table[0]) - 1))))
    readings = [{"baseline": name, "rms": one.rms, **one.constants._asdict()} for name, one in fits.items()]
    return {"constants": constants._asdict(), "rows": rows, "readings": readings}


def lines_of(fits: dict[str, Fit]) -> list[str]:
    """Return the lines to print about the fits: the constants for each reading of oneCCL, and paper and plan side by
    side.

    Args:
        fits: by the exchange that oneCCL is taken to be.
    """
    lines = ["Figure 11 fitted with latency_us, sibling, plane (of NICs as of Xe links):"]
    lines.append(f"{'baseline':<26}{'latency us':>11}{'sibling':>9}{'slower':>9}{'rms':>8}")
    for name, one in fits.items():
        c = one.constants
        lines.append(f"{name:<26}{c.latency_us:>11.0f}{c.sibling:>9.3f}{c.plane:>9.3f}{one.rms:>8.0%}")
    lines.append("taken: flat_serial")
    lines.append(f"{'':<26}{'paper':>10}{'plan':>10}{'off by':>9}")
    for (name, said), seconds in zip(figure_11("flat_serial").items(), fits["flat_serial"].predicted, strict=True):
        unit = 1.0 if said.over is not None else 1e3
        lines.append(f"{name:<26}{said.value * unit:>10.2f}{seconds * unit:>10.2f}{seconds / said.value - 1:>9.0%}")
    return lines

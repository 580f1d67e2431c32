"""`cocodiff plan --paper`: the CoCoDiff paper's figures beside what the plan says of the same cases (docs/papers.md).

Three constants are fitted on Figure 11 alone: a message's latency, and the parts of their nominal rates that links on a
card and all slower links reach. Everything else is predicted with them. Nothing is fitted to the predicted figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from cocodiff.config.config import Config, load_machine
from cocodiff.config.machine import Machine, Topology
from cocodiff.engine.assemble import AttentionWork
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.terminal import say
from cocodiff.planner.calibrate import Calibration, Constants, Fit, Measured
from cocodiff.planner.costs import state_sizes
from cocodiff.planner.layers import Case, StepPlan, plan_step
from cocodiff.planner.memory import Load, ModelShape, largest_batch, size_run
from cocodiff.planner.placement import choose
from cocodiff.planner.traffic import Latencies
from cocodiff.topology.axes import Mesh

FITTED = ("latency_us", "sibling", "plane")
TIED = ("plane", "nic")  # Figure 11 is of one node: NICs are taken to reach the same part of their rate as Xe links
BASELINES = ("flat_serial", "flat")
LARGEST_BATCH = 32  # the paper's
CACHES = state_sizes(Config(selection="v_major", scoring="card"))


def figure_11(baseline: str) -> dict[str, Measured]:
    """The statements of the paper's text on Figure 11, with the baseline read as an exchange of ours, and a message
    size as a rank's whole tensor (14 MB in the paper's running example; q, k and v are 14.2 MB). Phase 1 "stays at
    0.3-0.5 ms" from 3 to 48 MB; phase 2 takes 6.0 and oneCCL 25.5 ms at 48 MB; oneCCL over TAPA is 3.0 at 24 MB and 1
    at 6 MB."""
    return {
        "TAPA, phase 1, 3 MB": Measured("tapa", 3, 0.3e-3, "phase1"),
        "TAPA, phase 1, 48 MB": Measured("tapa", 48, 0.5e-3, "phase1"),
        "TAPA, phase 2, 48 MB": Measured("tapa", 48, 6.0e-3, "phase2"),
        "oneCCL, 48 MB": Measured(baseline, 48, 25.5e-3),
        "oneCCL over TAPA, 24 MB": Measured(baseline, 24, 3.0, over=Measured("tapa", 24, 0.0)),
        "oneCCL over TAPA, 6 MB": Measured(baseline, 6, 1.0, over=Measured("tapa", 6, 0.0)),
    }


def fit_figure_11(machine: Machine, baseline: str = "flat_serial") -> Fit:
    topology = Topology.build(replace(machine, nodes=None), machine.tiles_per_node or 12)
    return Calibration(topology, [*figure_11(baseline).values()]).fit(Constants(), FITTED, TIED)


@dataclass(frozen=True)
class Run:
    """One case of the paper. batch None: the largest that the plan's memory holds, at most 32."""

    model: str
    size: int
    nodes: int
    batch: int | None = 1


class Paper:
    """Plans of the paper's cases on the calibrated machine, each made once."""

    def __init__(self, machine: Machine, shape_of: Callable[[str], ModelShape]) -> None:
        """machine: nominal but for its links. Launches are free: Figure 11 does not tell what they cost."""
        self.machine = replace(machine, nodes=None, device=replace(machine.device, launch_us=0.0))
        self._shape_of = shape_of
        self._plans: dict[tuple[Run, str], StepPlan] = {}

    def degree(self, run: Run) -> int:
        """Ranks of a Ulysses group: the paper's, where the model has the heads; the others are in rings."""
        size, most = self._topology(run).size, min(self._shape_of(run.model).heads, DEGREES.get(run.nodes, 48))
        return max(n for n in range(1, most + 1) if size % n == 0)

    def _mesh(self, run: Run) -> Mesh:
        shape, topology = self._shape_of(run.model), self._topology(run)
        return choose(topology, AttentionWork(shape.heads, shape.head_dim), topology.size // self.degree(run))

    def batch(self, run: Run) -> int:
        shape, topology = self._shape_of(run.model), self._topology(run)
        load = Load(shape.segments(run.size), 1, 2, shape.branches, CACHES)
        memory = int(self.machine.device.memory_gib * 2**30)
        return (
            min(LARGEST_BATCH, largest_batch(shape, topology, load, memory, self._mesh(run)))
            if run.batch is None
            else run.batch
        )

    def fits(self, run: Run) -> bool:
        """Whether CoCoDiff's caches fit as well."""
        shape, topology = self._shape_of(run.model), self._topology(run)
        rows = self.batch(run) * shape.rows_per_image
        load = Load(shape.segments(run.size), rows, 2, shape.branches, CACHES)
        memory = self.machine.device.memory_gib * 2**30
        return rows > 0 and max(rank.total for rank in size_run(shape, topology, load, self._mesh(run))) <= memory

    def plan(self, run: Run, variant: str) -> StepPlan:
        """variant: "flat_serial", or a preset."""
        if (run, variant) not in self._plans:
            shape, topology = self._shape_of(run.model), self._topology(run)
            ring = topology.size // self.degree(run)
            config = Config.preset(variant.removesuffix("_serial"), machine=self.machine.name, ring=ring)
            rows = self.batch(run) * shape.rows_per_image
            load = Load(shape.segments(run.size), rows, 2, shape.branches, state_sizes(config))
            case = Case(shape, topology, config, load, one_peer=variant == "flat_serial")
            self._plans[run, variant] = plan_step(case, Latencies.of(self.machine))
        return self._plans[run, variant]

    def speed_up(self, run: Run, variant: str, baseline: str) -> float:
        return self.plan(run, baseline).step_s / self.plan(run, variant).step_s

    def _topology(self, run: Run) -> Topology:
        return Topology.build(self.machine, run.nodes * (self.machine.tiles_per_node or 12))


MODELS = ("sd3.5-paper", "qwen-image", "flux.1", "flux.2")
SIZES = (768, 1536, 2304)
ONE_NODE = tuple(Run(model, size, 1) for model in MODELS for size in SIZES)
MORE_NODES = tuple(Run(model, 1536, nodes, None) for model in MODELS for nodes in (2, 4, 8))
SHARES = (  # Figure 1
    (Run("qwen-image", 768, 1), "64 %"),
    (Run("qwen-image", 2304, 1), "over 80 %"),
    (Run("qwen-image", 768, 2), "96 % (size not said)"),
    (Run("qwen-image", 2304, 2), "96 % (size not said)"),
)
SINGLE = (  # Figure 7b: CoCoDiff over flat
    (Run("qwen-image", 1536, 2, None), 7.1),
    (Run("qwen-image", 1536, 4, None), 1.7),
    (Run("sd3.5-paper", 1536, 4, None), 8.4),
    (Run("sd3.5-paper", 1536, 8, None), 3.8),
)
DEGREES = {1: 12, 2: 24, 4: 48, 8: 48}


def rows_of(paper: Paper, tell: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """The paper's figures beside the plan's, with either baseline; None where nothing fits.

    tell: called with each row as soon as it is there.
    """
    rows = []

    def named(run: Run) -> str:
        nodes = f"{run.nodes} node" + ("s" if run.nodes > 1 else "")
        return f"{run.model} {run.size}, {nodes}, batch {paper.batch(run)}"

    def add(figure: str, what: str, said: str, values: dict[str, float | None]) -> None:
        rows.append({"figure": figure, "what": what, "paper": said, **values})
        tell(rows[-1])

    for run, said in SHARES:
        shares: dict[str, float | None] = {name: paper.plan(run, name).communication_share for name in BASELINES}
        add("1", f"share of all-to-all, {named(run)}", said, shares)
    for variant, one, more in (("tapa", "2.3", "2.2"), ("cocodiff", "2.5", "5.1")):
        for where, runs, said in (("one node", ONE_NODE, one), ("several nodes", MORE_NODES, more)):
            can = [run for run in runs if paper.fits(run)]
            values: dict[str, float | None] = {
                name: mean(paper.speed_up(run, variant, name) for run in can) for name in BASELINES
            }
            add("7", f"{variant} over flat, mean of {len(can)} of {len(runs)} cases on {where}", said, values)
    for run, ratio in SINGLE:
        known = paper.fits(run)
        values = {name: paper.speed_up(run, "cocodiff", name) if known else None for name in BASELINES}
        add("7b", f"cocodiff over flat, {named(run)}", f"{ratio}", values)
    return rows


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


# What is said and written ---------------------------------------------------------------------------------------------


def run_paper(values: dict[str, Any]) -> dict[str, Any]:
    """Says the figures; what stands of them in plan.json."""
    machine = load_machine(values["machine"])
    fits = {baseline: fit_figure_11(machine, baseline) for baseline in BASELINES}
    say("\n".join(lines_of(fits)))
    fit = fits["flat_serial"]
    paper = Paper(fit.constants.machine(machine), cache(load_shape))
    say("\npredicted with these constants; the baseline read as one that serves one peer at a time (flat_serial) and")
    say("as one that serves all at once (flat); ranks beyond the paper's degree of Ulysses, or the heads, are in rings")
    say(f"{'':<66}{'paper':>22}{'flat_serial':>13}{'flat':>8}")
    rows = rows_of(paper, say_row)
    say("degrees of Ulysses in the paper: " + ", ".join(f"{degree} on {n} node(s)" for n, degree in DEGREES.items()))
    return {
        "constants": asdict(fit.constants),
        "rows": rows,
        "readings": [
            {"baseline": name, "rms": rms_of(one, name), **asdict(one.constants)} for name, one in fits.items()
        ],
    }


def say_row(row: dict[str, Any]) -> None:
    shown = [shown_as(row[name], row["figure"] == "1") for name in BASELINES]
    say(f"{row['what']:<66}{row['paper']:>22}{shown[0]:>13}{shown[1]:>8}")


def rms_of(fit: Fit, baseline: str) -> float:
    return fit.rms([*figure_11(baseline).values()])


def lines_of(fits: dict[str, Fit]) -> list[str]:
    """The fits by reading of the baseline, and the table of the one that is taken."""
    lines = [f"Figure 11 fitted with {', '.join(FITTED)} (of NICs as of Xe links):"]
    lines.append(f"{'baseline':<26}{'latency us':>11}{'sibling':>9}{'slower':>9}{'rms':>8}")
    for name, fit in fits.items():
        c = fit.constants
        lines.append(f"{name:<26}{c.latency_us:>11.0f}{c.sibling:>9.3f}{c.plane:>9.3f}{rms_of(fit, name):>8.0%}")
    lines.append("taken: flat_serial")
    lines.append(f"{'':<26}{'paper':>10}{'plan':>10}{'off by':>9}")
    measured = figure_11("flat_serial").items()
    for (name, one), seconds in zip(measured, fits["flat_serial"].predicted, strict=True):
        unit = 1.0 if one.over is not None else 1e3
        lines.append(f"{name:<26}{one.value * unit:>10.2f}{seconds * unit:>10.2f}{seconds / one.value - 1:>9.0%}")
    return lines


def shown_as(value: float | None, share: bool) -> str:
    return "-" if value is None else f"{value:.0%}" if share else f"{value:.2f}"

"""`cocodiff plan --paper`: the CoCoDiff paper's figures beside what the plan says of the same cases (docs/papers.md),
and beside what was measured, where `launch/campaign.pbs` has measured it.

Three constants are fitted on Figure 11 alone: a message's latency, and the parts of their nominal rates that links on a
card and all slower links reach. Everything else is predicted with them. Nothing is fitted to the predicted figures.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cocodiff.config.config import Config, load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine, Topology
from cocodiff.engine.assemble import AttentionWork, mesh_of
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.terminal import say
from cocodiff.planner.calibrate import AllToAll, Calibration, Constants, Fit, Measured, scale_of
from cocodiff.planner.costs import state_sizes
from cocodiff.planner.layers import Case, StepPlan, plan_step
from cocodiff.planner.memory import Load, ModelShape, largest_batch, size_run
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


class Run(NamedTuple):
    """A case. batch None: the largest that the plan's memory holds, at most 32."""

    model: str
    size: int
    nodes: int
    batch: int | None = 1


class Planned:
    """What the plan says of cases on a machine, each planned once. baseline: the exchange that "flat" is read as."""

    def __init__(
        self, machine: Machine, shape_of: Callable[[str], ModelShape], baseline: str = "flat", title: str = ""
    ) -> None:
        self.machine, self.baseline, self.title = replace(machine, nodes=None), baseline, title
        self._shape_of = shape_of
        self._plans: dict[tuple[Run, str], StepPlan] = {}

    def read_as(self, baseline: str, title: str) -> Planned:
        """The same plans, with another reading of the baseline."""
        other = Planned(self.machine, self._shape_of, baseline, title)
        other._plans = self._plans
        return other

    def degree(self, run: Run) -> int:
        """Ranks of a Ulysses group: the paper's, where the model has the heads; the others are in rings."""
        size, most = self._topology(run).size, min(self._shape_of(run.model).heads, DEGREES.get(run.nodes, 48))
        return max(n for n in range(1, most + 1) if size % n == 0)

    def _mesh(self, run: Run) -> Mesh:
        shape, topology = self._shape_of(run.model), self._topology(run)
        config = Config(ring=topology.size // self.degree(run), image_tokens=shape.image_tokens(run.size))
        return mesh_of(config, topology, AttentionWork(shape.heads, shape.head_dim))

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
        """variant: "flat" for the baseline, or a preset."""
        variant = self.baseline if variant == "flat" else variant
        if (run, variant) not in self._plans:
            shape, topology = self._shape_of(run.model), self._topology(run)
            ring = topology.size // self.degree(run)
            named, tokens = variant.removesuffix("_serial"), shape.image_tokens(run.size)
            config = Config.preset(named, machine=self.machine.name, ring=ring, image_tokens=tokens)
            rows = self.batch(run) * shape.rows_per_image
            load = Load(shape.segments(run.size), rows, 2, shape.branches, state_sizes(config))
            case = Case(shape, topology, config, load, one_peer=variant == "flat_serial")
            self._plans[run, variant] = plan_step(case, Latencies.of(self.machine))
        return self._plans[run, variant]

    def step_s(self, run: Run, variant: str) -> float | None:
        return self.plan(run, variant).step_s if self.fits(run) else None

    def share(self, run: Run) -> float | None:
        """Of the baseline's step, what the all-to-all takes."""
        return self.plan(run, "flat").communication_share

    def alltoall_s(self, nodes: int, size_mb: float, variant: str) -> float | None:
        topology = self._topology(Run("", 0, nodes))
        return AllToAll(topology, self.baseline if variant == "flat" else variant, size_mb).seconds(self.machine)

    def gib(self, run: Run, variant: str) -> float | None:
        """Of the fullest tile."""
        shape = self._shape_of(run.model)
        state = state_sizes(Config.preset(variant))
        load = Load(shape.segments(run.size), self.batch(run) * shape.rows_per_image, 2, shape.branches, state)
        return max(rank.total for rank in size_run(shape, self._topology(run), load, self._mesh(run))) / 2**30

    def _topology(self, run: Run) -> Topology:
        return Topology.build(self.machine, run.nodes * (self.machine.tiles_per_node or 12))


MODELS = ("sd3.5-paper", "qwen-image", "flux.1", "flux.2")
SIZES = (768, 1536, 2304)
NODES = (1, 2, 4, 8)
ONE_NODE = tuple(Run(model, size, 1) for model in MODELS for size in SIZES)
MORE_NODES = tuple(Run(model, 1536, nodes, None) for model in MODELS for nodes in NODES[1:])
DEGREES = {1: 12, 2: 24, 4: 48, 8: 48}
REAL = {"sd3.5-paper": "sd3.5"}  # what can be measured in the place of a model that does not exist


class Measurements:
    """What launch/campaign.pbs has measured, in the bench.json of every folder. The baseline is the library's own
    all-to-all, or our flat."""

    def __init__(self, folder: Path, baseline: str, title: str, machine: Machine) -> None:
        self.baseline, self.title = baseline, title
        self._steps: dict[Run, dict[str, Any]] = {}
        self._alltoall: dict[tuple[int, float, str], float] = {}
        for path in sorted(folder.glob("*/bench.json")):
            rows = read_bench(path)
            scale = 1.0
            if rows and "model" not in rows[0]:
                scale = scale_of(rows, Topology.build(machine, rows[0]["nodes"] * (machine.tiles_per_node or 12)))
            for row in rows:
                variant = row["variant"].replace("tapa v_first", "v_first")
                if "model" in row:
                    self._steps.setdefault(Run(row["model"], row["size"], row["nodes"], row["batch"]), {})[variant] = (
                        row
                    )
                else:
                    size = float(row["case"].removesuffix("MB"))
                    self._alltoall[row["nodes"], size, variant] = row["median_s"] / scale

    @property
    def runs(self) -> list[Run]:
        return sorted(self._steps)

    @property
    def exchanges(self) -> list[tuple[int, float]]:
        return sorted({key[:2] for key in self._alltoall})

    def _row(self, run: Run, variant: str) -> dict[str, Any]:
        model = REAL.get(run.model, run.model)
        batches = [
            one.batch for one in self._steps if one[:3] == (model, run.size, run.nodes) and one.batch is not None
        ]
        batch = max(batches, default=None) if run.batch is None else run.batch
        of_run = self._steps.get(Run(model, run.size, run.nodes, batch), {})
        found: dict[str, Any] = of_run.get(self.baseline if variant == "flat" else variant, {})
        return found

    def step_s(self, run: Run, variant: str) -> float | None:
        return self._row(run, variant).get("median_s")

    def share(self, run: Run) -> float | None:
        return self._row(run, "flat").get("communication_share")

    def alltoall_s(self, nodes: int, size_mb: float, variant: str) -> float | None:
        return self._alltoall.get((nodes, size_mb, self.baseline if variant == "flat" else variant))

    def gib(self, run: Run, variant: str) -> float | None:
        peak = self._row(run, variant).get("peak_bytes")
        return None if peak is None else peak / 2**30


def read_bench(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        assert all({"variant", "median_s", "case", "nodes"} <= row.keys() for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(
            f"{path} is no bench.json of launch/campaign.pbs: remove its folder and run that again"
        ) from error
    return rows


class Source(Protocol):
    """Who says something of the paper's cases. None: says nothing of this one."""

    title: str

    def step_s(self, run: Run, variant: str) -> float | None: ...

    def share(self, run: Run) -> float | None: ...

    def alltoall_s(self, nodes: int, size_mb: float, variant: str) -> float | None: ...

    def gib(self, run: Run, variant: str) -> float | None: ...


class Claim(NamedTuple):
    """A figure of the paper, and how it is found in a source. unit: "%", "ms", "GiB", or "" for a ratio."""

    figure: str
    what: str
    paper: str
    of: Callable[[Source], float | None]
    unit: str = ""


def ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def speed_up(run: Run, variant: str, source: Source, over: str = "flat") -> float | None:
    return ratio(source.step_s(run, over), source.step_s(run, variant))


def mean_speed_up(runs: Iterable[Run], variant: str, source: Source, over: str = "flat") -> float | None:
    return mean(found for run in runs if (found := speed_up(run, variant, source, over)) is not None)


def share(run: Run, source: Source) -> float | None:
    return source.share(run)


def gib(run: Run, variant: str, source: Source) -> float | None:
    return source.gib(run, variant)


def flat_over_tapa(nodes: int, size_mb: float, source: Source) -> float | None:
    return ratio(*(source.alltoall_s(nodes, size_mb, variant) for variant in ("flat", "tapa")))


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def alltoall_s(nodes: int, size_mb: float, variant: str, source: Source) -> float | None:
    return source.alltoall_s(nodes, size_mb, variant)


def claims(planned: Planned, measured: Measurements | None) -> Iterator[Claim]:
    """The paper's, and the same of all other cases that were measured."""

    def named(run: Run) -> str:
        nodes = f"{run.nodes} node" + ("s" if run.nodes > 1 else "")
        return f"{Path(run.model).name.removesuffix('.yaml')} {run.size}, {nodes}, batch {planned.batch(run)}"

    shares = [
        (Run("qwen-image", 768, 1), "64 %"),
        (Run("qwen-image", 2304, 1), "over 80 %"),
        (Run("qwen-image", 768, 2), "96 % (size not said)"),
        (Run("qwen-image", 2304, 2), "96 % (size not said)"),
    ]
    for run, said in shares:
        yield Claim("1", f"share of all-to-all, {named(run)}", said, partial(share, run), "%")
    for variant, one, more in (("tapa", "2.3", "2.2"), ("cocodiff", "2.5", "5.1")):
        for where, runs, said in (("one node", ONE_NODE, one), ("several nodes", MORE_NODES, more)):
            what = f"{variant} over flat, mean of {sum(map(planned.fits, runs))} of {len(runs)} cases on {where}"
            yield Claim("7", what, said, partial(mean_speed_up, runs, variant))
    singles = [("qwen-image", 2, "7.1"), ("qwen-image", 4, "1.7"), ("sd3.5-paper", 4, "8.4"), ("sd3.5-paper", 8, "3.8")]
    for model, nodes, said in singles:
        run = Run(model, 1536, nodes, None)
        yield Claim("7b", f"cocodiff over flat, {named(run)}", said, partial(speed_up, run, "cocodiff"))
    yield from ablation()
    if measured is None:
        return
    given = {(1, 48.0, "flat"): "25.5 ms", (1, 48.0, "tapa"): "6.5 ms", (1, 48.0, "ratio"): "3.9"}
    given |= {(1, 24.0, "ratio"): "3.0", (1, 6.0, "ratio"): "about 1"}
    for nodes, size in measured.exchanges:
        where = f"{size:g} MB, {nodes} node(s)"
        for variant in ("flat", "tapa"):
            said = given.get((nodes, size, variant), "")
            yield Claim("11", f"all-to-all, {variant}, {where}", said, partial(alltoall_s, nodes, size, variant), "ms")
        said = given.get((nodes, size, "ratio"), "")
        yield Claim("11", f"flat over tapa, {where}", said, partial(flat_over_tapa, nodes, size))
    for run in measured.runs:
        for variant in ("tapa", "v_first", "cocodiff"):
            yield Claim("7", f"{variant} over flat, {named(run)}", "", partial(speed_up, run, variant))
        yield Claim("1", f"share of all-to-all, {named(run)}", "", partial(share, run), "%")
    for run in measured.runs:
        for variant in ("flat", "cocodiff"):
            yield Claim("memory", f"fullest tile, {variant}, {named(run)}", "", partial(gib, run, variant), "GiB")


def ablation() -> Iterator[Claim]:
    """Figure 8: what each part adds to the speed-up, SD3.5 at 1536 x 1536 with the largest batch that fits."""
    parts = (("tapa", "flat"), ("v_first", "tapa"), ("cocodiff", "v_first"))
    said = {"tapa": "2.2 on the mean", "v_first": "negligible", "cocodiff": "negligible"}
    means = {"v_first": "1.3", "cocodiff": "2.9"}
    for variant, before in parts:
        name = "v_major" if variant == "cocodiff" else variant
        runs = [Run("sd3.5-paper", 1536, nodes, None) for nodes in NODES]
        for run in runs:
            of_one = said[variant] if variant == "tapa" or run.nodes == 1 else ""
            what = f"what {name} adds, sd3.5-paper 1536, {run.nodes} node(s)"
            yield Claim("8", what, of_one, partial(speed_up, run, variant, over=before))
        if variant in means:
            of = partial(mean_speed_up, runs[1:], variant, over=before)
            yield Claim("8", f"what {name} adds, mean of 2, 4 and 8 nodes", means[variant], of)


# What is said and written ---------------------------------------------------------------------------------------------


def run_paper(values: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Says the figures; what stands of them in plan.json. folder: gets `paper.html`, where there are measurements."""
    machine, shape_of = load_machine(values["machine"]), cache(load_shape)
    fits = {baseline: fit_figure_11(machine, baseline) for baseline in BASELINES}
    say("\n".join(lines_of(fits)))
    fit = fits["flat_serial"]
    # Figure 11 does not tell what launches and the host's waits for them cost.
    free = replace(machine, device=replace(machine.device, launch_us=0.0, wait_us=0.0))
    serial = Planned(fit.constants.machine(free), shape_of, "flat_serial", "plan, one peer")
    sources: list[Source] = [serial, serial.read_as("flat", "plan, all at once")]
    measured = None
    if values["measured"]:
        where = Path(values["measured"])
        measured = Measurements(where, "library", "measured, over the library", machine)
        if not measured.runs and not measured.exchanges:
            raise UserError(f"--measured {where} holds no */bench.json: run launch/campaign.pbs into it")
        sources += [Planned(machine, shape_of, "flat", "plan, machine file"), measured]
        sources.append(Measurements(where, "flat", "measured, over our flat", machine))
    say("\nplan, one peer and all at once: with these constants, of a baseline that serves one peer at a time and one")
    say("that serves all at once; ranks beyond the paper's degree of Ulysses, or the heads, are in rings")
    width = 66
    say(f"{'':<{width}}{'paper':>22}" + "".join(f"{one.title:>28}" for one in sources))
    rows = []
    for claim in claims(serial, measured):
        found = {one.title: claim.of(one) for one in sources}
        rows.append({"figure": claim.figure, "what": claim.what, "paper": claim.paper, "unit": claim.unit, **found})
        shown = "".join(f"{shown_as(value, claim.unit):>28}" for value in found.values())
        say(f"{claim.what:<{width}}{claim.paper:>22}{shown}")
    say("degrees of Ulysses in the paper: " + ", ".join(f"{degree} on {n} node(s)" for n, degree in DEGREES.items()))
    if measured is not None and folder is not None:
        write_page(folder / "paper.html", rows, [one.title for one in sources], Path(values["measured"]))
    return {
        "constants": asdict(fit.constants),
        "rows": rows,
        "readings": [
            {"baseline": name, "rms": rms_of(one, name), **asdict(one.constants)} for name, one in fits.items()
        ],
    }


TITLES = {
    "1": "Share of the all-to-all in a step (figure 1)",
    "7": "Speed-up of a step (figure 7)",
    "7b": "Speed-up on several nodes (figure 7b)",
    "8": "What each part adds (figure 8)",
    "11": "All-to-all (figure 11)",
    "memory": "Memory of the fullest tile",
}
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>The CoCoDiff paper, the plan, and this machine</title>
<style>body {{ font: 15px/1.4 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; margin: .5em 0 1.5em }}
th, td {{ padding: .2em .8em; border-bottom: 1px solid #ccc }}
td + td, th + th {{ text-align: right }} img {{ max-width: 100% }}</style>
<h1>The CoCoDiff paper, the plan, and this machine</h1>
<p>{about}</p>
<img alt="Speed-ups: the paper's, planned and measured" src="data:image/png;base64,{picture}">
{tables}
"""


def write_page(path: Path, rows: Sequence[Mapping[str, Any]], titles: Sequence[str], where: Path) -> None:
    """The paper's figures, the plan's and the measured ones on one page, without external resources."""
    refused = sorted(one.parent.name for one in where.glob("*/refused"))
    about = (
        f"Measured in {escape(str(where))}; - : not said, or not measured. Plan, one peer and all at once: what is "
        f"fitted to figure 11, of a baseline that serves one peer at a time, or all at once. Plan, machine file: with "
        f"its rates. Measured: over the library's own all-to-all, and over our flat. "
    )
    if refused:
        about += f"Did not fit into a tile's memory: {escape(', '.join(refused))}. "
    if (where / "sweep" / "report.html").exists():
        about += 'Figure 10 is the <a href="../sweep/report.html">report of the sweep</a>.'
    tables = []
    for figure, title in TITLES.items():
        of_figure = [row for row in rows if row["figure"] == figure]
        if of_figure:
            head = "".join(f"<th>{escape(one)}</th>" for one in ("", "paper", *titles))
            body = [
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
                for row in of_figure
                for cells in [[row["what"], row["paper"] or "-", *(shown_as(row[one], row["unit"]) for one in titles)]]
            ]
            tables.append(f"<h2>{title}</h2><table><tr>{head}</tr>" + "\n".join(body) + "</table>")
    path.write_text(PAGE.format(about=about, picture=picture_of(rows, titles), tables="\n".join(tables)))


def number_in(words: str) -> float:
    """The first one; 0 without."""
    found = re.search(r"\d+(\.\d+)?", words)
    return float(found.group()) if found else 0.0


def picture_of(rows: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> str:
    """Bars of all ratios that were measured, the paper's and the plans' beside them, as PNG in base64."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if not row["unit"] and any(row[one] for one in titles if one.startswith("measured"))]
    figure = Figure(figsize=(11, 1.2 + 0.12 * (len(titles) + 3) * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    names = ("paper", *titles)
    for number, name in enumerate(names):
        values = [number_in(row["paper"]) if name == "paper" else row[name] or 0.0 for row in shown]
        at = [place + number / (len(names) + 1) for place in range(len(shown))]
        axes.barh(at, values, height=1 / (len(names) + 1), label=name)
    axes.set_yticks([place + 0.4 for place in range(len(shown))], [row["what"] for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("times as fast")
    axes.legend(fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    return base64.b64encode(data.getvalue()).decode("ascii")


def shown_as(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return {"%": f"{value:.0%}", "ms": f"{value * 1e3:.2f} ms", "GiB": f"{value:.1f} GiB"}.get(unit, f"{value:.2f}")


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

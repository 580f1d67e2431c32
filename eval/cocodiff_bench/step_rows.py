"""What `cocodiff bench step --model` measures of every variant, and the rows that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cocodiff.config import Config
from cocodiff.planning.costs import WHOLE, CallKind, Typical
from cocodiff.planning.decisions import Decisions, decisions_of, read_decisions, without_seldom
from cocodiff.planning.memory import ModelShape
from cocodiff.topology.machine import Topology
from cocodiff.trace_summary import summarise_late
from cocodiff_bench import common
from cocodiff_bench.common import Row, Values
from cocodiff_bench.step_variants import ALL_VARIANTS, STABLE, Variant

OUTPUTS = "exchange of outputs"


def config_of(values: Values, variant: Variant) -> Config:
    chosen = {name: getattr(variant, name) for name in ("exchange", "order", "selection", "chunks", "codec", "arrival")}
    if variant.codec != "none":
        chosen["predictor"] = values["predictor"]
    if values["tau"] is not None:
        chosen["tau"] = values["tau"]
    return common.engine_config(values, **chosen)


def replayed(values: Values, config: Config) -> Decisions | None:
    """The recorded decisions that a variant is measured by."""
    return decisions_of(config, values["steps"], read_decisions(values["decisions"]))


def schedule_of(values: Values, variant: Variant) -> list[Mapping[CallKind, float]]:
    """Of every step the parts of its calls by their kind. For V-Major it is the paper's schedule: linear, a tenth of
    the steps warm, every tenth step full."""
    from cocodiff.planning.costs import costs_of

    config, steps = config_of(values, variant), values["steps"]
    decisions = replayed(values, config)
    displaced = without_seldom(decisions.over(steps)) if decisions else ()
    return costs_of(config).kinds_of_steps(config, steps, Typical(0.0, displaced))


def measured_kinds(values: Values, variant: Variant) -> list[CallKind]:
    if variant.selection == "v_major":
        return list(STABLE)
    return sorted({kind for step in schedule_of(values, variant) for kind in step}, key=lambda kind: not kind.whole)


def key_of(name: str, kind: CallKind) -> str:
    """Of a variant's layers in calls of a kind."""
    return f"{name}@{kind}"


def over_schedule(of_kind: Mapping[CallKind, float], steps: Sequence[Mapping[CallKind, float]]) -> float:
    """The mean over all steps; between measured fractions, straight lines. Where 0 is not measured, all tokens travel
    there as in a whole step."""
    from cocodiff.planning.layers import over_steps

    return over_steps({CallKind(): of_kind[WHOLE], **of_kind}, steps)


class Late(NamedTuple):
    """Bytes that no call waited for, and those of them that were hidden, in calls of one kind on all ranks."""

    sent: int
    hidden: float

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Late:
        """By the spans of every rank."""
        found = summarise_late({"": {number: record["spans"] for number, record in enumerate(records)}})
        return cls(sum(one.sent for one in found), sum(one.hidden_bytes for one in found))


@dataclass(frozen=True)
class Measured:
    """A case. texts: tokens of both branches' prompts; computing: seconds of a mean layer of rank 0, by variant; late:
    of calls that do not wait, by variant and kind."""

    shape: ModelShape
    topology: Topology
    size: int
    batch: int
    efficiency: float
    texts: Sequence[int]
    dilation: float
    computing: Mapping[str, float]
    late: Mapping[str, Late]

    def layers(self, name: str) -> int:
        """Of a step, one after the other: a part of the ranks has those of its own branch."""
        branches = self.shape.branches if ALL_VARIANTS[name].parts == 1 else 1
        return (self.shape.joint_layers + self.shape.parallel_layers) * branches

    def step_s(self, name: str, measured_s: float) -> float:
        """Seconds of a step's layers on the real machine. measured_s: of one layer, or of one for each text."""
        apart = len(set(self.texts)) if ALL_VARIANTS[name].parts == 1 else 1
        return measured_s / apart * self.layers(name) / self.dilation

    def hidden_share(self, name: str, steps: Sequence[Mapping[CallKind, float]]) -> float | None:
        """Of the bytes that no call waits for, by the trace's account, over all steps; None where there are none."""
        parts = [
            (part, self.late[key])
            for of in steps
            for kind, part in of.items()
            if (key := key_of(name, kind)) in self.late
        ]
        sent = sum(part * late.sent for part, late in parts)
        return sum(part * late.hidden for part, late in parts) / sent if sent else None

    @property
    def title(self) -> str:
        texts = f", texts of {self.texts[0]} and {self.texts[1]} tokens" if len(set(self.texts)) > 1 else ""
        return (
            f"{self.shape.name} {self.size}x{self.size} batch {self.batch}, {self.topology.size} ranks on "
            f"{self.topology.nodes} node(s), link efficiency {self.efficiency:g}{texts}"
        )


def rows_of(values: Values, case: Measured, slowest: Mapping[str, list[float]]) -> list[Row]:
    """Seconds of a step on the real machine. slowest: of one layer, by variant and fraction."""
    seconds: dict[str, list[float]] = {}
    for name in values["variants"]:
        variant = ALL_VARIANTS[name]
        schedule, kinds = schedule_of(values, variant), measured_kinds(values, variant)
        turns = zip(*(slowest[key_of(name, kind)] for kind in kinds), strict=True)
        steps = [over_schedule(dict(zip(kinds, turn, strict=True)), schedule) for turn in turns]
        seconds[name] = [case.step_s(name, of_layer) for of_layer in steps]
        if variant.parts > 1:
            once = [outputs / case.dilation for outputs in slowest[OUTPUTS]]
            seconds[name] = [step + outputs for step, outputs in zip(seconds[name], once, strict=True)]
    references = common.compared_with(seconds, "flat_serial", "flat")
    exact = [name for name in seconds if ALL_VARIANTS[name].exact]
    if exact and len(exact) < len(seconds):
        best = min(exact, key=lambda name: statistics.median(seconds[name]))
        references = {name: of | {"best_exact": best} for name, of in references.items()}
    found = common.rows(case.title, seconds, {}, references)
    for row in found:
        row["compute_s"] = case.computing[row["variant"]] * case.layers(row["variant"])
        row["communication_share"] = 1 - row["compute_s"] / row["median_s"]
        decisions = replayed(values, config_of(values, ALL_VARIANTS[row["variant"]]))
        row["decisions"] = None if decisions is None else decisions.title()
        row["hidden_share"] = case.hidden_share(row["variant"], schedule_of(values, ALL_VARIANTS[row["variant"]]))
    return found


def more_words(row: Row) -> list[str]:
    ratios = {name: row[f"ratio_vs_{name}"] for name in ("flat_serial", "flat")}
    faster = [f"{1 / ratio:.2f}x over {name}" for name, ratio in ratios.items() if ratio]
    replays = [f"displaced as in {row['decisions']}"] if row["decisions"] else []
    if row["hidden_share"] is not None:
        replays.append(f"{row['hidden_share']:.1%} of what is sent late hidden")
    return [f"communication {row['communication_share']:.1%}", *faster, *replays]

"""What `bench step --model` measures: variants by name, calls of which kinds, and the rows that come of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from cocodiff.config import Config
from cocodiff.planning.costs import WHOLE, CallKind
from cocodiff.planning.decisions import decisions_of
from cocodiff.planning.layers import Case, kinds_of_steps, over_steps, sampled_kinds
from cocodiff.topology.axes import Mesh
from cocodiff.topology.machine import Topology
from cocodiff.trace_summary import summarise_late
from cocodiff_bench import common
from cocodiff_bench.common import Row, Values

OUTPUTS = "exchange of outputs"
STABLE = (WHOLE, CallKind(stable=0.5), CallKind(stable=1.0))  # calls of V-Major that are measured
VARIANTS: dict[str, dict[str, Any]] = {
    "flat_serial": {"exchange": "flat"},
    "flat": {"exchange": "flat"},
    "tapa": {"exchange": "tapa"},
    "tapa v_first": {"exchange": "tapa", "order": "v_first"},
    "cocodiff": {"exchange": "tapa", "order": "v_first", "selection": "v_major"},
    "split": {"exchange": "split"},
    "split v_first": {"exchange": "split", "order": "v_first"},
    "split v_major": {"exchange": "split", "order": "v_first", "selection": "v_major"},
}
# Beside those that are measured where none are named. In two parts of the ranks each computes a guidance branch. Rings
# are of as many ranks as --ring says.
MORE_VARIANTS: dict[str, dict[str, Any]] = {
    "flat chunks": {"exchange": "flat", "chunks": 2},
    "split chunks": {"exchange": "split", "chunks": 2},
    "guidance flat": {"exchange": "flat", "guidance_parallel": 2},
    "guidance flat v_first": {"exchange": "flat", "order": "v_first", "guidance_parallel": 2},
    "guidance split": {"exchange": "split", "guidance_parallel": 2},
    "guidance split v_first": {"exchange": "split", "order": "v_first", "guidance_parallel": 2},
    "guidance flat chunks": {"exchange": "flat", "chunks": 2, "guidance_parallel": 2},
    "guidance split chunks": {"exchange": "split", "chunks": 2, "guidance_parallel": 2},
    "ring": {"exchange": "flat", "ring_kind": "keys"},
    "token ring": {"exchange": "flat", "ring_kind": "token"},
    "streaming": {"exchange": "flat", "ring_kind": "streaming"},
}
CODECS = ("lossless", "int8", "int4", "int2")
ARRIVALS = {"ahead": "adaptive", "displaced": "displaced"}
ALL_VARIANTS = {  # whatever sends tensors whole also with a codec's name behind it, and with an arrival's behind that
    " ".join(word for word in (name, codec, late) if word): settings
    | ({"codec": codec} if codec else {})
    | ({"arrival": ARRIVALS[late]} if late else {})
    for (name, settings), codec, late in product({**VARIANTS, **MORE_VARIANTS}.items(), ("", *CODECS), ("", *ARRIVALS))
    if not {"selection", "ring_kind"} & settings.keys() or not codec + late
}
USUAL_VARIANTS = (*VARIANTS, "split v_first int4", "split v_first int2")


def exact(name: str) -> bool:
    """Whether a variant sends tensors as they are, and waits for all of them."""
    return not {"selection", "codec", "arrival"} & ALL_VARIANTS[name].keys()


def parts_of(name: str) -> int:
    return int(ALL_VARIANTS[name].get("guidance_parallel", 1))


def mesh_of(values: Values, name: str, topology: Topology) -> Mesh:
    """Ulysses alone, or the mesh with a ring. Raises UserError where that does not divide the ranks."""
    if "ring_kind" not in ALL_VARIANTS[name]:
        return Mesh.build(topology)
    kind = ALL_VARIANTS[name]["ring_kind"]
    return Mesh.build(topology, values["ring"] or topology.size, values["placement"], kind=kind)


def config_of(values: Values, name: str) -> Config:
    chosen = dict(ALL_VARIANTS[name])
    if "codec" in chosen:
        chosen["predictor"] = values["predictor"]
    if values["tau"] is not None:
        chosen["tau"] = values["tau"]
    return common.engine_config(values, **chosen)


def measured_kinds(case: Case) -> list[CallKind]:
    return list(STABLE) if case.config.selection == "v_major" else sampled_kinds(case)


def key_of(name: str, kind: CallKind) -> str:
    """Of a variant's layers in calls of a kind."""
    return f"{name}@{kind}"


def over_schedule(of_kind: Mapping[CallKind, float], steps: Sequence[Mapping[CallKind, float]]) -> float:
    """The mean over all steps; between measured fractions, straight lines. Where 0 is not measured, all tokens travel
    there as in a whole step."""
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
    """A size at one efficiency of links. cases: a layer of every variant. texts: tokens of both branches' prompts.
    computing: seconds of a mean layer of rank 0, by variant; late: of calls that do not wait, by variant and kind."""

    title: str
    cases: Mapping[str, Case]
    texts: Sequence[int]
    dilation: float
    computing: Mapping[str, float]
    late: Mapping[str, Late]

    def layers(self, name: str) -> int:
        """Of a step, one after the other: a part of the ranks has those of its own branch."""
        shape = self.cases[name].shape
        branches = shape.branches if parts_of(name) == 1 else 1
        return (shape.joint_layers + shape.parallel_layers) * branches

    def step_s(self, name: str, measured_s: float) -> float:
        """Seconds of a step's layers on the real machine. measured_s: of one layer, or of one for each text."""
        apart = len(set(self.texts)) if parts_of(name) == 1 else 1
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


def rows_of(case: Measured, slowest: Mapping[str, list[float]]) -> list[Row]:
    """Seconds of a step on the real machine. slowest: of one layer, by variant and kind of calls."""
    seconds: dict[str, list[float]] = {}
    schedules = {name: kinds_of_steps(one) for name, one in case.cases.items()}
    for name, schedule in schedules.items():
        kinds = measured_kinds(case.cases[name])
        turns = zip(*(slowest[key_of(name, kind)] for kind in kinds), strict=True)
        steps = [over_schedule(dict(zip(kinds, turn, strict=True)), schedule) for turn in turns]
        seconds[name] = [case.step_s(name, of_layer) for of_layer in steps]
        if parts_of(name) > 1:
            once = [outputs / case.dilation for outputs in slowest[OUTPUTS]]
            seconds[name] = [step + outputs for step, outputs in zip(seconds[name], once, strict=True)]
    references = common.compared_with(seconds, "flat_serial", "flat")
    unchanged = [name for name in seconds if exact(name)]
    if unchanged and len(unchanged) < len(seconds):
        best = min(unchanged, key=lambda name: statistics.median(seconds[name]))
        references = {name: of | {"best_exact": best} for name, of in references.items()}
    found = common.rows(case.title, seconds, {}, references)
    for row in found:
        name = row["variant"]
        one = case.cases[name]
        row["compute_s"] = case.computing[name] * case.layers(name)
        row["communication_share"] = 1 - row["compute_s"] / row["median_s"]
        decisions = decisions_of(one.config, one.steps, one.decisions)
        row["decisions"] = None if decisions is None else decisions.title()
        row["hidden_share"] = case.hidden_share(name, schedules[name])
    return found


def more_words(row: Row) -> list[str]:
    ratios = {name: row[f"ratio_vs_{name}"] for name in ("flat_serial", "flat")}
    faster = [f"{1 / ratio:.2f}x over {name}" for name, ratio in ratios.items() if ratio]
    replays = [f"displaced as in {row['decisions']}"] if row["decisions"] else []
    if row["hidden_share"] is not None:
        replays.append(f"{row['hidden_share']:.1%} of what is sent late hidden")
    return [f"communication {row['communication_share']:.1%}", *faster, *replays]

"""Where attention's time went, from spans: what was computed, what travelled, and how much of that was hidden.

Communication is what a rank's lanes are busy with, packing and waiting for late peers included. It is exposed while
the rank's main thread waits, and hidden while that thread does something else. T(V), T(Q,K) and T(Vp1) are the terms
of V-First (CoCoDiff section III-C): V-First can hide all of T(Vp1) where T(Q,K) is longer.

Late messages bring displaced tensors, which no call waits for before the next call of the same layer. Theirs is an
account of its own, in bytes: whatever the main thread waits for meanwhile exposes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from cocodiff.comm.trace import Span

Interval = tuple[int, int]  # start and end in nanoseconds
Spans = Mapping[str, Mapping[int, Sequence[Span]]]  # mode -> rank -> spans, in any order

MAIN = "main"
ATTENTION = "attention"  # the span that every attention call has once
V_FIRST_PHASES = ("v sibling", "v plane")  # v's first phase is the first of these that a mode has


class AttentionTimes(NamedTuple):
    """Seconds of a mean attention call on a mean rank, of one kind of layer in one mode.

    calls: attention calls that the mean is over, those of all ranks together.
    v_phase1_s: T(Vp1); with its hidden part None where v does not travel alone, as in joint order.
    communication_s: equal to exposed_s and hidden_s together.
    """

    mode: str
    layer: str
    calls: int
    project_v_s: float
    project_qk_s: float
    v_phase1_s: float | None
    v_phase1_hidden_s: float | None
    communication_s: float
    exposed_s: float
    hidden_s: float


class Late(NamedTuple):
    """Bytes that no call waited for, and those of them that were hidden: that travelled while the rank's main thread
    waited for nothing. Of a message that is hidden in part, the bytes are by its time."""

    sent: int
    hidden: float

    @classmethod
    def of(cls, of_ranks: Iterable[Sequence[Span]]) -> Late:
        """By the spans of every rank."""
        sent, hidden = 0, 0.0
        for of_rank in of_ranks:
            waits = _waits(of_rank)
            for late in (span for span in of_rank if span.late_bytes):
                duration = late.end_ns - late.start_ns
                unseen = duration - overlap(_times([late]), waits)
                sent, hidden = sent + late.late_bytes, hidden + late.late_bytes * (unseen / duration if duration else 1)
        return cls(sent, hidden)


def summarise(spans: Spans) -> list[AttentionTimes]:
    """One entry for each mode and kind of layer, in the modes' order. Layers without an attention span are left out,
    as are spans that belong to no layer."""
    found = []
    for mode, of_ranks in spans.items():
        layers = {s.layer: None for of_rank in of_ranks.values() for s in by_time(of_rank) if s.name == ATTENTION}
        found += [_of_layer(mode, layer, of_ranks.values()) for layer in layers if layer]
    return found


def first_phase(spans: Iterable[Span]) -> str | None:
    """The name of v's first phase among these spans: on the card where there are siblings, else on the plane."""
    names = {span.name for span in spans}
    return next((name for name in V_FIRST_PHASES if name in names), None)


def _of_layer(mode: str, layer: str, of_ranks: Collection[Sequence[Span]]) -> AttentionTimes:
    calls = 0
    phase1 = first_phase(s for of_rank in of_ranks for s in of_rank if s.layer == layer)
    totals = []  # of each rank, in nanoseconds and in the order of the fields
    for of_rank in of_ranks:
        own = [s for s in of_rank if s.layer == layer]
        waits = _waits(of_rank)
        project_v, project_qk, v_travels = (
            union(_times(s for s in own if s.name == name)) for name in ("project v", "project qk", phase1)
        )
        travels = union(_times(s for s in own if s.lane != MAIN))
        calls += sum(s.name == ATTENTION for s in own)
        v_phase1, v_exposed = length(v_travels), overlap(v_travels, waits)
        communication, exposed = length(travels), overlap(travels, waits)
        v_times, all_times = (v_phase1, v_phase1 - v_exposed), (communication, exposed, communication - exposed)
        totals.append((length(project_v), length(project_qk), *v_times, *all_times))
    v, qk, v_phase1_s, v_hidden_s, *rest = (sum(of_field) / calls / 1e9 for of_field in zip(*totals, strict=True))
    of_phase1 = (v_phase1_s, v_hidden_s) if phase1 else (None, None)
    return AttentionTimes(mode, layer, calls, v, qk, *of_phase1, *rest)


def _waits(of_rank: Iterable[Span]) -> list[Interval]:
    """When the rank's main thread waited, for whatever."""
    return union(_times(s for s in of_rank if s.lane == MAIN and s.name.startswith("wait")))


def by_time(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.start_ns, span.end_ns))


def _times(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start_ns, span.end_ns) for span in spans]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that are in order and apart; empty ones go."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif start < end:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def overlap(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """The time that two unions have in common."""
    return length(first) + length(second) - length(union([*first, *second]))

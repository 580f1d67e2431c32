"""What a site keeps between calls: of q, k, v and the output, the reconstructions that both ends have alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cocodiff.kernels.residual import Onward, Prediction, Reconstructions

TENSORS = ("q", "k", "v", "o")
NEWEST = 3  # noise levels that a continuation needs


@dataclass
class End:
    """One end's reconstructions of one tensor, each contiguous, in turn the newest."""

    buffers: list[Tensor]

    def newest(self, call: int) -> Tensor:
        """What the call of this number, from 1, finds as the newest."""
        return self.buffers[(call - 1) % len(self.buffers)]

    def known(self, call: int, rows: slice) -> Reconstructions:
        """Some rows for that call: the newest, and what is written over."""
        last, written = self.newest(call), self.written(call)
        return Reconstructions(last[:, rows], None if written is last else written[:, rows])

    def written(self, call: int) -> Tensor:
        """What that call's reconstruction is written to."""
        return self.buffers[call % len(self.buffers)]


@dataclass
class SiteState:
    """form: shape, dtype, layout and inference mode of the last call, which was at `last_step`.
    follows: the calls since the last one that began anew, which nothing could predict. levels: the noise levels of
    the newest of these, that one too.
    fits: whether at the last call every group that was coded had a scale, on every rank.
    linear: with predictor auto, the tensors that the linear continuation predicted better at the last call.
    plain: whether tensors travel as they are in a call that follows no other, as a code has failed before it.
    changes: of the tensors that were measured at the last call, by how much they had changed since the one before,
    relatively.
    late: what receives the last call's tensors that this call did not wait for; in_flight: their bytes until then, at
    most, sent and received ones. wanted: the operands that are to be written while these are received, by name.
    sent, received: both ends' reconstructions by the tensors' names: of q, k and v the sender has its own rows and all
    heads, the receiver all rows and its own heads; of the output it is the other way round.
    sampled: of tensors that travel as they are, the rows of the last call by which the change is measured."""

    form: tuple[Any, ...] = ()
    last_step: int = -2
    follows: int = 0
    levels: list[float] = field(default_factory=list)
    fits: bool = True
    linear: frozenset[str] = frozenset()
    plain: bool = False
    changes: Mapping[str, float] = field(default_factory=dict)
    late: list[Callable[[], object]] = field(default_factory=list)
    in_flight: int = 0
    wanted: dict[str, Onward] = field(default_factory=dict)
    sent: dict[str, End] = field(default_factory=dict)
    received: dict[str, End] = field(default_factory=dict)
    sampled: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, form: tuple[Any, ...], step: int, level: float, anew: bool) -> None:
        """A call begins. It follows the last one if that was at the step before, of the same form, and all groups had a
        scale. anew: it does not in any case."""
        anew = anew or self.form != form or self.last_step != step - 1 or not self.fits
        self.form, self.last_step = form, step
        if anew:
            self.catch_up()
            self.plain, self.fits = not self.fits, True
            self.follows, self.linear, self.levels, self.changes = 0, frozenset(), [level], {}
            self.sent, self.received, self.sampled = {}, {}, {}
        else:
            self.follows, self.levels = self.follows + 1, [*self.levels[1 - NEWEST :], level]

    def owe(self, receive: Callable[[], object], in_flight: int) -> None:
        """Something of this call is received before the next one."""
        self.late.append(receive)
        self.in_flight += in_flight

    def catch_up(self, wanted: Mapping[str, Onward] | None = None) -> dict[str, Onward]:
        """Receives what the last call did not wait for, and writes the wanted operands while it is decoded. Returns
        those of tensors that are here already."""
        self.wanted = dict(wanted or {})
        late, self.late, self.in_flight = self.late, [], 0
        for receive in late:
            receive()
        left, self.wanted = self.wanted, {}
        return left

    def taken_up(self, name: str) -> Onward | None:
        """What is to be written beside a tensor that is decoded now."""
        return self.wanted.pop(name, None)

    @property
    def factor(self) -> float:
        """Of the linear continuation, 0 where there is none."""
        return continuation(self.levels) if self.follows > 1 else 0.0

    @property
    def pace(self) -> float:
        """How far the noise level moves to this call, in distances of its last move: what a tensor changes by goes with
        it. At least 1/4 and at most 4; 1 where the level did not move."""
        if len(self.levels) < NEWEST:
            return 1.0
        now, last = abs(self.levels[-1] - self.levels[-2]), abs(self.levels[-2] - self.levels[-3])
        return min(max(now / last, 0.25), 4.0) if now > 0 and last > 0 else 1.0

    def settle(self, notes: Sequence[Sequence[int]]) -> None:
        """Takes what was noted in the last call, summed over all ranks, of each of TENSORS: how many groups had no
        scale; how the two predictions compared; and, in eighths of an octave, the sizes of changes less those of the
        values, and over how many groups."""
        of_tensors = dict(zip(TENSORS, notes, strict=True))
        self.fits = not any(unfit for unfit, *_ in of_tensors.values())
        self.linear = frozenset(name for name, (_, compared, *_) in of_tensors.items() if compared < 0)
        measured = {name: (size, groups) for name, (_, _, size, groups) in of_tensors.items() if groups}
        self.changes = {name: 2 ** (size / (8 * groups)) for name, (size, groups) in measured.items()}

    def bytes_held(self) -> int:
        ends = (*self.sent.values(), *self.received.values())
        buffers = [buffer for end in ends for buffer in end.buffers]
        return sum(buffer.nbytes for buffer in (*buffers, *self.sampled.values())) + self.in_flight


@dataclass
class CodedStep:
    """Of one step: the calls of attention, those of them that were coded, and of their tensors (four each) those
    predicted linearly. sets: the calls by the tensors that were displaced, as "qkv". sent, awaited: the tensors' sizes
    on the wire, a whole one being 1, and the part of it that attention waited for, as a model of 16 bits has them whose
    heads are whole groups of channels: a small model's actual bytes are in the trace."""

    calls: int = 0
    coded: int = 0
    linear: int = 0
    sets: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0
    awaited: float = 0.0

    def add(self, predictions: Collection[Prediction], displaced: Collection[str], share: float) -> None:
        """A call, whose tensors are predicted so; none where they travel whole. displaced: those not waited for. share:
        of a whole tensor's bytes that each takes, of 16-bit numbers in heads of whole groups."""
        self.calls += 1
        self.coded += bool(predictions)
        self.linear += sum(how.linear for how in predictions)
        self.sets["".join(name for name in TENSORS if name in displaced)] += 1
        self.sent += len(TENSORS) * share
        self.awaited += (len(TENSORS) - len(displaced)) * share

    @classmethod
    def merged(cls, parts: Sequence[CodedStep]) -> dict[str, Any]:
        """Over ranks: "coded_fraction" of the calls; "linear_fraction" of the tensors that were coded, None where none
        was; "displaced_fraction" of all tensors, and "displaced_sets": the fraction of calls by the tensors that were
        displaced together, as {"qkv": 0.25, "": 0.75}; of the bytes that whole tensors of 16 bits take, "sent_fraction"
        and "exposed_fraction", which attention waited for, with heads of whole groups."""
        names = ("calls", "coded", "linear", "sent", "awaited")
        calls, coded, linear, sent, awaited = (sum(getattr(part, name) for part in parts) for name in names)
        sets: Counter[str] = sum((part.sets for part in parts), Counter())
        late = sum(len(names) * count for names, count in sets.items())
        return {
            "coded_fraction": coded / calls,
            "linear_fraction": linear / (len(TENSORS) * coded) if coded else None,
            "displaced_fraction": late / (len(TENSORS) * calls),
            "displaced_sets": {names: count / calls for names, count in sorted(sets.items())},
            "sent_fraction": sent / (len(TENSORS) * calls),
            "exposed_fraction": awaited / (len(TENSORS) * calls),
        }


def continuation(levels: Sequence[float]) -> float:
    """The factor of the linear continuation by the noise levels of the last calls, the current one last: how far this
    call is from the last one, in distances of the last two; at most 2, and 0 where the level did not move."""
    if len(levels) < NEWEST or levels[-2] == levels[-3]:
        return 0.0
    factor = (levels[-1] - levels[-2]) / (levels[-2] - levels[-3])
    return min(factor, 2.0) if factor > 0 else 0.0  # NaN is none


def kept(first: Tensor, count: int) -> End:
    """An end with `first` as its newest reconstruction and room for the ones before it."""
    return End([first, *(torch.empty_like(first) for _ in range(count - 1))])

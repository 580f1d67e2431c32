"""Codecs that keep the last values of every layer at both ends: which calls of a layer follow one another, what all
ranks noted of the last one, the values, and the life of a run.

Of q, k, v and the output every call has a row of notes, whole numbers that ranks add up: see `kernels.residual`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.attention.strategy import LayerKey
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import LaneFuture
from cocodiff.exchange.codec import AllRanks, Codec, StepInfo, StepNotes
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import OUTPUT, EncodedCall
from cocodiff.kernels.residual import NOTES, Reconstructions
from cocodiff.topology.layout import Layout

TENSORS = ("q", "k", "v", OUTPUT)
NEEDED = 1  # the note of which the largest of all ranks counts, not the sum: of how much room streams need
NEWEST = 3  # noise levels that a continuation needs
NOTED_SITES = 64  # whose notes are one tensor: nobody tells a first step how many there are
TakeNotes = Callable[[Sequence[Sequence[int]]], None]


@dataclass
class LayerState:
    """form: shape, dtype, layout and inference mode of the last call, which was at `last_step`.
    follows: the calls since the last one that began anew, which nothing could predict. levels: the noise levels of
    the newest of these, that one too.
    fits: whether at the last call every group that was coded had a scale, on every rank."""

    form: tuple[Any, ...] = ()
    last_step: int = -2
    follows: int = 0
    levels: list[float] = field(default_factory=list)
    fits: bool = True

    def begin(self, like_BLHD: Tensor, layout: Layout, moment: StepInfo, anew: bool) -> None:
        """A call begins. It follows the last one, at an earlier step of the run, if that was of the same form and all
        groups had a scale; with `anew` it does not. Steps between that left the layer out change nothing."""
        form = tuple(like_BLHD.shape), like_BLHD.dtype, layout, torch.is_inference_mode_enabled()
        level = float(moment.step) if moment.sigma is None else moment.sigma
        anew = anew or self.form != form or self.last_step >= moment.step or not self.fits
        self.form, self.last_step = form, moment.step
        if anew:
            self.begin_anew()
            self.fits, self.follows, self.levels = True, 0, [level]
        else:
            self.follows, self.levels = self.follows + 1, [*self.levels[1 - NEWEST :], level]

    def begin_anew(self) -> None:
        """Forgets the state that earlier calls have left."""

    def bytes_held(self) -> int:
        return 0

    def take_notes(self, notes: Sequence[Sequence[int]]) -> None:
        """Takes what was noted in the last call, summed over all ranks, of each of TENSORS: how many groups had no
        scale; the lossless codec's need of room (the largest); and, in eighths of an octave, the sizes of changes less
        those of the values, and over how many groups."""
        self.fits = not any(unfit for unfit, *_ in notes)

    @property
    def factor(self) -> float:
        """Of the linear continuation, 0 where there is none."""
        return continuation(self.levels)

    @property
    def pace(self) -> float:
        """How far the noise level moves to this call, in distances of its last move: what a tensor changes by goes with
        it. At least 1/4 and at most 4; 1 where the level did not move."""
        if len(self.levels) < NEWEST:
            return 1.0
        now, last = abs(self.levels[-1] - self.levels[-2]), abs(self.levels[-2] - self.levels[-3])
        return min(max(now / last, 0.25), 4.0) if now > 0 and last > 0 else 1.0


def continuation(levels: Sequence[float]) -> float:
    """The factor of the linear continuation by the noise levels of the last calls, the current one last: how far this
    call is from the last one, in distances of the last two; at most 2, and 0 where the level did not move."""
    if len(levels) < NEWEST or levels[-2] == levels[-3]:
        return 0.0
    factor = (levels[-1] - levels[-2]) / (levels[-2] - levels[-3])
    return min(factor, 2.0) if factor > 0 else 0.0  # NaN is none


def values_kept(settings: Any) -> int:
    """How many of a tensor an end keeps: one where the newest is all that is looked at."""
    return 1 if settings.codec == "none" or settings.predictor == "last" else 2


class FixedKind(NamedTuple):
    """A kind of call, for recordings. anew: it follows no other. fine: with the bits of the last steps. displaced: the
    tensors that are. share: what the first part of the lossless codec takes of a whole tensor."""

    anew: bool
    fine: bool = False
    displaced: frozenset[str] = frozenset()
    share: float = 1.0


class Noted(NamedTuple):
    """The notes of one call, int64 [tensors, NOTES], and who takes their sum over all ranks."""

    own: Tensor
    takers: list[TakeNotes]

    def of(self, name: str) -> Tensor:
        """A tensor's, [NOTES]."""
        return self.own[TENSORS.index(name)]


class SharedNotes:
    """The notes of all calls of attention in one call of the model, summed over the ranks that share a sequence: in the
    background, behind what comes before the next call's first attention."""

    def __init__(self, everyone: AllRanks, trace: Trace) -> None:
        self._everyone, self._trace = everyone, trace
        self._moment: StepInfo | None = None
        self._noted: list[Noted] = []
        self._blocks: list[Tensor] = []  # theirs, of so many layers each
        self._deciding: tuple[list[Noted], LaneFuture[list[Any] | None]] | None = None

    def of_call(self, device: torch.device, taker: TakeNotes) -> Noted:
        """Room for the notes of one more call."""
        first = len(self._noted) % NOTED_SITES * len(TENSORS)
        if not first:
            self._blocks.append(torch.zeros(NOTED_SITES * len(TENSORS), NOTES, dtype=torch.int64, device=device))
        self._noted.append(Noted(self._blocks[-1][first : first + len(TENSORS)], [taker]))
        return self._noted[-1]

    def begin_step(self, moment: StepInfo) -> None:
        """Has the notes of the model's last call summed. Whoever takes notes calls it; the first of them has it done,
        so the same object tells the same call of the model."""
        if moment is self._moment:
            return
        self._moment = moment
        self.hand_out()
        if self._noted:
            whole = torch.cat(self._blocks) if len(self._blocks) > 1 else self._blocks[0]
            own = whole[: len(self._noted) * len(TENSORS)]
            self._deciding = self._noted, self._everyone.ranks.control.submit(self._sum, own)
            self._noted, self._blocks = [], []

    def hand_out(self) -> None:
        """Waits for the sums and hands them out: alike on all ranks."""
        if self._deciding is None:
            return
        (noted, pending), self._deciding = self._deciding, None
        with self._trace.span("wait for notes"):
            sums = pending.wait() or []
        for number, one in enumerate(noted if sums else ()):
            for take_notes in one.takers:
                take_notes(sums[number * len(TENSORS) : (number + 1) * len(TENSORS)])

    def clear(self) -> None:
        self._noted, self._blocks, self._deciding = [], [], None

    def _sum(self, own: Tensor) -> list[Any] | None:
        """Every rank's notes in one message to each; None for tensors without numbers, as predictions have them."""
        topology, ranks = self._everyone
        with self._trace.span("gather notes", "control"):
            parts = [torch.empty_like(own) for _ in range(ranks.size)]
            ranks.world.all_gather(own, parts).wait()
        for peer in range(ranks.size):
            self._trace.count(topology.link_class(ranks.rank, peer), own.nbytes, purpose="notes")
        of_ranks = torch.stack(parts)
        total = of_ranks.sum(0)
        total[:, NEEDED] = of_ranks[..., NEEDED].amax(0)
        return None if total.is_meta else total.tolist()


@dataclass
class End:
    """One end's values of one tensor at the last calls, each contiguous, in turn the newest."""

    buffers: list[Tensor]

    def newest(self, call: int) -> Tensor:
        """The newest one that the call of this number, from 1, finds."""
        return self.buffers[(call - 1) % len(self.buffers)]

    def known(self, call: int, rows: slice) -> Reconstructions:
        """Some rows for that call: the newest, and what is written over."""
        last, written = self.newest(call), self.written(call)
        return Reconstructions(last[:, rows], None if written is last else written[:, rows])

    def written(self, call: int) -> Tensor:
        """The buffer that that call's values are written to."""
        return self.buffers[call % len(self.buffers)]


@dataclass
class LayerEnds(LayerState):
    """sent, received: what both ends hold of a layer, by the tensors' names: of q, k and v the sender has its own rows
    and all heads, the receiver all rows and its own heads; of the output it is the other way round."""

    sent: dict[str, End] = field(default_factory=dict)
    received: dict[str, End] = field(default_factory=dict)

    def begin_anew(self) -> None:
        self.sent, self.received = {}, {}

    def bytes_held(self) -> int:
        ends = (*self.sent.values(), *self.received.values())
        return sum(buffer.nbytes for end in ends for buffer in end.buffers)


@dataclass
class CodedStep:
    """Of one step: the calls of attention, those of them that were coded, and of their tensors (four each) those
    predicted linearly. sent: the tensors' sizes on the wire, a whole one being 1, as a model of 16 bits has them whose
    heads are whole groups of channels: a small model's actual bytes are in the trace. sets: the calls by the tensors
    that were displaced, as "qkv", and awaited: of `sent` what attention waited for; both only with displacement."""

    calls: int = 0
    coded: int = 0
    linear: int = 0
    sent: float = 0.0
    sets: Counter[str] = field(default_factory=Counter)
    awaited: float = 0.0

    def add(self, coded: bool = False, share: float = 1.0, linear: int = 0) -> None:
        """A call. share: of a whole tensor's bytes that each takes. linear: of its tensors, predicted linearly."""
        self.calls += 1
        self.coded += coded
        self.linear += linear
        self.sent += len(TENSORS) * share

    def displace(self, names: frozenset[str] = frozenset(), share: float = 1.0) -> None:
        """The tensors that a call did not wait for."""
        self.sets["".join(name for name in TENSORS if name in names)] += 1
        self.awaited += (len(TENSORS) - len(names)) * share

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """Over ranks: "coded_fraction" of the calls; "linear_fraction" of the tensors that were coded, None where none
        was; "displaced_fraction" of all tensors, "displaced_sets": the fraction of calls by those displaced together,
        as {"qkv": 0.25, "": 0.75}; of the bytes that whole tensors of 16 bits take, with heads of whole groups,
        "sent_fraction" and "exposed_fraction", which attention waited for."""
        names = ("calls", "coded", "linear", "sent", "awaited")
        calls, coded, linear, sent, awaited = (sum(getattr(part, name) for part in parts) for name in names)
        sets: Counter[str] = sum((part.sets for part in parts), Counter())
        return {
            "coded_fraction": coded / calls,
            "linear_fraction": linear / (len(TENSORS) * coded) if coded else None,
            "displaced_fraction": sum(len(names) * count for names, count in sets.items()) / (len(TENSORS) * calls),
            "displaced_sets": {names: count / calls for names, count in sorted(sets.items())} or {"": 1.0},
            "sent_fraction": sent / (len(TENSORS) * calls),
            "exposed_fraction": (awaited if sets else sent) / (len(TENSORS) * calls),
        }


class StatefulCodec(Codec):
    """Keeps every layer's last values, and decides by what all ranks noted of the last call. One rank codes nothing."""

    keeps_state = True
    fixed_kind: FixedKind | None = None  # every call is of this kind, in recordings
    step_notes: type[StepNotes] = CodedStep
    _report: defaultdict[int, Any]

    def __init__(self, settings: Any, exchange: Exchange | None, ranks: Any, everyone: AllRanks) -> None:
        """everyone: that share the sequence, who decide together."""
        super().__init__(settings, exchange, ranks)
        self.kept, self._report = values_kept(settings), defaultdict(self.step_notes)
        self.notes = None if exchange is None else SharedNotes(everyone, exchange.trace)

    @property
    def fine(self) -> bool:
        """Whether this is one of the last steps, whose errors no later step corrects."""
        if self.fixed_kind is not None:
            return self.fixed_kind.fine
        return self.moment.steps is not None and self.moment.step >= self.moment.steps - self.settings.fine_steps

    @property
    def noted_step(self) -> Any:
        """Where calls of this step are noted."""
        return self._report[self.moment.step]

    def note_whole(self) -> None:
        self.noted_step.add()

    def begin_step(self, moment: StepInfo) -> None:
        """Has all ranks' notes of the last call summed, behind what comes before the first attention."""
        super().begin_step(moment)
        if self.notes is not None:
            self.notes.begin_step(moment)

    def end(self, drain: bool = True) -> None:
        if self.notes is not None:
            if drain:
                self.notes.hand_out()
            self.notes.clear()
        super().end(drain)


class LayerCall(EncodedCall):
    """One attention call of a codec that keeps a state of its layer."""

    state: LayerState

    def __init__(self, codec: Codec, exchange: Exchange, layout: Layout, layer_key: LayerKey) -> None:
        super().__init__(layout)
        self._codec, self.state, self._layer = codec, codec.state_of(layer_key), layer_key.kind
        self._exchange, self._kernels, self._trace = exchange, exchange.kernels, exchange.trace

    def sent_rows(self, name: str) -> int:
        """Of a tensor that is sent: of the output all of the sequence, of others this rank's."""
        return sum(self.layout.rows) if name == OUTPUT else self.layout.rows[self._exchange.rank]


class StatefulCall(LayerCall):
    """number: among calls that follow one another, from 0, once it has begun."""

    _codec: StatefulCodec
    number: int
    noted: Noted | None = None

    def begin(self, like_BLHD: Tensor) -> None:
        """Takes the notes of earlier calls, and learns which one of its layer this is."""
        codec = self._codec
        assert codec.notes is not None, "one rank alone codes nothing"
        self._notes = codec.notes
        self._notes.hand_out()
        self.state.begin(like_BLHD, self.layout, codec.moment, codec.fixed_kind is not None and codec.fixed_kind.anew)
        self.number = self.state.follows

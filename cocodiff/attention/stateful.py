"""The base of codecs that keep the last values of every layer at both ends.

It decides which calls of a layer follow one another, shares what all ranks noted about the last call, and holds the
values for the length of a run. For each call, q, k, v and the output have a row of notes: integers that are summed over
ranks (see `kernels.residual`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.attention.strategy import LayerKey
from cocodiff.comm.lane import LaneFuture
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.exchange.codec import (
    CODED,
    WHOLE,
    CallKind,
    Codec,
    StateBytes,
    StepInfo,
    StepKinds,
    StepNotes,
    TensorSets,
)
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import OUTPUT
from cocodiff.exchange.transfer import Transfer
from cocodiff.kernels.residual import NOTES, Onward, Reconstructions
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout

TENSORS = ("q", "k", "v", OUTPUT)  # the tensors of a call, in the order of their notes
NEEDED = 1  # index of the note that is combined by the maximum over ranks, not the sum: the bytes that streams need
NEWEST = 3  # number of noise levels that a continuation needs
HEAD = 128  # head dim at which the sizes of ordinary codes and of the last steps' codes are compared
NOTED_CALLS = 64  # calls whose notes share one tensor; a first step does not know the number of calls


@dataclass
class End:
    """The values that one rank keeps of a tensor from the layer's last calls, as its sender or as its receiver.

    The contiguous buffers take turns in holding the newest values. Calls are numbered from 0 in a sequence of calls
    that follow one another.
    """

    buffers: list[Tensor]  # one or two of the tensor's shape

    def newest(self, call: int) -> Tensor:
        """Return the newest values at the beginning of call number `call` (from 1): those that the call before has
        written."""
        return self.buffers[(call - 1) % len(self.buffers)]

    def known(self, call: int, rows: slice) -> Reconstructions:
        """Return some rows of the values that are known at the beginning of a call: the newest, and the older ones if
        two are kept.

        The call will write its own values over the older ones, or over the newest if only one is kept.

        Args:
            call: number of the call, from 1.
            rows: the rows to return, as views.
        """
        last, written = self.newest(call), self.written(call)
        return Reconstructions(last[:, rows], None if written is last else written[:, rows])

    def written(self, call: int) -> Tensor:
        """Return the buffer for the values of call number `call` (from 0): the one with the oldest values, which it
        overwrites."""
        return self.buffers[call % len(self.buffers)]


@dataclass
class LayerState:
    """The memory of a codec between the calls of one layer for one guidance branch. A codec uses the fields that it
    needs.

    A call *follows* the last one if its tensors can be predicted from that one's. Otherwise it begins a new sequence of
    calls.
    """

    form: tuple[Any, ...] = ()  # shape, dtype, layout and inference mode of the last call
    last_step: int = -2  # step of the last call
    follows: int = 0  # number of calls in the sequence after its first one
    levels: list[float] = field(default_factory=list)  # noise levels of the newest calls in the sequence, at most 3

    # What all ranks noted of the last call, see `take_notes`.
    fits: bool = True  # False if in the last call some values were too large for a scale, or not finite
    failed: bool = False  # True in a sequence of calls that began because `fits` was False
    needed: dict[str, int] = field(default_factory=dict)  # by tensor, 1/16 bytes a token and head that streams need
    changes: dict[str, float] = field(default_factory=dict)  # by tensor that was measured, its relative change

    # Tensors, by name. Of q, k and v the sender has its own rows and all heads, the receiver all rows and its own
    # heads. Of the output it is the other way round.
    sent: dict[str, End] = field(default_factory=dict)  # values of tensors that this rank sends
    received: dict[str, End] = field(default_factory=dict)  # values of tensors that it receives
    last: dict[str, Tensor] = field(default_factory=dict)  # newest received tensors, in the memory of `received` if any
    compared: dict[str, Tensor] = field(default_factory=dict)  # rows of the last call by which changes are measured

    # Tensors that attention did not wait for (displaced ones).
    late: list[Callable[[], object]] = field(default_factory=list)  # functions that receive those of the last call
    in_flight: int = 0  # most bytes of their messages, sent and received
    onward: dict[str, Onward] = field(default_factory=dict)  # by tensor, the stand-in to write when it is decoded

    def begin(self, like_BLHD: Tensor, layout: Layout, step_info: StepInfo, anew: bool) -> None:
        """Begin a call of the layer, and decide whether it follows the last one. If it does not, drop what earlier
        calls have left.

        It follows if it has the same form, is at a later step of the run, and all groups of channels of the last call
        had a scale. Steps in between that left the layer out do not matter. `follows` is then the number of the call in
        its sequence; else it is 0.

        Args:
            like_BLHD: a tensor of the call, for its shape and dtype.
            layout: the tokens and heads of every rank.
            step_info: run, step and noise level of the call.
            anew: True to begin a new sequence in any case.
        """
        form = tuple(like_BLHD.shape), like_BLHD.dtype, layout, torch.is_inference_mode_enabled()
        level = float(step_info.step) if step_info.sigma is None else step_info.sigma
        anew = anew or self.form != form or self.last_step >= step_info.step or not self.fits
        self.form, self.last_step = form, step_info.step
        if anew:
            self.catch_up()
            for kept in (self.needed, self.changes, self.sent, self.received, self.last, self.compared):
                kept.clear()
            self.failed, self.fits, self.follows, self.levels = not self.fits, True, 0, [level]
        else:
            self.follows, self.levels = self.follows + 1, [*self.levels[1 - NEWEST :], level]

    def catch_up(self) -> None:
        """Receive and decode the tensors that the layer's last call did not wait for."""
        late, self.late, self.in_flight = self.late, [], 0
        for receive in late:
            receive()

    def bytes_held(self) -> int:
        """Return the number of bytes that the codec keeps of this layer and branch now, messages in flight included."""
        held = [buffer for end in (*self.sent.values(), *self.received.values()) for buffer in end.buffers]
        held += self.compared.values()
        held += [x for name, x in self.last.items() if name not in self.received]
        return sum(x.nbytes for x in held) + self.in_flight

    def take_notes(self, notes: Sequence[Sequence[int]]) -> None:
        """Keep what all ranks noted of the last call's tensors: set `fits`, and update `needed` and `changes`.

        A tensor's row of notes, combined over all ranks, has

            [0]  the number of groups of channels without a scale;
            [1]  the space for each token and head in which every stream would have fit, in sixteenths of a byte;
            [2]  the sum over groups of the change's size minus the value's size, in eighths of an octave;
            [3]  the number of groups in that sum.

        A 0 of [1] or [3] says that nothing was noted: the codec does not use streams, or did not measure.

        Args:
            notes: one row for each of TENSORS.
        """
        of_tensors = dict(zip(TENSORS, notes, strict=True))
        self.fits = not any(unfit for unfit, *_ in notes)
        self.needed |= {name: needed for name, (_, needed, *_) in of_tensors.items() if needed}
        measured = {name: 2 ** (size / (8 * groups)) for name, (_, _, size, groups) in of_tensors.items() if groups}
        self.changes = measured or self.changes

    @property
    def factor(self) -> float:
        """The factor of the linear continuation by which tensors are predicted; 0 to predict their last values."""
        return continuation(self.levels)

    @property
    def pace(self) -> float:
        """The move of the noise level to this call, relative to its move before. Changes of tensors are proportional to
        it.

        It is limited to 1/4 and 4, and 1 if the level did not move.
        """
        if len(self.levels) < NEWEST:
            return 1.0
        now, last = abs(self.levels[-1] - self.levels[-2]), abs(self.levels[-2] - self.levels[-3])
        return min(max(now / last, 0.25), 4.0) if now > 0 and last > 0 else 1.0


def continuation(levels: Sequence[float]) -> float:
    """Return the factor f of the linear continuation: a tensor is predicted as its last value plus f times its last
    change.

    It is the move of the noise level to this call, relative to its move before. It is at most 2, and 0 if the level did
    not move on.

    Args:
        levels: noise levels of the last calls, the current one last; with fewer than three the factor is 0.
    """
    if len(levels) < NEWEST or levels[-2] == levels[-3]:
        return 0.0
    factor = (levels[-1] - levels[-2]) / (levels[-2] - levels[-3])
    return min(factor, 2.0) if factor > 0 else 0.0  # NaN is none


class CallNotes(NamedTuple):
    """The numbers that a codec notes about the tensors of one attention call, to be combined over ranks."""

    own: Tensor  # this rank's numbers, int64 [4 tensors, NOTES], see `LayerState.take_notes`
    state: LayerState  # the layer's memory, which takes the numbers combined over all ranks

    def of(self, name: str) -> Tensor:
        """Return this rank's numbers about one tensor, int64 [NOTES], as a view for kernels to add to.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
        """
        return self.own[TENSORS.index(name)]


class SharedNotes:
    """The numbers that codecs note about all attention calls of one call of the model, combined over the ranks of a
    sequence.

    They are combined in the background, while the model's next call computes up to its first attention.
    """

    def __init__(self, everyone: RankContext | None) -> None:
        self._everyone = everyone  # this rank among those that share the sequence; None: one rank, which notes nothing
        self._trace = Trace() if everyone is None else everyone.trace
        self._noted: list[CallNotes] = []
        self._blocks: list[Tensor] = []  # memory of the notes, for NOTED_CALLS attention calls each
        self._deciding: tuple[list[CallNotes], LaneFuture[list[Any] | None]] | None = None

    def of_call(self, device: torch.device, state: LayerState) -> CallNotes:
        """Return the notes of one more attention call, all zero, for kernels to write to.

        Args:
            device: the device that they are on.
            state: the layer's memory, which will take the notes of all ranks.
        """
        first = len(self._noted) % NOTED_CALLS * len(TENSORS)
        if not first:
            self._blocks.append(torch.zeros(NOTED_CALLS * len(TENSORS), NOTES, dtype=torch.int64, device=device))
        self._noted.append(CallNotes(self._blocks[-1][first : first + len(TENSORS)], state))
        return self._noted[-1]

    def begin_step(self) -> None:
        """Start combining the notes of the model's last call over ranks, on a background thread.

        Codecs call it when the next call of the model begins.
        """
        self.hand_out()
        if self._noted and self._everyone is not None:
            whole = torch.cat(self._blocks) if len(self._blocks) > 1 else self._blocks[0]
            own = whole[: len(self._noted) * len(TENSORS)]
            self._deciding = self._noted, self._everyone.transport.control.submit(self._sum, own)
            self._noted, self._blocks = [], []

    def hand_out(self) -> None:
        """Wait for the notes that are being combined, and give them to the layers' states. They are the same on every
        rank."""
        if self._deciding is None:
            return
        (noted, pending), self._deciding = self._deciding, None
        with self._trace.span("wait for notes"):
            sums = pending.wait() or []
        for number, one in enumerate(noted if sums else ()):
            one.state.take_notes(sums[number * len(TENSORS) : (number + 1) * len(TENSORS)])

    def clear(self) -> None:
        """Drop all notes, also those that are being combined."""
        self._noted, self._blocks, self._deciding = [], [], None

    def _sum(self, own: Tensor) -> list[Any] | None:
        """Gather every rank's notes and return them combined, the same on all ranks: NOTES integers for each tensor.

        The tensors are q, k, v and o of every attention call, see `LayerState.take_notes`. Notes are summed over ranks;
        of the one at index NEEDED the largest is taken. Return None for meta tensors, which predictions have. A
        background thread (lane "control") runs it.

        Args:
            own: this rank's notes of all calls, int64 [calls * 4 tensors, NOTES].
        """
        assert self._everyone is not None, "one rank notes nothing"
        topology, ranks = self._everyone.topology, self._everyone.transport
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
class CodedStep:
    """The counts of one denoising step over a rank's layers, for the drift profile.

    Sizes of messages are relative to tensors as they are, and computed for 16-bit tensors whose heads are whole groups
    of channels. The trace has a small model's actual bytes.
    """

    calls: int = 0  # attention calls
    coded: int = 0  # calls whose tensors were coded
    linear: int = 0  # coded tensors (four per call) that were predicted linearly
    sent: float = 0.0  # bytes of all tensors in messages, as a multiple of one tensor's uncoded bytes
    sets: Counter[str] = field(default_factory=Counter)  # number of calls by the tensors not waited for, as "qkv"
    awaited: float = 0.0  # the same of the tensors that attention waited for; only with displacement

    def add(self, coded: bool = False, share: float = 1.0, linear: int = 0) -> None:
        """Count one attention call.

        Args:
            coded: True if its tensors were coded.
            share: bytes of each tensor in messages, as a fraction of the uncoded tensor's.
            linear: number of its four tensors that are predicted linearly.
        """
        self.calls += 1
        self.coded += coded
        self.linear += linear
        self.sent += len(TENSORS) * share

    def displace(self, names: frozenset[str] = frozenset(), share: float = 1.0) -> None:
        """Count the tensors of a call that attention does not wait for, and the bytes of those that it does wait for.

        Args:
            names: the tensors that are not waited for, such as {"k", "v"}.
            share: bytes of each tensor in messages, as a fraction of the uncoded tensor's.
        """
        self.sets["".join(name for name in TENSORS if name in names)] += 1
        self.awaited += (len(TENSORS) - len(names)) * share

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """Return the counts of several ranks as columns of the drift profile, by name.

        coded_fraction      of calls;
        linear_fraction     of coded tensors; None if there are none;
        displaced_fraction  of all tensors;
        displaced_sets      fraction of calls by their displaced tensors, as {"qkv": 0.25, "": 0.75};
        sent_fraction       of the bytes of uncoded 16-bit tensors;
        exposed_fraction    the same of the bytes that attention waited for.

        Args:
            parts: the counts of each rank.
        """
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
    """The base of codecs that keep tensors of every layer between its calls. On a single rank nothing is coded."""

    keeps_state = True
    fixed_kind: CallKind | None = None  # the kind that every call is made to be, in recordings; None: by the step
    agrees = True  # ranks gather decisions in each coded call of the model
    # After a first call two more differ in cost: no linear prediction, no measured change, nothing in flight.
    steps_to_settle = 2
    step_notes: type[StepNotes] = CodedStep  # class of the counts of a step
    _report: defaultdict[int, Any]  # counts by step

    def __init__(self, settings: Config, exchange: Exchange | None = None, everyone: RankContext | None = None) -> None:
        """Create the codec of one rank.

        Args:
            settings: the engine's settings.
            exchange: the exchange of this rank's Ulysses group; None for one rank, or for questions that need no
                messages.
            everyone: this rank among all ranks that share the sequence, which decide together; None for one rank.
        """
        super().__init__(settings, exchange)
        self._report = defaultdict(self.step_notes)
        # values of a tensor that an end keeps: the newest, and the one before if predictions use it
        self.kept = 1 if settings.predictor == "last" else 2
        self.notes = SharedNotes(everyone)
        self._layers: dict[LayerKey, LayerState] = {}
        self._first: dict[str, None] = {}  # a set: the layers of this run that are coded

    def open(self, exchange: Exchange, layout: Layout, layer_key: LayerKey) -> Transfer:
        if self.codes(layer_key.layer):
            return self.transfer(self, exchange, layout, layer_key)
        self.note_whole()
        return Transfer(exchange, layout, layer_key.kind)

    def codes(self, layer: str) -> bool:
        """Return True if a layer's tensors are coded: it is among the first `state_layers` layers that the run has
        called, or there is no such limit.

        The result is the same on every rank, because all call a model's layers in the same order.

        Args:
            layer: name of the layer's module.
        """
        if self.settings.state_layers is None:
            return True
        if len(self._first) < self.settings.state_layers:
            self._first[layer] = None
        return layer in self._first

    def state_of(self, layer_key: LayerKey) -> LayerState:
        """Return what is kept of a layer for a guidance branch between calls. It is created, empty, at the first call.

        Args:
            layer_key: the layer and guidance branch.
        """
        return self._layers.setdefault(layer_key, LayerState())

    @property
    def fine(self) -> bool:
        """True at the last steps of a run, which are coded in more bits: no later step corrects their errors."""
        if self.fixed_kind is not None:
            return self.fixed_kind.fine
        _, step, steps, _ = self.step_info
        return steps is not None and step >= steps - self.settings.fine_steps

    @property
    def noted_step(self) -> Any:
        """The counts of the current step, of the class `step_notes`."""
        return self._report[self.step_info.step]

    def note_whole(self) -> None:
        """Count a call whose tensors are sent as they are, because its layer is not coded."""
        self.noted_step.add()

    def begin_step(self, step_info: StepInfo) -> None:
        """Begin a call of the model, and start combining, over all ranks, what was noted about tensors in the call
        before.

        Args:
            step_info: the position of the call.
        """
        super().begin_step(step_info)
        self.notes.begin_step()

    def catch_up(self) -> None:
        """Receive and decode, for all layers, the tensors that their last calls did not wait for."""
        for state in self._layers.values():
            state.catch_up()

    def forget(self, layer_key: LayerKey) -> None:
        if layer_key in self._layers:
            self._layers.pop(layer_key).catch_up()

    def end(self, drain: bool = True) -> None:
        if drain:
            self.notes.hand_out()
            self.catch_up()
        self.notes.clear()
        self._layers.clear()
        self._first.clear()

    def bytes_held(self) -> int:
        return sum(state.bytes_held() for state in self._layers.values())

    # For plans and recordings -----------------------------------------------------------------------------------------

    def kinds_of_steps(self, steps: int, stable: float, displaced: TensorSets) -> StepKinds:
        """Return, for every step of a run, the kinds of its attention calls with their fractions: for plans.

        The first step is whole. The last ones are fine, and wait for all tensors.

        Args:
            steps: number of steps.
            stable: not used; see `Codec`.
            displaced: for every step, the fraction of calls by the tensors that they do not wait for.
        """
        fine = CallKind(fine=True)
        finer = fine if self.sent_bytes(HEAD, 2, fine) != self.sent_bytes(HEAD, 2) else CODED
        found = [{WHOLE: 1.0}, *[{finer: 1.0}] * (steps - 1)]
        for step in range(1, steps - self.settings.fine_steps):
            found[step] = {CallKind(displaced=names): part for names, part in displaced[step].items()}
        return found

    def state_bytes(self, topology: Topology, layout: Layout, batch: int, head_dim: int, itemsize: int) -> StateBytes:
        """Return the bytes that a layer keeps on every rank, exactly: the kept values of tensors, as sender and as
        receiver.

        There is one dictionary a rank, {"reconstructions": bytes}.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads.
            batch: rows of the batch.
            head_dim: channels of a head.
            itemsize: bytes of an element.
        """
        cells = [L * sum(layout.heads) + sum(layout.rows) * G for L, G in zip(layout.rows, layout.heads, strict=True)]
        return [{"reconstructions": len(TENSORS) * self.kept * batch * head_dim * itemsize * count} for count in cells]

    def hold_at(self, kind: CallKind) -> None:
        self.fixed_kind = kind

    def agree(self) -> None:
        self.notes.hand_out()


class StatefulCall(Transfer):
    """The base of attention calls of codecs that keep tensors of every layer between its calls."""

    _codec: StatefulCodec
    number: int  # index of the call in its sequence of calls, from 0; set by `begin`
    noted: CallNotes | None = None  # this rank's numbers about the call; None if nothing is noted

    def __init__(self, codec: StatefulCodec, exchange: Exchange, layout: Layout, layer_key: LayerKey) -> None:
        super().__init__(exchange, layout, layer_key.kind)
        self._codec, self.state = codec, codec.state_of(layer_key)

    def sent_rows(self, name: str) -> int:
        """Return the number of rows that this rank sends of a tensor: of attention's output all of the sequence, else
        its own.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
        """
        return sum(self.layout.rows) if name == OUTPUT else self.layout.rows[self.rank]

    def begin(self, like_BLHD: Tensor) -> None:
        """Begin the call: give the layers what ranks noted of earlier calls, and decide whether this call follows the
        layer's last one.

        Args:
            like_BLHD: the first tensor to be sent, for its shape and dtype.
        """
        codec = self._codec
        codec.notes.hand_out()
        anew = codec.fixed_kind is not None and codec.fixed_kind.whole
        self.state.begin(like_BLHD, self.layout, codec.step_info, anew)
        self.number = self.state.follows

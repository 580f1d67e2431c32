"""The lossless codec: what travels is what a tensor differs by from its prediction, in units of the last place.

Both ends of a tensor of 16 bits hold what it was at the last calls of its layer, exactly, and so its prediction; at a
layer's first call it is that of exponents alone. The difference takes few bits, but how many depends on the data, and
whoever receives or passes on a message has to know its size before. So a block's stream (`cocodiff.kernels.lossless`
defines it) goes in two parts. The first is as long as all ranks have agreed, by the longest stream of the layer's last
call; it goes along the routes of the exchange, which carry it unopened. What does not fit, the rest, goes straight to
the rank that decodes, which reads in the first part how long it is: nobody else need know that there is one. Where all
fits, no message is added.

docs/exchange.md has the figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from cocodiff_sycl.parts import Cut, room_of, stream_places
from torch import Tensor

from cocodiff.attention.stateful import NEEDED, TENSORS, CodedStep, End, LayerEnds, StatefulCall, StatefulCodec
from cocodiff.attention.strategy import LayerKey
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import OUTPUT, Encoded, EncodedCall
from cocodiff.kernels.device import used_on_current_stream
from cocodiff.kernels.lossless import CODED, PARTS, Known, least_room
from cocodiff.topology.layout import Layout

FIRST_ROOMS = (0.68, 0.4)  # of a whole tensor: of the first part in a layer's first and second call, which none tells
MARGIN = 0.125  # bits for a number that the first part has room for beyond what the last call needed
CONTINUED = {"last": 0.0, "taylor": 0.5}  # by the setting `predictor`: times the continuation's factor
OVERFLOW = "overflow"  # what the bytes of rests are counted for besides


@dataclass
class SiteState(LayerEnds):
    """needed: of each tensor the room for a token and head in which every stream of the last call would have fit, in
    sixteenths of a byte, 0 where that is not known."""

    needed: Mapping[str, int] = field(default_factory=dict)

    def begin_anew(self) -> None:
        super().begin_anew()
        self.needed = {}

    def take_notes(self, notes: Sequence[Sequence[int]]) -> None:
        self.needed = {name: needed for name, (_, needed, *_) in zip(TENSORS, notes, strict=True)}


@dataclass
class LosslessStep(CodedStep):
    """overflows: the exchanges of rests."""

    overflows: int = 0

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """Besides: "overflows", exchanges of what did not fit where it should have, for a call."""
        overflows = sum(part.overflows for part in parts) / sum(part.calls for part in parts)
        return super().merged(parts) | {"linear_fraction": None, "overflows": overflows}


class Lossless(StatefulCodec):
    """Sends streams."""

    layer_state, step_notes = SiteState, LosslessStep

    def call(self, exchange: Exchange, layout: Layout, layer_key: LayerKey) -> EncodedCall:
        return LosslessCall(self, exchange, layout, layer_key)

    def room(self, state: SiteState, name: str, head_dim: int) -> int:
        """Bytes for a token and head of the first part of a tensor's streams: what the last call needed, and more where
        the noise level moves farther now than it did then, as a bit more holds twice the difference."""
        whole, needed = 2 * head_dim, state.needed.get(name, 0)
        if self.fixed_kind is not None:
            room = self.fixed_kind.share * whole
        elif state.follows < len(FIRST_ROOMS) or not needed:
            room = FIRST_ROOMS[min(state.follows, 1)] * whole
        else:
            room = needed / PARTS + (MARGIN + max(0.0, math.log2(state.pace))) * head_dim / 8
        return max(least_room(head_dim), min(math.ceil(room), whole))


class Sent(NamedTuple):
    """A stream that was sent to a rank, in one tensor of this rank's streams. number: its place in `lengths_N`."""

    stream: Tensor
    lengths_N: Tensor
    number: int
    room: int


class Arrived(NamedTuple):
    """One tensor's first parts. found: by `stream_lengths`."""

    name: str
    code_BTHW: Tensor
    known: Known
    lengths_N: Tensor
    found: Tensor | None


class LosslessCall(StatefulCall):
    """What follows is known once the call has begun. codes: whether tensors are of a type that is coded; others travel
    whole. factor: of the continuation, 0 where the last values stand alone. rooms: of every tensor that is coded the
    bytes for a token and head of the first part."""

    _codec: Lossless
    state: SiteState
    codes: bool
    factor: float
    noted_step: LosslessStep
    rooms: Mapping[str, int]

    def __init__(self, codec: Lossless, exchange: Exchange, layout: Layout, layer_key: LayerKey) -> None:
        super().__init__(codec, exchange, layout, layer_key)
        self.rooms = {}
        self._sent: defaultdict[str, dict[int, Sent]] = defaultdict(dict)

    def begin(self, like_BLHD: Tensor) -> None:
        super().begin(like_BLHD)
        self._like, self._batch, self._head_dim = like_BLHD.new_empty(0), len(like_BLHD), like_BLHD.shape[-1]
        codec, state = self._codec, self.state
        self.factor = state.factor * CONTINUED[codec.settings.predictor]
        self.noted_step, self.codes = codec.noted_step, like_BLHD.dtype in CODED
        if self.codes:
            there = state.sent if state.follows else TENSORS
            self.rooms = {name: codec.room(state, name, self._head_dim) for name in TENSORS if name in there}
            self.share = sum(self.rooms.values()) / (len(self.rooms) * 2 * self._head_dim)
            self.noted = self._notes.of_call(like_BLHD.device, state.take_notes)
        self.noted_step.add(bool(self.rooms), self.share)

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        width = max(self.rooms.values()) if self.rooms else x_BLHD.shape[-1] * x_BLHD.element_size()
        return len(x_BLHD) * width

    def _known(self, ends: dict[str, End], name: str, shape: Sequence[int], rows: slice) -> Known:
        """What one end knows of some rows of a tensor, of [B, T, H] in all."""
        if name not in ends:
            ends[name] = End([self._like.new_empty(*shape, self._head_dim) for _ in range(self._codec.kept)])
        end, written = ends[name], ends[name].written(self.number)[:, rows]
        if not self.number:
            return Known(written)
        before = written if self.number > 1 and self._codec.kept > 1 else None
        return Known(written, end.newest(self.number)[:, rows], before, self.factor)

    def _cut(self, ranks: Sequence[int], by_rows: bool) -> Cut:
        """By the rows of these ranks, or by all ranks' heads."""
        return Cut(1, tuple(self.layout.rows[rank] for rank in ranks)) if by_rows else Cut(2, self.layout.heads)

    # The sender's end -------------------------------------------------------------------------------------------------

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        if not self.codes:
            return super().encode(tensors, rows, ranks)
        cut = self._cut(ranks, by_rows=OUTPUT in tensors)
        return Encoded([self._encoded(name, x, rows, cut, ranks) for name, x in tensors.items()], self.layout)

    def _encoded(self, name: str, x_BTHD: Tensor, rows: slice, cut: Cut, ranks: Sequence[int]) -> list[Tensor]:
        """What travels in the place of a tensor's `rows`, a block for each of `ranks`."""
        B, _, H, _ = x_BTHD.shape
        known = self._known(self.state.sent, name, (B, self.sent_rows(name), H), rows)
        assert self.noted is not None, "a coded call has notes"
        cells, room = cut.cells(x_BTHD.shape), self.rooms[name]
        places = stream_places(cells, self._head_dim)
        streams = x_BTHD.new_empty(places[-1], dtype=torch.uint8)
        lengths_N = x_BTHD.new_empty(len(cells), dtype=torch.int64)
        needed_1 = self.noted.of(name)[NEEDED : NEEDED + 1]
        with self._trace.span(f"encode {name}", "codec", self._layer):
            self._kernels.encode_lossless(x_BTHD, known, cut, streams, lengths_N, needed_1)
        found = list[Tensor]()
        for number, (rank, shape, count) in enumerate(zip(ranks, cut.shapes(x_BTHD.shape), cells, strict=True)):
            stream = streams[places[number] : places[number + 1]]
            self._sent[name][rank] = Sent(stream, lengths_N, number, room_of(count, room))
            found.append(stream[: room * count].view(*shape, room))
        return found

    # The receiver's end -----------------------------------------------------------------------------------------------

    def decode(self, received: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        if not self.codes:
            return super().decode(received, rows, ranks)
        cut = self._cut(ranks, by_rows=OUTPUT not in received)
        ends, arrived = self.state.received, list[Arrived]()
        with self._trace.span(f"lengths {''.join(received)}", "main", self._layer):
            for name, x_BTHW in received.items():
                code_BTHW, known = _rows_in_turn(x_BTHW, rows), self._known(ends, name, x_BTHW.shape[:3], rows)
                lengths_N = code_BTHW.new_empty(len(cut.sizes), dtype=torch.int64)
                found = self._kernels.stream_lengths(code_BTHW, cut, known.written, lengths_N)
                arrived.append(Arrived(name, code_BTHW, known, lengths_N, found))
        rests = self._rests(arrived, cut, ranks)
        for (name, code_BTHW, known, lengths_N, found), rest in zip(arrived, rests, strict=True):
            with self._trace.span(f"decode {name}", "codec", self._layer):
                self._kernels.decode_lossless(code_BTHW, rest, lengths_N, found, known, cut)
        return [ends[name].written(self.number) for name in received]

    def _rests(self, arrived: Sequence[Arrived], cut: Cut, ranks: Sequence[int]) -> list[Tensor]:
        """What did not fit in first parts, every tensor's in one: exchanged straight between the two ends. All ranks
        come here in one order, each for what it decodes next; it is two ranks' affair whether there is a message."""
        own, staged, hearing = self._exchange.rank, self._exchange.staged, ranks
        if staged is not None and ranks in staged.chunks:  # a chunk goes to other ranks than it comes from
            hearing = staged.hearing[staged.chunks.index(ranks)]
        ours = [(one.name, rank, self._sent[one.name][rank]) for one in arrived for rank in hearing]
        used_on_current_stream(ours)  # a lane's stream wrote them, this one reads the lengths and the own block's rest
        own_lengths = {id(sent.lengths_N): sent.lengths_N for _, _, sent in ours}
        numbers = _numbers([*(one.lengths_N for one in arrived), *own_lengths.values()])
        if numbers is None:  # predictions have none
            return [one.code_BTHW.new_empty(0) for one in arrived]
        of_arrived, of_ours = numbers[: len(arrived)], dict(zip(own_lengths, numbers[len(arrived) :], strict=True))
        sends, here = [], {}
        for name, rank, sent in ours:
            rest = sent.stream[sent.room : of_ours[id(sent.lengths_N)][sent.number]]
            if rank == own:
                here[name] = rest
            elif len(rest):
                sends.append((rest, rank))
        receives, rests = [], list[Tensor]()
        for one, lengths in zip(arrived, of_arrived, strict=True):
            rooms = [room_of(cells, one.code_BTHW.shape[-1]) for cells in cut.cells(one.code_BTHW.shape)]
            sizes = [max(0, length - room) for length, room in zip(lengths, rooms, strict=True)]
            rests.append(one.code_BTHW.new_empty(sum(sizes)))
            for rank, part in zip(ranks, rests[-1].split_with_sizes(sizes), strict=True):
                if len(part) and rank == own:
                    part.copy_(here[one.name])
                elif len(part):
                    receives.append((part, rank))
        if sends or receives:
            for rest, rank in sends:
                self._exchange.port.count(rank, rest.nbytes)
                link = self._exchange.topology.link_class(own, rank)
                self._trace.count(link, rest.nbytes, purpose=OVERFLOW)
            leaving = [*here.values(), *(rest for rest, _ in sends)]  # a first part is as long for the own block
            whole_bytes = self._batch * self.layout.rows[own] * sum(self.layout.heads) * 2 * self._head_dim
            self.noted_step.overflows += 1
            self.noted_step.sent += sum(x.nbytes for x in leaving) / (whole_bytes * len(self.rooms) // len(TENSORS))
            with self._trace.span("wait for rests", layer=self._layer):
                self._codec.ranks.control.submit(self._exchange_rests, sends, receives).wait()
        return rests

    def _exchange_rests(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        with self._trace.span("rests", "control"):
            self._codec.ranks.world.send_recv(sends, receives).wait()


def _rows_in_turn(x_BTHW: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor whose blocks of rows lie one behind the other in memory."""
    B, T, *cell = x_BTHW.shape
    if rows == slice(0, T):
        return x_BTHW
    count = rows.stop - rows.start
    return x_BTHW.view(T, -1)[rows].view(B, count, *cell)


def _numbers(tensors: Sequence[Tensor]) -> list[list[int]] | None:
    """The numbers of some tensors, looked at together; None of tensors without numbers."""
    whole = torch.cat(list(tensors))
    if whole.is_meta:
        return None
    return [part.tolist() for part in whole.cpu().split_with_sizes([len(x) for x in tensors])]

"""The lossless codec: a tensor is sent as its difference from a prediction, in units of the last place.

Both ends of a 16-bit tensor hold its exact values at the last calls of its layer, and so the same prediction. At a
layer's first call only exponents are predicted. The difference takes few bits. But their number depends on the data,
and every rank that receives or passes on a message has to know its size in advance.

So a block's stream (defined in `cocodiff.kernels.lossless`) is sent in two parts. All ranks have agreed on the length
of the first part, by the longest stream of the layer's last call. It is sent along the routes of the exchange, which
carry it without decoding it. The rest, which does not fit, is sent straight to the rank that decodes. That rank reads
its length in the first part; no other rank needs to know of it. If everything fits, no message is added.

docs/exchange.md has the figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from cocodiff_sycl.parts import BlockCut, room_of, stream_places
from torch import Tensor

from cocodiff.attention.stateful import NEEDED, TENSORS, CodedStep, End, StatefulCall, StatefulCodec
from cocodiff.exchange.codec import CODED, CallKind, StateBytes
from cocodiff.exchange.messages import cut_of
from cocodiff.exchange.outgoing import OUTPUT, Encoded
from cocodiff.kernels.device import used_on_current_stream
from cocodiff.kernels.lossless import CODED as CODED_DTYPES
from cocodiff.kernels.lossless import PARTS, Known, least_room
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout

FIRST_ROOMS = (0.68, 0.4)  # first part of a stream as a fraction of the tensor, in a layer's first and second call
# The fraction of a tensor's bytes that a call sends: the mean of a run of 50 steps, and a layer's first call. Heads are
# wide enough that rounding to whole bytes does not matter (docs/exchange.md).
TYPICAL, TYPICAL_FIRST = 0.3, 0.68
MARGIN = 0.125  # bits per number that the first part has in addition to the last call's need
CONTINUED = {"last": 0.0, "taylor": 0.5}  # by setting `predictor`, what the factor of the continuation is multiplied by
OVERFLOW = "overflow"  # purpose that the bytes of rests are also counted for in the trace


@dataclass
class LosslessStep(CodedStep):
    """The counts of the lossless codec in one denoising step, over all layers of one rank."""

    overflows: int = 0  # number of exchanges of bytes that did not fit in the streams' first parts ("rests")

    @classmethod
    def merged(cls, parts: Sequence[Any]) -> dict[str, Any]:
        """Return the counts of several ranks for one step as columns of the drift profile, by name.

        They are those of `CodedStep.merged`, and "overflows": per attention call, the number of exchanges of bytes that
        did not fit in first parts.

        Args:
            parts: the `LosslessStep` of each rank.
        """
        overflows = sum(part.overflows for part in parts) / sum(part.calls for part in parts)
        return super().merged(parts) | {"linear_fraction": None, "overflows": overflows}


class SentStream(NamedTuple):
    """The encoded bytes of one tensor for one rank, in a buffer with this rank's streams of the tensor for the other
    ranks."""

    stream: Tensor  # uint8: the stream, and unused memory after it
    lengths_N: Tensor  # int64: bytes of each of the tensor's streams
    number: int  # index of the stream in `lengths_N`
    room: int  # bytes of the first part, which the exchange sends; bytes beyond it are sent apart


class ReceivedParts(NamedTuple):
    """The first parts of one tensor's streams, as they have arrived. Bytes that did not fit in them are received
    apart."""

    name: str  # name of the tensor: "q", "k", "v" or "o" (attention's output)
    firsts: Tensor  # first parts of all streams, one after the other, uint8
    width: int  # bytes of a first part for each token and head
    known: Known  # the tensor's values at the last calls, which predict the new ones, and the place for these
    lengths_N: Tensor  # length in bytes of each whole stream, one stream for each rank
    found: Tensor | None  # what `stream_lengths` returned, for `decode_lossless`; None in torch


class LosslessCall(StatefulCall):
    """An attention call whose tensors are sent without loss, as streams of coded differences from predicted values.

    Attributes that are only annotated are set by `begin`.
    """

    codes: bool  # True if the tensors' dtype is coded (16 bits); others are sent as they are
    factor: float  # factor of the linear continuation that predicts values; 0 to predict the last values
    noted_step: LosslessStep  # counts of the current step
    rooms: Mapping[str, int]  # by coded tensor, the bytes for each token and head of the first part

    def begin(self, like_BLHD: Tensor) -> None:
        super().begin(like_BLHD)
        self.rooms, self._sent = {}, defaultdict[str, dict[int, SentStream]](dict)
        self._like, self._batch, self._head_dim = like_BLHD.new_empty(0), len(like_BLHD), like_BLHD.shape[-1]
        codec, state = self._codec, self.state
        self.factor = state.factor * CONTINUED[codec.settings.predictor]
        self.noted_step, self.codes = codec.noted_step, like_BLHD.dtype in CODED_DTYPES
        if self.codes:
            there = state.sent if state.follows else TENSORS
            self.rooms = {name: self._room(name) for name in TENSORS if name in there}
            self.share = sum(self.rooms.values()) / (len(self.rooms) * 2 * self._head_dim)
            self.noted = codec.notes.of_call(like_BLHD.device, state)
        self.noted_step.add(bool(self.rooms), self.share)

    def _room(self, name: str) -> int:
        """Return the bytes for each token and head that are reserved for the first part of a tensor's streams.

        It is what the layer's last call needed, and more if the noise level moves farther now: one more bit holds twice
        the difference.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
        """
        head_dim, state, fixed_kind = self._head_dim, self.state, self._codec.fixed_kind
        whole, needed = 2 * head_dim, state.needed.get(name, 0)
        if fixed_kind is not None:
            room = (TYPICAL_FIRST if fixed_kind.whole else TYPICAL) * whole
        elif state.follows < len(FIRST_ROOMS) or not needed:
            room = FIRST_ROOMS[min(state.follows, 1)] * whole
        else:
            room = needed / PARTS + (MARGIN + max(0.0, math.log2(state.pace))) * head_dim / 8
        return max(least_room(head_dim), min(math.ceil(room), whole))

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        width = max(self.rooms.values()) if self.rooms else x_BLHD.shape[-1] * x_BLHD.element_size()
        return len(x_BLHD) * width

    def _known(self, ends: dict[str, End], name: str, shape: Sequence[int], rows: slice) -> Known:
        """Return the last values of some rows of a tensor, by which they are predicted, and the memory for the new
        ones.

        The first call for a tensor allocates its memory in `ends`.

        Args:
            ends: the values kept for tensors that this rank sends, or for those that it receives, by name.
            name: "q", "k", "v" or "o" (attention's output).
            shape: batch, tokens and heads of the whole tensor there.
            rows: the rows that are encoded or decoded.
        """
        if name not in ends:
            ends[name] = End([self._like.new_empty(*shape, self._head_dim) for _ in range(self._codec.kept)])
        end, written = ends[name], ends[name].written(self.number)[:, rows]
        if not self.number:
            return Known(written)
        before = written if self.number > 1 and self._codec.kept > 1 else None
        return Known(written, end.newest(self.number)[:, rows], before, self.factor)

    # The sender's end -------------------------------------------------------------------------------------------------

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        if not self.codes:
            return super().encode(tensors, rows, ranks)
        cut = cut_of(self.layout, ranks, by_rows=OUTPUT in tensors)
        return Encoded([self._encoded(name, x, rows, cut, ranks) for name, x in tensors.items()], self.layout)

    def _encoded(self, name: str, x_BTHD: Tensor, rows: slice, cut: BlockCut, ranks: Sequence[int]) -> list[Tensor]:
        """Encode some rows of a tensor, keep the streams for `_rests`, and return the first part of each rank's block.

        A first part is uint8 [B, rows, heads, W], with W bytes for each token and head.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
            x_BTHD: the T rows to encode.
            rows: their place among all rows that this rank sends of the tensor.
            cut: the blocks that the tensor is cut into, one for each of `ranks`.
            ranks: the rank that each block goes to.
        """
        B, _, H, _ = x_BTHD.shape
        known = self._known(self.state.sent, name, (B, self.sent_rows(name), H), rows)
        assert self.noted is not None, "a coded call has notes"
        cells, room = cut.cells(x_BTHD.shape), self.rooms[name]
        places = stream_places(cells, self._head_dim)
        streams = x_BTHD.new_empty(places[-1], dtype=torch.uint8)
        lengths_N = x_BTHD.new_empty(len(cells), dtype=torch.int64)
        needed_1 = self.noted.of(name)[NEEDED : NEEDED + 1]
        with self.exchange.trace.span(f"encode {name}", "codec", self.layer):
            self.kernels.encode_lossless(x_BTHD, known, cut, streams, lengths_N, needed_1)
        found = list[Tensor]()
        for number, (rank, shape, count) in enumerate(zip(ranks, cut.shapes(x_BTHD.shape), cells, strict=True)):
            stream = streams[places[number] : places[number + 1]]
            self._sent[name][rank] = SentStream(stream, lengths_N, number, room_of(count, room))
            found.append(stream[: room * count].view(*shape, room))
        return found

    # The receiver's end -----------------------------------------------------------------------------------------------

    def decode(self, received: Mapping[str, Any], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        if not self.codes:
            return super().decode(received, rows, ranks)
        cut = cut_of(self.layout, ranks, by_rows=OUTPUT not in received)
        ends, arrived = self.state.received, list[ReceivedParts]()
        with self.exchange.trace.span(f"lengths {''.join(received)}", "main", self.layer):
            for name, packed in received.items():
                firsts, (*shape, width) = packed.of_rows(rows), packed.shape
                known = self._known(ends, name, shape, rows)
                lengths_N = firsts.new_empty(len(cut.sizes), dtype=torch.int64)
                found = self.kernels.stream_lengths(firsts, cut, known.written, lengths_N)
                arrived.append(ReceivedParts(name, firsts, width, known, lengths_N, found))
        rests = self._rests(arrived, cut, ranks)
        for (name, firsts, _, known, lengths_N, found), rest in zip(arrived, rests, strict=True):
            with self.exchange.trace.span(f"decode {name}", "codec", self.layer):
                self.kernels.decode_lossless(firsts, rest, lengths_N, found, known, cut)
        return [ends[name].written(self.number) for name in received]

    def _rests(self, arrived: Sequence[ReceivedParts], cut: BlockCut, ranks: Sequence[int]) -> list[Tensor]:
        """Exchange the bytes that did not fit in streams' first parts, straight between the rank that encoded and the
        one that decodes.

        Return those that this rank received, one flat uint8 tensor for each of `arrived`, streams in order. All ranks
        call this in the same order, each for what it decodes next. If everything fits between two ranks, there is no
        message between them.

        Args:
            arrived: the tensors whose first parts have been received.
            cut: the blocks that these tensors consist of, one from each of `ranks`.
            ranks: the ranks that the blocks come from.
        """
        own, staged, attending_ranks = self.rank, self.exchange.staged, ranks
        if staged is not None and ranks in staged.chunks:  # a chunk is sent to other ranks than it comes from
            attending_ranks = staged.attending_ranks[staged.chunks.index(ranks)]
        ours = [(one.name, rank, self._sent[one.name][rank]) for one in arrived for rank in attending_ranks]
        used_on_current_stream(ours)  # a lane's stream wrote them; this one reads the lengths and the own block's rest
        own_lengths = {id(sent.lengths_N): sent.lengths_N for _, _, sent in ours}
        numbers = _numbers([*(one.lengths_N for one in arrived), *own_lengths.values()])
        if numbers is None:  # meta tensors of predictions
            return [one.firsts.new_empty(0) for one in arrived]
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
            rooms = [room_of(cells, one.width) for cells in cut.cells(one.known.written.shape)]
            sizes = [max(0, length - room) for length, room in zip(lengths, rooms, strict=True)]
            rests.append(one.firsts.new_empty(sum(sizes)))
            for rank, part in zip(ranks, rests[-1].split_with_sizes(sizes), strict=True):
                if len(part) and rank == own:
                    part.copy_(here[one.name])
                elif len(part):
                    receives.append((part, rank))
        if sends or receives:
            for rest, rank in sends:
                self.exchange.count(rank, rest.nbytes)
                link = self.exchange.topology.link_class(own, rank)
                self.exchange.trace.count(link, rest.nbytes, purpose=OVERFLOW)
            # With the own block's rest, because the share of first parts counts its first part too.
            leaving = [*here.values(), *(rest for rest, _ in sends)]
            whole_bytes = self._batch * self.layout.rows[own] * sum(self.layout.heads) * 2 * self._head_dim
            self.noted_step.overflows += 1
            self.noted_step.sent += sum(x.nbytes for x in leaving) / (whole_bytes * len(self.rooms) // len(TENSORS))
            with self.exchange.trace.span("wait for rests", layer=self.layer):
                self.exchange.transport.control.submit(self._exchange_rests, sends, receives).wait()
        return rests

    def _exchange_rests(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Send and receive the bytes that did not fit in first parts, and wait for them. A background thread runs it.

        Args:
            sends: tensors to send, each with the rank that gets it.
            receives: tensors to fill, each with the rank that sends it.
        """
        with self.exchange.trace.span("rests", "control"):
            self.exchange.transport.world.send_recv(sends, receives).wait()


class Lossless(StatefulCodec):
    """The codec that sends tensors exactly, in fewer bytes: as coded differences from values that both ends can
    predict."""

    transfer, step_notes = LosslessCall, LosslessStep

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        """Return the bytes that a typical run sends of one token for one head, of each of q, k, v and the output, for
        plans.

        The true number depends on the data.

        Args:
            head_dim: channels of a head.
            itemsize: bytes of an element; only elements of 2 bytes are coded.
            kind: the kind of attention calls.
        """
        whole, share = head_dim * itemsize, TYPICAL_FIRST if kind.whole else TYPICAL
        return whole if itemsize != 2 else max(least_room(head_dim), math.ceil(share * whole))

    def state_bytes(self, topology: Topology, layout: Layout, batch: int, head_dim: int, itemsize: int) -> StateBytes:
        if itemsize != 2:  # elements of this size are not coded
            return [{}] * topology.size
        return super().state_bytes(topology, layout, batch, head_dim, itemsize)


def _numbers(tensors: Sequence[Tensor]) -> list[list[int]] | None:
    """Return the values of integer tensors as lists of Python numbers, one a tensor. All are read in one copy to the
    host.

    Return None for meta tensors, which predictions have.
    """
    whole = torch.cat(list(tensors))
    if whole.is_meta:
        return None
    return [part.tolist() for part in whole.cpu().split_with_sizes([len(x) for x in tensors])]

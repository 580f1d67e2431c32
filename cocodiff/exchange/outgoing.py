"""The tensors that an exchange sends: q, k and v to the ranks of their heads, or attention's output to the ranks of its
rows.

The lane that sends tensors first encodes them (`EncodedCall`) and cuts them into blocks. A tensor that is being
received is a `TensorFuture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.comm.transport import RankContext
from cocodiff.exchange.messages import Blocks, BlockSet, PackedBlocks, Payload, Target, cut_of
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Block

OUTPUT = "o"  # the name of attention's output among the tensors of a call


class Encoded(NamedTuple):
    """The encoded form of tensors that are sent together."""

    # one for each tensor, all of one dtype: [B, L, H, W], or a list of separately encoded blocks [B, rows, heads, W]
    payloads: Sequence[Payload | list[Tensor]]
    layout: Layout  # rows and heads of every rank in the payloads, which may have fewer rows than the tensors


class EncodedCall:
    """The encoding and decoding of one attention call's tensors. This base class sends tensors as they are.

    Codecs' subclasses override what they change. Routes, chunks and sizes follow from what `encode` returns.
    """

    def __init__(self, here: RankContext, layout: Layout, layer: str = "") -> None:
        """Describe a call.

        Args:
            here: this rank among the ranks of the exchange.
            layout: the rows and heads of every rank in the tensors before encoding.
            layer: kind of layer, such as "transformer_blocks.attn", for the trace.
        """
        self.rank, self.kernels, self.layout, self.layer = here.rank, here.kernels, layout, layer

    def begin(self, like_BLHD: Tensor) -> None:
        """Prepare the call. It is called once, on the thread that attends, before the first tensor is sent.

        Args:
            like_BLHD: the first tensor to be sent, for its shape and dtype.
        """

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        """Return the bytes that one token takes in messages for one head of a tensor, over the batch.

        Args:
            x_BLHD: a tensor of the same batch, head dim and dtype.
        """
        return len(x_BLHD) * x_BLHD.shape[-1] * x_BLHD.element_size()

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        """Return the payloads to send instead of tensors, one for each tensor. The caller cuts them into blocks.

        A background thread calls it, and it may wait there for earlier work that it needs. This base class returns the
        tensors as they are.

        Args:
            tensors: by name, q, k or v, [B, L, H, D] with this rank's L rows and all H heads; or OUTPUT, [B, T, G, D]
                with T rows of the sequence and this rank's G heads.
            rows: the place of the given rows, among this rank's rows or, of OUTPUT, in the sequence.
            ranks: the ranks that the blocks will be sent to, in order.
        """
        return Encoded(list(tensors.values()), self.layout)

    def decode(self, received: Mapping[str, Any], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        """Return the tensors that received payloads stand for, in the same order. This runs on the thread that attends.

        Of q, k and v the results are all rows for this rank's heads, [B, S, G, D]. Of OUTPUT they are all heads of this
        rank's rows, [B, L, H, D].

        Args:
            received: the payloads with all their rows, by name: tensors, or `PackedBlocks` if `encode` returns lists of
                blocks.
            rows: the rows of the payloads that have arrived since the last call.
            ranks: the ranks that the blocks of these rows come from.
        """
        return list(received.values())

    # For calls that do not wait for some tensors, see `attention/displaced.py` ----------------------------------------

    share = 1.0  # bytes of an encoded tensor as a fraction of the tensor's
    measures = False  # True if encoding measures by how much tensors change
    continues = False  # True if `operand` extrapolates from the last values of a tensor

    def displace(self, names: frozenset[str]) -> None:
        """Tell the call, after `begin`, which of its tensors attention will not wait for.

        Args:
            names: their names, such as {"q", "k"}; "o" is attention's output.
        """

    def operand(self, name: str, last: Tensor) -> Tensor:
        """Return what attention uses in place of a tensor that it does not wait for. This base class returns the last
        value.

        Args:
            name: "q", "k", "v" or "o" (attention's output).
            last: the tensor's value in the layer's last call.
        """
        return last


class Outgoing:
    """Tensors of one attention call that are sent together, "forward" or "back".

    Forward, q, k or v [B, L, H, D] go from the ranks of their rows to the ranks of their heads. Back, rows of
    attention's output, OUTPUT [B, T, G, D], go to the ranks of these rows.
    """

    def __init__(
        self,
        call: EncodedCall,
        tensors: Mapping[str, Tensor],
        ranks: Sequence[int] | None = None,
        purpose: str | None = None,
    ) -> None:
        """Prepare tensors for sending. They are encoded later, by `encode_now` or by `blocks`.

        Args:
            call: encodes and decodes.
            tensors: the tensors by name: some of "q", "k" and "v", or OUTPUT alone.
            ranks: the ranks whose rows of OUTPUT these are, consecutive in the sequence; None for all.
            purpose: the purpose that the bytes are also counted for in the trace, such as "late"; None for attention
                only.
        """
        self.call, self.layer, self.purpose = call, call.layer, purpose
        self.names, self._tensors = tuple(tensors), tensors
        self.label = " ".join(filter(None, (purpose, "".join(tensors))))  # name of spans in the trace
        self.layout: Layout = call.layout  # rows and heads of the tensors; of the payloads once they were encoded
        # the layout of the tensors as they are, and the bytes of one token for one head in all of them together
        self._whole = self.layout, sum(len(x) * x.shape[-1] * x.element_size() for x in tensors.values())
        self._encoded: Encoded | None = None
        self._separate = False  # True if `call` encodes each block by itself
        self.way = "back" if OUTPUT in tensors else "forward"
        # The ranks that blocks are sent to, and the rows that are given: of this rank's, or of the sequence.
        self._ranks: Sequence[int] = range(len(self.layout.heads))
        self._rows = slice(0, self.layout.rows[call.rank])
        if self.way == "back":
            self._ranks = self.layout.in_sequence if ranks is None else ranks
            self._rows = self.layout.rows_of(self._ranks)

    def contained_tensors(self) -> Sequence[object]:
        """Return the tensors or payloads that `blocks` is made of.

        `used_on_current_stream` asks for them, to tell the allocator which streams use their memory.
        """
        return (*self._tensors.values(), *(() if self._encoded is None else self._encoded.payloads))

    def encode_now(self) -> None:
        """Encode the tensors on the calling thread, so that only the payloads have to wait for the thread that
        sends."""
        self._encoded, self._tensors = self.encoded(), {}

    def blocks(self) -> BlockSet:
        """Return the tensors as encoded blocks. They are encoded now, unless `encode_now` has done it."""
        (payloads, self.layout), self._encoded = self._encoded or self.encoded(), None
        self._separate = isinstance(payloads[0], list)
        return BlockSet(self.cut(payloads), self.layout, self._whole)

    def encoded(self) -> Encoded:
        """Encode the tensors, and return the payloads to send in their place."""
        return self.call.encode(self._tensors, self._rows, self._ranks)

    def cut(self, payloads: Sequence[Payload | list[Tensor]]) -> Blocks:
        """Cut payloads into a block for each rank that they go to: forward by heads, back by rows. Return the parts by
        block.

        A payload that is a list was cut by its codec, and is only sorted by block.
        """
        return self._by_block(payloads, self.way == "back", self._ranks)

    def target(self, here: BlockSet) -> Target:
        """Allocate the tensors that this rank receives, with the place of every block in them.

        Args:
            here: blocks that this rank holds, which show dtype and width.
        """
        forward, own, layout = self.way == "forward", self.call.rank, self.layout
        rows, heads = (sum(layout.rows), layout.heads[own]) if forward else (layout.rows[own], sum(layout.heads))
        shapes = [(len(here.like), rows, heads, width) for width in here.widths]
        if self._separate:
            cut = cut_of(layout, self.senders, by_rows=forward)
            packed = [PackedBlocks(here.like.new_empty(math.prod(shape)), shape, cut) for shape in shapes]
            places = self._by_block([one.blocks() for one in packed], forward, self.senders)
            return Target(packed, places, self.call.kernels)
        received = [here.like.new_empty(shape) for shape in shapes]
        return Target(received, self._by_block(received, forward, self.senders), self.call.kernels)

    def _by_block(self, tensors: Sequence[Any], by_rows: bool, ranks: Sequence[int]) -> dict[Block, tuple[Any, ...]]:
        """Cut each tensor into blocks. Return a mapping from each block to its parts, one for each tensor.

        It serves for tensors to be sent, and for tensors that received blocks are put into.

        Args:
            tensors: the tensors, or lists of parts of tensors that are cut already.
            by_rows: True for blocks of the others' rows and this rank's heads, False for this rank's rows and the
                others' heads.
            ranks: the rank at the other end of each block, in the order of the blocks in a tensor.
        """
        own, cut = self.call.rank, cut_of(self.layout, ranks, by_rows)
        parts = [x if isinstance(x, list) else x.split_with_sizes(cut.sizes, cut.dim) for x in tensors]
        blocks = [Block(rank, own) if by_rows else Block(own, rank) for rank in ranks]
        return dict(zip(blocks, zip(*parts, strict=True), strict=True))

    def placed(self, here: BlockSet) -> Target:
        """Allocate the tensors that this rank receives, copy their blocks into them, and return them as a `Target`.

        Args:
            here: the blocks that this rank holds after the exchange: those received, and its own. Others are left out.
        """
        target = self.target(here)
        target.place(here.blocks)
        return target

    def decode(self, received: Sequence[Tensor | PackedBlocks], chunk: Sequence[int] | None = None) -> list[Tensor]:
        """Return the tensors that received payloads stand for, in the order of `names`.

        Args:
            received: the received payloads, one for each tensor.
            chunk: the ranks whose rows have arrived since the last call; None for all.
        """
        by_name = dict(zip(self.names, received, strict=True))
        rows = slice(0, received[0].shape[1]) if chunk is None else self.layout.rows_of(chunk)
        return self.call.decode(by_name, rows, self.senders if chunk is None else chunk)

    @property
    def senders(self) -> Sequence[int]:
        """The ranks whose blocks this rank receives, in the order of the blocks in the received tensor."""
        return self.layout.in_sequence if self.way == "forward" else range(len(self.layout.heads))


class TensorFuture:
    """The future of a tensor that this rank receives for its heads, all at once or in chunks of tokens."""

    def __init__(
        self,
        together: str,
        wait_for_chunk: Callable[[int], Tensor],
        chunks: int = 1,
        land: Callable[[int], object] | None = None,
    ) -> None:
        """Describe a tensor on its way.

        Args:
            together: the names of the tensors in the same messages, such as "qk".
            wait_for_chunk: takes the number of a chunk, waits for it, and returns the tensor of the whole sequence.
            chunks: number of chunks.
            land: takes the number of a chunk, and starts putting it in place; only the first call for a chunk does
                something. None for a tensor without chunks.
        """
        self.together, self._wait_for_chunk, self._chunks, self._land = together, wait_for_chunk, chunks, land

    def wait(self) -> Tensor:
        """Wait for the whole tensor and return it: all rows of the sequence for this rank's heads, [B, S, G, D]."""
        return [self.chunk(number) for number in range(self._chunks)][-1]

    def chunk(self, number: int) -> Tensor:
        """Wait for a chunk of tokens. Return the tensor of the whole sequence, in which this chunk and those asked for
        before are valid.

        Args:
            number: number of the chunk, from 0. Ask for each chunk once, in ascending order.
        """
        return self._wait_for_chunk(number)

    def expect(self, number: int) -> None:
        """Have chunk `number` put in place as soon as it arrives. Chunks are put in place in the order of these
        calls."""
        if self._land is not None:
            self._land(number)

"""What an exchange carries: tensors on their way to the ranks of their heads, and attention's output on its way back.

A cargo is encoded and cut into blocks by the lane that sends it first, and tells where blocks go that are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cocodiff.kernels import Kernels
from cocodiff.routes.plans import Block
from cocodiff.wire.blocks import BlockSet, Payload, Streams, Target, blocks_of, whole_cell
from cocodiff.wire.coded import CodedCall, Encoded


class End(NamedTuple):
    """Whose end of a call this is. layer: the kind of layer, for the trace."""

    rank: int
    kernels: Kernels
    coded: CodedCall
    layer: str


class Cargo(Protocol):
    """What an exchange carries one way: `blocks` on the first lane, `target` where it is put in place.

    purpose: what its bytes are counted for in the trace besides attention, if anything."""

    way: str  # "forward" or "back"
    label: str  # of its spans in the trace
    layer: str
    purpose: str | None

    def held_tensors(self) -> Sequence[Payload | Streams]:
        """What `blocks` is made of."""
        ...

    def blocks(self) -> BlockSet: ...

    def target(self, held: BlockSet) -> Target:
        """Allocates what the blocks fill."""
        ...


class Forward:
    """Tensors on their way from the ranks of their rows to the ranks of their heads."""

    way = "forward"

    def __init__(self, end: End, tensors_BLHD: Mapping[str, Tensor], label: str = "", purpose: str | None = None):
        """label: by default the tensors' names."""
        self.names, self._tensors, self._end = tuple(tensors_BLHD), tensors_BLHD, end
        self.label, self.layer, self.purpose = label or "".join(self.names), end.layer, purpose
        self.coded = end.coded
        self.layout = end.coded.layout  # of what travels, once it was encoded
        self._whole = self.layout, whole_cell(tensors_BLHD.values())
        self._code: Encoded | None = None

    def held_tensors(self) -> Sequence[Payload | Streams]:
        return (*self._tensors.values(), *(() if self._code is None else self._code.payloads))

    def encode_now(self) -> None:
        """On the thread that calls, so that only the code waits for the lane."""
        self._code, self._tensors = self.encoded(), {}

    def blocks(self) -> BlockSet:
        (payloads, self.layout), self._code = self._code or self.encoded(), None
        self._in_turn = isinstance(payloads[0], Streams)
        own, parts = self._end.rank, [x.split_with_sizes(self.layout.heads, 2) for x in payloads]
        blocks = {Block(own, peer): list(of) for peer, of in enumerate(zip(*parts, strict=True))}
        return BlockSet(blocks, self.layout, self._whole)

    def encoded(self) -> Encoded:
        return self.coded.encode(self._tensors)

    def target(self, held: BlockSet) -> Target:
        own, layout = self._end.rank, held.layout
        shape, ranks = (len(held.like), sum(layout.rows), layout.heads[own]), layout.in_sequence
        received_BSGW = [held.like.new_empty((*shape, width)) for width in held.widths]
        rows = [layout.rows[rank] for rank in ranks]
        of_ranks = zip(*(blocks_of(x, rows, 1, self._in_turn) for x in received_BSGW), strict=True)
        places = {Block(rank, own): parts for rank, parts in zip(ranks, of_ranks, strict=True)}
        return Target(received_BSGW, places, self._end.kernels)

    def decode(self, received_BSGW: Sequence[Tensor], rows: slice | None = None) -> list[Tensor]:
        """rows: those that have just arrived, None for all."""
        by_name = dict(zip(self.names, received_BSGW, strict=True))
        return self.coded.decode(by_name, self.layout, rows or slice(0, sum(self.layout.rows)))


class Back:
    """Attention's output on its way from the ranks of its heads to the ranks of its rows."""

    way = "back"

    def __init__(
        self,
        end: End,
        out_BTGD: Tensor,
        ranks: Sequence[int] | None = None,
        label: str = "o",
        purpose: str | None = None,
    ) -> None:
        """ranks: whose rows these are, consecutive in the sequence; None for all."""
        self.label, self.layer, self.purpose, self._end = label, end.layer, purpose, end
        self._layout = end.coded.layout
        self._ranks = self._layout.in_sequence if ranks is None else ranks
        where = self._layout.row_slices
        self._rows = slice(where[self._ranks[0]].start, where[self._ranks[-1]].stop)
        self._whole = self._layout, whole_cell([out_BTGD])
        self._out = out_BTGD
        self._code: Tensor | Streams | None = None

    def held_tensors(self) -> Sequence[Payload | Streams]:
        return (self._out if self._code is None else self._code,)

    def encode_now(self) -> None:
        """As of `Forward`."""
        self._code = self._end.coded.encode_output(self._out, self._rows)

    def blocks(self) -> BlockSet:
        own = self._end.rank
        if self._code is None:
            self.encode_now()
        assert self._code is not None
        parts = self._code.split_with_sizes([self._layout.rows[rank] for rank in self._ranks], 1)
        blocks = {Block(rank, own): [part] for rank, part in zip(self._ranks, parts, strict=True)}
        return BlockSet(blocks, self._layout, self._whole)

    def target(self, held: BlockSet) -> Target:
        own, layout = self._end.rank, held.layout
        shape = (len(held.like), layout.rows[own], sum(layout.heads), held.like.shape[-1])
        out_BLHW = held.like.new_empty(shape)
        parts = blocks_of(out_BLHW, layout.heads, 2, isinstance(self._code, Streams))
        places = {Block(own, rank): [part] for rank, part in enumerate(parts)}
        return Target([out_BLHW], places, self._end.kernels)

"""What an exchange carries: tensors on their way to the ranks of their heads, and attention's output on its way back.

A cargo is encoded and cut into blocks by the lane that sends it first, and tells where blocks go that are here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from cocodiff.routes.plans import Block
from cocodiff.wire.blocks import BlockSet, Payload, Target, rows_of_ranks, whole_cell
from cocodiff.wire.coding import Encoded

if TYPE_CHECKING:
    from cocodiff.wire.exchange import Transfer


class Cargo(Protocol):
    """What an exchange carries one way: `blocks` on the first lane, `target` where it is put in place."""

    way: str  # "forward" or "back"
    label: str  # of its spans in the trace
    layer: str
    late: bool  # see `Transfer.post`

    def held_tensors(self) -> Sequence[Payload]:
        """What `blocks` is made of."""
        ...

    def blocks(self) -> BlockSet: ...

    def target(self, held: BlockSet) -> Target:
        """Allocates what the blocks fill."""
        ...


class Forward:
    """Tensors on their way from the ranks of their rows to the ranks of their heads."""

    way = "forward"

    def __init__(self, transfer: Transfer, tensors_BLHD: Mapping[str, Tensor], late: bool = False) -> None:
        """late: see `Transfer.post`."""
        self.names, self._tensors, self.late = tuple(tensors_BLHD), tensors_BLHD, late
        self.label, self.layer = ("late " if late else "") + "".join(self.names), transfer.layer
        self.coded, self.exchange = transfer.coded, transfer.exchange
        self.layout = transfer.layout  # of what travels, once it was encoded
        self._whole = self.layout, whole_cell(tensors_BLHD.values())
        self._code: Encoded | None = None
        if late:
            self._code, self._tensors = self.encoded(), {}

    def held_tensors(self) -> Sequence[Payload]:
        return (*self._tensors.values(), *(() if self._code is None else self._code.payloads))

    def blocks(self) -> BlockSet:
        (payloads, self.layout), self._code = self._code or self.encoded(), None
        own, parts = self.exchange.rank, [x.split_with_sizes(self.layout.heads, 2) for x in payloads]
        blocks = {Block(own, peer): list(of) for peer, of in enumerate(zip(*parts, strict=True))}
        return BlockSet(blocks, self.layout, self._whole)

    def encoded(self) -> Encoded:
        return self.coded.encode(self._tensors)

    def target(self, held: BlockSet) -> Target:
        own, layout = self.exchange.rank, held.layout
        shape = (len(held.like), sum(layout.rows), layout.heads[own], held.like.shape[-1])
        received_BSGW = [held.like.new_empty(shape) for _ in range(held.tensors)]
        of_ranks = [rows_of_ranks(x, layout) for x in received_BSGW]
        places = {Block(rank, own): [rows[rank] for rows in of_ranks] for rank in range(len(layout.rows))}
        return Target(received_BSGW, places, self.exchange.kernels)

    def decode(self, received_BSGW: Sequence[Tensor], rows: slice | None = None) -> list[Tensor]:
        """rows: those that have just arrived, None for all."""
        by_name = dict(zip(self.names, received_BSGW, strict=True))
        return self.coded.decode(by_name, self.layout, rows or slice(0, sum(self.layout.rows)))


class Back:
    """Attention's output on its way from the ranks of its heads to the ranks of its rows."""

    way = "back"

    def __init__(
        self, transfer: Transfer, out_BTGD: Tensor, ranks: Sequence[int] | None = None, late: bool = False
    ) -> None:
        """ranks: whose rows these are, consecutive in the sequence; None for all. late: see `Transfer.post`."""
        self.label, self.layer, self._exchange = "late o" if late else "o", transfer.layer, transfer.exchange
        self._layout = transfer.layout
        self._ranks = transfer.layout.in_sequence if ranks is None else ranks
        where = self._layout.row_slices
        rows = slice(where[self._ranks[0]].start, where[self._ranks[-1]].stop)
        self._whole = self._layout, whole_cell([out_BTGD])
        self._coded, self._rows, self.late = transfer.coded, rows, late
        self._out = self._coded.encode_output(out_BTGD, rows) if late else out_BTGD

    def held_tensors(self) -> Sequence[Payload]:
        return (self._out,)

    def blocks(self) -> BlockSet:
        own = self._exchange.rank
        out_BTGW = self._out if self.late else self._coded.encode_output(self._out, self._rows)
        parts = out_BTGW.split_with_sizes([self._layout.rows[rank] for rank in self._ranks], 1)
        blocks = {Block(rank, own): [part] for rank, part in zip(self._ranks, parts, strict=True)}
        return BlockSet(blocks, self._layout, self._whole)

    def target(self, held: BlockSet) -> Target:
        own, layout = self._exchange.rank, held.layout
        shape = (len(held.like), layout.rows[own], sum(layout.heads), held.like.shape[-1])
        out_BLHW = held.like.new_empty(shape)
        parts = out_BLHW.split_with_sizes(layout.heads, 2)
        places = {Block(own, rank): [part] for rank, part in enumerate(parts)}
        return Target([out_BLHW], places, self._exchange.kernels)

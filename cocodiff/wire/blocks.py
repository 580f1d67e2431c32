"""Blocks in memory: how large they are, how they lie in messages, and where they belong when they are here.

The only module that sizes what travels. A payload, what a coding sends in the place of a tensor, is [B, rows, heads, W]
of any dtype, so all sizes follow from one payload block and the layout of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from cocodiff.kernels import Kernels, Rows, views
from cocodiff.routes.plans import Block
from cocodiff.topology.layout import Layout

Payload = Tensor | Rows  # [B, L, H, W], or chosen rows of such a tensor
Blocks = Mapping[Block, Sequence[Payload]]  # of every block the payloads that travel together, [B, rows, heads, W] each


class EncodedBlocks:
    """A tensor of which every block was encoded by itself: the blocks [B, rows, heads, W]."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self._blocks = blocks

    def contained_tensors(self) -> Sequence[Tensor]:
        return self._blocks

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
        """The blocks, which were made for these sizes."""
        return self._blocks


class BlockSet:
    """The blocks that a rank holds during an exchange, and their sizes in messages.

    blocks: one payload for each tensor that travels together. layout: rows and heads of every rank in this exchange.
    whole: the layout of the tensors themselves, before they were coded, and their bytes of a token and head, of all
    together; None: they travel as they are.
    """

    def __init__(self, blocks: Blocks, layout: Layout, whole: tuple[Layout, int] | None = None) -> None:
        self.blocks, self.layout, self.whole = dict(blocks), layout, whole
        some = next(iter(blocks.values()))
        self.like, self.widths = some[0], [one.shape[-1] for one in some]
        self._batch, self._width = len(self.like), sum(self.widths)
        self._itemsize = self.like.new_empty(0).element_size()

    def contained_tensors(self) -> list[Payload]:
        return [payload for payloads in self.blocks.values() for payload in payloads]

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token of one head, of all tensors together."""
        return self._batch * self._width * self._itemsize

    def numel(self, message: Sequence[Block]) -> int:
        rows, heads = self.layout.rows, self.layout.heads
        cells = sum([rows[block.rows] * heads[block.heads] for block in message])
        return cells * self._batch * self._width

    def bytes(self, message: Sequence[Block]) -> int:
        return self.numel(message) * self._itemsize

    def whole_bytes(self, message: Sequence[Block]) -> int:
        """Bytes of a message if tensors travelled as they are."""
        if self.whole is None:
            return self.bytes(message)
        layout, cell = self.whole
        return cell * sum([layout.rows[block.rows] * layout.heads[block.heads] for block in message])

    def buffer(self, message: Sequence[Block]) -> Tensor:
        """Memory for one message, flat."""
        return self.like.new_empty(self.numel(message))

    def buffers(self, messages: Iterable[Sequence[Block]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Memory for messages that come or go together, flat: all of it, and the part of each."""
        sizes = [self.numel(message) for message in messages]
        whole = self.like.new_empty(sum(sizes))
        return whole, whole.split_with_sizes(sizes)

    def views(self, message: Sequence[Block], buffer: Tensor) -> dict[Block, list[Payload]]:
        """The blocks of a message as they lie in a flat buffer."""
        B, rows, heads = self._batch, self.layout.rows, self.layout.heads
        parts = iter(views(buffer, [(B, rows[b.rows], heads[b.heads], W) for b in message for W in self.widths]))
        return {block: [next(parts) for _ in self.widths] for block in message}


def whole_cell(tensors_BLHD: Iterable[Tensor]) -> int:
    """Bytes of one token of one head of tensors as they are, of all together."""
    return sum([len(x) * x.shape[-1] * x.element_size() for x in tensors_BLHD])


class Target:
    """Tensors that an exchange fills. places: of every block that belongs here, where it goes in each of `tensors`."""

    def __init__(self, tensors: Sequence[Tensor], places: Mapping[Block, Sequence[Tensor]], kernels: Kernels) -> None:
        self.tensors, self._places, self._kernels = tensors, places, kernels

    def contained_tensors(self) -> Sequence[Tensor]:
        return self.tensors

    def place(self, blocks: Blocks) -> None:
        """Copies those blocks that belong here to their places, in one launch."""
        here = [block for block in blocks if block in self._places]
        if here:
            parts = [part for block in here for part in blocks[block]]
            self._kernels.unpack(parts, [place for block in here for place in self._places[block]])


def blocks_of(x_BTHW: Tensor, sizes: Sequence[int], dim: int, in_turn: bool) -> Sequence[Tensor]:
    """The blocks of a tensor, cut by rows or by heads. in_turn: what travelled as `EncodedBlocks` lies block by
    block in its memory, whatever the tensor's strides say."""
    if not in_turn:
        return x_BTHW.split_with_sizes(sizes, dim)
    B, T, H, W = x_BTHW.shape
    return views(x_BTHW.view(-1), [(B, size, H, W) if dim == 1 else (B, T, size, W) for size in sizes])

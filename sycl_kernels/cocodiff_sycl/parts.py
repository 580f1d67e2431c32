"""The data on parts of tensors that kernels take: rows that are gathered while they are packed, and the blocks and
streams of the lossless codec.

`cocodiff.kernels.lossless` defines blocks, strips, tiles and streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

RUN = 8  # elements of a token in a strip
TOKENS = 32  # most tokens of a strip
TILE = 16  # strips of a tile


@dataclass(frozen=True)
class Rows:
    """A choice of rows of a tensor, which a kernel gathers while it packs them."""

    source_RHD: Tensor  # the tensor that rows are chosen from
    index_K: Tensor  # the chosen rows, int64, in this order
    reference_RHD: Tensor | None = None  # where the gathered rows are written as well
    reference_index_K: Tensor | None = None  # their rows there, int64; negative ones are not written

    @property
    def shape(self) -> torch.Size:
        """The shape that the gathered rows will have, [1, K, H, D] for K rows."""
        return torch.Size((1, len(self.index_K), *self.source_RHD.shape[1:]))

    def contained_tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that the choice consists of, for `used_on_current_stream`; None for absent ones."""
        return self.source_RHD, self.index_K, self.reference_RHD, self.reference_index_K

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> list[Rows]:
        """Cut the rows by heads into consecutive parts, as a tensor's method does. Return the parts.

        Args:
            sizes: number of heads of each part.
            dim: must be 2, the dimension of heads in `shape`.
        """
        assert dim == 2, "rows are split by heads"
        sources = self.source_RHD.split_with_sizes(sizes, 1)
        if self.reference_RHD is None:
            return [Rows(source, self.index_K) for source in sources]
        references = self.reference_RHD.split_with_sizes(sizes, 1)
        return [
            Rows(source, self.index_K, reference, self.reference_index_K)
            for source, reference in zip(sources, references, strict=True)
        ]

    def new_empty(self, *shape: Any) -> Tensor:
        """Return an uninitialised tensor of the given shape with the dtype and device of the source."""
        return self.source_RHD.new_empty(*shape)

    def __len__(self) -> int:
        """Return 1, the batch size of `shape`."""
        return 1


class BlockCut(NamedTuple):
    """A cut of a tensor [B, T, H, ...] (T tokens) into blocks, one for each rank that a tensor is sent to or received
    from."""

    dim: int  # 1: along rows; 2: along heads
    sizes: tuple[int, ...]  # rows or heads of each block, along `dim`

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (batch size, tokens, heads) of every block.

        Args:
            shape: shape of the tensor, [B, T, H, ...].
        """
        B, T, H = shape[:3]
        return [(B, size, H) if self.dim == 1 else (B, T, size) for size in self.sizes]

    def cells(self, shape: Sequence[int]) -> list[int]:
        """Return the number of cells of every block. A cell is one token and head of one batch entry.

        Args:
            shape: shape of the tensor, [B, T, H, ...].
        """
        return [math.prod(block) for block in self.shapes(shape)]

    def tiles(self, shape: Sequence[int], head_dim: int) -> list[int]:
        """Return the number of tiles of every block, the groups of 16 strips in which the lossless codec stores it.

        Args:
            shape: shape of the tensor, [B, T, H, ...].
            head_dim: channels of a head.
        """
        strips = (B * -(-T // TOKENS) * -(-H * head_dim // RUN) for B, T, H in self.shapes(shape))
        return [-(-count // TILE) for count in strips]


def width_of(firsts: Tensor, like_BLHD: Tensor) -> int:
    """Return the bytes of streams' first parts for each token and head of a tensor; 0 for a tensor without any.

    Args:
        firsts: the first parts of all its streams, uint8.
        like_BLHD: a tensor of its shape.
    """
    return firsts.numel() // max(1, math.prod(like_BLHD.shape[:3]))


def most_bytes(cells: int, head_dim: int) -> int:
    """Return the largest number of bytes that the lossless codec's stream of a block can take.

    Args:
        cells: number of tokens times heads in the block.
        head_dim: channels of a head.
    """
    # The worst case: strips of one token, each with a byte for its size.
    strips = cells * -(-head_dim // RUN)
    return 2 * RUN * strips + strips + 4 * -(-strips // TILE)


def room_of(cells: int, width: int) -> int:
    """Return the number of bytes of a stream's first part, whose size is fixed, rounded down to whole words of 2 bytes.

    Args:
        cells: number of tokens times heads in the block.
        width: bytes for each of them.
    """
    return cells * width // 2 * 2


def stream_places(cells: Sequence[int], head_dim: int) -> list[int]:
    """Return the first byte of each block's stream in a buffer that has room for streams of any length, and last the
    buffer's size.

    Args:
        cells: number of tokens times heads in each block.
        head_dim: channels of a head.
    """
    return list(accumulate((most_bytes(count, head_dim) // 2 * 2 for count in cells), initial=0))

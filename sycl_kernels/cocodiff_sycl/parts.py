"""Parts of tensors, as data that kernels take: chosen rows that are gathered where they are packed; blocks that the
lossless codec cuts a tensor into, and where their streams have room (`cocodiff.kernels.lossless` tells what these
are)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

RUN = 8  # numbers of a strip's token
TOKENS = 32  # of a strip, at most
TILE = 16  # strips


@dataclass(frozen=True)
class Rows:
    """Rows `index_K` (int64) of source_RHD, in that order, not yet gathered.

    reference_RHD: where the gathered rows are written as well, at rows reference_index_K; a negative one is not.
    """

    source_RHD: Tensor
    index_K: Tensor
    reference_RHD: Tensor | None = None
    reference_index_K: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[1, K, H, D], as the gathered rows of all batch rows in one would have it."""
        return torch.Size((1, len(self.index_K), *self.source_RHD.shape[1:]))

    def contained_tensors(self) -> tuple[Tensor | None, ...]:
        return self.source_RHD, self.index_K, self.reference_RHD, self.reference_index_K

    def split_with_sizes(self, sizes: Sequence[int], dim: int) -> list[Rows]:
        """The same rows of consecutive heads, so many each; dim is 2, that of the heads."""
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
        return self.source_RHD.new_empty(*shape)

    def __len__(self) -> int:
        return 1


class Cut(NamedTuple):
    """A cut of a tensor [B, T, H, ...] into blocks along dim 1 (rows) or 2 (heads), of these sizes."""

    dim: int
    sizes: tuple[int, ...]

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int, int]]:
        """Batch, tokens and heads of every block of a tensor [B, T, H, ...]."""
        B, T, H = shape[:3]
        return [(B, size, H) if self.dim == 1 else (B, T, size) for size in self.sizes]

    def cells(self, shape: Sequence[int]) -> list[int]:
        """Tokens times heads of every block, over the batch, of a tensor [B, T, H, ...]."""
        return [math.prod(block) for block in self.shapes(shape)]

    def tiles(self, shape: Sequence[int], head_dim: int) -> list[int]:
        """Return the number of tiles of every block of a tensor [B, T, H, ...]."""
        strips = (B * -(-T // TOKENS) * -(-H * head_dim // RUN) for B, T, H in self.shapes(shape))
        return [-(-count // TILE) for count in strips]


def most_bytes(cells: int, head_dim: int) -> int:
    """Return the most bytes that a block's stream takes, whatever it holds: a strip of one token has a byte for its
    size."""
    strips = cells * -(-head_dim // RUN)
    return 2 * RUN * strips + strips + 4 * -(-strips // TILE)


def room_of(cells: int, width: int) -> int:
    """Bytes of a stream's first part, where a token and head has so many bytes: whole words."""
    return cells * width // 2 * 2


def stream_places(cells: Sequence[int], head_dim: int) -> list[int]:
    """Return where blocks' streams begin in a buffer that has room for any, in bytes, and at the end its size."""
    return list(accumulate((most_bytes(count, head_dim) // 2 * 2 for count in cells), initial=0))

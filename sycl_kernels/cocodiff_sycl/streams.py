"""How a tensor of the lossless codec is cut into blocks, and where their streams have room: `cocodiff.kernels.lossless`
tells what these are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

RUN = 8  # numbers of a strip's token
TOKENS = 32  # of a strip, at most
TILE = 16  # strips


class Cut(NamedTuple):
    """How a tensor [B, T, H, ...] is cut into blocks: dim 1 by rows or 2 by heads, so many each."""

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
        """Of every block."""
        strips = (B * -(-T // TOKENS) * -(-H * head_dim // RUN) for B, T, H in self.shapes(shape))
        return [-(-count // TILE) for count in strips]


def most_bytes(cells: int, head_dim: int) -> int:
    """Of a block's stream, whatever its numbers and its shape are: a strip of one token has a byte for its size."""
    strips = cells * -(-head_dim // RUN)
    return 2 * RUN * strips + strips + 4 * -(-strips // TILE)


def room_of(cells: int, width: int) -> int:
    """Bytes of a stream's first part, where a token and head has so many bytes: whole words."""
    return cells * width // 2 * 2


def stream_places(cells: Sequence[int], head_dim: int) -> list[int]:
    """Where blocks' streams begin in a buffer that has room for any, in bytes; at the end its size."""
    return list(accumulate((most_bytes(count, head_dim) // 2 * 2 for count in cells), initial=0))

"""The engine's data movement as operations with one signature each; here their torch form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def pack(pieces: Sequence[Tensor], buffer: Tensor) -> None:
    """Copies pieces of any shape and stride, one after the other, into a contiguous 1-D buffer of their dtype."""
    start = 0
    for piece in pieces:
        end = start + piece.numel()
        buffer[start:end].view(piece.shape).copy_(piece)
        start = end


def unpack(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a packed buffer, in the order and the shapes in which `pack` put them there."""
    views, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        views.append(buffer[start:end].view(shape))
        start = end
    return views

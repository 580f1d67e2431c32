"""A tensor's bits in one number: what ranks compare where sending the tensor itself would cost too much."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = -0x61C8864680B583EB  # odd, of 64 bits: 2^64 over the golden ratio


def digest(x: Tensor, first: int = 0) -> Tensor:
    """A tensor's bits in one number, int64 []: a sum of mixed values and places, the same in any order of summation.

    first: the place of its first element, or of its first 8 bytes where it is a multiple of 8 bytes: a tensor's digest
    is the sum of those of its pieces."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().contiguous().flatten()
    size = flat.element_size()
    if flat.nbytes % 8 == 0:  # several elements at a time
        flat, size = (flat.clone() if flat.storage_offset() * size % 8 else flat), 8
    bits = flat.view(INTEGERS[size]).to(torch.int64)
    mixed = torch.arange(first + 1, first + 1 + len(bits), device=x.device).mul_(MULTIPLIER).add_(bits).mul_(MULTIPLIER)
    for _ in range(2):  # after one round a word's highest bits have changed few others: two errors there may cancel
        mixed.bitwise_xor_(mixed >> 32).mul_(MULTIPLIER)
    return mixed.sum()

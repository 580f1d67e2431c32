"""A tensor's bits in one number: what ranks compare where sending the tensor itself would cost too much."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = -0x61C8864680B583EB  # odd, of 64 bits: 2^64 over the golden ratio


def digest(x: Tensor) -> Tensor:
    """A tensor's bits in one number, int64 []: a sum of mixed values and places, the same in any order of summation."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().contiguous().flatten()
    size = flat.element_size()
    if flat.nbytes % 8 == 0:  # several elements at a time
        flat, size = (flat.clone() if flat.storage_offset() * size % 8 else flat), 8
    bits = flat.view(INTEGERS[size]).to(torch.int64)
    mixed = (bits + torch.arange(1, len(bits) + 1, device=x.device) * MULTIPLIER) * MULTIPLIER
    return ((mixed ^ (mixed >> 32)) * MULTIPLIER).sum()

"""Tensors for the tests of operations, and how far apart two results may be."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
batches, tokens, heads = st.integers(1, 3), st.integers(0, 9), st.integers(1, 5)
head_dims = st.sampled_from((1, 2, 3, 7, 8, 16, 18, 31, 32, 64, 72, 130))
even_dims = st.sampled_from((2, 6, 14, 16, 18, 32, 34, 64, 72, 128, 130))
forms = st.sampled_from(("contiguous", "sliced rows", "sliced heads", "transposed"))


def random_BLHD(seed: int, shape: tuple[int, ...], dtype: torch.dtype, form: str = "contiguous") -> Tensor:
    """Random numbers in one of several memory layouts."""
    generator = torch.Generator().manual_seed(seed)
    B, L, H, D = shape
    if form == "sliced rows":
        return torch.randn(B, L + 3, H, D, generator=generator).to(dtype)[:, 2 : L + 2]
    if form == "sliced heads":
        return torch.randn(B, L, H + 2, D, generator=generator).to(dtype)[:, :, 1 : H + 1]
    if form == "transposed":
        return torch.randn(B, H, L, D, generator=generator).to(dtype).transpose(1, 2)
    return torch.randn(shape, generator=generator).to(dtype)


def ulps(found: Tensor, expected: Tensor) -> int:
    """The largest distance in steps of the dtype; same signs are assumed where numbers differ."""
    if not found.numel():
        return 0
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    ordered = [
        torch.where(i < 0, -(i & torch.iinfo(bits).max), i)
        for i in (x.contiguous().view(bits).long() for x in (found, expected))
    ]
    return int((ordered[0] - ordered[1]).abs().max())


def allowed_ulps(dtype: torch.dtype) -> int:
    return 4 if dtype == torch.float32 else 1

"""encode_residual and decode_residual: the very bits of torch, whatever the shapes, strides and numbers."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl import SyclOps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import DTYPES, batches, dtypes, forms, heads, random_BLHD, seeds, tokens
from torch import Tensor

from cocodiff.kernels import Prediction, Reconstructions, TorchOps, coded_width
from cocodiff.kernels.residual import GROUP

TORCH = TorchOps()
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
shapes = st.tuples(batches, tokens, heads, st.sampled_from((1, 6, 8, 24, 32, 40, 64, 100, 128, 130)))
bit_counts = st.sampled_from((2, 4, 8))
SPECIAL = (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 7e4, -0.0, 1e-40, -1e-40, 2.0**-20, 2.0**-24)


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Of NaN: that it is one."""
    if one is None or other is None:
        return one is other
    number = torch.int32 if one.dtype == torch.float32 else torch.int16
    equal = one.contiguous().view(number) == other.contiguous().view(number)
    return bool((equal | (one.isnan() & other.isnan())).all())


def coded(ops, x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, form: str):
    """The code, the notes, and what both ends hold after it."""
    B, L, H, D = x_BLHD.shape
    code_BLHW = random_BLHD(1, (B, L, H, coded_width(D, bits)), torch.float32, form).abs().to(torch.uint8)
    notes_2 = torch.tensor([5, -7])
    ends = []
    for _ in range(2):
        ends.append(Reconstructions(*(None if one is None else placed(one, form) for one in known)))
    ops.encode_residual(x_BLHD, ends[0], how, bits, code_BLHW, notes_2)
    ops.decode_residual(code_BLHW, ends[1], how.factor if how.linear else None, bits)
    return code_BLHW, notes_2, *ends[0], *ends[1]


def placed(x_BLHD: Tensor, form: str) -> Tensor:
    return random_BLHD(0, tuple(x_BLHD.shape), x_BLHD.dtype, form).copy_(x_BLHD)


@given(
    shape=shapes,
    dtype=dtypes,
    bits=bit_counts,
    seed=seeds,
    form=forms,
    code_form=forms,
    two=st.booleans(),
    how=st.builds(Prediction, st.floats(0, 2), st.booleans(), st.booleans()),
    exponent=st.integers(-30, 14),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
)
@quick
def test_the_bits_of_torch(sycl: SyclOps, shape, dtype, bits, seed, form, code_form, two, how, exponent, special):
    x_BLHD, last_BLHD, before_BLHD = (random_BLHD(seed + n, shape, dtype, form) for n in range(3))
    x_BLHD = last_BLHD + (x_BLHD * 2.0**exponent).to(dtype) if exponent < 12 else x_BLHD * 2**exponent
    generator = torch.Generator().manual_seed(seed)
    for number in special if x_BLHD.numel() else ():
        place = [int(torch.randint(size, (1,), generator=generator)) for size in shape]
        x_BLHD[tuple(place)] = number
    known = Reconstructions(last_BLHD, before_BLHD if two else None)
    found, expected = (coded(ops, x_BLHD, known, how, bits, code_form) for ops in (sycl, TORCH))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert all(map(same_bits, found[2:], expected[2:]))
    assert all(map(same_bits, found[2:4], found[4:])), "both ends hold the same"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_at_their_edges(sycl: SyclOps, bits):
    """Residuals whose largest number lies at each step of a scale, one float below and one above."""
    steps = ((torch.arange(-20, 275) - 1 + (107 << 3)) << 20).int()
    largest = torch.cat([steps - 1, steps, steps + 1]).view(torch.float32) * 2 ** (bits - 1)
    x_BLHD = torch.rand(1, len(largest), 1, GROUP, generator=torch.Generator().manual_seed(1)) * 2 - 1
    x_BLHD[0, :, 0, 0] = 1
    x_BLHD *= largest[None, :, None, None]
    known = Reconstructions(torch.zeros_like(x_BLHD))
    found, expected = (coded(ops, x_BLHD, known, Prediction(), bits, "contiguous") for ops in (sycl, TORCH))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert all(map(same_bits, found[2:], expected[2:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_closed_loop_comes_nearer(sycl: SyclOps, dtype):
    """Encoded by SYCL and decoded by torch, both ends keep the same bits; what stands still is soon known."""
    x_BLHD = random_BLHD(1, (1, 5, 3, 40), dtype)
    ends = [[torch.zeros_like(x_BLHD), torch.zeros_like(x_BLHD)] for _ in range(2)]
    code_BLHW, notes_2 = torch.empty(1, 5, 3, coded_width(40, 4), dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    errors = []
    for _ in range(4):
        sycl.encode_residual(x_BLHD, Reconstructions(*ends[0]), Prediction(), 4, code_BLHW, notes_2)
        TORCH.decode_residual(code_BLHW, Reconstructions(*ends[1]), None, 4)
        for end in ends:
            end.reverse()
        assert same_bits(ends[0][0], ends[1][0])
        errors.append(float((ends[0][0] - x_BLHD).abs().max()))
    assert errors[-1] < errors[0] / 8 and notes_2.tolist() == [0, 0]


def test_errors_come_before_a_launch(sycl: SyclOps):
    x_BLHD, code_BLHW = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 5, dtype=torch.uint8)
    known, notes_2 = Reconstructions(torch.zeros_like(x_BLHD)), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 bits: choose from 2, 4, 8"):
        sycl.encode_residual(x_BLHD, known, Prediction(), 3, code_BLHW, notes_2)
    with pytest.raises(ValueError, match=r"code is \[1, 2, 3, 5\], not \[1, 2, 3, 3\]"):
        sycl.decode_residual(code_BLHW, known, None, 2)
    with pytest.raises(ValueError, match=r"notes are torch\.float32"):
        sycl.encode_residual(x_BLHD, known, Prediction(), 4, code_BLHW, torch.zeros(2))
    with pytest.raises(ValueError, match=r"last is torch\.float16"):
        sycl.encode_residual(x_BLHD, Reconstructions(x_BLHD.half()), Prediction(), 4, code_BLHW, notes_2)

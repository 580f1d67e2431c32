"""encode_residual, note_change and decode_residual: torch's very bits, whatever the shapes, strides and numbers."""

from __future__ import annotations

import math

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import DTYPES, batches, dtypes, forms, heads, random_BLHD, seeds, tokens
from torch import Tensor

from cocodiff.kernels import TorchOps
from cocodiff.kernels.residual import GROUP, NOTES, Onward, Prediction, Reconstructions, coded_width

TORCH = TorchOps()
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
shapes = st.tuples(batches, tokens, heads, st.sampled_from((1, 6, 8, 24, 32, 40, 64, 100, 128, 130)))
bit_counts = st.sampled_from((2, 4, 8))
SPECIAL = (math.nan, math.inf, -math.inf, 3e38, -3e38, 7e4, -6e4, -0.0, 1e-40, -1e-40, 2.0**-20, 2.0**-24)


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
    notes_N = torch.tensor([5, -7, 11, 13])
    ends = []
    for _ in range(2):
        ends.append(Reconstructions(*(None if one is None else placed(one, form) for one in known)))
    ops.encode_residual(x_BLHD, ends[0], how, bits, code_BLHW, notes_N)
    ops.decode_residual(code_BLHW, ends[1], how.factor if how.linear else None, bits)
    return code_BLHW, notes_N, *ends[0], *ends[1]


def near(last_BLHD: Tensor, x_BLHD: Tensor, exponent: int) -> Tensor:
    """x so large, and for small exponents added to last."""
    return last_BLHD + (x_BLHD * 2.0**exponent).to(x_BLHD.dtype) if exponent < 12 else x_BLHD * 2**exponent


def with_special(x_BLHD: Tensor, seed: int, numbers: list[float]) -> Tensor:
    """x with these numbers at places of it."""
    generator = torch.Generator().manual_seed(seed)
    for number in numbers if x_BLHD.numel() else ():
        x_BLHD[tuple(int(torch.randint(size, (1,), generator=generator)) for size in x_BLHD.shape)] = number
    return x_BLHD


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
    x_BLHD = with_special(near(last_BLHD, x_BLHD, exponent), seed, special)
    known = Reconstructions(last_BLHD, before_BLHD if two else None)
    found, expected = (coded(ops, x_BLHD, known, how, bits, code_form) for ops in (sycl, TORCH))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert all(map(same_bits, found[2:], expected[2:]))
    assert all(map(same_bits, found[2:4], found[4:])), "both ends hold the same"


@given(
    shape=shapes,
    dtype=dtypes,
    seed=seeds,
    form=forms,
    every=st.sampled_from((1, 3)),
    exponent=st.integers(-30, 14),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
)
@quick
def test_changes_are_noted_as_torch_notes_them(sycl: SyclOps, shape, dtype, seed, form, every, exponent, special):
    """Of rows of a larger tensor, which then are the last ones."""
    x_BLHD, last_BLHD = (random_BLHD(seed + n, shape, dtype, form) for n in range(2))
    last_BLHD, x_BLHD = with_special(last_BLHD, seed + 1, special[1:3]), near(last_BLHD, x_BLHD, exponent)
    x_BLHD, last_BLHD = with_special(x_BLHD, seed, special)[:, ::every], last_BLHD[:, : len(range(0, shape[1], every))]
    found, expected = (placed(last_BLHD, form) for _ in range(2))
    notes = [torch.tensor([5, -7, 11, 13]) for _ in range(2)]
    for ops, kept_BLHD, notes_N in zip((sycl, TORCH), (found, expected), notes, strict=True):
        ops.note_change(x_BLHD, kept_BLHD, notes_N)
    assert same_bits(found, x_BLHD) and same_bits(expected, x_BLHD) and torch.equal(*notes)


@given(
    shape=shapes,
    dtype=dtypes,
    bits=bit_counts,
    seed=seeds,
    form=forms,
    out_form=forms,
    two=st.booleans(),
    factor=st.none() | st.floats(0, 2),
    further=st.floats(0, 2),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
)
@quick
def test_what_is_decoded_is_continued_in_the_same_pass(
    sycl: SyclOps, shape, dtype, bits, seed, form, out_form, two, factor, further, special
):
    """As torch does it, and as it is done from two reconstructions; what is decoded stays as it is without."""
    x_BLHD, last_BLHD, before_BLHD = (random_BLHD(seed + n, shape, dtype, form) for n in range(3))
    code_BLHW = torch.empty(*shape[:3], coded_width(shape[3], bits), dtype=torch.uint8)
    known = Reconstructions(with_special(last_BLHD, seed, special), before_BLHD if two else None)
    how = Prediction(factor or 0.0, factor is not None)
    start = Reconstructions(*(None if one is None else one.clone() for one in known))
    TORCH.encode_residual(x_BLHD, start, how, bits, code_BLHW, torch.zeros(NOTES, dtype=torch.int64))
    found = []
    for ops in (sycl, TORCH):
        ends = [Reconstructions(*(None if one is None else placed(one, form) for one in known)) for _ in range(2)]
        newest = ends[0].last.clone()
        outs = [placed(x_BLHD, out_form) for _ in range(2)]
        ops.decode_residual(code_BLHW, ends[0], factor, bits, Onward(further, outs[0]))
        ops.decode_residual(code_BLHW, ends[1], factor, bits)
        next_BLHD = ends[0].before if two else ends[0].last
        ops.continue_linearly(next_BLHD, newest, Onward(further, outs[1]))
        assert all(map(same_bits, ends[0], ends[1])) and same_bits(*outs)
        found.append((*ends[0], *outs))
    assert all(map(same_bits, *found))


def test_notes_tell_how_a_tensor_has_changed(sycl: SyclOps):
    """Of values that are off by an eighth and by a thirty-second, in as many groups: the geometric mean, also where
    something else predicts them."""
    last_BLHD = random_BLHD(1, (1, 6, 2, 2 * GROUP), torch.float32).sign()
    x_BLHD = last_BLHD * torch.tensor([8 / 7, 32 / 33]).repeat_interleave(GROUP)
    before_BLHD = random_BLHD(2, tuple(x_BLHD.shape), torch.float32)
    for ops in (sycl, TORCH):
        coded_N, predicted_N, changed_N = torch.zeros(3, NOTES, dtype=torch.int64)
        code_BLHW = torch.empty(1, 6, 2, coded_width(2 * GROUP, 8), dtype=torch.uint8)
        known = Reconstructions(last_BLHD.clone()), Reconstructions(last_BLHD, before_BLHD.clone())
        ops.encode_residual(x_BLHD, known[0], Prediction(measure=True), 8, code_BLHW, coded_N)
        ops.encode_residual(x_BLHD, known[1], Prediction(1.0, linear=True, measure=True), 8, code_BLHW, predicted_N)
        ops.note_change(x_BLHD, last_BLHD.clone(), changed_N)
        for notes_N in (coded_N, predicted_N, changed_N):
            assert notes_N.tolist() == [0, 0, -8 * 12 * (3 + 5), 24]


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
    code_BLHW, notes_N = (
        torch.empty(1, 5, 3, coded_width(40, 4), dtype=torch.uint8),
        torch.zeros(NOTES, dtype=torch.int64),
    )
    errors = []
    for _ in range(4):
        sycl.encode_residual(x_BLHD, Reconstructions(*ends[0]), Prediction(), 4, code_BLHW, notes_N)
        TORCH.decode_residual(code_BLHW, Reconstructions(*ends[1]), None, 4)
        for end in ends:
            end.reverse()
        assert same_bits(ends[0][0], ends[1][0])
        errors.append(float((ends[0][0] - x_BLHD).abs().max()))
    assert errors[-1] < errors[0] / 8 and not notes_N.any()


ILL_CONDITIONED = {
    "all large": lambda x, step: x * 1e30,
    "one large": lambda x, step: x.index_fill(-1, torch.tensor([step]), 1e30 * (-1) ** step),
    "at both ends": lambda x, step: x.sign() * 3.4e38 * (-1) ** step,
    "outliers": lambda x, step: x.index_fill(-1, torch.tensor([5]), 1e4 * math.sin(2 * step + 1)),
    "nearly too large for float16": lambda x, step: x.sign() * 65504 / (1 + step % 2),
    "growing": lambda x, step: x * 10.0 ** (step - 2),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ILL_CONDITIONED)
def test_finite_tensors_stay_finite(kind, dtype, bits):
    """Whatever predicts them; so does what stands for the next one. After a group without a scale a tensor is whole."""
    most = torch.finfo(dtype).max
    start, drift = (random_BLHD(seed, (1, 3, 2, 40), torch.float32) for seed in (1, 2))
    steps = [ILL_CONDITIONED[kind](start + 0.1 * step * drift, step).clamp(-most, most).to(dtype) for step in range(8)]
    for factor in (None, 2.0):
        ends = [steps[0], steps[0].clone()]
        for x_BLHD in steps[1:]:
            code_BLHW = torch.empty(1, 3, 2, coded_width(40, bits), dtype=torch.uint8)
            notes_N, out_BLHD, how = (
                torch.zeros(NOTES, dtype=torch.int64),
                torch.empty_like(x_BLHD),
                Prediction(factor or 0.0, factor is not None),
            )
            TORCH.encode_residual(
                x_BLHD, Reconstructions(*(end.clone() for end in ends)), how, bits, code_BLHW, notes_N
            )
            TORCH.decode_residual(code_BLHW, Reconstructions(*ends), factor, bits, Onward(1.0, out_BLHD))
            ends.reverse()
            assert bool(ends[0].isfinite().all()) and bool(out_BLHD.isfinite().all())
            if notes_N[0]:
                ends = [x_BLHD, x_BLHD.clone()]


def test_errors_come_before_a_launch(sycl: SyclOps):
    x_BLHD, code_BLHW = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 5, dtype=torch.uint8)
    known, notes_N = Reconstructions(torch.zeros_like(x_BLHD)), torch.zeros(NOTES, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 bits: choose from 2, 4, 8"):
        sycl.encode_residual(x_BLHD, known, Prediction(), 3, code_BLHW, notes_N)
    with pytest.raises(ValueError, match=r"code is \[1, 2, 3, 5\], not \[1, 2, 3, 3\]"):
        sycl.decode_residual(code_BLHW, known, None, 2)
    with pytest.raises(ValueError, match=r"notes are torch\.float32"):
        sycl.encode_residual(x_BLHD, known, Prediction(), 4, code_BLHW, torch.zeros(2))
    with pytest.raises(ValueError, match=r"note_change: notes are torch\.int64 \[2\] .* give torch\.int64 \[4\]"):
        sycl.note_change(x_BLHD, known.last, notes_N[:2])
    with pytest.raises(ValueError, match=r"last is \[1, 2, 3, 8\], not \[1, 1, 3, 8\]"):
        sycl.note_change(x_BLHD[:, ::2], known.last, notes_N)
    with pytest.raises(ValueError, match=r"last is torch\.float16"):
        sycl.encode_residual(x_BLHD, Reconstructions(x_BLHD.half()), Prediction(), 4, code_BLHW, notes_N)

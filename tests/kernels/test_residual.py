"""encode_residual, note_change and decode_residual: torch's very bits, whatever the shapes, strides and numbers."""

from __future__ import annotations

import math

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import given, strategies
from kernel_helpers import TORCH, distance, dtypes, forms, placed, quick, random_BLHD, same_as_torch, seeds, shapes_of
from torch import Tensor

from cocodiff.kernels.residual import GROUP, NOTES, Onward, Prediction, Reconstructions, coded_width

shapes = shapes_of(strategies.sampled_from((1, 6, 8, 24, 32, 40, 64, 100, 128, 130)))
bit_counts = strategies.sampled_from((2, 4, 8))
SPECIAL = (math.nan, math.inf, -math.inf, 3e38, -3e38, 7e4, -6e4, -0.0, 1e-40, -1e-40, 2.0**-20, 2.0**-24)


def near(last_BLHD: Tensor, x_BLHD: Tensor, exponent: int) -> Tensor:
    """x so large, and for small exponents added to last."""
    return last_BLHD + (x_BLHD * 2.0**exponent).to(x_BLHD.dtype) if exponent < 12 else x_BLHD * 2**exponent


def with_special(x_BLHD: Tensor, seed: int, numbers: list[float]) -> Tensor:
    """x with these numbers at places of it."""
    generator = torch.Generator().manual_seed(seed)
    for number in numbers if x_BLHD.numel() else ():
        x_BLHD[tuple(int(torch.randint(size, (1,), generator=generator)) for size in x_BLHD.shape)] = number
    return x_BLHD


specials = strategies.lists(strategies.sampled_from(SPECIAL), max_size=4)
of_tensors = {"shape": shapes, "dtype": dtypes, "seed": seeds, "form": forms, "special": specials}


def known_of(last_BLHD: Tensor, before_BLHD: Tensor | None, form: str) -> Reconstructions:
    return Reconstructions(*(None if one is None else placed(one, form) for one in (last_BLHD, before_BLHD)))


def there_and_back(
    ops, x_BLHD: Tensor, ends: list[Reconstructions], how: Prediction, bits: int, code_BLHW: Tensor, notes_N: Tensor
) -> None:
    ops.encode_residual(x_BLHD, ends[0], how, bits, code_BLHW, notes_N)
    ops.decode_residual(code_BLHW, ends[1], how.factor if how.linear else None, bits)
    assert all(one is None or distance(one, other) == 0 for one, other in zip(*ends, strict=True)), "of both ends"


@given(
    **of_tensors,
    bits=bit_counts,
    code_form=forms,
    two=strategies.booleans(),
    how=strategies.builds(Prediction, strategies.floats(0, 2), strategies.booleans(), strategies.booleans()),
    exponent=strategies.integers(-30, 14),
)
@quick
def test_both_ends_know_the_bits_of_torch(
    sycl: SyclOps, shape, dtype, bits, seed, form, code_form, two, how, exponent, special
):
    x_BLHD, last_BLHD, before_BLHD = (random_BLHD(seed + n, shape, dtype, form) for n in range(3))
    x_BLHD = with_special(near(last_BLHD, x_BLHD, exponent), seed, special)
    ends = [known_of(last_BLHD, before_BLHD if two else None, form) for _ in range(2)]
    code_BLHW = random_BLHD(1, (*shape[:3], coded_width(shape[3], bits)), torch.float32, code_form).abs()
    code_BLHW = placed(code_BLHW.to(torch.uint8), code_form)
    same_as_torch(sycl, there_and_back, x_BLHD, ends, how, bits, code_BLHW, torch.tensor([5, -7, 11, 13]))


@given(**of_tensors, every=strategies.sampled_from((1, 3)), exponent=strategies.integers(-30, 14))
@quick
def test_changes_are_noted_as_torch_notes_them(sycl: SyclOps, shape, dtype, seed, form, every, exponent, special):
    """Of rows of a larger tensor, which then are the last ones."""
    x_BLHD, last_BLHD = (random_BLHD(seed + n, shape, dtype, form) for n in range(2))
    last_BLHD, x_BLHD = with_special(last_BLHD, seed + 1, special[1:3]), near(last_BLHD, x_BLHD, exponent)
    x_BLHD, last_BLHD = with_special(x_BLHD, seed, special)[:, ::every], last_BLHD[:, : len(range(0, shape[1], every))]
    x, last, _ = same_as_torch(sycl, "note_change", x_BLHD, placed(last_BLHD, form), torch.tensor([5, -7, 11, 13]))
    assert distance(last, x) == 0


def continued(ops, code_BLHW: Tensor, ends: list[Reconstructions], factor, bits, further, outs: list[Tensor]) -> None:
    """What is decoded stays as it is without, and is continued as from two reconstructions."""
    newest = ends[0].last.clone()
    ops.decode_residual(code_BLHW, ends[0], factor, bits, Onward(further, outs[0]))
    ops.decode_residual(code_BLHW, ends[1], factor, bits)
    ops.continue_linearly(ends[0].older, newest, Onward(further, outs[1]))
    assert all(one is None or distance(one, other) == 0 for one, other in zip(*ends, strict=True))
    assert distance(*outs) == 0


@given(
    **of_tensors,
    bits=bit_counts,
    out_form=forms,
    two=strategies.booleans(),
    factor=strategies.none() | strategies.floats(0, 2),
    further=strategies.floats(0, 2),
)
@quick
def test_what_is_decoded_is_continued_in_the_same_pass(
    sycl: SyclOps, shape, dtype, bits, seed, form, out_form, two, factor, further, special
):
    x_BLHD, last_BLHD, before_BLHD = (random_BLHD(seed + n, shape, dtype, form) for n in range(3))
    code_BLHW = torch.empty(*shape[:3], coded_width(shape[3], bits), dtype=torch.uint8)
    last_BLHD, before_BLHD = with_special(last_BLHD, seed, special), before_BLHD if two else None
    sender, *ends = (known_of(last_BLHD, before_BLHD, form) for _ in range(3))
    how = Prediction(factor or 0.0, factor is not None)
    TORCH.encode_residual(x_BLHD, sender, how, bits, code_BLHW, torch.zeros(NOTES, dtype=torch.int64))
    same_as_torch(sycl, continued, code_BLHW, ends, factor, bits, further, [placed(x_BLHD, out_form) for _ in range(2)])


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
    ends = [Reconstructions(torch.zeros_like(x_BLHD)) for _ in range(2)]
    code_BLHW = torch.zeros(1, len(largest), 1, coded_width(GROUP, bits), dtype=torch.uint8)
    notes_N = torch.zeros(NOTES, dtype=torch.int64)
    same_as_torch(sycl, there_and_back, x_BLHD, ends, Prediction(), bits, code_BLHW, notes_N)


ILL_CONDITIONED = {
    "all large": lambda x, step: x * 1e30,
    "one large": lambda x, step: x.index_fill(-1, torch.tensor([step]), 1e30 * (-1) ** step),
    "at both ends": lambda x, step: x.sign() * 3.4e38 * (-1) ** step,
    "outliers": lambda x, step: x.index_fill(-1, torch.tensor([5]), 1e4 * math.sin(2 * step + 1)),
    "nearly too large for float16": lambda x, step: x.sign() * 65504 / (1 + step % 2),
    "growing": lambda x, step: x * 10.0 ** (step - 2),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ILL_CONDITIONED)
def test_finite_tensors_stay_finite(kind, dtype, bits):
    """Whatever predicts them; so does what stands for the next one. After a group without a scale a tensor is whole."""
    most = torch.finfo(dtype).max
    start, drift = (random_BLHD(seed, (1, 3, 2, 40), torch.float32) for seed in (1, 2))
    steps = [ILL_CONDITIONED[kind](start + 0.1 * step * drift, step).clamp(-most, most).to(dtype) for step in range(8)]
    for factor in (None, 2.0):
        ends, how = [steps[0], steps[0].clone()], Prediction(factor or 0.0, factor is not None)
        for x_BLHD in steps[1:]:
            code_BLHW = torch.empty(1, 3, 2, coded_width(40, bits), dtype=torch.uint8)
            notes_N, out_BLHD = torch.zeros(NOTES, dtype=torch.int64), torch.empty_like(x_BLHD)
            sender = Reconstructions(*(end.clone() for end in ends))
            TORCH.encode_residual(x_BLHD, sender, how, bits, code_BLHW, notes_N)
            TORCH.decode_residual(code_BLHW, Reconstructions(*ends), factor, bits, Onward(1.0, out_BLHD))
            ends.reverse()
            assert bool(ends[0].isfinite().all()) and bool(out_BLHD.isfinite().all())
            if notes_N[0]:
                ends = [x_BLHD, x_BLHD.clone()]

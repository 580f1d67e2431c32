"""The residual codec's arithmetic: what a tensor's difference to its prediction becomes on the wire, and back.

Everything is float32, one rounding (to nearest, ties to even) for each operation written here, denormal numbers kept,
and no fused multiply-add, so that every implementation has the same bits (of NaN: that it is one). For one channel of x
with the reconstructions r1 (newest) and r0 (the one before it), all of one dtype:

    prediction   p = r1, or r1 + f * (r1 - r0) with the factor f of a linear continuation; limited to +- 2**102, NaN
                 becoming - 2**102, so that no difference to a finite number overflows
    residual     d = x - p

A group is 32 channels of one head, the last group of a head what is left. Of the group's largest |d|, a:

    step         4 and 8 bits: s = a / 2**(bits - 1), with its significand rounded up to 4 bits
                 2 bits: s = a * 13/32, then twice the step with the least squared error for the magnitudes that the
                 one before gives: s = T / K with T = 2 * (A + 2 * B) and the integer K = n + 8 * m, where n channels of
                 the group are there, A is the sum of their |d|, m of them are large and B is the sum of those; large
                 is |d| >= a * 13/32, the second time |d| * K >= T. The quotient is rounded once, to a significand of 4
                 bits, the smaller one in the middle
    scale byte   0: every |d| is so small that s < 2**-20, or s is larger than the largest step, which is told (see
                 encode_residual): the next call does without a code; the reconstruction is p
                 1 to 254: s = (1 + m / 8) * 2**e, the byte being 8 * (e + 20) + m + 1
                 255: some x is not finite; the reconstruction is NaN in the whole group
    magnitude    k = min(trunc(|d| * (1 / s)), 2**(bits - 1) - 1), 1 / s being the float32 nearest to it
    code         u = 2**(bits - 1) + k, or 2**(bits - 1) - 1 - k where d has its sign bit set;
                 0 where the scale byte is 0 or 255
    value        v = (u - 2**(bits - 1) + 1/2) * s, which is exact
    new state    r = p + v, rounded to the dtype of x; of float16 limited to +- 65504, NaN staying
    operand      r + g * (r - r1), rounded and limited likewise: what stands for the next x where nobody waits for it,
                 with a factor g of its own

    size byte    of any values of a group, for comparisons: the scale byte of the smallest step that none of their
                 magnitudes exceeds, 0 where that would be below 1, and the largest of 254 above and where some value
                 is not finite. 8 of them are an octave, so differences of size bytes are relative sizes, as integers,
                 whose sum no order changes

Sums add the upper half of 32 numbers, zeros where channels are missing, to the lower half, and so on: 16 and 16, 8 and
8, down to 1 and 1.

There is no level at zero: with 4 levels the halves lose 2 dB less than {-1, 0, 1}, and an error in one step is part of
the next one's residual. A linear continuation brings the last errors back five times in square, so it is worth much
that 2 bits err as little as they can.

One head of one token travels as its codes, `bits` each and the first channel in the lowest bits (those that are left of
the last byte are 0), followed by a scale byte for each group.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
NOTES = 4  # of the codec of a tensor: see encode_residual
LOWEST = -20  # exponent of the smallest step
BAD, LARGEST = 255, 254
LIMIT = 2.0**102  # of a prediction: any finite float32 less that is finite
FIRST_STEP = 13 / 32  # of 2 bits, of the largest |d|: nearly the best for residuals like noise


class Prediction(NamedTuple):
    """How x is predicted. factor: of the linear continuation. linear: whether it is used, or the newest reconstruction
    as it is. measure: whether encoding tells how large x's difference to the newest reconstruction is beside x."""

    factor: float = 0.0
    linear: bool = False
    measure: bool = False


class Reconstructions(NamedTuple):
    """What both ends hold of a tensor, [B, L, H, D] of its dtype: the newest, and the one before where one is kept.
    Encoding and decoding write the next one over the older of them."""

    last: Tensor
    before: Tensor | None = None

    @property
    def older(self) -> Tensor:
        return self.last if self.before is None else self.before


class Onward(NamedTuple):
    """Where decoding writes the operand, [B, L, H, D], of a call that does not wait; the factor that continues it."""

    factor: float
    out_BLHD: Tensor


def coded_width(head_dim: int, bits: int) -> int:
    """Bytes of one head of one token on the wire."""
    return math.ceil(head_dim * bits / 8) + groups_of(head_dim)


def groups_of(head_dim: int) -> int:
    return math.ceil(head_dim / GROUP)


def encode_residual(
    x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, code_BLHW: Tensor, notes_N: Tensor
) -> None:
    """Writes the code of x, uint8, and the next reconstruction.

    notes_N: int64 [NOTES], to which is added
        [0]  the number of groups that no scale fits (not finite, or larger than the largest step)
        [1]  nothing: the lossless codec's
        [2]  with `how.measure` the sum over groups of the size byte of x's difference to the newest reconstruction,
             whatever predicts x, less that of x
        [3]  with `how.measure` the number of groups
    So 2 ** ([2] / (8 * [3])) is by how much x has changed, relatively: the geometric mean over groups."""
    x = x_BLHD.float()
    predicted = _predicted(known, how.factor if how.linear else None)
    residual_GC = _in_groups(x - predicted)
    D = x.shape[-1]
    scale_G, too_large = _scale_bytes(residual_GC, D, bits)
    notes_N[0] += too_large
    if how.measure:
        _note_sizes(_in_groups(x - known.last.float()), x, notes_N)
    half, step_G = 2 ** (bits - 1), _steps(scale_G)
    # Of a group without scale this gives numbers of no meaning; the next line replaces them.
    magnitude_GC = (residual_GC.abs() * (1 / step_G)[..., None]).clamp_(max=half - 1).to(torch.int32)
    code_GC = torch.where(residual_GC.signbit(), half - 1 - magnitude_GC, half + magnitude_GC)
    code_GC = code_GC.masked_fill_(((scale_G == 0) | (scale_G == BAD))[..., None], 0)
    _write_state(known, predicted, _values(code_GC, step_G, scale_G, bits))
    width = code_BLHW.shape[-1] - scale_G.shape[-1]
    code_BLHW[..., :width] = _packed(code_GC.flatten(-2)[..., : x.shape[-1]], bits)
    code_BLHW[..., width:] = scale_G


def note_change(x_BLHD: Tensor, last_BLHD: Tensor, notes_N: Tensor) -> None:
    """Adds to notes [2] and [3] what `encode_residual` adds with `how.measure`, of a tensor that travels as it is and
    is predicted to be as it was; then last becomes x."""
    x = x_BLHD.float()
    _note_sizes(_in_groups(x - last_BLHD.float()), x, notes_N)
    last_BLHD.copy_(x_BLHD)


def decode_residual(
    code_BLHW: Tensor, known: Reconstructions, factor: float | None, bits: int, onward: Onward | None = None
) -> None:
    """Writes the next reconstruction from a code and, with `onward`, the operand that continues it. factor: of the
    linear continuation that predicted it, None for the newest one."""
    D = known.last.shape[-1]
    width = math.ceil(D * bits / 8)
    code_GC = _in_groups(_unpacked(code_BLHW[..., :width], D, bits))
    scale_G = code_BLHW[..., width:]
    newest = known.last.clone() if onward else known.last
    _write_state(known, _predicted(known, factor), _values(code_GC, _steps(scale_G), scale_G, bits))
    if onward:
        continue_linearly(known.older, newest, onward)


def continue_linearly(last_BLHD: Tensor, before_BLHD: Tensor, onward: Onward) -> None:
    """Writes the operand that continues two reconstructions."""
    _write(onward.out_BLHD, _continued(Reconstructions(last_BLHD, before_BLHD), onward.factor))


def _predicted(known: Reconstructions, factor: float | None) -> Tensor:
    forecast = _continued(known, factor)
    low = torch.tensor(-LIMIT, device=forecast.device)
    return torch.fmin(torch.fmax(forecast, low), -low)


def _continued(known: Reconstructions, factor: float | None) -> Tensor:
    last = known.last.float()
    if factor is None or known.before is None:
        return last
    return last + (last - known.before.float()) * torch.tensor(factor, dtype=torch.float32, device=last.device)


def _write(target: Tensor, x: Tensor) -> None:
    """Rounds to the target's dtype."""
    most = torch.finfo(target.dtype).max
    target.copy_(x.clamp(-most, most) if target.dtype == torch.float16 else x)


def _write_state(known: Reconstructions, predicted_BLHD: Tensor, values_GC: Tensor) -> None:
    target = known.older
    _write(target, predicted_BLHD + values_GC.flatten(-2)[..., : target.shape[-1]])


def _in_groups(x_BLHD: Tensor) -> Tensor:
    """[B, L, H, groups, 32], the last group filled up with zeros."""
    missing = -x_BLHD.shape[-1] % GROUP
    padded = torch.nn.functional.pad(x_BLHD, (0, missing)) if missing else x_BLHD
    return padded.unflatten(-1, (-1, GROUP))


def _scale_bytes(residual_GC: Tensor, D: int, bits: int) -> tuple[Tensor, Tensor]:
    """Of every group its scale byte, int32, and how many groups no scale fits."""
    size_GC = residual_GC.abs()
    largest_G = _largest(size_GC)
    not_finite_G = ~torch.isfinite(largest_G)
    if bits == 2:
        byte_G = _best_of_two_bits(size_GC, largest_G, D)
    else:
        byte_G = _byte_above(largest_G / 2 ** (bits - 1))
    too_large_G = byte_G > LARGEST
    byte_G = byte_G.clamp_(min=0).masked_fill_(too_large_G, 0).masked_fill_(not_finite_G, BAD)
    return byte_G, (too_large_G | not_finite_G).sum()


def _note_sizes(residual_GC: Tensor, x_BLHD: Tensor, notes_N: Tensor) -> None:
    difference_G = _size_byte(residual_GC) - _size_byte(_in_groups(x_BLHD))
    notes_N[2] += difference_G.sum()
    notes_N[3] += difference_G.numel()


def _size_byte(values_GC: Tensor) -> Tensor:
    # NaN counts as infinity: some of its patterns would overflow.
    return _byte_above(_largest(values_GC.abs()).nan_to_num_(math.inf, math.inf)).clamp_(0, LARGEST)


def _largest(size_GC: Tensor) -> Tensor:
    """By bit patterns, in which NaN comes after infinity and infinity after all numbers."""
    return size_GC.contiguous().view(torch.int32).amax(-1).view(torch.float32)


def _byte_above(step_G: Tensor, round_up: int = 0xFFFFF) -> Tensor:
    """The byte of the smallest step that is not smaller, outside of 1 to 254 where there is none."""
    return ((step_G.view(torch.int32) + round_up) >> 20) - ((127 + LOWEST) << 3) + 1


def _best_of_two_bits(size_GC: Tensor, largest_G: Tensor, D: int) -> Tensor:
    groups = groups_of(D)
    channels_G = torch.full((groups,), GROUP, dtype=torch.float32, device=size_GC.device)
    channels_G[-1] = D - GROUP * (groups - 1)
    all_G, total_G, count_G = sum_of(size_GC), largest_G * FIRST_STEP, torch.ones_like(largest_G)
    for _ in range(2):
        large_GC = size_GC * count_G[..., None] >= total_G[..., None]
        total_G = 2 * (all_G + 2 * sum_of(torch.where(large_GC, size_GC, 0.0)))
        count_G = channels_G + 8 * large_GC.sum(-1)
    # The quotient may be rounded across the middle of two steps: products of the middles, which are exact, decide.
    byte_G = _byte_above(total_G / count_G, 0x7FFFF)
    byte_G += (total_G > _middle_below(byte_G + 1) * count_G).int() - (total_G <= _middle_below(byte_G) * count_G).int()
    return byte_G


def _middle_below(byte_G: Tensor) -> Tensor:
    """The middle of a byte's step and the one before."""
    return (_steps(byte_G - 1) + _steps(byte_G)) / 2


def sum_of(x_GC: Tensor) -> Tensor:
    """Over the last dimension, of as many numbers as a power of 2: the upper half added to the lower, and so on."""
    while x_GC.shape[-1] > 1:
        low_GC, high_GC = x_GC.chunk(2, -1)
        x_GC = low_GC + high_GC
    return x_GC[..., 0]


def _steps(scale_G: Tensor) -> Tensor:
    """The step of every scale byte; what 0 and 255 give is not used."""
    return ((scale_G.to(torch.int32) - 1 + ((127 + LOWEST) << 3)) << 20).view(torch.float32)


def _values(code_GC: Tensor, step_G: Tensor, scale_G: Tensor, bits: int) -> Tensor:
    """What a code adds to the prediction."""
    value_GC = (code_GC.float() + (0.5 - 2 ** (bits - 1))) * step_G[..., None]
    value_GC = value_GC.masked_fill_((scale_G == 0)[..., None], -0.0)  # changes no prediction, not even -0
    return value_GC.masked_fill_((scale_G == BAD)[..., None], math.nan)


def _packed(code_BLHD: Tensor, bits: int) -> Tensor:
    """Bytes of int32 codes."""
    in_byte = 8 // bits
    code_BLHD = torch.nn.functional.pad(code_BLHD.to(torch.uint8), (0, -code_BLHD.shape[-1] % in_byte))
    packed = code_BLHD[..., ::in_byte].clone()
    for number in range(1, in_byte):
        packed |= code_BLHD[..., number::in_byte] << number * bits
    return packed


def _unpacked(packed: Tensor, D: int, bits: int) -> Tensor:
    """[B, L, H, D] of uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :D]

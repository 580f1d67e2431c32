"""The arithmetic of the residual codec, which sends a tensor's difference to its prediction in a few bits per channel.

Everything is float32. Each operation written here is rounded once (to nearest, ties to even), denormal numbers are
kept, and there is no fused multiply-add. So every implementation gives the same bits (for NaN: some NaN). The following
is for one channel of x. r1 is its newest reconstruction and r0 the one before it, all in one dtype.

    prediction   p = r1, or r1 + f * (r1 - r0) with the factor f of a linear continuation; limited to +- 2**102, NaN
                 becoming - 2**102, so that no difference to a finite number overflows;
    residual     d = x - p.

A group is 32 channels of one head. The last group of a head has the remaining channels. a is the group's largest |d|.

    step         4 and 8 bits: s = a / 2**(bits - 1), with its significand rounded up to 4 bits;
                 2 bits: s begins at a * 13/32. Twice it is replaced by the step with the least squared error for the
                 magnitudes that the step before gives: s = T / K with T = 2 * (A + 2 * B) and the integer
                 K = n + 8 * m. n is the number of channels in the group, A the sum of their |d|, m the number of
                 large ones and B the sum of those. Large is |d| >= a * 13/32, the second time |d| * K >= T. The
                 quotient is rounded once, to a significand of 4 bits, a tie to the smaller one;
    scale byte   0: all |d| are so small that s < 2**-20, or s is larger than the largest step. The reconstruction is p.
                 The latter is counted (see encode_residual), and the next call sends the tensor uncoded;
                 1 to 254: s = (1 + m / 8) * 2**e, the byte being 8 * (e + 20) + m + 1;
                 255: some x is not finite; the reconstruction is NaN in the whole group;
    magnitude    k = min(trunc(|d| * (1 / s)), 2**(bits - 1) - 1), 1 / s being the float32 nearest to it;
    code         u = 2**(bits - 1) + k, or 2**(bits - 1) - 1 - k if the sign bit of d is set;
                 0 if the scale byte is 0 or 255;
    value        v = (u - 2**(bits - 1) + 1/2) * s, which is exact;
    new state    r = p + v, rounded to the dtype of x; in float16 limited to +- 65504, NaN staying;
    operand      r + g * (r - r1), rounded and limited likewise. It stands for the next x in displaced calls, and has a
                 factor g of its own.

    size byte    for comparing the sizes of groups: the scale byte of the smallest step that no magnitude of the group
                 exceeds. It is 0 if that would be below 1, and 254 if it would be above or some value is not finite.
                 8 of them are an octave. So differences of size bytes are relative sizes, as integers, whose sum does
                 not depend on the order.

Sums are over 32 numbers, with zeros for missing channels. They add the upper half to the lower half, and so on: 16 and
16, 8 and 8, down to 1 and 1.

There is no level at zero. With 4 levels the halves lose 2 dB less than {-1, 0, 1}, and an error in one step is part of
the next step's residual. A linear continuation returns the last errors five times in square, so it matters that 2 bits
err as little as possible.

One head of one token is sent as its codes followed by a scale byte for each group. Codes have `bits` bits each, the
first channel in the lowest bits; unused bits of the last byte are 0.

At the end stands V-Major's choice: the tokens that it chooses among, and the choice in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # channels that share a scale
NOTES = 4  # counters of a tensor's codec: see encode_residual
LOWEST = -20  # exponent of the smallest step
BAD, LARGEST = 255, 254  # scale bytes: of values that are not finite, and of the largest step
LIMIT = 2.0**102  # largest magnitude of a prediction: any finite float32 minus it is finite
FIRST_STEP = 13 / 32  # with 2 bits, as a fraction of the largest |d|: nearly the best for residuals like noise


class Prediction(NamedTuple):
    """The way in which the residual codec predicts a tensor x from its reconstructions."""

    factor: float = 0.0  # of the linear continuation
    linear: bool = False  # True to continue linearly; False to predict the newest reconstruction
    measure: bool = False  # True to also measure the relative change since the newest reconstruction


class Reconstructions(NamedTuple):
    """The last values of a tensor as its sender and receivers both hold them, each [B, L, H, D] in its dtype.

    Encoding and decoding overwrite the older one with the next one.
    """

    last: Tensor  # the newest reconstruction
    before: Tensor | None = None  # the reconstruction before it; None if only one is kept

    @property
    def older(self) -> Tensor:
        """The reconstruction that the next one overwrites: the older one, or the only one."""
        return self.last if self.before is None else self.before


class Onward(NamedTuple):
    """The request to write the operand of a displaced call while decoding: the new reconstruction, continued by one
    more step."""

    factor: float  # factor of this linear continuation
    out_BLHD: Tensor  # tensor that the operand is written to, [B, L, H, D]


def coded_width(head_dim: int, bits: int) -> int:
    """Return the number of bytes that one head of one token takes as a code, with its scales.

    Args:
        head_dim: channels of a head.
        bits: bits of the code of one channel.
    """
    return math.ceil(head_dim * bits / 8) + groups_of(head_dim)


def groups_of(head_dim: int) -> int:
    """Return the number of groups of channels in one head, each of which has a scale of its own."""
    return math.ceil(head_dim / GROUP)


def encode_residual(
    x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, code_BLHW: Tensor, notes_N: Tensor
) -> None:
    """Encode a tensor as its difference to a prediction, and write the next reconstruction over the older one.

    So 2 ** ([2] / (8 * [3])) of `notes_N` is the relative change of x, as a geometric mean over groups of channels.

    Args:
        x_BLHD: the tensor.
        known: its reconstructions, of which the older one is overwritten.
        how: the way to predict x.
        bits: bits of the code of one channel: 2, 4 or 8.
        code_BLHW: receives the code, uint8, W bytes for each token and head.
        notes_N: counters, int64 [NOTES], to which these numbers are added. [0]: the number of groups that no scale fits
            (not finite, or larger than the largest step). [1]: nothing, as it belongs to the lossless codec. [2], with
            `how.measure`: the sum over groups of the size byte of x's difference to the newest reconstruction, minus
            the size byte of x, regardless of how x is predicted. [3], with `how.measure`: the number of groups.
    """
    x = x_BLHD.float()
    predicted = _predicted(known, how.factor if how.linear else None)
    residual_GC = _in_groups(x - predicted)
    D = x.shape[-1]
    scale_G, too_large = _scale_bytes(residual_GC, D, bits)
    notes_N[0] += too_large
    if how.measure:
        _note_sizes(_in_groups(x - known.last.float()), x, notes_N)
    half, step_G = 2 ** (bits - 1), _steps(scale_G)
    # For a group without scale this gives meaningless numbers; the next line replaces them.
    magnitude_GC = (residual_GC.abs() * (1 / step_G)[..., None]).clamp_(max=half - 1).to(torch.int32)
    code_GC = torch.where(residual_GC.signbit(), half - 1 - magnitude_GC, half + magnitude_GC)
    code_GC = code_GC.masked_fill_(((scale_G == 0) | (scale_G == BAD))[..., None], 0)
    _write_state(known, predicted, _values(code_GC, step_G, scale_G, bits))
    width = code_BLHW.shape[-1] - scale_G.shape[-1]
    code_BLHW[..., :width] = _packed(code_GC.flatten(-2)[..., : x.shape[-1]], bits)
    code_BLHW[..., width:] = scale_G


def note_change(x_BLHD: Tensor, last_BLHD: Tensor, notes_N: Tensor) -> None:
    """Measure how much a tensor that is sent uncoded has changed since its last values, then copy it over these values.

    Args:
        x_BLHD: the tensor.
        last_BLHD: its last values, which are overwritten.
        notes_N: counters, int64 [NOTES]. The change is added to [2] and [3], as `encode_residual` does with
            `how.measure`.
    """
    x = x_BLHD.float()
    _note_sizes(_in_groups(x - last_BLHD.float()), x, notes_N)
    last_BLHD.copy_(x_BLHD)


def decode_residual(
    code_BLHW: Tensor, known: Reconstructions, factor: float | None, bits: int, onward: Onward | None = None
) -> None:
    """Decode a code: write the next reconstruction over the older one and, with `onward`, the operand that continues
    it.

    Args:
        code_BLHW: the code, uint8, W bytes for each token and head.
        known: the receiver's reconstructions, of which the older one is overwritten.
        factor: factor of the linear continuation that predicted x; None if the newest reconstruction did.
        bits: bits of the code of one channel: 2, 4 or 8.
        onward: the operand of a displaced call to write as well; None for none.
    """
    D = known.last.shape[-1]
    width = math.ceil(D * bits / 8)
    code_GC = _in_groups(_unpacked(code_BLHW[..., :width], D, bits))
    scale_G = code_BLHW[..., width:]
    newest = known.last.clone() if onward else known.last
    _write_state(known, _predicted(known, factor), _values(code_GC, _steps(scale_G), scale_G, bits))
    if onward:
        continue_linearly(known.older, newest, onward)


def continue_linearly(last_BLHD: Tensor, before_BLHD: Tensor, onward: Onward) -> None:
    """Write the operand that continues two reconstructions linearly, for a displaced call that decodes nothing.

    Args:
        last_BLHD: the newest reconstruction.
        before_BLHD: the reconstruction before it.
        onward: the factor of the continuation, and the tensor that is written.
    """
    _write(onward.out_BLHD, _continued(Reconstructions(last_BLHD, before_BLHD), onward.factor))


def _predicted(known: Reconstructions, factor: float | None) -> Tensor:
    """Return the prediction of a tensor, limited to +-LIMIT, in float32.

    Args:
        known: its reconstructions.
        factor: factor of a linear continuation; None to predict the newest reconstruction.
    """
    forecast = _continued(known, factor)
    low = torch.tensor(-LIMIT, device=forecast.device)
    return torch.fmin(torch.fmax(forecast, low), -low)


def _continued(known: Reconstructions, factor: float | None) -> Tensor:
    """Return the newest reconstruction, or its linear continuation if there is a factor and an older one, in float32.

    Args:
        known: the reconstructions.
        factor: factor of the linear continuation; None for none.
    """
    last = known.last.float()
    if factor is None or known.before is None:
        return last
    return last + (last - known.before.float()) * torch.tensor(factor, dtype=torch.float32, device=last.device)


def _write(target: Tensor, x: Tensor) -> None:
    """Round x to the target's dtype and write it there; in float16 it is limited to finite numbers."""
    most = torch.finfo(target.dtype).max
    target.copy_(x.clamp(-most, most) if target.dtype == torch.float16 else x)


def _write_state(known: Reconstructions, predicted_BLHD: Tensor, values_GC: Tensor) -> None:
    """Write the next reconstruction, the sum of prediction and decoded residual, over `known.older`.

    Args:
        known: the reconstructions.
        predicted_BLHD: the prediction, float32.
        values_GC: the decoded residual in groups of channels, [B, L, H, groups, 32]. Channels after the last of a head
            are left out.
    """
    target = known.older
    _write(target, predicted_BLHD + values_GC.flatten(-2)[..., : target.shape[-1]])


def _in_groups(x_BLHD: Tensor) -> Tensor:
    """Return a tensor with its channels in groups of 32, [B, L, H, groups, 32], a view or a copy. The last group is
    filled up with zeros."""
    missing = -x_BLHD.shape[-1] % GROUP
    padded = torch.nn.functional.pad(x_BLHD, (0, missing)) if missing else x_BLHD
    return padded.unflatten(-1, (-1, GROUP))


def _scale_bytes(residual_GC: Tensor, D: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return (the scale byte of every group of channels, int32; the number of groups that no scale fits).

    Args:
        residual_GC: differences to the prediction, [..., groups, 32].
        D: channels of a head.
        bits: bits of the code of one channel.
    """
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
    """Add to the counters [2] and [3] of `notes_N` how large residuals are relative to the tensor, and the number of
    groups.

    Args:
        residual_GC: the residuals in groups of channels, [..., groups, 32].
        x_BLHD: the tensor, float32.
        notes_N: counters, int64 [NOTES].
    """
    difference_G = _size_byte(residual_GC) - _size_byte(_in_groups(x_BLHD))
    notes_N[2] += difference_G.sum()
    notes_N[3] += difference_G.numel()


def _size_byte(values_GC: Tensor) -> Tensor:
    """Return the size byte of every group of channels: the largest magnitude in it on a logarithmic scale, 8 to an
    octave.

    Args:
        values_GC: numbers in groups of channels, [..., groups, 32].
    """
    # NaN counts as infinity, because some of its bit patterns would overflow.
    return _byte_above(_largest(values_GC.abs()).nan_to_num_(math.inf, math.inf)).clamp_(0, LARGEST)


def _largest(size_GC: Tensor) -> Tensor:
    """Return the largest number of every group. NaN counts as larger than infinity, since bit patterns are compared.

    Args:
        size_GC: non-negative float32 numbers in groups of channels, [..., groups, 32].
    """
    return size_GC.contiguous().view(torch.int32).amax(-1).view(torch.float32)


def _byte_above(step_G: Tensor, round_up: int = 0xFFFFF) -> Tensor:
    """Return the scale byte of the smallest step that is not below the given one. It is outside of 1 to 254 if there is
    none.

    Args:
        step_G: a step for each group of channels, float32.
        round_up: added before the low bits are cut off; the default rounds up, 0x7FFFF to the nearest.
    """
    return ((step_G.view(torch.int32) + round_up) >> 20) - ((127 + LOWEST) << 3) + 1


def _best_of_two_bits(size_GC: Tensor, largest_G: Tensor, D: int) -> Tensor:
    """Return, for every group of channels, the scale byte whose step has the least squared error in 2 bits.

    Args:
        size_GC: magnitudes of the residuals, [..., groups, 32].
        largest_G: the largest one of each group.
        D: channels of a head.
    """
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
    """Return the middle between the step of each scale byte and the next smaller step."""
    return (_steps(byte_G - 1) + _steps(byte_G)) / 2


def sum_of(x_GC: Tensor) -> Tensor:
    """Return sums over the last dimension, whose size is a power of 2. They are added in a fixed order: upper half to
    lower half, and so on."""
    while x_GC.shape[-1] > 1:
        low_GC, high_GC = x_GC.chunk(2, -1)
        x_GC = low_GC + high_GC
    return x_GC[..., 0]


def _steps(scale_G: Tensor) -> Tensor:
    """Return the quantisation step of every scale byte, float32. The results for 0 and 255 are not used."""
    return ((scale_G.to(torch.int32) - 1 + ((127 + LOWEST) << 3)) << 20).view(torch.float32)


def _values(code_GC: Tensor, step_G: Tensor, scale_G: Tensor, bits: int) -> Tensor:
    """Return the numbers that codes stand for, to be added to the prediction, float32 [..., groups, 32]. They are NaN
    in groups with the scale byte for values that are not finite.

    Args:
        code_GC: codes in groups of channels, [..., groups, 32].
        step_G: the quantisation step of each group.
        scale_G: the scale byte of each group.
        bits: bits of a code.
    """
    value_GC = (code_GC.float() + (0.5 - 2 ** (bits - 1))) * step_G[..., None]
    value_GC = value_GC.masked_fill_((scale_G == 0)[..., None], -0.0)  # changes no prediction, not even -0
    return value_GC.masked_fill_((scale_G == BAD)[..., None], math.nan)


def _packed(code_BLHD: Tensor, bits: int) -> Tensor:
    """Pack codes into bytes, the first one in the lowest bits. Return uint8 [B, L, H, bytes].

    Args:
        code_BLHD: codes, int32.
        bits: bits of a code: 2, 4 or 8.
    """
    in_byte = 8 // bits
    code_BLHD = torch.nn.functional.pad(code_BLHD.to(torch.uint8), (0, -code_BLHD.shape[-1] % in_byte))
    packed = code_BLHD[..., ::in_byte].clone()
    for number in range(1, in_byte):
        packed |= code_BLHD[..., number::in_byte] << number * bits
    return packed


def _unpacked(packed: Tensor, D: int, bits: int) -> Tensor:
    """Unpack bytes into codes, uint8 [B, L, H, D].

    Args:
        packed: the bytes, as `_packed` makes them.
        D: channels of a head.
        bits: bits of a code: 2, 4 or 8.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)[..., :D]


# V-Major's choice -----------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """The tokens that V-Major may leave unsent, in sets. A set is the tokens of one card in one batch entry."""

    place_CT: Tensor  # int64 [1 or 2, tokens]: place of each token's score among all scores, then of its norm
    begin_M: Tensor  # every set's first token, and behind them the number of all tokens, int64
    sizes: tuple[tuple[int, int], ...]  # number of sets of one size that follow each other, and that size in tokens

    @classmethod
    def of_sets(cls, places: Sequence[Tensor], device: torch.device) -> Candidates:
        """Build the candidates from the tokens of each card.

        Args:
            places: for each card an int64 tensor [1 or 2, B, tokens] with the places of its tokens' scores among all
                scores, then of their norms if a threshold decides.
            device: the device that the result is on.
        """
        sizes = [x_CBN.shape[2] for x_CBN in places for _ in range(x_CBN.shape[1])]
        begin_M = torch.tensor([0, *accumulate(sizes)])
        place_CT = torch.cat([x_CBN.flatten(1) for x_CBN in places], 1)
        return cls(place_CT.to(device), begin_M.to(device), tuple((len([*same]), n) for n, same in groupby(sizes)))


class RowOrder(NamedTuple):
    """The rows of all ranks in the order in which V-Major sends them: by rank, batch entry and place."""

    token_N: Tensor  # index of each row's token among the candidates; for rows always sent their number, int64
    last_R: Tensor  # index of every rank's last row, int64; every rank has one
    table_KN: Tensor  # K numbers about every row, int64; `compact` returns the columns of the rows that are sent


def choose(scores: Tensor, among: Candidates, share: float | None, threshold: float) -> Tensor:
    """Choose the tokens that V-Major sends: return uint8 [tokens + 1], 1 for those to send. The last entry, always 1,
    stands for rows that are always sent.

    Args:
        scores: scores, and norms if a threshold decides, of all tokens, float32 in one dimension.
        among: the tokens to choose among, in sets, with their places in `scores`.
        share: part of each set that stays unsent: its floor(N * share) tokens with the smallest scores, of equal scores
            the first ones; NaN counts as larger than every number. None to use the threshold.
        threshold: tokens stay unsent if their score is at most this number times the mean norm of their set.
    """
    active_T = torch.ones(among.place_CT.shape[1] + 1, dtype=torch.uint8, device=scores.device)
    start = 0
    for sets, tokens in among.sizes:
        end = start + sets * tokens
        score_MN = scores[among.place_CT[0, start:end]].view(sets, tokens)
        active_MN = active_T[start:end].view(sets, tokens)
        if share is None:
            norm_MN = scores[among.place_CT[1, start:end]].view(sets, tokens)
            limit_M1 = threshold * norm_MN.mean(1, keepdim=True, dtype=torch.float64)
            torch.logical_not(score_MN.double() <= limit_M1, out=active_MN.view(torch.bool))
        else:
            order_MN = torch.sort(score_MN, dim=1, stable=True).indices
            active_MN.scatter_(1, order_MN[:, : math.floor(tokens * share)], 0)
        start = end
    return active_T


def compact(active_T: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
    """Pick the rows to send from a table, in the order in which they are sent.

    Return (their columns of the table, int64 [K, rows], with any numbers behind the chosen rows; the end of each rank's
    rows among them, int64 [ranks]).

    Args:
        active_T: uint8, 1 for tokens to send, as `choose` returns it.
        order: the rows of all ranks with their table.
    """
    columns, rows = order.table_KN.shape
    active_N = active_T.index_select(0, order.token_N)
    place_N = active_N.cumsum(0)  # from 1 on; rows that stay are written to place 0
    end_R = place_N.index_select(0, order.last_R)
    chosen_KN = order.table_KN.new_empty(columns, rows + 1)
    chosen_KN.scatter_(1, place_N.mul_(active_N).expand(columns, rows), order.table_KN)
    return chosen_KN[:, 1:], end_R

"""Intensities: the range of known voxels, normalisation to [0, 1] and back to the input's dtype.

The comparison of a truth with the known voxels of its input is here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.jobs.declared import Declared, describe, find_limits, find_missing, move_off_missing
from cocodiff_eval.data.masks import Mask
from cocodiff_eval.data.volume import Progress, Stack, compare_voxel_sizes, unwatched

_TAPS = (0.125, 0.375, 0.375, 0.125)  # binomial (1, 3, 3, 1): enough smoothing that halving does not alias visibly


def _smooth_halve(values: np.ndarray, axis: int) -> np.ndarray:
    """Return an array smoothed and at half the resolution along `axis`: weighted sums of four neighbours.

    Beyond the ends it counts as zero.
    """
    values = np.moveaxis(values, axis, 0)
    even = len(values) + len(values) % 2
    padded = np.pad(values, [(1, even + 1 - len(values)), (0, 0)])
    result = sum(tap * padded[offset : offset + even : 2] for offset, tap in enumerate(_TAPS))
    return np.moveaxis(np.asarray(result), 0, axis)


def downsample(image_YX: np.ndarray, weight_YX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an image and the weights of its samples at half the resolution, both [ceil(Y/2), ceil(X/2)].

    It makes a level of the pyramid from which holes are filled. A weight is the share of known voxels behind a sample,
    in [0, 1]. Where it is 0, the image is 0.

    Args:
        image_YX: float64 [Y, X].
        weight_YX: float64 [Y, X] in [0, 1]; at full resolution 1 for known voxels, 0 for others.
    """
    total = _smooth_halve(_smooth_halve(image_YX * weight_YX, 0), 1)
    weight = _smooth_halve(_smooth_halve(weight_YX, 0), 1)
    reach = _smooth_halve(_smooth_halve(np.ones_like(weight_YX), 0), 1)
    image = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
    return image, np.minimum(weight / reach, 1.0)


def _double(values: np.ndarray, axis: int, length: int) -> np.ndarray:
    """Return an array interpolated linearly to twice as many places along `axis`, cut to `length` places."""
    values = np.moveaxis(values, axis, 0)
    before = np.concatenate([values[:1], values[:-1]])
    after = np.concatenate([values[1:], values[-1:]])
    result = np.stack([0.75 * values + 0.25 * before, 0.75 * values + 0.25 * after], axis=1)
    return np.moveaxis(result.reshape(-1, values.shape[1])[:length], 0, axis)


def upsample(image_YX: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return an image interpolated linearly to the next finer level of a pyramid, which has `shape`.

    Samples lie where `downsample` has them.
    """
    return _double(_double(image_YX, 0, shape[0]), 1, shape[1])


def fill_from_outside(image_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """Return an image as float64 whose masked voxels continue the known ones smoothly.

    A pyramid of weighted means is built from known voxels until every sample is known. It is then interpolated back
    into the holes. Known voxels are unchanged. Masked ones, NaN and Inf included, influence no bit of the result, which
    stays between the smallest and the largest known value. Raise ValueError if all voxels are masked.
    """
    if mask_YX.all():
        raise ValueError("all voxels are masked: there is nothing to fill from")
    levels = [(np.where(mask_YX, 0.0, image_YX).astype(np.float64), (~mask_YX).astype(np.float64))]
    while not (levels[-1][1] > 0).all():
        levels.append(downsample(*levels[-1]))
    filled, _ = levels.pop()
    for image, weight in reversed(levels):
        filled = weight * image + (1.0 - weight) * upsample(filled, image.shape)
    # One product and one sum with weight 1 keep the bits, but the bounds of the known values are worth a guarantee.
    known = image_YX[~mask_YX]
    return np.where(mask_YX, np.clip(filled, float(known.min()), float(known.max())), image_YX).astype(np.float64)


TAIL = 0.001  # share of voxels below the lower percentile, and above the upper one
# In a small image a spot of a few voxels exceeds that share. So at least TAIL_VOXELS voxels lie beyond each percentile,
# but at most the share LARGEST_TAIL.
TAIL_VOXELS, LARGEST_TAIL = 16, 0.01
# How far beyond a percentile outliers begin, in distances between both percentiles. The largest of 10^8 voxels of
# normally distributed noise lies .41 beyond.
FENCE = 0.5
LEAST_WITHIN = 0.01  # share of known voxels that a given range must contain; else it is taken for a mistake
SAMPLED = 1 << 20  # number of voxels, about, that percentiles are computed from
UNBOUNDED = 0.99  # share of a dtype's range: a wider interval means that nothing is known


@dataclass(frozen=True)
class IntensityRange:
    """The two intensities of a stack that models, metrics and pictures take for 0 and 1, in the input's units.

    They are the smallest and the largest known voxel that is not an outlier, unless the user gives others.
    """

    low: float  # the intensity that is 0
    high: float  # the intensity that is 1
    extremes: tuple[float, float] | None = None  # smallest and largest of all known voxels; None without outliers
    beyond: int = 0  # number of known voxels that are outliers
    # for instance the value of missing voxels
    declared: Declared = field(default_factory=dict, hash=False)  # what the file's attributes declare of its values

    @property
    def scale(self) -> float:
        """The input units per normalised unit; 1 for a range of zero, so that a constant image can be divided."""
        return self.high - self.low if self.high > self.low else 1.0

    @property
    def limits01(self) -> tuple[float, float]:
        """The least and the largest normalised value of restorations: 0 and 1, or the data's extremes beyond them."""
        low, high = self.extremes or (self.low, self.high)
        return min(0.0, (low - self.low) / self.scale), max(1.0, (high - self.low) / self.scale)

    def normalise(self, image_YX: np.ndarray) -> np.ndarray:
        """Return an image in normalised units, float64, with `low` as 0 and `high` as 1. Outliers and masked voxels may
        lie beyond."""
        return (image_YX.astype(np.float64) - self.low) / self.scale

    def known01(self, image: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return a slice as models see its known voxels: float64 in [0, 1], with outliers at its ends.

        Masked voxels are not read. They become some value of [0, 1].

        Args:
            image: in the input's units.
            mask: True for voxels that are not known.
        """
        known = np.where(mask, np.asarray(self.low).astype(image.dtype), image)
        return np.clip(self.normalise(known), 0.0, 1.0)

    def denormalise(self, image01_YX: np.ndarray) -> np.ndarray:
        """Return a normalised image in the input's units, float64. A range of zero gives its one value."""
        return image01_YX.astype(np.float64) * (self.high - self.low) + self.low


def parse_range(text: str) -> tuple[float, float]:
    """Return the two intensities of `--range low,high`. Raise UserError for other text."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = math.nan, math.nan
    if not (low < high and math.isfinite(high - low)):
        raise UserError(f"--range {text[:60]!r}: give two intensities, the lower first, as --range 0,16383")
    return low, high


def intensity_range(
    stack: Stack, mask: Mask, progress: Progress = unwatched, given: tuple[float, float] | None = None
) -> IntensityRange:
    """Return the range of the known voxels of a stack without outliers (see `fences`), or the given range.

    Known voxels are those outside a mask from a file, or the whole stack if the mask was generated. Slices that are
    masked wholly are not read. The stack is read slice by slice, once, and a second time if voxels lie beyond the
    range.

    Raise UserError if voxels outside the mask are NaN, Inf or declared missing by their file, with their number and the
    first position. Raise it also for a range that float64 cannot hold, and for a given range that contains less than
    LEAST_WITHIN of the known voxels.

    Args:
        progress: shows the progress of reading.
        given: the user's range; None to find it.
    """
    low, high, within, count = _extremes_and_fences(stack, mask, progress)
    own, within = within, given or within
    ends, extremes, beyond = (low, high), None, 0
    if low < within[0] or high > within[1]:
        extremes = ends
        ends, beyond = _within(stack, mask, progress, within)
    if given is not None and count - beyond < LEAST_WITHIN * count:
        low, high = _within(stack, mask, progress, own)[0]
        raise UserError(
            f"--range {given[0]:g},{given[1]:g}: of {count:,} known voxels of {stack.path} {count - beyond:,} lie in "
            f"it; their own range is --range {low:.9g},{high:.9g}"
        )
    if stack.dtype.kind in "ui" and max(-low, high) >= 2**53:
        told = f"{stack.path}: integers from {low:.0f} to {high:.0f}, of which float64 holds each only up to 2^53"
        raise UserError(f"{told}; subtract their least from all of them, or save them as float64")
    low, high = given or ends
    if not np.isfinite(high - low):
        raise UserError(f"{stack.path}: intensities from {low:g} to {high:g} are too far apart; rescale them")
    return IntensityRange(low, high, extremes, beyond, stack.metadata.declared)


def _extremes_and_fences(stack: Stack, mask: Mask, progress: Progress) -> tuple[float, float, tuple[float, float], int]:
    """Read the known voxels of a stack. Return the smallest, the largest, their `fences` against outliers, and their
    number.

    Raise UserError if voxels outside the mask are NaN, Inf or declared missing.
    """
    low, high = np.inf, -np.inf
    count, bad, first = 0, 0, ""
    sample: list[np.ndarray] = []
    every = max(1, math.prod(stack.shape) // SAMPLED)
    # a step that has no factor in common with the row length, so that samples lie in all columns
    every = next(n for n in range(every, 2 * every + 2) if math.gcd(n, stack.shape[2]) == 1)
    for index, known_P, bad_YX in _read_known(stack, mask, progress, f"reading {stack.name}"):
        if bad_YX.any() and not bad:
            first = stack.place(index, *np.argwhere(bad_YX)[0].tolist())
        bad += int(np.count_nonzero(bad_YX))
        if known_P.size and not bad:
            low, high = min(low, float(known_P.min())), max(high, float(known_P.max()))
            count += known_P.size
            sample.append(known_P[::every].astype(np.float64))
    if bad:
        declared = ", ".join(describe(stack.metadata.declared))
        kinds = ["NaN or Inf"] * (stack.dtype.kind == "f") + [f"missing ({declared})"] * bool(declared)
        raise UserError(
            f"{stack.path}: {bad} {' or '.join(kinds)} voxels outside the mask {mask.name!r}, the first at {first}; "
            f"mask them or replace them{', or delete the attribute if it is wrong' * bool(declared)}"
        )
    return low, high, fences(np.concatenate(sample), count), count


def _read_known(
    stack: Stack, mask: Mask, progress: Progress, what: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Read the slices that are not masked wholly. Yield (index, known voxels [P], missing voxels outside the mask) of
    each.

    The missing voxels are a boolean [Y, X].

    Args:
        progress: shows the progress of reading.
        what: the title of the progress.
    """
    for index in progress(range(len(stack)), what):
        if index not in mask.full:
            image_YX, outside_YX = stack.read(index), ~mask.read(index)
            missing_YX = find_missing(stack.metadata.declared, image_YX) | ~np.isfinite(image_YX)
            yield index, image_YX[outside_YX if mask.from_file else ~missing_YX], missing_YX & outside_YX


def _within(stack: Stack, mask: Mask, progress: Progress, ends: tuple[float, float]) -> tuple[tuple[float, float], int]:
    """Return the smallest and the largest known voxel between two intensities, as a pair, and the number of known
    voxels outside the two.

    Known voxels are those of the stack that are not masked. If none lies between, the pair is (inf, -inf).

    Args:
        progress: shows the progress of reading.
        ends: the two intensities, which count as between them.
    """
    low, high, beyond = np.inf, -np.inf, 0
    for _, known_P, _ in _read_known(stack, mask, progress, f"reading {stack.name} again"):
        known_P = known_P.astype(np.float64)
        inside_P = known_P[(known_P >= ends[0]) & (known_P <= ends[1])]
        beyond += known_P.size - inside_P.size
        if inside_P.size:
            low, high = min(low, float(inside_P.min())), max(high, float(inside_P.max()))
    return (low, high), beyond


def fences(sample: np.ndarray, count: int) -> tuple[float, float]:
    """Return the two intensities beyond which voxels are outliers.

    An outlier lies below the .1 percentile or above the 99.9 percentile by more than half the distance between these.
    For fewer than 16000 voxels the percentiles leave 16 voxels beyond each, but at most 1 %. If both percentiles are
    equal, outliers cannot be distinguished from data, and the fences are infinite.

    Args:
        sample: a sample of the voxels.
        count: the number of voxels that it is a sample of.
    """
    share = max(TAIL, min(LARGEST_TAIL, TAIL_VOXELS / count))
    cut = min(round(share * sample.size), (sample.size - 1) // 2)
    ordered = np.partition(sample, (cut, sample.size - 1 - cut))
    low, high = float(ordered[cut]), float(ordered[sample.size - 1 - cut])
    margin = FENCE * (high - low) if high > low else math.inf
    return low - margin, high + margin


def prepare_slice(image_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange) -> np.ndarray:
    """Return a slice as models see it: float32 [Y, X] in [0, 1], with masked voxels filled from the known ones.

    Outliers become 0 or 1 first, so that they do not brighten the fill around them, and because models were trained
    without them. The values of masked voxels do not influence the result.
    """
    return fill_from_outside(scale.known01(image_YX, mask_YX), mask_YX).astype(np.float32)


def compose_native(
    original_YX: np.ndarray, restored01_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> np.ndarray:
    """Return the restored slice in the dtype of the input's. Outside the mask it has the input's bits.

    Restored values are rounded to the nearest integer for integer dtypes. They are clipped to the dtype, or to the
    valid range that the file declares. A value that the file declares to mean "missing" is replaced by the next one.

    Args:
        original_YX: the input's slice.
        restored01_YX: the restored slice, normalised.
        mask_YX: True for restored voxels.
        scale: the intensity range, and what the file declares of its values.
    """
    restored_P = restored01_YX[mask_YX]
    endless_P = np.isinf(restored_P)  # they stay so if the range is zero
    restored_P = np.where(endless_P, restored_P, scale.denormalise(np.where(endless_P, 0.0, restored_P)))
    if original_YX.dtype.kind in "ui":
        restored_P = np.rint(restored_P)
    low, high = find_limits(scale.declared, original_YX.dtype)
    native_P = np.full(restored_P.shape, high, original_YX.dtype)  # float64 cannot hold the largest 64-bit integers
    fits_P = ~(restored_P >= high)
    native_P[fits_P] = np.maximum(restored_P[fits_P], low)
    move_off_missing(scale.declared, native_P, scale.high)
    result_YX = original_YX.copy()
    result_YX[mask_YX] = native_P
    return result_YX


def half_width(ends: Sequence[np.ndarray], mask_YX: np.ndarray, scale: IntensityRange) -> np.ndarray:
    """Return half the width of a slice's intervals, float [Y, X] in the input's units, from the two ends in files.

    All of it is infinite if nothing is known of the slice's errors. The files then have the lowest and the highest
    value, of the dtype or of the range that the input declares, everywhere under the mask.

    Args:
        ends: the lower and the upper ends, [Y, X] each, in the files' dtype.
        mask_YX: True where the slice was restored.
        scale: the intensity range, with the limits that the input declares.
    """
    low, high = ends
    least, most = find_limits(scale.declared, low.dtype)
    width_YX = high * 0.5 - low * 0.5
    known = (width_YX[mask_YX] < UNBOUNDED * (most * 0.5 - least * 0.5)).any()
    return width_YX if known else np.full_like(width_YX, np.inf)


SAME = 1e-3  # share of the intensity range: voxels that differ by less are equal, as after rounding
OTHER = 0.02  # share of the range, root mean square: a truth that differs by more is refused if a reason is found
ALIKE = 0.25  # least squared correlation with the input of a truth that shows the same object
FLIPS = ((), (0,), (1,), (2,), (1, 2))  # axes (0: z) along which a truth may be mirrored


def compare_truth(
    truth: Stack, stack: Stack, mask: Mask, scale: IntensityRange, progress: Progress = unwatched
) -> Stack:
    """Compare a truth (known original) with its input outside the mask. Return the truth, with a remark if they differ.

    Voxels are equal if they differ by less than SAME of the range, or by at most one unit in an integer stack. Voxels
    of the truth that are NaN are not compared. Both volumes are read once.

    Raise UserError if the root mean square difference is above OTHER of the range and `likeness` sees why: the truth is
    mirrored, scaled, or unlike the input. Without such a reason there is only the remark.

    Args:
        truth: the known original.
        stack: the input.
        mask: the voxels to restore.
        scale: the input's range of intensities.
        progress: shows the progress of reading.
    """
    step = min(1.0, scale.scale / 10) if stack.dtype.kind in "ui" else 0.0
    known, other, largest, squares = 0, 0, 0.0, 0.0
    for index in progress(range(len(stack)), f"comparing {truth.name}"):
        truth_YX = truth.read(index)
        known_YX = ~mask.reader(index) & np.isfinite(truth_YX)  # nothing of a slice that is masked wholly
        apart_P = np.abs(stack.read(index)[known_YX].astype(np.float64) - truth_YX[known_YX])
        known, other = known + apart_P.size, other + int((apart_P > max(SAME * scale.scale, step)).sum())
        largest, squares = max(largest, float(apart_P.max(initial=0.0))), squares + float(np.square(apart_P).sum())
    remarks = compare_voxel_sizes(truth, stack)
    if other:
        why = likeness(truth, stack, mask, scale)
        told = f"outside the mask {other:,} of {known:,} voxels differ (largest difference {largest:.6g}){why}"
        if why and squares / known > (OTHER * scale.scale) ** 2:
            remedy = "give the original in the input's place and units, NaN where it is not known, or no --truth"
            raise UserError(f"{truth.path} is not the truth of {stack.path}: {told}; {remedy}")
        remarks.append(f"{truth.path}: {told}; PSNR and SSIM compare with it as it is")
    return replace(truth, metadata=replace(truth.metadata, remarks=remarks))


def likeness(truth: Stack, stack: Stack, mask: Mask, scale: IntensityRange) -> str:
    """Return a phrase that says why a truth differs from the known voxels of its input; "" if no reason is found.

    At most four slices are compared, without outliers. A truth looks mirrored, turned by 180 degrees or scaled if
    undoing that halves the squared difference. Otherwise it may have little in common with the input.
    """
    last = len(stack) - 1
    numbers = sorted({at for part in (1, 3) for at in (last * part // 8, last - last * part // 8)})
    image, given, hidden = (np.stack([read(n) for n in numbers]) for read in (stack.read, truth.read, mask.reader))
    known, pairs = ~hidden & (image >= scale.low) & (image <= scale.high), dict[tuple[int, ...], np.ndarray]()
    for axes in FLIPS:
        other = np.flip(given, axes)
        both = known & np.isfinite(other)
        pairs[axes] = np.stack([image[both], other[both]]).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        alike = {one: float(np.nan_to_num(np.corrcoef(pair_2P)[0, 1])) ** 2 for one, pair_2P in pairs.items()}
    best = max(alike, key=lambda axes: alike[axes])
    if alike[best] >= ALIKE and 1 - alike[best] < (1 - alike[()]) / 2:
        return f"; it looks mirrored along {' and '.join('zyx'[axis] for axis in best)}"
    if alike[()] < ALIKE:
        return f"; they have little in common (correlation {math.sqrt(alike[()]):.2f})"
    own_P, other_P = pairs[()]
    factor, more = np.polyfit(other_P, own_P, 1)
    if np.square(own_P - other_P).mean() < 2 * np.var(own_P - factor * other_P):
        return ""
    return f"; the input looks like {factor:.6g} times the truth {more:+.6g}"

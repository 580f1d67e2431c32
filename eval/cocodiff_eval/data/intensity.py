"""Intensities: the range outside the mask, normalising to [0, 1] and going back to the user's dtype; and how the truth
of an input is told from that of another one: its known voxels are the input's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.jobs.declared import Declared, describe, find_limits, find_missing, move_off_missing
from cocodiff_eval.data.masks import Mask
from cocodiff_eval.data.volume import Progress, Stack, compare_voxel_sizes, unwatched

_TAPS = (0.125, 0.375, 0.375, 0.125)  # binomial (1, 3, 3, 1): enough smoothing that halving does not alias visibly


def _smooth_halve(values: np.ndarray, axis: int) -> np.ndarray:
    """Weighted sums of four neighbours at every second place along `axis`; zeros lie beyond the ends."""
    values = np.moveaxis(values, axis, 0)
    even = len(values) + len(values) % 2
    padded = np.pad(values, [(1, even + 1 - len(values)), (0, 0)])
    result = sum(tap * padded[offset : offset + even : 2] for offset, tap in enumerate(_TAPS))
    return np.moveaxis(np.asarray(result), 0, axis)


def downsample(image_YX: np.ndarray, weight_YX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next coarser image and its weight in [0, 1], the share of known voxels behind each sample (0: none, image 0).

    image_YX float64, weight_YX float64 in [0, 1]; both [Y, X] to [ceil(Y/2), ceil(X/2)].
    """
    total = _smooth_halve(_smooth_halve(image_YX * weight_YX, 0), 1)
    weight = _smooth_halve(_smooth_halve(weight_YX, 0), 1)
    reach = _smooth_halve(_smooth_halve(np.ones_like(weight_YX), 0), 1)
    image = np.divide(total, weight, out=np.zeros_like(total), where=weight > 0)
    return image, np.minimum(weight / reach, 1.0)


def _double(values: np.ndarray, axis: int, length: int) -> np.ndarray:
    values = np.moveaxis(values, axis, 0)
    before = np.concatenate([values[:1], values[:-1]])
    after = np.concatenate([values[1:], values[-1:]])
    result = np.stack([0.75 * values + 0.25 * before, 0.75 * values + 0.25 * after], axis=1)
    return np.moveaxis(result.reshape(-1, values.shape[1])[:length], 0, axis)


def upsample(image_YX: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Linear interpolation onto the next finer level of `shape`, the inverse placement of `downsample`."""
    return _double(_double(image_YX, 0, shape[0]), 1, shape[1])


def fill_from_outside(image_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """`image_YX` as float64 with the masked voxels replaced by a smooth continuation of the others.

    A pyramid of weighted means is built from known voxels only until every sample is known, then interpolated back into
    the holes. Voxels outside the mask are unchanged; those inside (NaN and Inf included) influence no bit of
    the result, which stays between the smallest and the largest known value. At least one voxel must be known.
    """
    if mask_YX.all():
        raise ValueError("all voxels are masked: there is nothing to fill from")
    image = np.where(mask_YX, 0.0, image_YX).astype(np.float64)
    if not mask_YX.any():
        return image
    weight = (~mask_YX).astype(np.float64)
    levels = [(image, weight)]
    while not (weight > 0).all():
        image, weight = downsample(image, weight)
        levels.append((image, weight))
    filled = levels.pop()[0]
    while levels:
        image, weight = levels.pop()
        filled = weight * image + (1.0 - weight) * upsample(filled, image.shape)
    # One product and one sum with weight 1 keep the bits, but the bounds of the known values are worth a guarantee.
    known = image_YX[~mask_YX]
    return np.where(mask_YX, np.clip(filled, float(known.min()), float(known.max())), image_YX).astype(np.float64)


TAIL = 0.001  # the share of voxels below the lower percentile, and above the upper one
# A spot of a few voxels is more than that share of a small image: there so many voxels lie beyond each percentile, up
# to a larger share.
TAIL_VOXELS, LARGEST_TAIL = 16, 0.01
# How far beyond a percentile an outlier lies, in distances between both. Of 10^8 voxels of normally distributed noise
# the largest lies .41 beyond.
FENCE = 0.5
LEAST_WITHIN = 0.01  # of the known voxels: a given range that fewer are in is a mistake
SAMPLED = 1 << 20  # voxels that percentiles are taken of
UNBOUNDED = 0.99  # of a type's numbers: an interval of so many says nothing


@dataclass(frozen=True)
class IntensityRange:
    """The intensities that are 0 and 1 for models, metrics and pictures, in the input's units: of a whole stack the
    smallest and the largest known one that is no outlier.

    extremes  the smallest and the largest of all known voxels, where `beyond` of them are outliers; None
              where none is
    declared  what the file's attributes say of its values
    """

    low: float
    high: float
    extremes: tuple[float, float] | None = None
    beyond: int = 0
    declared: Declared = field(default_factory=dict, hash=False)

    @property
    def scale(self) -> float:
        """Input units per normalised unit; 1 where the range is zero, so that a constant image divides by one."""
        return self.high - self.low if self.high > self.low else 1.0

    @property
    def limits01(self) -> tuple[float, float]:
        """What restorations may reach, normalised: 0 and 1, or the extremes of the data where they lie beyond."""
        low, high = self.extremes or (self.low, self.high)
        return min(0.0, (low - self.low) / self.scale), max(1.0, (high - self.low) / self.scale)

    def normalise(self, image_YX: np.ndarray) -> np.ndarray:
        """To float64 where low is 0 and high is 1; outliers and voxels under a mask may lie outside [0, 1]."""
        return (image_YX.astype(np.float64) - self.low) / self.scale

    def known01(self, image: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """As models see what is known: float64 in [0, 1], outliers at its ends. What lies under the mask is not read:
        it becomes some value of [0, 1]."""
        known = np.where(mask, np.asarray(self.low).astype(image.dtype), image)
        return np.clip(self.normalise(known), 0.0, 1.0)

    def denormalise(self, image01_YX: np.ndarray) -> np.ndarray:
        """Back to the input's units, float64. A range of zero gives back its one value."""
        return image01_YX.astype(np.float64) * (self.high - self.low) + self.low


def parse_range(text: str) -> tuple[float, float]:
    """The two intensities of `--range low,high`. Raises UserError for other text."""
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
    """Return the range of the known voxels of a stack, without outliers (`fences`), or the one that is given.

    Known are the voxels outside a mask from a file, and the whole stack under one that is made. Reads one slice at a
    time, each once; where voxels lie beyond the range, a second time. Slices that are masked wholly are not looked at.
    progress: shows how far it is. Raises UserError if voxels outside the mask are NaN, Inf or declared missing by their
    file, with their count and the first position (inside they are fine), for a range that float64 cannot hold, and for
    a given one that fewer than LEAST_WITHIN of the known voxels are in.
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
    """Return the smallest and the largest known voxel, the `fences` of all of them, and their number."""
    low, high = np.inf, -np.inf
    count, bad, first = 0, 0, ""
    sample: list[np.ndarray] = []
    every = max(1, math.prod(stack.shape) // SAMPLED)
    every = next(n for n in range(every, 2 * every + 2) if math.gcd(n, stack.shape[2]) == 1)  # not the same columns
    for index in progress(range(len(stack)), f"reading {stack.name}"):
        if index in mask.full:
            continue
        image_YX, known_YX, bad_YX = _read_known(stack, mask, index)
        found = int(np.count_nonzero(bad_YX))
        if found and not first:
            row, column = np.argwhere(bad_YX)[0].tolist()
            first = stack.place(index, row, column)
        bad += found
        known = image_YX[known_YX]
        if known.size and not bad:
            low, high = min(low, float(known.min())), max(high, float(known.max()))
            count += known.size
            sample.append(known[::every].astype(np.float64))
    if bad:
        declared = ", ".join(describe(stack.metadata.declared))
        kinds = ["NaN or Inf"] * (stack.dtype.kind == "f") + [f"missing ({declared})"] * bool(declared)
        raise UserError(
            f"{stack.path}: {bad} {' or '.join(kinds)} voxels outside the mask {mask.name!r}, the first at {first}; "
            f"mask them or replace them{', or delete the attribute if it is wrong' * bool(declared)}"
        )
    return low, high, fences(np.concatenate(sample), count), count


def _read_known(stack: Stack, mask: Mask, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a slice, where it is known, and where voxels outside the mask are missing."""
    image_YX, outside_YX = stack.read(index), ~mask.read(index)
    missing_YX = find_missing(stack.metadata.declared, image_YX) | ~np.isfinite(image_YX)
    return image_YX, outside_YX if mask.from_file else ~missing_YX, missing_YX & outside_YX


def _within(stack: Stack, mask: Mask, progress: Progress, ends: tuple[float, float]) -> tuple[tuple[float, float], int]:
    """Return the smallest and the largest known voxel within two intensities, and how many lie beyond."""
    low, high, beyond = np.inf, -np.inf, 0
    for index in progress(range(len(stack)), f"reading {stack.name} again"):
        if index in mask.full:
            continue
        image_YX, known_YX, _ = _read_known(stack, mask, index)
        known = image_YX[known_YX].astype(np.float64)
        inside = known[(known >= ends[0]) & (known <= ends[1])]
        beyond += known.size - inside.size
        if inside.size:
            low, high = min(low, float(inside.min())), max(high, float(inside.max()))
    return (low, high), beyond


def fences(sample: np.ndarray, count: int) -> tuple[float, float]:
    """The intensities beyond which voxels are outliers, of a sample of `count` voxels.

    An outlier lies below the .1 percentile or above the 99.9 percentile by more than half the distance between these.
    Of fewer than 16000 voxels, more lie beyond the percentiles: 16, but at most 1 %. Where both percentiles are the
    same value, which all but a few voxels have, nothing tells outliers from data: there are none.
    """
    share = max(TAIL, min(LARGEST_TAIL, TAIL_VOXELS / count))
    cut = min(round(share * sample.size), (sample.size - 1) // 2)
    ordered = np.partition(sample, (cut, sample.size - 1 - cut))
    low, high = float(ordered[cut]), float(ordered[sample.size - 1 - cut])
    margin = FENCE * (high - low) if high > low else math.inf
    return low - margin, high + margin


def prepare_slice(image_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange) -> np.ndarray:
    """The slice as models see it: float32 [Y, X] in [0, 1], with the voxels under the mask filled from outside it.

    Outliers become 0 or 1 before that: a model has not seen others, and none is to brighten the fill around it. The
    voxels under the mask are replaced before anything reads them; whatever they hold, the result has the same bits.
    """
    return fill_from_outside(scale.known01(image_YX, mask_YX), mask_YX).astype(np.float32)


def compose_native(
    original_YX: np.ndarray, restored01_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> np.ndarray:
    """Return the restored slice in the dtype of `original_YX`: outside the mask its very bits, inside what is restored.

    Integers are rounded to nearest. Numbers are clipped to the type's, or the valid range that the file declares, and
    moved to the next one where they would be missing ones.
    """
    restored_P = scale.denormalise(restored01_YX[mask_YX])
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
    """Return half the width of a slice's intervals in the input's units, as floats, from their two ends in files.

    It is infinite where nothing is known of the slice's errors: all ends under the mask are those of the type then.
    """
    low, high = ends
    least, most = find_limits(scale.declared, low.dtype)
    width_YX = high * 0.5 - low * 0.5
    known = (width_YX[mask_YX] < UNBOUNDED * (most * 0.5 - least * 0.5)).any()
    return width_YX if known else np.full_like(width_YX, np.inf)


SAME = 1e-3  # of the range of intensities: a voxel that differs by less is the same, as after rounding
OTHER = 0.02  # of the range, root mean square: a truth that differs by more is refused where it is known why
ALIKE = 0.25  # squared correlation with the input of a truth of the same object, at least
FLIPS = ((), (0,), (1,), (2,), (1, 2))  # of axes z, y, x: what a truth may look like


def compare_truth(
    truth: Stack, stack: Stack, mask: Mask, scale: IntensityRange, progress: Progress = unwatched
) -> Stack:
    """Return the truth of a stack, with a remark if its voxels outside the mask are not those of the stack.

    Voxels count as the same within SAME of the range, or one unit of an integer stack; those without a value (NaN) are
    not compared. Reads both once. Raises UserError if they differ by more than OTHER and `likeness` tells why.
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
    """Return in words how the known voxels of four slices at most look like the truth mirrored, turned or scaled, if
    that halves the squared difference, or that they have little in common; else "". Outliers are left out."""
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

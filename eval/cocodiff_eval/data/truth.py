"""The truth of an input, and how it is told from that of another one: its known voxels are the input's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import Mask
from cocodiff_eval.data.volume import Progress, Stack, unlike, unwatched

SAME = 1e-3  # of the range of intensities: a voxel that differs by less is the same, as after rounding
OTHER = 0.02  # of the range, root mean square: a truth that differs by more is refused where it is known why
ALIKE = 0.25  # squared correlation with the input of a truth of the same object, at least
FLIPS = ((), (0,), (1,), (2,), (1, 2))  # of axes z, y, x: what a truth may look like


def compared(truth: Stack, stack: Stack, mask: Mask, scale: IntensityRange, progress: Progress = unwatched) -> Stack:
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
    remarks = unlike(truth, stack)
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

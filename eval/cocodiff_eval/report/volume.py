"""Volumes in the report: what their three views show, 8 bits a voxel, in a text of bounded size.

The whole volume is embedded if it fits. Otherwise it is the part around the mask, every second voxel of that, or the
part around one masked region: the first of these that fits. Voxels are picked and not averaged, as an average would
hide noise and jumps between slices.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.masks import Mask
from cocodiff_eval.data.slices import to_grey8
from cocodiff_eval.data.volume import Reader, Stack, start_of, unit_symbol
from cocodiff_eval.report.pictures import base64_text, window

VOLUME_BYTES = 3_000_000  # of all volumes of a page; 4 MB in base64
VOXEL_BYTES = 1.125  # of a voxel and its bit of the mask; each layer has one more for a masked voxel
CELLS = 128  # most cells along a side of the grid on which masked regions are found before anything is embedded
MARGIN = 8  # voxels around the mask
MOST_REGIONS = 1000  # number of the largest regions whose places the page has
Box = tuple[slice, ...]  # the slices of indices of a box, [z, y, x]


@dataclass(frozen=True)
class ShownVolume:
    """A volume [Z, Y, X] and its restorations, as the report shows it from three sides. Each is read slice by slice
    along z."""

    stack: Stack  # the input
    mask: Mask  # the voxels that were restored
    scale: IntensityRange  # the input's range of intensities
    truth: Stack | None  # the original; None if unknown: then nothing of it is shown under the mask
    grey: Mapping[str, Reader]  # what was restored, and ends of intervals, by the name that the page shows
    # by the name that the page shows
    uncertainty: Mapping[str, Reader]  # half the width of 90 % intervals; infinite if unknown


@dataclass(frozen=True)
class ShownPart:
    """The part of a volume that the report embeds: every `step`-th voxel of a box."""

    box: Box  # range of indices along z, y and x
    step: int  # distance of embedded voxels along each axis
    told: str  # phrase that tells the page's reader which voxels are embedded, such as "every voxel"
    middle: list[int]  # [z, y, x] of the voxel that is shown first, as indices of embedded voxels


def embedded(volume: ShownVolume, room: int) -> dict[str, Any]:
    """Return what the report's script reads of a volume: metadata and voxels in base64, of at most `room` bytes before
    that.

    Memory holds one slice of each file and what is embedded.
    """
    part = _part(volume, room)
    numbers = range(part.box[0].start, part.box[0].stop, part.step)
    inside = tuple(slice(side.start, side.stop, part.step) for side in part.box[1:])
    mask_ZYX = np.stack([volume.mask.read(index)[inside] for index in numbers])
    base_ZYX = np.stack([volume.stack.read(index)[inside] for index in numbers]).astype(np.float64)
    masked = [(index, mask_YX) for index, mask_YX in zip(numbers, mask_ZYX, strict=True) if mask_YX.any()]

    def under_mask(read: Reader) -> np.ndarray:
        """Return a volume's masked voxels, of the part that the page embeds: float64 [N], slice after slice."""
        found = [read(index)[inside][mask_YX].astype(np.float64) for index, mask_YX in masked]
        return np.concatenate([np.zeros(0), *found])

    base_ZYX[mask_ZYX] = volume.scale.low if volume.truth is None else under_mask(volume.truth.read)
    known_ZYX = np.isfinite(base_ZYX) & (~mask_ZYX if volume.truth is None else True)
    low, high = window(base_ZYX, known_ZYX, mask_ZYX, volume.scale)
    layers: list[dict[str, Any]] = [
        {"name": name, "voxels": _packed(to_grey8(under_mask(read), low, high))} for name, read in volume.grey.items()
    ]
    widths = {name: under_mask(read) for name, read in volume.uncertainty.items()}
    known = {name: values[np.isfinite(values)] for name, values in widths.items()}
    top = max((float(np.quantile(values, 0.99)) for values in known.values() if values.size), default=0.0)
    for name in [name for name, values in known.items() if values.size]:
        layers.append({"name": name, "voxels": _packed(to_grey8(widths[name], 0.0, top)), "top": top})
    kept, first = volume.stack.metadata, start_of(volume.stack.region)
    return {
        "name": volume.stack.name,
        "mask": volume.mask.name,
        "shape": mask_ZYX.shape,
        "first": [a + side.start for a, side in zip(first, part.box, strict=True)],
        "step": part.step,
        "size": [part.step * side for side in kept.voxel_size or (1.0, 1.0, 1.0)],
        "unit": unit_symbol(kept.unit) if kept.voxel_size else "voxels",
        "told": part.told,
        "at": part.middle,
        "regions": [[[side.start, side.stop] for side in box] for box in _regions(mask_ZYX)[0][:MOST_REGIONS]],
        "low": low,
        "high": high,
        "truth": volume.truth is not None,
        "voxels": _packed(to_grey8(base_ZYX, low, high)),
        "masked": _packed(np.packbits(mask_ZYX)),
        "layers": layers,
    }


def _part(volume: ShownVolume, room: int) -> ShownPart:
    """Choose the part of a volume that the report embeds: the largest of a few that fits in `room` bytes.

    They are the whole volume, the part around the mask, every second voxel of that, and the part around one masked
    region.
    """
    shape = volume.stack.shape
    step = [-(-side // CELLS) for side in shape]
    starts = [np.arange(0, side, by) for side, by in zip(shape, step, strict=True)]
    cells_ZYX = np.zeros([*map(len, starts)], bool)
    for index in range(shape[0]):
        rows_YX = np.logical_or.reduceat(volume.mask.read(index), starts[1], axis=0)
        cells_ZYX[index // step[0]] |= np.logical_or.reduceat(rows_YX, starts[2], axis=1)
    layers = len(volume.grey) + len(volume.uncertainty)
    whole = tuple(slice(0, side) for side in shape)
    near = []
    for axis, (by, side) in enumerate(zip(step, shape, strict=True)):
        found = np.flatnonzero(cells_ZYX.any(axis=tuple({0, 1, 2} - {axis})))
        first, last = (int(found[0]) * by, int(found[-1] + 1) * by) if found.size else (0, side)
        near.append(slice(max(0, first - MARGIN), min(side, last + MARGIN)))
    middle = [by * at + by // 2 for by, at in zip(step, _regions(cells_ZYX)[1], strict=True)]
    box, every = _around(middle, shape, room / (VOXEL_BYTES + layers)), 1
    told = "every voxel of the part around the masked region of median size"
    for larger, apart, of_larger in (
        (tuple(near), 2, "every second voxel along each axis of the part around the mask"),
        (tuple(near), 1, "every voxel of the part around the mask"),
        (whole, 1, "every voxel"),
    ):
        voxels = math.prod(-(-(side.stop - side.start) // apart) for side in larger)
        masked = int(cells_ZYX.sum()) * math.prod(-(-by // apart) for by in step)  # at most so many are masked
        if VOXEL_BYTES * voxels + layers * min(masked, voxels) <= room:
            box, every, told = larger, apart, of_larger
    at = [min(a - side.start, side.stop - side.start - 1) // every for a, side in zip(middle, box, strict=True)]
    return ShownPart(box, every, told, at)


def _around(middle: Sequence[int], shape: Sequence[int], voxels: float) -> Box:
    """Return the box around one voxel that holds at most `voxels` voxels, with equal sides if the volume is large
    enough.

    Args:
        middle: indices of the voxel.
        shape: the volume's.
        voxels: most voxels of the box.
    """
    box: dict[int, slice] = {}
    for left, axis in enumerate(sorted(range(3), key=lambda axis: shape[axis])):
        side = max(1, min(shape[axis], int(voxels ** (1 / (3 - left)) + 1e-9)))
        voxels /= side
        start = min(max(0, middle[axis] - side // 2), shape[axis] - side)
        box[axis] = slice(start, start + side)
    return box[0], box[1], box[2]


def _regions(mask_ZYX: np.ndarray) -> tuple[list[Box], list[int]]:
    """Return a mask's connected regions as boxes, the largest first, and a voxel in the middle of the median one.

    The latter is a list of three indices. For an empty mask it is the voxel in the middle of the volume.
    """
    from scipy import ndimage

    labels_ZYX, count = ndimage.label(mask_ZYX)
    if not count:
        return [], [side // 2 for side in mask_ZYX.shape]
    order = np.argsort(-np.bincount(labels_ZYX.ravel())[1:], kind="stable")
    boxes = ndimage.find_objects(labels_ZYX)
    number = int(order[count // 2])
    points_P3 = np.argwhere(labels_ZYX[boxes[number]] == number + 1)
    nearest = np.square(points_P3 - points_P3.mean(axis=0)).sum(axis=1).argmin()
    middle = [int(at) + side.start for at, side in zip(points_P3[nearest], boxes[number], strict=True)]
    return [boxes[one] for one in order], middle


def _packed(values: np.ndarray) -> str:
    """Return an array's bytes as text: gzip in base64."""
    return base64_text(gzip.compress(values.tobytes(), 9, mtime=0))

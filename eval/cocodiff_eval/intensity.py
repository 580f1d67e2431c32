"""Intensities: the range outside the mask, normalising to [0, 1] and going back to the user's dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cocodiff.errors import UserError
from cocodiff_eval.filling import fill_from_outside
from cocodiff_eval.formats.volume import Progress, unwatched
from cocodiff_eval.masks import Mask
from cocodiff_eval.slices import Stack


@dataclass(frozen=True)
class IntensityRange:
    """Smallest and largest intensity outside the mask over a whole stack, in the input's units."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """Input units per normalised unit; 1 where the range is zero, so that a constant image divides by one."""
        return self.high - self.low if self.high > self.low else 1.0

    def normalise(self, image_YX: np.ndarray) -> np.ndarray:
        """To float64 where low is 0 and high is 1; voxels under a mask may lie outside [0, 1]."""
        return (image_YX.astype(np.float64) - self.low) / self.scale

    def denormalise(self, image01_YX: np.ndarray) -> np.ndarray:
        """Back to the input's units, float64. A range of zero gives back its one value."""
        return image01_YX.astype(np.float64) * (self.high - self.low) + self.low


def intensity_range(stack: Stack, mask: Mask, progress: Progress = unwatched) -> IntensityRange:
    """Minimum and maximum outside the mask over the whole stack; reads one slice at a time, each once.

    progress: shows how far it is. Raises UserError if NaN or Inf lies outside the mask, with their count and the first
    position (inside they are fine), and for a range that float64 cannot hold.
    """
    low, high = np.inf, -np.inf
    count, first = 0, ""
    for index in progress(range(len(stack)), f"reading {stack.name}"):
        image_YX, known_YX = stack.read(index), ~mask.read(index)
        if stack.dtype.kind == "f":
            bad_YX = ~np.isfinite(image_YX) & known_YX
            found = int(np.count_nonzero(bad_YX))
            if found and not first:
                row, column = np.argwhere(bad_YX)[0].tolist()
                place = f"row {row}, column {column}"
                first = f"slice {index}, {place}" if stack.ndim == 3 else place
            count += found
        outside = image_YX[known_YX]
        if outside.size and not count:
            low, high = min(low, float(outside.min())), max(high, float(outside.max()))
    if count:
        raise UserError(
            f"{stack.path}: {count} NaN or Inf voxels outside the mask {mask.name!r}, the first at {first}; "
            "mask them or replace them"
        )
    if not np.isfinite(high - low):
        raise UserError(f"{stack.path}: intensities from {low:g} to {high:g} are too far apart; rescale them")
    return IntensityRange(low, high)


def prepare_slice(image_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange) -> np.ndarray:
    """The slice as models see it: float32 [Y, X] in [0, 1], with the voxels under the mask filled from outside it.

    The voxels under the mask are replaced before anything reads them; whatever they hold, the result has the same bits.
    """
    known_YX = np.where(mask_YX, np.asarray(scale.low).astype(image_YX.dtype), image_YX)
    filled01_YX = fill_from_outside(scale.normalise(known_YX), mask_YX)
    return np.clip(filled01_YX, 0.0, 1.0).astype(np.float32)


def compose_native(
    original_YX: np.ndarray, restored01_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> np.ndarray:
    """The restored slice in the dtype of `original_YX`: outside the mask its very bits, inside what was restored.

    Integers are rounded to nearest and clipped to their range.
    """
    restored_YX = scale.denormalise(restored01_YX)
    if original_YX.dtype.kind in "ui":
        limits = np.iinfo(original_YX.dtype)
        # Through Python integers at the ends: float64 cannot hold the largest 64-bit ones.
        inside = np.rint(restored_YX[mask_YX])
        native = np.where(inside >= float(limits.max), limits.max, 0).astype(original_YX.dtype)
        fits = (inside < float(limits.max)) & (inside >= float(limits.min))
        native[fits] = inside[fits].astype(original_YX.dtype)
        native[inside < float(limits.min)] = limits.min
    else:
        limit = np.finfo(original_YX.dtype)
        native = np.clip(restored_YX[mask_YX], float(limit.min), float(limit.max)).astype(original_YX.dtype)
    result_YX = original_YX.copy()
    result_YX[mask_YX] = native
    return result_YX

"""What the report shows of a slice or a generated image, and which slices it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cocodiff_eval.intensity import IntensityRange

SHOWN_SLICES = 4


@dataclass(frozen=True)
class Picture:
    """One slice under one mask, as the report shows it; images [Y, X] in the input's units.

    name, mask     as in the rows of `metrics.json`; slices of a stack are called `stack[number]`
    slice_index    0 for a single slice
    input_YX       the slice as given; under the mask it is shown only where `truth_YX` is given
    restored       preset (or "biharmonic") to restored slice; empty where nothing is masked
    truth_YX       the original, or None where it is unknown
    spread         preset to the standard deviation of its samples
    """

    name: str
    mask: str
    slice_index: int
    input_YX: np.ndarray
    mask_YX: np.ndarray
    scale: IntensityRange
    restored: Mapping[str, np.ndarray]
    truth_YX: np.ndarray | None = None
    spread: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Generated:
    """A generated image in every mode, uint8 [Y, X, 3] each, and the prompt it was made for ("" for none)."""

    name: str
    prompt: str
    images: Mapping[str, np.ndarray]
    mask: None = None


def shown_slices(mask_voxels: Sequence[int], limit: int = SHOWN_SLICES) -> list[int]:
    """At most `limit` slices of a stack with masked voxels, evenly spread, ends included."""
    masked = [index for index, count in enumerate(mask_voxels) if count]
    if len(masked) <= limit:
        return masked
    return [masked[round(i * (len(masked) - 1) / (limit - 1))] for i in range(limit)] if limit > 1 else masked[:limit]


def error_image(
    truth_YX: np.ndarray, restored_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange
) -> tuple[np.ndarray, np.ndarray]:
    """Absolute error in normalised units, float64 [Y, X], 0 outside the mask; and where it is known (finite truth)."""
    known_YX = mask_YX & np.isfinite(truth_YX)
    difference_YX = np.where(known_YX, scale.normalise(restored_YX) - scale.normalise(truth_YX), 0.0)
    return np.abs(difference_YX), known_YX

"""Biharmonic inpainting, the usual tool without a model, as the number every restoration is compared with."""

from __future__ import annotations

import numpy as np

from cocodiff_eval.filling import fill_from_outside
from cocodiff_eval.pyramid import downsample, upsample

# One sparse system per hole. 320 x 320 voxels take 4 s on one core; time and memory then grow faster than the hole, and
# a biharmonic surface is so smooth that larger holes lose nothing visible when solved at half the resolution.
LARGEST_HOLE = 400 * 400


def biharmonic(image01_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """Restore the masked voxels of a normalised slice by scikit-image's `inpaint_biharmonic`; float64 [Y, X].

    Voxels under the mask are never read (NaN is fine there). Slices whose largest connected hole has more than
    400 x 400 voxels are solved on a grid coarser by 2 (repeatedly if needed) and interpolated back.
    Outside the mask the result equals the input.
    """
    known01_YX = np.where(mask_YX, 0.0, image01_YX).astype(np.float64)
    if not mask_YX.any():
        return known01_YX
    smooth_YX = _solve(known01_YX, mask_YX)
    return np.where(mask_YX, smooth_YX, known01_YX)


def _solve(known_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    from skimage.restoration import inpaint_biharmonic

    if _largest_hole(mask_YX) <= LARGEST_HOLE:
        return np.asarray(inpaint_biharmonic(known_YX, mask_YX))
    coarse, weight = downsample(known_YX, (~mask_YX).astype(np.float64))
    hidden = weight < 0.5
    coarse = np.where(weight > 0, coarse, 0.0)
    solved = _solve(coarse, hidden) if hidden.any() else fill_from_outside(coarse, weight == 0)
    return upsample(solved, (known_YX.shape[0], known_YX.shape[1]))


def _largest_hole(mask_YX: np.ndarray) -> int:
    from scipy import ndimage

    labels_YX, count = ndimage.label(mask_YX)
    return int(np.bincount(labels_YX.ravel(), minlength=2)[1:].max()) if count else 0

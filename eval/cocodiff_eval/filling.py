"""Filling voxels under a mask from outside it, smoothly and in linear time, before anything else may read them."""

from __future__ import annotations

import numpy as np

from cocodiff_eval.pyramid import downsample, upsample


def fill_from_outside(image_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """`image_YX` as float64 with the masked voxels replaced by a smooth continuation of the others.

    A pyramid of weighted means is built from known voxels only until every sample is known, then interpolated back into
    the holes. Voxels outside the mask are unchanged; those inside (NaN and Inf included) influence no bit of
    the result, which stays between the smallest and the largest known value. At least one voxel must be known.
    """
    assert image_YX.shape == mask_YX.shape, (image_YX.shape, mask_YX.shape)
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

"""Filling voxels under a mask from outside it, smoothly and in linear time, before anything else may read them.

It goes by factor-2 image pyramids that know a mask: smoothing takes only known voxels (normalised convolution). A level
of n samples has ceil(n / 2) on the next one; sample i there sits between samples 2i and 2i + 1 here.
"""

from __future__ import annotations

import numpy as np

_TAPS = (0.125, 0.375, 0.375, 0.125)  # binomial (1, 3, 3, 1): enough smoothing that halving does not alias visibly


def halve_shape(shape: tuple[int, int]) -> tuple[int, int]:
    """Shape of the next coarser level."""
    return ((shape[0] + 1) // 2, (shape[1] + 1) // 2)


def _smooth_halve(values: np.ndarray, axis: int) -> np.ndarray:
    """Weighted sums of four neighbours at every second place along `axis`; zeros lie beyond the ends."""
    values = np.moveaxis(values, axis, 0)
    length = values.shape[0]
    half = (length + 1) // 2
    padded = np.zeros((2 * half + 2, *values.shape[1:]), dtype=values.dtype)
    padded[1 : length + 1] = values
    result = sum(tap * padded[offset : offset + 2 * half : 2] for offset, tap in enumerate(_TAPS))
    return np.moveaxis(np.asarray(result), 0, axis)


def downsample(image_YX: np.ndarray, weight_YX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next coarser image and its weight in [0, 1], the share of known voxels behind each sample (0: none, image 0).

    image_YX float64, weight_YX float64 in [0, 1]; both [Y, X] to [ceil(Y/2), ceil(X/2)].
    """
    total = _smooth_halve(_smooth_halve(image_YX * weight_YX, 0), 1)
    weight = _smooth_halve(_smooth_halve(weight_YX, 0), 1)
    reach = _smooth_halve(_smooth_halve(np.ones_like(weight_YX), 0), 1)
    known = weight > 0
    image = np.divide(total, weight, out=np.zeros_like(total), where=known)
    return image, np.minimum(weight / reach, 1.0)


def _double(values: np.ndarray, axis: int, length: int) -> np.ndarray:
    values = np.moveaxis(values, axis, 0)
    before = np.concatenate([values[:1], values[:-1]])
    after = np.concatenate([values[1:], values[-1:]])
    result = np.empty((2 * values.shape[0], *values.shape[1:]), dtype=values.dtype)
    result[0::2] = 0.75 * values + 0.25 * before
    result[1::2] = 0.75 * values + 0.25 * after
    return np.moveaxis(result[:length], 0, axis)


def upsample(image_YX: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Linear interpolation onto the next finer level of `shape`, the inverse placement of `downsample`."""
    return _double(_double(image_YX, 0, shape[0]), 1, shape[1])


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

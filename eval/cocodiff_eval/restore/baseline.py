"""Restoring without a model: biharmonic inpainting, the number every restoration is compared with, and in volumes
linear along an axis, Laplace's equation and total variation in three dimensions, which hidden regions judge beside it.

All take normalised images and never read the voxels under the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cocodiff_eval.data.intensity import downsample, fill_from_outside, upsample
from cocodiff_eval.data.volume import Triple

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
    return np.where(mask_YX, _solve(known01_YX, mask_YX), known01_YX)


def _solve(known_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """mask_YX: with at least one voxel."""
    from scipy import ndimage
    from skimage.restoration import inpaint_biharmonic

    labels_YX, _ = ndimage.label(mask_YX)
    if np.bincount(labels_YX.ravel())[1:].max() <= LARGEST_HOLE:
        return np.asarray(inpaint_biharmonic(known_YX, mask_YX))
    coarse, weight = downsample(known_YX, (~mask_YX).astype(np.float64))
    hidden = weight < 0.5
    solved = _solve(coarse, hidden) if hidden.any() else fill_from_outside(coarse, weight == 0)
    return upsample(solved, (known_YX.shape[0], known_YX.shape[1]))


CELL, REACH = 64, 32  # voxels of a side that are solved at once, and so many more around them
TV_WEIGHT, TV_ROUNDS, TV_INNER = 0.05, 20, 10
Window = tuple[slice, slice, slice]
Solver = Callable[[np.ndarray, np.ndarray], np.ndarray]


def linear(image01: np.ndarray, mask: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Masked voxels between the nearest known ones before and after them along an axis, float64; beyond the last known
    one its value, NaN where a line has none. And how far these two are apart, NaN where there are no two; at known
    voxels 0. Any number of dimensions."""
    known, hidden = np.moveaxis(np.where(mask, 0.0, image01), axis, 0), np.moveaxis(mask, axis, 0)
    count = len(known)
    place = np.arange(count).reshape(-1, *[1] * (known.ndim - 1))
    before = np.maximum.accumulate(np.where(hidden, -1, place), axis=0)
    after = np.minimum.accumulate(np.where(hidden, count, place)[::-1], axis=0)[::-1]
    low, high = (np.take_along_axis(known, np.clip(at, 0, count - 1), axis=0) for at in (before, after))
    share = (place - before) / np.maximum(1, after - before)
    found = np.where(before < 0, high, np.where(after == count, low, low + share * (high - low)))
    found = np.where((before < 0) & (after == count), np.nan, found)
    apart = np.where((before < 0) | (after == count), np.nan, np.abs(high - low))
    return np.moveaxis(np.where(hidden, found, known), 0, axis), np.moveaxis(np.where(hidden, apart, 0.0), 0, axis)


def laplace(image01: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the harmonic continuation into the mask, by conjugate gradients; float64 of the image's shape.

    Each masked voxel becomes the mean of its neighbours, with no gradient across the borders of the array. At least one
    voxel must be known. Any number of dimensions.
    """
    known = np.where(mask, 0.0, image01).astype(np.float64)
    if mask.any():
        rows_RN = laplacian(mask)
        start_P = np.full(rows_RN.shape[0], known[~mask].mean())
        known[mask] = _solved(rows_RN[:, mask.ravel()], -(rows_RN @ known.ravel()), start_P, 1e-4, 2000)
    return known


def smooth_continuation(image01: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the biharmonic continuation into the mask, by conjugate gradients; float64 of the image's shape.

    The sum of the squared Laplacians of all voxels in and beside the mask becomes smallest. Of whole volumes this is
    what scikit-image's `inpaint_biharmonic` solves directly, in a small part of its time. Any number of dimensions.
    """
    from scipy.ndimage import binary_dilation

    restored = laplace(image01, mask)
    if mask.any():
        rows_RN = laplacian(binary_dilation(mask))
        of_hidden_RP = rows_RN[:, mask.ravel()]
        right_P = -(of_hidden_RP.T @ (rows_RN @ np.where(mask, 0.0, restored).ravel()))
        restored[mask] = _solved(of_hidden_RP.T @ of_hidden_RP, right_P, restored[mask], 1e-5, 2000)
    return restored


def laplacian(rows: np.ndarray) -> Any:
    """Return the graph Laplacian's rows of the voxels where `rows` is True, a sparse matrix [R, N] of all N voxels."""
    from scipy.sparse import csr_matrix

    index, row_N = np.arange(rows.size).reshape(rows.shape), np.cumsum(rows) - 1
    pairs = [(row_N[rows.ravel()], index[rows])]  # of each row: the voxel itself, then its neighbours
    for axis in range(rows.ndim):
        front, back = (np.moveaxis(index, axis, 0)[part].ravel() for part in (slice(None, -1), slice(1, None)))
        pairs += [
            (row_N[own[rows.ravel()[own]]], other[rows.ravel()[own]]) for own, other in ((front, back), (back, front))
        ]
    row, voxel = map(np.concatenate, zip(*pairs, strict=True))
    count = int(rows.sum())
    values = np.full(row.size, -1.0)
    values[:count] = np.bincount(row, minlength=count) - 1.0
    return csr_matrix((values, (row, voxel)), shape=(count, rows.size))


def _solved(matrix_PP: Any, right_P: np.ndarray, start_P: np.ndarray, tolerance: float, most: int) -> np.ndarray:
    """Solve a symmetric system by conjugate gradients with the diagonal as preconditioner."""
    from scipy.sparse import diags
    from scipy.sparse.linalg import cg

    scale = diags(1.0 / np.maximum(matrix_PP.diagonal(), 1e-12))
    found_P, _ = cg(matrix_PP, right_P, x0=start_P, rtol=tolerance, maxiter=most, M=scale)
    return np.asarray(found_P)


def total_variation(image01: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Laplace's continuation, denoised (Chambolle) by turns with putting known voxels back; float32, twice as fast."""
    from skimage.restoration import denoise_tv_chambolle

    restored = laplace(image01, mask).astype(np.float32)
    for _ in range(TV_ROUNDS):
        smoothed = denoise_tv_chambolle(restored, weight=TV_WEIGHT, max_num_iter=TV_INNER)
        restored = np.where(mask, smoothed, restored)
    return restored


VARIATION, SMOOTH = "total variation in 3-D", "biharmonic in 3-D"
SOLVERS: dict[str, Solver] = {"Laplace in 3-D": laplace, VARIATION: total_variation, SMOOTH: smooth_continuation}


def in_cells(
    solver: Solver, read: Callable[[Window], tuple[np.ndarray, np.ndarray]], shape: Triple, points_P3: np.ndarray
) -> np.ndarray:
    """What a solver makes of some voxels of a volume [Z, Y, X], float64 [P]; NaN where nothing is known around one.

    Cells of 64 voxels a side that hold some of them are solved one by one, with the 32 voxels around, so that memory
    does not grow with the volume. read: the normalised image and the mask of a window. points_P3: indices.
    """
    found_P = np.full(len(points_P3), np.nan)
    cells_P3 = points_P3 // CELL
    for cell in np.unique(cells_P3, axis=0):
        inside_P = (cells_P3 == cell).all(axis=1)
        low = np.maximum(points_P3[inside_P].min(axis=0) - REACH, 0)
        high = np.minimum(points_P3[inside_P].max(axis=0) + REACH + 1, shape)
        window = slice(low[0], high[0]), slice(low[1], high[1]), slice(low[2], high[2])
        image01_ZYX, mask_ZYX = read(window)
        if not mask_ZYX.all():
            found_P[inside_P] = solver(image01_ZYX, mask_ZYX)[tuple((points_P3[inside_P] - low).T)]
    return found_P

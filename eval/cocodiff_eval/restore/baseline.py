"""Methods without a model: biharmonic inpainting, with which every restoration is compared, and methods for volumes.

Those for volumes are lines along an axis, Laplace's equation, biharmonic continuation, total variation and
autoregression. Hidden regions judge them. All take normalised images and never read the voxels under the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cocodiff_eval.data.intensity import downsample, fill_from_outside, upsample
from cocodiff_eval.data.volume import Triple

# Each hole is one sparse system. 320 x 320 voxels take 4 s on one core, and time and memory grow faster than the hole.
# Biharmonic surfaces are so smooth that larger holes lose nothing visible when they are solved at half the resolution.
LARGEST_HOLE = 400 * 400


def biharmonic(image01_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """Restore a slice's masked voxels by scikit-image's `inpaint_biharmonic`, as a baseline. Return it; float64 [Y, X].

    Voxels under the mask are never read, and may be NaN. Known voxels are unchanged. While the largest connected hole
    has more than 400 x 400 voxels, the resolution is halved, and the result is interpolated back.

    Args:
        image01_YX: the slice, normalised to [0, 1]
        mask_YX: True where to restore
    """
    known01_YX = np.where(mask_YX, 0.0, image01_YX).astype(np.float64)
    if not mask_YX.any():
        return known01_YX
    return np.where(mask_YX, _solve(known01_YX, mask_YX), known01_YX)


def _solve(known_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """Return a slice whose masked voxels are restored by biharmonic inpainting, at lower resolution for large holes.

    Args:
        known_YX: the slice, with finite values under the mask, which are not used
        mask_YX: True where to restore; at least one voxel must be
    """
    from scipy import ndimage
    from skimage.restoration import inpaint_biharmonic

    labels_YX, _ = ndimage.label(mask_YX)
    if np.bincount(labels_YX.ravel())[1:].max() <= LARGEST_HOLE:
        return np.asarray(inpaint_biharmonic(known_YX, mask_YX))
    coarse, weight = downsample(known_YX, (~mask_YX).astype(np.float64))
    hidden = weight < 0.5
    solved = _solve(coarse, hidden) if hidden.any() else fill_from_outside(coarse, weight == 0)
    return upsample(solved, (known_YX.shape[0], known_YX.shape[1]))


CELL, REACH = 64, 32  # voxels: side of the cells that are solved at once, and width of the window around them
SMALL = 2**21  # voxels; smaller volumes have cells of twice that side, so that most are solved in one piece
WHOLE = 2**40  # a reach in voxels that includes the whole axis
BESIDE = 2  # voxels beside the mask that Laplace's, biharmonic and total variation's equations take in
PLANAR = 2**16  # most voxels of biharmonic systems in planes that are solved directly
TV_ROUNDS, TV_EDGE = 12, 0.01  # rounds of reweighting; the difference below which squares are minimised
# Of autoregressions: most voxels that coefficients are learnt from, and fewest for each coefficient; the ridge as a
# share of the variance, and the least value of the spectrum that is inverted, as a share of its mean.
AR_FITTED, AR_FEWEST, AR_RIDGE, AR_FLOOR = 10000, 4, 1e-3, 1e-3
SMALL_HOLE = 1000  # most voxels of a hole whose linear system is solved directly
# Scattered holes are solved directly together: at most so many voxels, for each of which there are at least so many
# predictions, times the side over which these reach. Conjugate gradients take less time for denser ones.
MOST_SCATTERED, SCATTERED = 2**15, 6
Window = tuple[slice, slice, slice]  # the slices, rows and columns of a part of a volume
Solver = Callable[..., np.ndarray]  # a function of an image and its mask that returns the restored image


def linear(image01: np.ndarray, mask: np.ndarray, axis: int) -> np.ndarray:
    """Return an image with masked voxels interpolated linearly along an axis between the nearest known ones; float64.

    Beyond the last known voxel its value is repeated. A line without known voxels becomes NaN. The image may have any
    number of dimensions.

    Args:
        image01: the normalised image
        mask: True where to restore, of the image's shape
        axis: number of the axis
    """
    known, hidden = np.moveaxis(np.where(mask, 0.0, image01), axis, 0), np.moveaxis(mask, axis, 0)
    count = len(known)
    place = np.arange(count).reshape(-1, *[1] * (known.ndim - 1))
    before = np.maximum.accumulate(np.where(hidden, -1, place), axis=0)
    after = np.minimum.accumulate(np.where(hidden, count, place)[::-1], axis=0)[::-1]
    low, high = (np.take_along_axis(known, np.clip(at, 0, count - 1), axis=0) for at in (before, after))
    share = (place - before) / np.maximum(1, after - before)
    found = np.where(before < 0, high, np.where(after == count, low, low + share * (high - low)))
    found = np.where((before < 0) & (after == count), np.nan, found)
    return np.moveaxis(np.where(hidden, found, known), 0, axis)


def around_mask(solve: Solver) -> Solver:
    """Wrap a method whose result depends on the voxels beside the mask alone, so that it solves only the part around
    the mask.

    Args:
        solve: the method.
    """

    @wraps(solve)
    def solve_part(image01: np.ndarray, mask: np.ndarray, *args: Any, **keywords: Any) -> np.ndarray:
        from scipy.ndimage import find_objects

        restored = np.where(mask, 0.0, image01).astype(np.float64)
        for box in find_objects(mask.astype(np.uint8)):
            part = tuple(slice(max(0, one.start - BESIDE), one.stop + BESIDE) for one in box)
            restored[part] = solve(restored[part], mask[part], *args, **keywords)
        return restored

    return solve_part


@around_mask
def laplace(image01: np.ndarray, mask: np.ndarray, axes: Sequence[int] | None = None) -> np.ndarray:
    """Restore an image's masked voxels by Laplace's equation. Return it as float64.

    Each masked voxel becomes the mean of its neighbours, with no gradient across the array's borders. Voxels that have
    no path of neighbours to a known one get the mean of those around the mask. The image may have any number of
    dimensions.

    Args:
        image01: the normalised image
        mask: True where to restore, of the image's shape; at least one voxel must be known
        axes: axes along which voxels are neighbours; None for all
    """
    rows_RN = laplacian(mask, axes)
    known = np.where(mask, 0.0, image01)
    start_P = np.full(rows_RN.shape[0], known[~mask].mean())
    known[mask] = _solved(rows_RN[:, mask.ravel()], -(rows_RN @ known.ravel()), start_P, 1e-4, 2000)
    return known


@around_mask
def smooth_continuation(image01: np.ndarray, mask: np.ndarray, axes: Sequence[int] | None = None) -> np.ndarray:
    """Restore an image's masked voxels by biharmonic continuation. Return it as float64.

    The sum of squared Laplacians of the voxels in and beside the mask is minimised: in planes directly, else by
    conjugate gradients. scikit-image's `inpaint_biharmonic` solves the same problem directly, and takes far longer. The
    image may have any number of dimensions.

    Args:
        image01: the normalised image
        mask: True where to restore, of the image's shape; at least one voxel must be known
        axes: axes along which voxels are neighbours, such as those of each slice; None for all. Planes along these axes
            that are masked wholly become NaN
    """
    from scipy.ndimage import binary_dilation
    from scipy.sparse.linalg import splu

    restored, whole = laplace(image01, mask, axes), mask.all(axis=tuple(axes), keepdims=True) if axes else np.False_
    hidden = mask & ~whole
    if hidden.any():
        rows_RN = laplacian(binary_dilation(hidden), axes)
        of_hidden_RP = rows_RN[:, hidden.ravel()]
        matrix_PP = of_hidden_RP.T @ of_hidden_RP
        right_P = -(of_hidden_RP.T @ (rows_RN @ np.where(hidden, 0.0, restored).ravel()))
        if axes and len(right_P) < PLANAR:
            restored[hidden] = splu(matrix_PP.tocsc(), "MMD_AT_PLUS_A", options={"SymmetricMode": True}).solve(right_P)
        else:
            restored[hidden] = _solved(matrix_PP, right_P, restored[hidden], 1e-5, 2000)
    return np.where(whole, np.nan, restored)


def differences(near: np.ndarray, axes: Sequence[int] | None = None) -> Any:
    """Return a sparse matrix [pairs, N] that maps the values of an array's N voxels to differences of neighbours.

    Args:
        near: boolean array; the matrix has a row for each pair of neighbours of which at least one is True here
        axes: axes along which voxels are neighbours; None for all
    """
    from scipy.sparse import csr_matrix

    index, near_N, pairs = np.arange(near.size).reshape(near.shape), near.ravel(), [np.zeros((2, 0), int)]
    for axis in range(near.ndim) if axes is None else axes:
        ends = [np.moveaxis(index, axis, 0)[part].ravel() for part in (slice(None, -1), slice(1, None))]
        pairs.append(np.stack(ends)[:, near_N[ends[0]] | near_N[ends[1]]])
    voxels = np.concatenate(pairs, axis=1)
    count = voxels.shape[1]
    places = np.tile(np.arange(count), 2), voxels.ravel()
    return csr_matrix((np.repeat([1.0, -1.0], count), places), shape=(count, near.size))


def laplacian(rows: np.ndarray, axes: Sequence[int] | None = None) -> Any:
    """Return rows of the graph Laplacian of an array's N voxels, a sparse matrix [R, N].

    A row maps the values of all voxels to the sum of one voxel's differences from its neighbours.

    Args:
        rows: boolean array, True for the R voxels whose rows are returned
        axes: axes along which voxels are neighbours; None for all
    """
    apart_EN = differences(rows, axes)
    return (apart_EN.T @ apart_EN).tocsr()[rows.ravel()]


def _solved(matrix_PP: Any, right_P: np.ndarray, start_P: np.ndarray, tolerance: float, most: int) -> np.ndarray:
    """Return the solution [P] of a symmetric linear system by conjugate gradients.

    The diagonal is the preconditioner.

    Args:
        matrix_PP: the system's sparse matrix
        right_P: its right side
        start_P: the first guess
        tolerance: relative residual at which iterations end
        most: largest number of iterations
    """
    from scipy.sparse import diags
    from scipy.sparse.linalg import cg

    scale = diags(1.0 / np.maximum(matrix_PP.diagonal(), 1e-12))
    found_P, _ = cg(matrix_PP, right_P, x0=start_P, rtol=tolerance, maxiter=most, M=scale)
    return np.asarray(found_P)


@around_mask
def total_variation(image01: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Restore an image's masked voxels with the least total variation. Return it as float64.

    The sum of absolute differences of neighbours is minimised, by reweighted least squares. The image may have any
    number of dimensions.

    Args:
        image01: the normalised image
        mask: True where to restore, of the image's shape; at least one voxel must be known
    """
    from scipy.sparse import diags

    restored, apart_EN = laplace(image01, mask), differences(mask)
    hidden_EP, known_E = apart_EN[:, mask.ravel()], apart_EN @ np.where(mask, 0.0, restored).ravel()
    found_P = restored[mask]
    for _ in range(TV_ROUNDS):
        weights_E = 1.0 / np.hypot(hidden_EP @ found_P + known_E, TV_EDGE)
        matrix_PP = hidden_EP.T @ diags(weights_E) @ hidden_EP
        found_P = _solved(matrix_PP, -(hidden_EP.T @ (weights_E * known_E)), found_P, 1e-3, 200)
    restored[mask] = found_P
    return restored


def autoregression(image01: np.ndarray, mask: np.ndarray, side: int, wanted: np.ndarray | None = None) -> np.ndarray:
    """Restore an image's masked voxels by an autoregression, fitted to the known ones. Return it as float64.

    The restored values have the least squared errors of its predictions, summed over all voxels (Janssen, Veldhuis and
    Vries 1986). So texture and edges continue as they do elsewhere, and far from known voxels their mean is approached.
    Masked voxels become NaN if too few voxels are known with all their neighbours to learn from (`predictor`). The
    image may have any number of dimensions.

    Holes that no prediction reaches together do not depend on each other. They are solved one by one, unless they fill
    most of the image, or are small and scattered.

    Args:
        image01: the normalised image
        mask: True where to restore; at least one voxel must be known
        side: voxels along each axis over which a prediction reaches: 1 for direct neighbours only
        wanted: True for masked voxels whose holes are to be restored, other holes may become NaN; None for all
    """
    from scipy import ndimage

    restored, wanted = np.where(mask, np.nan, image01).astype(np.float64), mask if wanted is None else wanted
    if not wanted.any():
        return restored
    mean = restored[~mask].mean()
    apart = np.where(mask, 0.0, restored - mean)
    learnt = predictor(apart, mask, side)
    if learnt is None:
        return restored
    near, margin = ndimage.maximum_filter(mask, 2 * side + 1), 2 * side
    labels, _ = ndimage.label(near, np.ones((3,) * mask.ndim))
    boxes, (whole,) = ndimage.find_objects(labels), ndimage.find_objects(near.astype(int))
    numbers = np.unique(labels[wanted & mask]).tolist()
    scattered = mask.sum() <= min(MOST_SCATTERED, near.sum() / (SCATTERED * side))
    if scattered or 2 * sum(_size(boxes[number - 1]) for number in numbers) > _size(whole):
        labels, boxes, numbers = np.isin(labels, numbers).astype(int), [whole], [1]  # together they take less time
    for number in numbers:
        box = boxes[number - 1]
        window = tuple(slice(max(0, part.start - side), part.stop + side) for part in box)
        hole = mask[window] & (labels[window] == number)
        if scattered or hole.sum() <= SMALL_HOLE:
            restored[window][hole] = _solve_small(apart[window], hole, *learnt) + mean
            continue
        pairs = zip(window, mask.shape, strict=True)
        beyond = [(margin * (part.start == 0 < n - 1), margin * (part.stop >= n > 1)) for part, n in pairs]
        hidden, known = np.pad(hole, beyond, constant_values=True), np.pad(apart[window], beyond)
        known[hidden] = _solve_large(known, hidden, *learnt)
        inner = tuple(slice(before, before + n) for (before, _), n in zip(beyond, hole.shape, strict=True))
        restored[window][hole] = known[inner][hole] + mean
    return restored


def _size(box: Sequence[slice]) -> int:
    """Return the number of voxels in a box, given as a slice of indices for each axis."""
    return math.prod(part.stop - part.start for part in box)


def _solve_small(known: np.ndarray, hidden: np.ndarray, offsets_KD: np.ndarray, products_KK: np.ndarray) -> np.ndarray:
    """Return the values of unknown voxels with which the squared errors of all predictions are least; float64 [P].

    A voxel beside the image's rim is predicted from the voxels that the image has, with coefficients of their own. Each
    error is divided by its root mean square.

    Args:
        known: the image as differences from its mean, with 0 at unknown voxels
        hidden: True for the P unknown voxels
        offsets_KD: offsets of a voxel, which is the first, and of those that predict it
        products_KK: mean products of their values
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.linalg import splu

    reach_D = np.abs(offsets_KD).max(axis=0)
    around = [(one, one) for one in reach_D]
    # The number of each unknown voxel; -1 for known ones, and -2 outside.
    numbers = np.pad(np.where(hidden, hidden.cumsum().reshape(hidden.shape) - 1, -1), around, constant_values=-2)
    shape, numbers, known = numbers.shape, numbers.ravel(), np.pad(known, around).ravel()
    shift_K = np.ravel_multi_index(tuple((offsets_KD + reach_D).T), shape)
    shift_K -= shift_K[0]
    rows_R = np.unique(np.flatnonzero(numbers >= 0)[:, None] - shift_K)
    rows_R = rows_R[numbers[rows_R] > -2]
    at_RD = np.stack(np.unravel_index(rows_R, shape), axis=1)
    to_rim_RD = at_RD - np.clip(at_RD, 2 * reach_D, np.subtract(shape, 2 * reach_D + 1))
    _, first, kind_R = np.unique(to_rim_RD, axis=0, return_index=True, return_inverse=True)
    weights_NK = np.zeros((len(first), len(shift_K)))  # for each of the N positions relative to the rim
    for row, weights_K in zip(rows_R[first], weights_NK, strict=True):
        inside = np.flatnonzero(numbers[row + shift_K] > -2)
        weights_K[inside] = error_filter(products_KK[np.ix_(inside, inside)])
    errors_R, parts = np.zeros(len(rows_R)), []
    for shift, weights_N in zip(shift_K, weights_NK.T, strict=True):
        weights_R, at_R = weights_N[kind_R.ravel()], rows_R + shift
        errors_R += weights_R * known[at_R]
        found = np.flatnonzero(numbers[at_R] >= 0)
        parts.append((weights_R[found], found, numbers[at_R[found]]))
    values, *places = map(np.concatenate, zip(*parts, strict=True))
    matrix_RP = csr_matrix((values, places))
    factors = splu((matrix_RP.T @ matrix_RP).tocsc(), "MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return np.asarray(factors.solve(-(matrix_RP.T @ errors_R)))


def _solve_large(known: np.ndarray, hidden: np.ndarray, offsets_KD: np.ndarray, products_KK: np.ndarray) -> np.ndarray:
    """Return what `_solve_small` does, by conjugate gradients, with the voxels beside the image's rim unknown, too.

    All sums are convolutions, in single precision, which takes half the time and gives the same values within the
    tolerance. The inverse of the spectrum is the preconditioner.

    Args:
        known: the image as differences from its mean, with 0 at unknown voxels
        hidden: True for the P unknown voxels
        offsets_KD: offsets of a voxel, which is the first, and of those that predict it
        products_KK: mean products of their values
    """
    from scipy.fft import irfftn, next_fast_len, rfftn
    from scipy.sparse.linalg import LinearOperator, cg

    more = [(0, next_fast_len(length, True) - length) for length in hidden.shape]
    unknown, known = np.pad(hidden, more, constant_values=True), np.pad(known.astype(np.float32), more)
    kernel = np.zeros(unknown.shape, np.float32)
    kernel[tuple((offsets_KD % unknown.shape).T)] = error_filter(products_KK)
    power = np.square(np.abs(rfftn(kernel)))

    def filtered(part_P: np.ndarray, spectrum: np.ndarray) -> np.ndarray:
        """Return the convolution of the unknown voxels with a kernel, at the unknown voxels [P].

        Args:
            part_P: values of the unknown voxels; all others count as 0
            spectrum: Fourier transform of the kernel
        """
        whole = np.zeros(unknown.shape, np.float32)
        whole[unknown] = part_P
        return np.asarray(irfftn(spectrum * rfftn(whole), unknown.shape)[unknown])

    count, right_P = int(unknown.sum()), -irfftn(power * rfftn(known), unknown.shape)[unknown]
    inverse = 1.0 / np.maximum(power, AR_FLOOR * power.mean())
    by_power, by_inverse = (
        LinearOperator((count, count), partial(filtered, spectrum=one), dtype=np.float32) for one in (power, inverse)
    )
    known[unknown], _ = cg(by_power, right_P, rtol=2e-3, maxiter=200, M=by_inverse)
    return np.asarray(known[tuple(map(slice, hidden.shape))][hidden])


def predictor(apart: np.ndarray, mask: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Learn how an image's known voxels and their neighbours go together. Return offsets and products.

    The offsets are those of K voxels, int [K, D] for D dimensions. The first is a voxel itself. The others are its
    neighbours before it, in the order of memory, from which it is predicted. The products are the mean ones of the
    values of each two of these, [K, K], over at most AR_FITTED random voxels that are known with all that predicts
    them. Return None if there are fewer than AR_FEWEST of these for each coefficient, as where every second
    slice is masked.

    Args:
        apart: the image, as differences from its mean
        mask: True for voxels that are not known
        side: voxels along each axis over which a prediction reaches
    """
    reach = [min(side, (length - 1) // 2) for length in mask.shape]
    around = product(*(range(-one, one + 1) for one in reach))
    offsets_KD = np.array([(0,) * mask.ndim, *(one for one in around if one < (0,) * mask.ndim)])
    ends = [*zip(reach, mask.shape, strict=True)]
    whole = np.ones([length - 2 * one for one, length in ends], dtype=bool)
    for offset in offsets_KD.tolist():
        whole &= ~mask[
            tuple(slice(one + by, length - one + by) for (one, length), by in zip(ends, offset, strict=True))
        ]
    points_P = np.flatnonzero(whole)
    if len(points_P) < AR_FEWEST * len(offsets_KD):
        return None
    points_P = np.random.default_rng(0).permutation(points_P)[:AR_FITTED]
    points_PD = np.stack(np.unravel_index(points_P, whole.shape), axis=1) + reach
    places_PK = np.ravel_multi_index(tuple((points_PD[:, None] + offsets_KD).transpose(2, 0, 1)), mask.shape)
    values_PK = apart.ravel()[places_PK]
    products_KK = values_PK.T @ values_PK / len(values_PK)
    return offsets_KD, products_KK


def error_filter(products_KK: np.ndarray) -> np.ndarray:
    """Return the weights [K] of the filter that gives errors of predictions, divided by their root mean square.

    Args:
        products_KK: mean products of the values of a voxel, which is the first, and of those that predict it
    """
    ridge_KK = (AR_RIDGE * products_KK[0, 0] + 1e-12) * np.eye(len(products_KK) - 1)
    weights_K = np.append(1.0, -np.linalg.solve(products_KK[1:, 1:] + ridge_KK, products_KK[0, 1:]))
    return weights_K / math.sqrt(max(weights_K @ products_KK @ weights_K, 1e-9 * products_KK[0, 0] + 1e-12))


class Method(NamedTuple):
    """A classical method that restores volumes without a model, with which the model's restoration is compared."""

    solve: Solver  # function of a normalised part of a volume [Z, Y, X] and its mask that returns the part restored
    reach: Triple  # number of voxels around those to restore that the part must include, along z, y and x
    fills: bool = True  # False if it may leave some voxels without a value (NaN)
    chooses: bool = False  # True if `solve` takes an argument `wanted`: True for the voxels that it must restore


AROUND = (REACH, REACH, REACH)
VARIATION, SMOOTH, HARMONIC = "total variation in 3-D", "biharmonic in 3-D", "Laplace in 3-D"
NEAR, FAR = "autoregression in 3-D, 1 voxel", "autoregression in 3-D, 2 voxels"
AUTOREGRESSIONS = (NEAR, FAR)
# The methods whose mean is written where nothing can be hidden: one that is best for noise and texture with another one
# that is best for smooth volumes, and restores what is too dense for the former.
UNTESTED = (NEAR, FAR, SMOOTH)
# Autoregressions take up to half a minute for a cell (`in_cells`) with more than SMALL_HOLE masked voxels. They are not
# tried if there may be more such cells than these.
MOST_CELLS = 64
METHODS = {
    "linear across z": Method(partial(linear, axis=0), (WHOLE, 0, 0), fills=False),
    "linear across y": Method(partial(linear, axis=1), (0, WHOLE, 0), fills=False),
    "linear across x": Method(partial(linear, axis=2), (0, 0, WHOLE), fills=False),
    "biharmonic": Method(partial(smooth_continuation, axes=(1, 2)), (0, REACH, REACH), fills=False),
    HARMONIC: Method(laplace, AROUND),
    VARIATION: Method(total_variation, AROUND),
    SMOOTH: Method(smooth_continuation, AROUND),
    NEAR: Method(partial(autoregression, side=1), AROUND, fills=False, chooses=True),
    FAR: Method(partial(autoregression, side=2), AROUND, fills=False, chooses=True),
}


def side_of_cells(shape: Triple) -> int:
    """Return the side, in voxels, of the cubes in which methods without a model restore a volume one by one.

    shape: number of the volume's slices, rows and columns; cubes of a small volume are larger
    """
    return CELL if np.prod(shape) > SMALL else 2 * CELL


def in_cells(
    method: Method, read: Callable[[Window], tuple[np.ndarray, np.ndarray]], shape: Triple, points_P3: np.ndarray
) -> np.ndarray:
    """Return the values that a method without a model restores at P voxels of a volume; float64 [P].

    The cubes that hold some of the voxels are solved one by one, so that memory does not grow with the volume. A cube
    is read with the voxels around it that the method reaches, or more if none of these is known. A value is NaN if the
    method cannot restore it.

    Args:
        method: the method
        read: function that returns the normalised image and the mask of a part of the volume, given as a slice of
            indices for each axis
        shape: number of the volume's slices, rows and columns
        points_P3: indices [z, y, x] of the voxels
    """
    found_P = np.full(len(points_P3), np.nan)
    cells_P3 = points_P3 // side_of_cells(shape)
    for cell in np.unique(cells_P3, axis=0):
        inside_P = (cells_P3 == cell).all(axis=1)
        first, last, reach = points_P3[inside_P].min(axis=0), points_P3[inside_P].max(axis=0), np.array(method.reach)
        while True:
            low, high = np.maximum(first - reach, 0), np.minimum(last + reach + 1, shape)
            image01_ZYX, mask_ZYX = read((slice(low[0], high[0]), slice(low[1], high[1]), slice(low[2], high[2])))
            whole = (reach == 0) | ((low == 0) & (high == shape))
            if whole.all() or not mask_ZYX.all():
                break
            reach = 2 * reach
        if not mask_ZYX.all():
            places, wanted_ZYX = tuple((points_P3[inside_P] - low).T), np.zeros_like(mask_ZYX)
            wanted_ZYX[places] = True
            choice = {"wanted": wanted_ZYX} if method.chooses else {}
            found_P[inside_P] = method.solve(image01_ZYX, mask_ZYX, **choice)[places]
    return found_P

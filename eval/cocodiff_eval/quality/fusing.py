"""Several restorations of the same voxels, taken together: which, with which weights, their mean and spread, and how
far they may be off.

All is learnt from voxels whose truth is known (`hidden.py`): weights from the errors of the better members and how much
they have in common, intervals by split conformal prediction, and which of two is better by a jackknife over regions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cocodiff_eval.data.intensity import IntensityRange

FOLDS = 8  # groups of blocks, each judged with weights that the others give
RIDGE, ONE = 1e-6, 1e3  # of the mean squared error, for equal members; and how firmly weights are 1 together
FLOORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # in root mean square errors, tried for the best intervals
SHARES = (0.5, 0.9)
FEWEST_HIDDEN = 200  # voxels that intervals are calibrated by
LEAD_SHARE, FEWEST = 0.95, 3  # of the ranges of leads, and the regions that it takes to know one


def fuse(
    values_SP: np.ndarray, weights_SP: np.ndarray, drawn_SP: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted mean of samples of voxels, and their weighted standard deviation about it; float64 [P] each.

    values_SP: float, S samples of P voxels; weights_SP: not negative, zero where a sample says nothing of a voxel, of
    any sum above zero; drawn_SP: weights of the deviation, as of the samples that are drawn at random, where they are
    others. With equal weights the deviation is the usual one, with S - 1; where one sample alone has a weight it is 0.
    A voxel without any weight becomes NaN.
    """
    drawn_SP = weights_SP if drawn_SP is None else drawn_SP
    values_SP = np.where((weights_SP > 0) | (drawn_SP > 0), values_SP, 0.0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights_SP, drawn_SP = weights_SP / weights_SP.sum(axis=0), drawn_SP / drawn_SP.sum(axis=0)
    mean_P = (weights_SP * values_SP).sum(axis=0)
    return mean_P, spread_about(mean_P, values_SP, drawn_SP)


def spread_about(mean_P: np.ndarray, values_SP: np.ndarray, shares_SP: np.ndarray) -> np.ndarray:
    """The standard deviation of samples about any mean, float64 [P]. shares_SP: their weights, 1 together."""
    squares_P = (shares_SP * np.square(values_SP - mean_P)).sum(axis=0)
    unseen_P = 1.0 - np.square(shares_SP).sum(axis=0)
    alone_P = unseen_P < 1e-9
    return np.sqrt(np.where(alone_P, 0.0, squares_P / np.where(alone_P, 1.0, unseen_P)))


def products_in_blocks(errors_AP: np.ndarray, block_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of products of members' errors in each block [B, A, A], and the voxels of each [B].

    errors_AP: of A members at P voxels. block_P: the number of each voxel's block, 0 to B - 1.
    """
    counts_B = np.bincount(block_P).astype(np.float64)
    sums = [[np.bincount(block_P, one_P * other_P) for other_P in errors_AP] for one_P in errors_AP]
    return np.moveaxis(np.array(sums).reshape(len(errors_AP), len(errors_AP), -1), -1, 0), counts_B


def near_best(products_BAA: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
    """Return which members' mean squared error is within one standard error of the least, boolean [A].

    The standard error is that of the difference from the best member, over blocks.
    """
    squares_BA = np.einsum("baa->ba", products_BAA)
    apart_BA = squares_BA - squares_BA[:, [int(squares_BA.sum(axis=0).argmin())]]
    blocks, voxels = len(counts_B), counts_B.sum()
    mean_A = apart_BA.sum(axis=0) / voxels
    scatter_A = np.square(apart_BA - mean_A * counts_B[:, None]).sum(axis=0) * blocks / max(1, blocks - 1)
    return np.asarray(mean_A <= np.sqrt(scatter_A) / voxels)


def learn_weights(products_BAA: np.ndarray, counts_B: np.ndarray) -> np.ndarray:
    """Return the weights [A], none negative and 1 together, with which the mean of the members errs least in all
    blocks, among those that are `near_best`; the others have none."""
    from scipy.optimize import nnls

    kept = np.flatnonzero(near_best(products_BAA, counts_B))
    mean_KK = products_BAA.sum(axis=0)[np.ix_(kept, kept)]
    scale, weights_A = np.trace(mean_KK) / len(kept) + 1e-20, np.zeros(products_BAA.shape[1])
    root_KK = np.linalg.cholesky(mean_KK / scale + RIDGE * np.eye(len(kept))).T
    found, _ = nnls(np.vstack([root_KK, np.full(len(kept), ONE)]), np.append(np.zeros(len(kept)), ONE))
    weights_A[kept] = found / found.sum()
    return weights_A


def mean_or_member(errors_AP: np.ndarray, block_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights of A members [A], and those that each of P voxels is judged with [A, P]: learnt in other blocks.

    Where the mean, judged so, errs more than its best member, that member has all the weight. errors_AP: at voxels
    whose truth is known. block_P: any number for each voxel's block.
    """
    _, block_P = np.unique(block_P, return_inverse=True)
    products_BAA, counts_B = products_in_blocks(errors_AP, block_P)
    blocks, best = len(counts_B), int(np.einsum("baa->a", products_BAA).argmin())
    fold_B = np.random.default_rng(0).permutation(blocks) % FOLDS
    weights_BA = np.zeros((blocks, len(errors_AP)))
    for fold in range(min(FOLDS, blocks) * (blocks > 1)):
        others = fold_B != fold
        weights_BA[~others] = learn_weights(products_BAA[others], counts_B[others])
    of_mean = np.einsum("bij,bi,bj", products_BAA, weights_BA, weights_BA)
    if blocks > 1 and of_mean <= products_BAA[:, best, best].sum():
        return learn_weights(products_BAA, counts_B), weights_BA[block_P].T
    alone_A = (np.arange(len(errors_AP)) == best).astype(np.float64)
    return alone_A, np.repeat(alone_A[:, None], len(block_P), axis=1)


def samples_along(samples: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Return how many samples each axis gets, at least one: as evenly as goes, more to those of larger weight."""
    each, more = divmod(samples, max(1, len(weights)))
    order = sorted(weights, key=lambda axis: -weights[axis])
    return {axis: each + (order.index(axis) < more) for axis in weights}


@dataclass(frozen=True)
class Intervals:
    """Intervals around restored voxels that hold their truth with a given probability: mean - r to mean + r, with
    r = factor (spread + floor) in the units of the errors; spread counts where `by_spread`. factors: for each of
    SHARES. floor: of voxels that touch known ones, until `at` gives that of each."""

    floor: float | np.ndarray
    factors: tuple[float, float]
    by_spread: bool = True

    def radius(self, spread: np.ndarray, share: float) -> np.ndarray:
        return self.factors[SHARES.index(share)] * ((spread if self.by_spread else np.zeros_like(spread)) + self.floor)

    def at(self, depth: np.ndarray) -> Intervals:
        """For voxels that are so far from known ones: the floor grows with the square root of it, for squared errors
        were found to grow in proportion to the distance. So regions that are cut tell of a mask that is deeper."""
        return replace(self, floor=self.floor * np.sqrt(np.maximum(depth, 1.0)))

    @classmethod
    def unknown(cls) -> Intervals:
        """Where nothing is known: without ends."""
        return cls(1.0, (math.inf, math.inf), False)

    def record(self) -> dict[str, float] | None:
        """For metrics.json; None where nothing is known."""
        low, high = self.factors
        if not math.isfinite(high):
            return None
        return {"floor": float(np.min(self.floor)), "factor_50": low, "factor_90": high}

    @classmethod
    def calibrated(cls, errors_P: np.ndarray, spread_P: np.ndarray, depth_P: np.ndarray) -> Intervals:
        """Calibrate by split conformal prediction (Papadopoulos et al. 2002; Lei et al. 2018): factors are the
        quantiles of |error| / (spread + floor) of P voxels whose truth is known, so that of voxels like these the share
        lies inside. Fewer than FEWEST_HIDDEN leave the intervals unknown. The floor is the one of FLOORS whose
        intervals of 90 % have the least interval score, the width and 2 / .1 times by how much they miss (Gneiting and
        Raftery 2007). depth_P: as of `at`."""
        if errors_P.size < FEWEST_HIDDEN:
            return cls.unknown()
        errors_P, scale = np.abs(errors_P), max(math.sqrt(float(np.square(errors_P).mean())), 1e-9)
        by_spread = bool(spread_P.any())
        found: list[tuple[float, Intervals]] = []
        for part in FLOORS if by_spread else (1.0,):
            tried = cls(part * scale / float(np.sqrt(np.maximum(depth_P, 1.0)).mean()), (1.0, 1.0), by_spread)
            sizes_P = tried.at(depth_P).radius(spread_P, SHARES[0])
            low, high = (quantile(errors_P / sizes_P, share) for share in SHARES)
            missed_P = np.maximum(errors_P - high * sizes_P, 0.0) / (1 - SHARES[1])
            found.append((float((high * sizes_P + missed_P).mean()), replace(tried, factors=(low, high))))
        return min(found, key=lambda one: one[0])[1]


@dataclass(frozen=True)
class Lead:
    """By how much one restoration is better than another, in dB of their mean squared errors.

    db: of all voxels of the regions together; low, high: what is to be expected, at 95 %, of a mask of a few parts that
    are like the regions, infinite where these are too few; wins: regions, of `of`, in which the first errs less
    """

    db: float
    low: float
    high: float
    wins: int
    of: int

    @property
    def is_clear(self) -> bool:
        """Whether one of the two is to be expected ahead."""
        return self.low > 0 or self.high < 0

    @classmethod
    def found(cls, own_P: np.ndarray, other_P: np.ndarray, region_P: np.ndarray, parts: int) -> Lead:
        """From the errors of both [P] and the number of the region of each voxel. The lead's variance among samples of
        R regions is that of the jackknife (Tukey 1958) with one region left out, so that of a mask of M parts differs
        by (1 + R / M) times as much; Student's t with R - 1 degrees of freedom."""
        from scipy.stats import t as student

        _, of_region_P = np.unique(region_P, return_inverse=True)
        own_R, other_R = (np.bincount(of_region_P, np.square(one_P)) + 1e-20 for one_P in (own_P, other_P))
        count, lead = len(own_R), 10 * math.log10(other_R.sum() / own_R.sum())
        reach = math.inf
        if count >= FEWEST:
            others_R = (np.maximum(one_R.sum() - one_R, 1e-20) for one_R in (other_R, own_R))
            without_R = 10 * np.log10(np.divide(*others_R))
            variance = (count - 1) * float(without_R.var()) * (1 + count / parts)
            reach = float(student.ppf((1 + LEAD_SHARE) / 2, count - 1)) * math.sqrt(variance)
        return cls(lead, lead - reach, lead + reach, int((own_R < other_R).sum()), count)


def quantile(scores_P: np.ndarray, share: float) -> float:
    """The smallest score such that one more, exchangeable with the P given, is no larger with at least this
    probability; the largest where P are too few for that."""
    rank = min(len(scores_P), math.ceil((len(scores_P) + 1) * share))
    return float(np.partition(scores_P, rank - 1)[rank - 1])


COVERAGES = {"coverage_50": 0.5, "coverage_90": 0.9}  # names in `metrics.json`, and the intervals' nominal shares


@dataclass(frozen=True)
class Moments:
    """Mean and spread of `count` images, without keeping them (Welford 1962; merged as by Chan, Golub, LeVeque 1979).

    mean_YX     float64 [Y, X]
    squares_YX  sum of squared deviations from the mean, float64 [Y, X]; exactly 0 where all images are equal
    """

    count: int
    mean_YX: np.ndarray
    squares_YX: np.ndarray

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """Those of no image: what is merged with them stays as it is."""
        return cls(0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, image_YX: np.ndarray) -> Moments:
        """Those of one image, of any real dtype."""
        return cls(1, image_YX.astype(np.float64), np.zeros(image_YX.shape))

    def merged(self, other: Moments) -> Moments:
        """Those of the images of both. The order changes the last bits: callers keep to one."""
        count = self.count + other.count
        apart_YX = other.mean_YX - self.mean_YX
        squares_YX = self.squares_YX + other.squares_YX + np.square(apart_YX) * (self.count * other.count / count)
        return Moments(count, self.mean_YX + apart_YX * (other.count / count), squares_YX)

    @property
    def deviation_YX(self) -> np.ndarray:
        """The standard deviation of a sample, with count - 1; float64 [Y, X], 0 for one image."""
        return np.sqrt(self.squares_YX / max(1, self.count - 1))


def spread_native(deviation01_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange) -> np.ndarray:
    """A standard deviation of normalised images in the input's units: float32 [Y, X], 0 outside the mask."""
    native_YX = np.where(mask_YX, deviation01_YX, 0.0) * (scale.high - scale.low)
    return np.minimum(native_YX, np.finfo(np.float32).max).astype(np.float32)


def coverage(
    moments01: Moments,
    truth_YX: np.ndarray | None,
    mask_YX: np.ndarray,
    scale: IntensityRange,
    intervals: Intervals | None = None,
) -> dict[str, float | None]:
    """`coverage_50` and `coverage_90`: how much of the truth lies in the intervals that N samples predict.

    With mean m and standard deviation s (with N - 1) of a voxel's samples, the interval of nominal share p is
    m - t s sqrt(1 + 1/N) to m + t s sqrt(1 + 1/N), ends included, where t is the quantile (1 + p) / 2 of Student's t
    with N - 1 degrees of freedom: the interval in which one further draw from the samples' own normal distribution lies
    with probability p. The coverage is the share of masked voxels with a finite truth whose truth is inside. Where the
    truth is distributed as the samples are, it is .5 and .9 on average; below that the samples are too much alike,
    above it they differ by more than they err.

    moments01: of normalised images, before rounding to the input's dtype. truth_YX: in the input's units. None each
    without a truth, and for a single sample. intervals: calibrated ones, which are judged in place of Student's, of a
    single sample as well.
    """
    count, judged_YX = moments01.count, mask_YX if truth_YX is None else mask_YX & np.isfinite(truth_YX)
    unknown = count < 2 if intervals is None else intervals.record() is None
    if truth_YX is None or unknown or not judged_YX.any():
        return dict.fromkeys(COVERAGES)
    from scipy.stats import t as student

    if intervals is None:
        low, high = student.ppf((1 + np.array(SHARES)) / 2, count - 1) * math.sqrt(1 + 1 / count)
        intervals = Intervals(0.0, (float(low), float(high)))
    error_P = np.abs(scale.normalise(truth_YX[judged_YX]) - moments01.mean_YX[judged_YX])
    radii = {name: intervals.radius(moments01.deviation_YX, share) for name, share in COVERAGES.items()}
    return {name: float(np.mean(error_P <= radius_YX[judged_YX])) for name, radius_YX in radii.items()}

"""The fusion of several restorations of the same voxels: weights, mean, spread, and intervals for the error.

All is learnt from voxels whose truth is known (`hidden.py`). Weights follow from the errors of the better members and
from what these errors have in common. Intervals are calibrated by split conformal prediction. A jackknife over regions
says which of two restorations is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cocodiff.jobs.arrays import Outcome
from cocodiff_eval.data.intensity import IntensityRange

FOLDS = 8  # groups of blocks, each judged with weights that are learnt from the others
# The ridge for members that are equal, as a share of the mean squared error; and the weight of the condition that all
# weights sum to 1.
RIDGE, ONE = 1e-6, 1e3
FLOORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # candidates for the intervals' floor, in root mean square errors
SHARES = (0.5, 0.9)  # nominal shares of the intervals
FEWEST_HIDDEN = 200  # least number of voxels that intervals are calibrated with
UNSURE_DB = 3.0  # a range of leads from below -UNSURE_DB to above UNSURE_DB says nothing: twice the error, either way
LEAD_SHARE, FEWEST = 0.95, 3  # nominal share of a lead's range, and the least number of regions for a range


def fuse(
    values_SP: np.ndarray, weights_SP: np.ndarray, drawn_SP: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weighted mean of samples of voxels and their weighted standard deviation about it; float64 [P] each.

    With equal weights the deviation is the usual one, with S - 1. Where only one sample has a weight it is 0. A voxel
    without any weight becomes NaN.

    Args:
        values_SP: S samples of P voxels, floats.
        weights_SP: weights of the mean, not negative, of any positive sum. A sample without a value has weight 0.
        drawn_SP: weights of the deviation, if they differ: those of the samples that are random. None for `weights_SP`.
    """
    drawn_SP = weights_SP if drawn_SP is None else drawn_SP
    values_SP = np.where((weights_SP > 0) | (drawn_SP > 0), values_SP, 0.0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights_SP, drawn_SP = weights_SP / weights_SP.sum(axis=0), drawn_SP / drawn_SP.sum(axis=0)
    mean_P = (weights_SP * values_SP).sum(axis=0)
    return mean_P, spread_about(mean_P, values_SP, drawn_SP)


def spread_about(mean_P: np.ndarray, values_SP: np.ndarray, shares_SP: np.ndarray) -> np.ndarray:
    """Return the weighted standard deviation of samples about a given value, float64 [P].

    Args:
        mean_P: that value at each of P voxels, such as the samples' mean.
        values_SP: S samples of P voxels.
        shares_SP: the samples' weights, which sum to 1 for each voxel.
    """
    squares_P = (shares_SP * np.square(values_SP - mean_P)).sum(axis=0)
    unseen_P = 1.0 - np.square(shares_SP).sum(axis=0)
    alone_P = unseen_P < 1e-9
    return np.sqrt(np.where(alone_P, 0.0, squares_P / np.where(alone_P, 1.0, unseen_P)))


def products_in_blocks(errors_AP: np.ndarray, block_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each of B blocks of voxels, the sums of products of errors, [B, A, A], and the number of voxels, [B].

    Weights of a mean follow from them (`learn_weights`).

    Args:
        errors_AP: the errors of A restorations at P voxels.
        block_P: the number of each voxel's block, 0 to B - 1.
    """
    counts_B = np.bincount(block_P).astype(np.float64)
    sums = [[np.bincount(block_P, one_P * other_P) for other_P in errors_AP] for one_P in errors_AP]
    return np.moveaxis(np.array(sums).reshape(len(errors_AP), len(errors_AP), -1), -1, 0), counts_B


def near_best(products_BAA: np.ndarray, counts_B: np.ndarray, errors: float = 1.0) -> np.ndarray:
    """Return a boolean for each of A restorations, [A]: True for those that are about as good as the best.

    The mean squared error of these is within one standard error of the least. The standard error is that of the
    difference from the best one, over blocks.

    Args:
        products_BAA: sums of products of errors, as `products_in_blocks` returns them.
        counts_B: number of voxels of each block.
        errors: number of standard errors to allow instead of one.
    """
    squares_BA = np.einsum("baa->ba", products_BAA)
    apart_BA = squares_BA - squares_BA[:, [int(squares_BA.sum(axis=0).argmin())]]
    blocks, voxels = len(counts_B), counts_B.sum()
    mean_A = apart_BA.sum(axis=0) / voxels
    if blocks < 2:  # one block has no standard error
        return np.ones(len(mean_A), bool)
    scatter_A = np.square(apart_BA - mean_A * counts_B[:, None]).sum(axis=0) * blocks / (blocks - 1)
    return np.asarray(mean_A <= errors * np.sqrt(scatter_A) / voxels)


def learn_weights(products_BAA: np.ndarray, counts_B: np.ndarray, drops: bool = True) -> np.ndarray:
    """Return the weights [A] with which the mean of A restorations has the least squared error over all blocks.

    Weights are not negative and sum to 1.

    Args:
        products_BAA: sums of products of errors, as `products_in_blocks` returns them.
        counts_B: number of voxels of each block.
        drops: True to give a weight above 0 only to restorations that are `near_best`.
    """
    from scipy.optimize import nnls

    kept = np.flatnonzero(near_best(products_BAA, counts_B) | (not drops))
    mean_KK = products_BAA.sum(axis=0)[np.ix_(kept, kept)]
    scale, weights_A = np.trace(mean_KK) / len(kept) + 1e-20, np.zeros(products_BAA.shape[1])
    root_KK = np.linalg.cholesky(mean_KK / scale + RIDGE * np.eye(len(kept))).T
    found, _ = nnls(np.vstack([root_KK, np.full(len(kept), ONE)]), np.append(np.zeros(len(kept)), ONE))
    weights_A[kept] = found / found.sum()
    return weights_A


def mean_or_member(errors_AP: np.ndarray, block_P: np.ndarray, drops: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights [A] of A restorations in their mean, and the weights [A, P] that each of P voxels is judged
    with.

    The latter are learnt from other blocks than the voxel's own. If the mean that is judged so has a larger error than
    the best restoration, that one has all the weight.

    Args:
        errors_AP: the restorations' errors at voxels whose truth is known.
        block_P: a number for each voxel's block.
        drops: True to leave out restorations that are not near the best, as for `learn_weights`.
    """
    _, block_P = np.unique(block_P, return_inverse=True)
    products_BAA, counts_B = products_in_blocks(errors_AP, block_P)
    blocks, best = len(counts_B), int(np.einsum("baa->a", products_BAA).argmin())
    fold_B = np.random.default_rng(0).permutation(blocks) % FOLDS
    weights_BA = np.zeros((blocks, len(errors_AP)))
    for fold in range(min(FOLDS, blocks) * (blocks > 1)):
        others = fold_B != fold
        weights_BA[~others] = learn_weights(products_BAA[others], counts_B[others], drops)
    of_mean = np.einsum("bij,bi,bj", products_BAA, weights_BA, weights_BA)
    if blocks > 1 and of_mean <= products_BAA[:, best, best].sum():
        return learn_weights(products_BAA, counts_B, drops), weights_BA[block_P].T
    alone_A = (np.arange(len(errors_AP)) == best).astype(np.float64)
    return alone_A, np.repeat(alone_A[:, None], len(block_P), axis=1)


def samples_along(samples: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Divide a number of samples among the axes along which a volume is restored. Return the number for each axis.

    Numbers are as equal as possible; axes of larger weight get one more.

    Args:
        samples: number of all samples, at least one for each axis.
        weights: weight of each axis.
    """
    each, more = divmod(samples, max(1, len(weights)))
    order = sorted(weights, key=lambda axis: -weights[axis])
    return {axis: each + (order.index(axis) < more) for axis in weights}


@dataclass(frozen=True)
class Intervals:
    """The intervals around restored voxels that hold their true value with a given probability, of 50 % and of 90 %.

    They reach from mean - r to mean + r, where r = factor (spread + floor) in the units of the errors. The spread is
    the samples' standard deviation, the floor a part that does not depend on it. Each probability has its factor.
    """

    floor: float | np.ndarray  # of voxels that touch known ones; after `at`, of each voxel
    factors: tuple[float, float]  # for each of SHARES; infinite if nothing is known
    by_spread: bool = True  # False to leave the spread out of r

    def radius(self, spread: np.ndarray, share: float) -> np.ndarray:
        """Return r, half the width of the intervals, for each voxel.

        Args:
            spread: the samples' standard deviation at each voxel.
            share: probability of the intervals, one of SHARES.
        """
        return self.factors[SHARES.index(share)] * ((spread if self.by_spread else np.zeros_like(spread)) + self.floor)

    def at(self, depth: np.ndarray) -> Intervals:
        """Return the intervals for voxels at some distances from known ones.

        The floor grows with the square root of the distance, since squared errors were found to grow in proportion to
        it. So small hidden regions predict the errors of a deeper mask.

        Args:
            depth: distance of each voxel from the nearest known one, in voxels.
        """
        return replace(self, floor=self.floor * np.sqrt(np.maximum(depth, 1.0)))

    @classmethod
    def unknown(cls) -> Intervals:
        """Return intervals without ends, for voxels whose errors nothing calibrates."""
        return cls(1.0, (math.inf, math.inf), False)

    def record(self) -> dict[str, float] | None:
        """Return the intervals for metrics.json: `floor`, `factor_50` and `factor_90`; None if nothing is known."""
        low, high = self.factors
        if not math.isfinite(high):
            return None
        return {"floor": float(np.min(self.floor)), "factor_50": low, "factor_90": high}

    @classmethod
    def calibrated(cls, errors_P: np.ndarray, spread_P: np.ndarray, depth_P: np.ndarray) -> Intervals:
        """Return intervals that are calibrated by split conformal prediction (Papadopoulos et al. 2002; Lei et al.
        2018).

        The factors are quantiles of |error| / (spread + floor) over P voxels whose truth is known. Of voxels like these
        the nominal share then lies inside. With fewer than FEWEST_HIDDEN voxels the intervals are unknown.

        Each of FLOORS is tried as the floor. The one whose 90 % intervals have the least interval score is taken: their
        width plus 2 / .1 times the distance by which they miss (Gneiting and Raftery 2007).

        Args:
            errors_P: the errors.
            spread_P: the samples' standard deviations; if all are 0, intervals follow from the floor alone.
            depth_P: distance to the nearest known voxel, in voxels. The floor grows with its square root, see `at`.
        """
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
    """The lead of one restoration over another: the ratio of their mean squared errors in dB at hidden voxels.

    Those are known voxels that were masked too in a test, in regions like the mask's parts.
    """

    db: float  # over all voxels of the hidden regions together; above 0 if the first is better
    low: float  # lower end of what a mask of a few parts like the regions is expected to show, at 95 %; may be infinite
    high: float  # upper end of that range; may be infinite
    wins: int  # number of regions in which the first has the smaller error
    of: int  # number of all regions
    voxels: int  # number of voxels in all regions

    def outcome(self, rival: str, by_model: bool = True) -> Outcome:
        """Return the answer for the user to whether a restoration is better than the best method without a model.

        Args:
            rival: that method's name.
            by_model: False if no model has a part in what was restored.
        """
        kind, reason = "tie", None
        if self.low > 0:
            kind = "ahead"
        elif not by_model or self.high < 0 or (self.low < -UNSURE_DB and self.high <= UNSURE_DB):
            kind = "as good"
        elif self.low < -UNSURE_DB:
            kind = "unknown"
            reason = "either may be far ahead" if math.isfinite(self.low) else "too few regions could be hidden"
        expected_db = (round(self.low, 2), round(self.high, 2)) if math.isfinite(self.low) else None
        return Outcome(kind, rival, round(self.db, 2), expected_db, self.of, self.voxels, reason)

    @classmethod
    def found(cls, own_P: np.ndarray, other_P: np.ndarray, region_P: np.ndarray, parts: int) -> Lead:
        """Return the lead of one restoration over another, with the range that is expected of it under the mask.

        The variance of the lead over samples of R regions is that of the jackknife with one region left out (Tukey
        1958). The lead under a mask of M parts varies (1 + R / M) times as much. The range follows from Student's t
        with R - 1 degrees of freedom. It is infinite for fewer than FEWEST regions.

        Args:
            own_P: errors of the first restoration at P hidden voxels.
            other_P: errors of the second.
            region_P: number of each voxel's hidden region.
            parts: M, the number of the mask's parts.
        """
        from scipy.special import stdtrit  # scipy.stats has it too, and takes half a second

        _, of_region_P = np.unique(region_P, return_inverse=True)
        own_R, other_R = (np.bincount(of_region_P, np.square(one_P)) + 1e-20 for one_P in (own_P, other_P))
        count, lead = len(own_R), 10 * math.log10(other_R.sum() / own_R.sum())
        reach = math.inf
        if count >= FEWEST:
            others_R = (np.maximum(one_R.sum() - one_R, 1e-20) for one_R in (other_R, own_R))
            without_R = 10 * np.log10(np.divide(*others_R))
            variance = (count - 1) * float(without_R.var()) * (1 + count / parts)
            reach = float(stdtrit(count - 1, (1 + LEAD_SHARE) / 2)) * math.sqrt(variance)
        return cls(lead, lead - reach, lead + reach, int((own_R < other_R).sum()), count, own_P.size)


def quantile(scores_P: np.ndarray, share: float) -> float:
    """Return the score that a new one, from the same distribution, exceeds with at most the probability 1 - `share`.

    It is the smallest such score of those given. If P scores are too few for that, return the largest. It calibrates
    intervals by conformal prediction.

    Args:
        scores_P: the scores of P voxels.
        share: the probability.
    """
    rank = min(len(scores_P), math.ceil((len(scores_P) + 1) * share))
    return float(np.partition(scores_P, rank - 1)[rank - 1])


COVERAGES = {"coverage_50": 0.5, "coverage_90": 0.9}  # names in `metrics.json`, and the intervals' nominal shares


@dataclass(frozen=True)
class Moments:
    """The mean and spread of images that are not kept (Welford 1962; merged as by Chan, Golub, LeVeque 1979)."""

    count: int  # number of images
    mean_YX: np.ndarray  # float64 [Y, X]
    squares_YX: np.ndarray  # sum of squared deviations from the mean, float64 [Y, X]; exactly 0 if all images are equal

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Moments:
        """Return the moments (mean and spread) of no image, all 0. Merging with them changes nothing.

        Args:
            shape: [Y, X] of images.
        """
        return cls(0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, image_YX: np.ndarray) -> Moments:
        """Return the moments (mean and spread) of one image, of any real dtype."""
        return cls(1, image_YX.astype(np.float64), np.zeros(image_YX.shape))

    def merged(self, other: Moments) -> Moments:
        """Return the moments (mean and spread) of both sets of images together.

        The order changes the last bits, so callers keep to one order.

        Args:
            other: the moments of the other set.
        """
        count = self.count + other.count
        apart_YX = other.mean_YX - self.mean_YX
        squares_YX = self.squares_YX + other.squares_YX + np.square(apart_YX) * (self.count * other.count / count)
        return Moments(count, self.mean_YX + apart_YX * (other.count / count), squares_YX)

    @property
    def deviation_YX(self) -> np.ndarray:
        """The sample standard deviation, with count - 1; float64 [Y, X], 0 for one image."""
        return np.sqrt(self.squares_YX / max(1, self.count - 1))


def spread_native(deviation01_YX: np.ndarray, mask_YX: np.ndarray, scale: IntensityRange) -> np.ndarray:
    """Return a standard deviation of normalised images in the input's units: float32 [Y, X], 0 outside the mask.

    Args:
        deviation01_YX: the standard deviation of the normalised images.
        mask_YX: True for restored voxels.
        scale: the range that normalised them.
    """
    native_YX = np.where(mask_YX, deviation01_YX, 0.0) * (scale.high - scale.low)
    return np.minimum(native_YX, np.finfo(np.float32).max).astype(np.float32)


def coverage(
    moments01: Moments,
    truth_YX: np.ndarray | None,
    mask_YX: np.ndarray,
    scale: IntensityRange,
    intervals: Intervals | None = None,
) -> dict[str, float | None]:
    """Return the shares of true values, `coverage_50` and `coverage_90`, that lie in intervals of these nominal shares.

    The intervals are those that N samples predict. The one of nominal share p is m - t s sqrt(1 + 1/N) to m + t s
    sqrt(1 + 1/N), ends included. Here m is the mean of a voxel's samples, and s their standard deviation with N - 1.
    The factor t is the quantile (1 + p) / 2 of Student's t with N - 1 degrees of freedom. A further sample from the
    samples' own normal distribution lies inside with probability p.

    The coverage is the share of masked voxels with a finite truth whose truth is inside. If the truth is distributed as
    the samples are, it is .5 and .9 on average. A smaller coverage means that the samples are too similar, a larger one
    that they differ by more than their error. Both are None without a truth, and for a single sample without calibrated
    intervals.

    Args:
        moments01: moments of the normalised samples, before rounding to the input's dtype.
        truth_YX: the truth in the input's units; None if unknown.
        mask_YX: True for restored voxels.
        scale: the range that normalises the truth.
        intervals: calibrated intervals, which are judged in place of Student's; also for a single sample.
    """
    count, judged_YX = moments01.count, mask_YX if truth_YX is None else mask_YX & np.isfinite(truth_YX)
    unknown = count < 2 if intervals is None else intervals.record() is None
    if truth_YX is None or unknown or not judged_YX.any():
        return dict.fromkeys(COVERAGES)
    from scipy.special import stdtrit

    if intervals is None:
        low, high = stdtrit(count - 1, (1 + np.array(SHARES)) / 2) * math.sqrt(1 + 1 / count)
        intervals = Intervals(0.0, (float(low), float(high)))
    error_P = np.abs(scale.normalise(truth_YX[judged_YX]) - moments01.mean_YX[judged_YX])
    radii = {name: intervals.radius(moments01.deviation_YX, share) for name, share in COVERAGES.items()}
    return {name: float(np.mean(error_P <= radius_YX[judged_YX])) for name, radius_YX in radii.items()}

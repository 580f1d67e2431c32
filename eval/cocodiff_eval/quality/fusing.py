"""Several restorations of the same voxels, taken together: which, with which weights, their mean and spread, and how
far they may be off.

All is learnt from voxels whose truth is known (`hidden.py`): weights from the errors of each member and how much they
have in common, intervals by split conformal prediction, and which of two is better by a jackknife over regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from cocodiff_eval.data.intensity import IntensityRange

RIDGE = 0.1  # of the harmonic mean of errors: with few hidden voxels weights of good members stay nearer to equal ones
ALIKE = 0.5  # how much correlations of errors are drawn to their mean, for few regions show more than there is
LEAST_WEIGHT = 0.02  # of an axis on average, below which it is not worth its samples
LEAST_OTHER = 0.05  # of a method without a model, below which it is not worth its time
STEPS = 4.0  # of an error's logarithm: voxels whose members' errors are within a quarter share their weights
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


def weights_of(products_AA: np.ndarray) -> np.ndarray:
    """The weights [A], none negative and 1 together, with which the mean of A estimates is expected to err least.

    products_AA: the mean products of their errors, C. The sum of w_i w_j C_ij is smallest, with correlations half way
    to their mean (as Ledoit and Wolf 2004 shrink covariances), and a tenth of the harmonic mean of C's diagonal added
    to the diagonal: in proportion to the best members, so that one that hardly errs has nearly all the weight.
    """
    count = len(products_AA)
    sizes_A = np.sqrt(np.maximum(np.diag(products_AA), 1e-20))
    alike_AA = products_AA / np.outer(sizes_A, sizes_A)
    mean = (alike_AA.sum() - count) / max(1, count * (count - 1))
    alike_AA = (1 - ALIKE) * alike_AA + ALIKE * (mean + (1 - mean) * np.eye(count))
    ridge = RIDGE * count / float(np.square(1 / sizes_A).sum())
    ridged_AA = alike_AA * np.outer(sizes_A, sizes_A) + np.eye(count) * ridge
    kept = [*range(count)]
    while True:
        found = np.linalg.solve(ridged_AA[np.ix_(kept, kept)], np.ones(len(kept)))
        if (found > 0).all():
            weights_A = np.zeros(count)
            weights_A[kept] = found / found.sum()
            return weights_A
        kept.pop(int(found.argmin()))


@dataclass(frozen=True)
class Mixture:
    """Members of a weighted mean whose weights differ from voxel to voxel.

    The expected square of a member's error is a + b d^2, where d is how far the known voxels are apart between which
    it interpolates; 0 for a member that does not interpolate along lines.

    names: of A members; alike_AA: mean products of their errors, each in units of its expected size; squares_A2: a and
    b of each; apart_A: the mean of d^2, for voxels where it is not known (NaN)
    """

    names: tuple[str, ...]
    alike_AA: np.ndarray
    squares_A2: np.ndarray
    apart_A: np.ndarray
    alone: str | None = None  # the member that has all the weight, where no mean is better than it

    @classmethod
    def learnt(cls, errors: Mapping[str, np.ndarray], apart: Mapping[str, np.ndarray]) -> Mixture:
        """errors: of each member at the same voxels, float64 [P]; apart: d of those that have it, [P]."""
        from scipy.optimize import nnls

        squares_A2, apart_A = np.zeros((len(errors), 2)), np.zeros(len(errors))
        for number, (name, error_P) in enumerate(errors.items()):
            square_P = np.square(error_P)
            d2_P = np.square(apart[name]) if name in apart else np.zeros_like(square_P)
            apart_A[number] = np.nanmean(d2_P) if np.isfinite(d2_P).any() else 0.0
            if not apart_A[number]:
                squares_A2[number, 0] = square_P.mean()
                continue
            relative_P = np.where(np.isfinite(d2_P), d2_P, apart_A[number]) / apart_A[number]
            # The last row is worth as many voxels that show no b: the few regions of a volume overrate it.
            rows_P2 = np.vstack([np.stack([np.ones_like(relative_P), relative_P], 1), [0.0, math.sqrt(error_P.size)]])
            a, b = nnls(rows_P2, np.append(square_P, 0.0))[0]
            squares_A2[number] = a, b / apart_A[number]
        found = cls((*errors,), np.eye(len(errors)), squares_A2, apart_A)
        relative_AP = np.stack([*errors.values()]) / found.sizes(apart, error_P.size)
        return cls(found.names, relative_AP @ relative_AP.T / error_P.size, squares_A2, apart_A)

    def sizes(self, apart: Mapping[str, np.ndarray], voxels: int) -> np.ndarray:
        """The expected size of each member's error, float64 [A, P]."""
        found_AP = np.empty((len(self.names), voxels))
        for number, (name, (a, b)) in enumerate(zip(self.names, self.squares_A2, strict=True)):
            d2_P = np.square(apart[name]) if name in apart else np.zeros(voxels)
            found_AP[number] = a + b * np.where(np.isfinite(d2_P), d2_P, self.apart_A[number])
        return np.sqrt(np.maximum(found_AP, 1e-12))

    def weights(self, apart: Mapping[str, np.ndarray], voxels: int) -> np.ndarray:
        """Of each member at each voxel, none negative and 1 together, float64 [A, P]."""
        if self.alone is not None:
            return np.repeat(np.array([[float(name == self.alone)] for name in self.names]), voxels, axis=1)
        sizes_AP = self.sizes(apart, voxels)
        steps_AP = np.round(np.log(sizes_AP) * STEPS).astype(np.int64)
        keys_P = np.zeros(voxels, np.int64)  # one number for the steps of all members
        for steps_P in steps_AP if voxels else ():
            keys_P = keys_P * (int(np.ptp(steps_P)) + 1) + steps_P - steps_P.min()
        _, first, places = np.unique(keys_P, return_index=True, return_inverse=True)
        weights = [weights_of(self.alike_AA * np.outer(one, one)) for one in sizes_AP[:, first].T]
        return np.stack(weights, 1)[:, places] if weights else np.zeros((len(self.names), 0))


def choose_axes(
    errors: Mapping[str, np.ndarray],
    most: int,
    allowed: Callable[[Sequence[str]], bool] = lambda axes: True,
    others: Mapping[str, np.ndarray] | None = None,
    apart: Mapping[str, np.ndarray] | None = None,
) -> Mixture:
    """As many axes as have a weight, those whose mean with the other members errs least.

    errors: of each axis at the same voxels, float64 [P]; most: so many axes at most; allowed: which sets of axes may be
    taken, at least one of them; others, apart: errors of members that are there in any case, and d as of
    `Mixture.learnt`. Those without such a d, which take time, leave where they have a weight of less than .05.
    """
    apart, others = apart or {}, others or {}

    def learnt(taken: Mapping[str, np.ndarray]) -> tuple[Mixture, np.ndarray, float]:
        """With the mean weight of each member, and the mean squared error."""
        mixture, values_AP = Mixture.learnt(taken, apart), np.stack([*taken.values()])
        weights_AP = mixture.weights(apart, values_AP.shape[1])
        return mixture, weights_AP.mean(axis=1), float(np.square((weights_AP * values_AP).sum(axis=0)).mean())

    tried = []
    for count in range(1, min(most, len(errors)) + 1):
        for axes in filter(allowed, combinations(errors, count)):
            mixture, weights_A, mse = learnt({axis: errors[axis] for axis in axes} | {**others})
            idle = bool((weights_A[:count] < LEAST_WEIGHT).any())
            worth = idle, count if idle else -count, mse
            tried.append((worth, dict(zip(mixture.names, weights_A.tolist(), strict=True))))
    assert tried, "a set of axes is allowed"
    _, weights = min(tried, key=lambda one: one[0])
    kept = [name for name, weight in weights.items() if name in {*errors, *apart} or weight >= LEAST_OTHER]
    return learnt({name: {**errors, **others}[name] for name in kept})[0]


def samples_along(samples: int, weights: Mapping[str, float]) -> dict[str, int]:
    """How many samples each axis gets, at least one each: as evenly as goes, more to those of larger weight."""
    each, more = divmod(samples, len(weights))
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

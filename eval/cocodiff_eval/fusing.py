"""Restorations along several axes, taken together: which axes, with which weights, and how far they may be off.

Both are learnt from voxels whose truth is known (`hidden.py`): weights from the errors of each axis and how much they
have in common, intervals by split conformal prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

RIDGE = 0.1  # of the mean error: with few hidden voxels weights stay nearer to equal ones
FLOORS = (0.03, 0.1, 0.3, 1.0, 3.0)  # in root mean square errors, tried for the narrowest intervals
SHARES = (0.5, 0.9)


def fuse(values_SP: np.ndarray, weights_SP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The weighted mean of samples of voxels, and their weighted standard deviation; float64 [P] each.

    values_SP: float, S samples of P voxels; weights_SP: not negative, zero where a sample says nothing of a voxel, of
    any sum above zero. With equal weights the deviation is the usual one, with S - 1; where one sample alone
    has a weight it is 0. A voxel without any weight becomes NaN.
    """
    values_SP = np.where(weights_SP > 0, values_SP, 0.0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights_SP = weights_SP / weights_SP.sum(axis=0)
    mean_P = (weights_SP * values_SP).sum(axis=0)
    squares_P = (weights_SP * np.square(values_SP - mean_P)).sum(axis=0)
    unseen_P = 1.0 - np.square(weights_SP).sum(axis=0)
    alone_P = unseen_P < 1e-9
    return mean_P, np.sqrt(np.where(alone_P, 0.0, squares_P / np.where(alone_P, 1.0, unseen_P)))


def weights_of(errors_AP: np.ndarray) -> np.ndarray:
    """The weights [A], none negative and 1 together, with which the mean of A estimates is expected to err least.

    errors_AP: of each estimate at the same P voxels. The sum of w_i w_j C_ij is smallest, where C is the matrix of mean
    products of errors, a tenth of its mean diagonal added to the diagonal.
    """
    products_AA = errors_AP @ errors_AP.T / errors_AP.shape[1]
    products_AA += np.eye(len(errors_AP)) * max(RIDGE * float(np.trace(products_AA)) / len(errors_AP), 1e-20)
    kept = [*range(len(errors_AP))]
    while True:
        found = np.linalg.solve(products_AA[np.ix_(kept, kept)], np.ones(len(kept)))
        if (found > 0).all():
            weights_A = np.zeros(len(errors_AP))
            weights_A[kept] = found / found.sum()
            return weights_A
        kept.pop(int(found.argmin()))


def choose_axes(
    errors: Mapping[str, np.ndarray], most: int, allowed: Callable[[Sequence[str]], bool] = lambda axes: True
) -> dict[str, float]:
    """The axes whose weighted mean errs least, and their weights. errors: of each axis at the same voxels, float64 [P];
    most: so many axes at most; allowed: which sets of axes may be taken, at least one of them."""
    best: tuple[float, dict[str, float]] | None = None
    for count in range(1, min(most, len(errors)) + 1):
        for axes in combinations(errors, count):
            weights_A = weights_of(np.stack([errors[axis] for axis in axes]))
            if not allowed(axes) or not weights_A.all():
                continue
            mse = float(np.square(sum(w * errors[axis] for w, axis in zip(weights_A, axes, strict=True))).mean())
            if best is None or mse < best[0]:
                best = mse, dict(zip(axes, weights_A.tolist(), strict=True))
    assert best is not None, "a set of axes is allowed"
    return best[1]


def dealt(samples: int, weights: Mapping[str, float]) -> dict[str, int]:
    """How many samples each axis gets, at least one each: as evenly as goes, more to those of larger weight."""
    each, more = divmod(samples, len(weights))
    order = sorted(weights, key=lambda axis: -weights[axis])
    return {axis: each + (order.index(axis) < more) for axis in weights}


@dataclass(frozen=True)
class Intervals:
    """Intervals around restored voxels that hold their truth with a given probability: mean - r to mean + r, with
    r = factor (spread + floor) in the units of the errors; spread counts where `by_spread`. factors: for each of
    SHARES."""

    floor: float
    factors: tuple[float, float]
    by_spread: bool = True

    def radius(self, spread: np.ndarray, share: float) -> np.ndarray:
        return self.factors[SHARES.index(share)] * ((spread if self.by_spread else np.zeros_like(spread)) + self.floor)

    @classmethod
    def unknown(cls) -> Intervals:
        """Where nothing is known: without ends."""
        return cls(1.0, (math.inf, math.inf), False)

    @classmethod
    def calibrated(cls, errors_P: np.ndarray, spread_P: np.ndarray) -> Intervals:
        """By split conformal prediction (Papadopoulos et al. 2002; Lei et al. 2018): factors are the quantiles of
        |error| / (spread + floor) of P voxels whose truth is known, so that of voxels like these the share lies inside.
        The floor is the one of FLOORS whose intervals of 90 % are narrowest on average."""
        errors_P, scale = np.abs(errors_P), max(math.sqrt(float(np.square(errors_P).mean())), 1e-9)
        by_spread = bool(spread_P.any())
        floors = [part * scale for part in FLOORS] if by_spread else [scale]
        found = [
            cls(floor, (quantile(errors_P / (spread_P + floor), 0.5), quantile(errors_P / (spread_P + floor), 0.9)))
            for floor in floors
        ]
        best = min(found, key=lambda one: float(one.radius(spread_P, 0.9).mean()))
        return cls(best.floor, best.factors, by_spread)


def quantile(scores_P: np.ndarray, share: float) -> float:
    """The smallest score such that one more, exchangeable with the P given, is no larger with at least this
    probability; the largest where P are too few for that."""
    rank = min(len(scores_P), math.ceil((len(scores_P) + 1) * share))
    return float(np.partition(scores_P, rank - 1)[rank - 1])

"""Several restorations of one slice: their mean, their spread, and how often the truth lies within it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cocodiff_eval.fusing import Intervals
from cocodiff_eval.intensity import IntensityRange

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
    def of(cls, image_YX: np.ndarray) -> Moments:
        """Those of one image, of any real dtype."""
        return cls(1, image_YX.astype(np.float64), np.zeros(image_YX.shape))

    def merged(self, other: Moments) -> Moments:
        """Those of the images of both. The order changes the last bits: callers keep to one."""
        count = self.count + other.count
        apart_YX = other.mean_YX - self.mean_YX
        mean_YX = self.mean_YX + apart_YX * (other.count / count)
        squares_YX = self.squares_YX + other.squares_YX + np.square(apart_YX) * (self.count * other.count / count)
        return Moments(count, mean_YX, squares_YX)

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
    judged_YX = mask_YX if truth_YX is None else mask_YX & np.isfinite(truth_YX)
    if truth_YX is None or (moments01.count < 2 and intervals is None) or not judged_YX.any():
        return dict.fromkeys(COVERAGES)
    from scipy.stats import t as student

    count = moments01.count
    error = np.abs(scale.normalise(truth_YX[judged_YX]) - moments01.mean_YX[judged_YX])
    if intervals is not None:
        spread_YX = moments01.deviation_YX
        radii = {name: intervals.radius(spread_YX, share)[judged_YX] for name, share in COVERAGES.items()}
        return {name: float(np.mean(error <= radius)) for name, radius in radii.items()}
    deviation = moments01.deviation_YX[judged_YX] * math.sqrt(1 + 1 / count)
    return {
        name: float(np.mean(error <= float(student.ppf((1 + share) / 2, count - 1)) * deviation))
        for name, share in COVERAGES.items()
    }

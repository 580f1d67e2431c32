"""The test on hidden regions: what each axis and each method without a model made of them, and what follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES
from cocodiff_eval.harness.volume import ALONE, OWN, HiddenRegionReport, Volume, along
from cocodiff_eval.quality.fusing import Intervals, Lead, Mixture, choose_axes, fuse, weights_of
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.quality.metrics import psnr_db
from cocodiff_eval.restore.baseline import SOLVERS, VARIATION, biharmonic, linear

# Methods without a model that work slice by slice, and the axis of their slices. Lines along z lie in slices along y.
LINES: dict[str, tuple[str, int]] = {
    "linear across z": ("y", 0),
    "linear across y": ("z", 0),
    "linear across x": ("z", 1),
}
BIHARMONIC = "biharmonic"
APART = ", ends"  # added to a line's name: how far the known voxels at its ends are apart
MEMBERS = (*LINES, BIHARMONIC, VARIATION)  # of the mean, beside the model's axes
METHODS = (*LINES, BIHARMONIC, *SOLVERS)
SEEN = 0.5  # of the hidden voxels that a method has to restore at least, for its figure to be told
ENOUGH = 3  # regions: with fewer, errors are those of weights that were learnt on the same voxels


def made_along(method: str) -> str:
    """The axis of the slices that a method without a model works in; z for those in three dimensions."""
    return LINES[method][0] if method in LINES else "z"


def in_slice(method: str, prepared: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """What a method that works slice by slice makes of one, and of a line its ends."""
    if method == BIHARMONIC:
        return {method: biharmonic(prepared, mask)}
    found, apart = linear(prepared, mask, LINES[method][1])
    return {method: found, method + APART: apart}


class Tested:
    """What was restored in one round at the voxels that are judged: those of the grid in which tested slices meet,
    [z, y, x].

    own: of the model along each axis, in each sample, float64 [S, *grid]; others: of methods without a model, and ends
    of lines; NaN where nothing was restored. truth: normalised; judged: which voxels of the grid are hidden;
    deep: how far each is from a known one, as of `depth`.
    """

    def __init__(self, hidden: Hidden, volume: Volume, task: Any) -> None:
        self.hidden, self.judged = hidden, judged_grid(hidden, volume)
        grid = self.judged.shape
        self.own = {axis: np.full((0, *grid), np.nan) for axis in volume.axes}
        self.others = {name: np.full(grid, np.nan) for name in (*METHODS, *(line + APART for line in LINES))}
        inside = np.ix_(hidden.tested["y"], hidden.tested["x"])
        self.truth = np.stack([task.scale.normalise(task.stack.read(z)[inside]) for z in hidden.tested["z"]])

        def unknown(index: int) -> np.ndarray:
            return volume.read_mask(index) | hidden.mask("z", index, volume.read_mask)

        slices = volume.statistics.shape[0]
        self.deep = np.stack([depth(unknown, index, slices)[inside] for index in hidden.tested["z"]])

    def add(self, axis: str, indices: Sequence[int], sample: int, made: Mapping[str, np.ndarray]) -> None:
        """What was made of slices along an axis, each [slice, *grid without that axis]; without an axis [*grid]."""
        places: list[Any] = [slice(None)] * len(AXES)
        first = AXES.index(axis) if axis else 0
        if axis:
            places[first] = [self.hidden.tested[axis].index(index) for index in indices]
        for name, values in made.items():
            if name == OWN:
                more = max(0, sample + 1 - len(self.own[axis]))
                self.own[axis] = np.concatenate([self.own[axis], np.full((more, *self.judged.shape), np.nan)])
            target = self.own[axis][sample] if name == OWN else self.others[name]
            target[tuple(places)] = np.moveaxis(values, 0, first)


def judged_grid(hidden: Hidden, volume: Volume) -> np.ndarray:
    """Which voxels of the grid in which tested slices meet are hidden, boolean [z, y, x]."""
    inside = np.ix_(hidden.tested["y"], hidden.tested["x"])
    return np.stack([hidden.mask("z", index, volume.read_mask)[inside] for index in hidden.tested["z"]])


def judge_test(rounds: Sequence[Tested], volume: Volume, samples: int) -> HiddenRegionReport:
    """The members and their weights, figures of all methods at the voxels that they all restore, and the intervals of
    the mean."""
    kind = "volume" if volume.statistics.shape[0] > 1 else "slice"
    equal = HiddenRegionReport(dict.fromkeys(volume.axes, 1 / len(volume.axes)), of=kind)
    truth_P = np.concatenate([one.truth[one.judged] for one in rounds])
    own = {axis: np.concatenate([one.own[axis][:, one.judged] for one in rounds], 1) for axis in volume.axes}
    others = {name: np.concatenate([one.others[name][one.judged] for one in rounds]) for name in rounds[0].others}
    apart = {line: others.pop(line + APART) for line in LINES}
    own = {axis: values for axis, values in own.items() if len(values) and seen(values[0]) >= SEEN}
    others = {name: values for name, values in others.items() if seen(values) >= SEEN}
    if not truth_P.size or not own or (volume.chosen and not volume.restores([*own])):
        return equal
    common_P = np.isfinite(np.stack([*(values[0] for values in own.values()), *others.values()])).all(axis=0)
    common_P &= np.isfinite(truth_P)
    if not common_P.any():
        return equal
    own_SP = {axis: values[:, common_P] for axis, values in own.items()}
    firsts = np.cumsum([0, *(len(one.hidden.pieces) for one in rounds[:-1])])
    region_P = np.concatenate([one.hidden.numbers[one.judged] + n for one, n in zip(rounds, firsts, strict=True)])
    truth_P, region_P = truth_P[common_P], region_P[common_P]
    regions = sum(len(one.hidden.pieces) for one in rounds)
    errors = {axis: values.mean(axis=0) - truth_P for axis, values in own_SP.items()}
    found = {name: values[common_P] - truth_P for name, values in others.items()}
    ends = {line: values[common_P] for line, values in apart.items() if line in found}
    members = {name: found[name] for name in MEMBERS if name in found}
    most, allowed = (samples, volume.restores) if volume.chosen else (len(own), lambda axes: len(axes) == len(own))
    mixture = choose_axes(errors, most, allowed, members, ends)
    taken = {name: (errors | members)[name] for name in mixture.names}
    error_P, weights_AP = _fused(mixture, taken, ends, region_P)
    axes = [axis for axis in mixture.names if axis in AXES]
    values_SP = np.concatenate([own_SP[axis] for axis in axes])
    # The deviation of the samples about what is written, each axis counted alike.
    shares_SP = np.concatenate([np.full(own_SP[axis].shape, 1 / len(own_SP[axis])) for axis in axes])
    _, spread_P = fuse(
        np.concatenate([values_SP, (error_P + truth_P)[None]]),
        np.concatenate([np.zeros_like(values_SP), np.ones_like(truth_P)[None]]),
        np.concatenate([shares_SP, np.zeros_like(truth_P)[None]]),
    )
    found[OWN] = error_P
    if len(own) > 1:
        found |= {along(axis): errors[axis] for axis in own}
    if members:
        errors_AP = np.stack([*errors.values()])
        found[ALONE] = weights_of(errors_AP @ errors_AP.T / errors_AP.shape[1]) @ errors_AP
    figures = {name: psnr_db(float(np.square(error_P).mean())) for name, error_P in found.items()}
    figures = dict(sorted(figures.items(), key=lambda one: -one[1]))
    deep_P = np.concatenate([one.deep[one.judged] for one in rounds])[common_P]
    intervals = Intervals.calibrated(error_P, spread_P, deep_P)
    rival = next((name for name in figures if name in METHODS), None)
    sources = {(piece.source, piece.shape) for one in rounds for piece in one.hidden.pieces}
    lead = None if rival is None else Lead.found(found[OWN], found[rival], region_P, len(sources))
    weights = dict(zip(mixture.names, weights_AP.mean(axis=1).tolist(), strict=True))
    weights = {axis: weights.get(axis, 0.0) for axis in (axes if volume.chosen else volume.axes)} | weights
    cut = any(one.hidden.cut for one in rounds)
    return HiddenRegionReport(weights, regions, truth_P.size, figures, intervals, mixture, lead, cut, kind)


def _fused(
    mixture: Mixture, errors: Mapping[str, np.ndarray], apart: Mapping[str, np.ndarray], region_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of the mean [P], in each region with weights that were learnt in the others, and those weights [A, P]."""
    errors_AP = np.stack([*errors.values()])
    weights_AP = mixture.weights(apart, region_P.size)
    regions = np.unique(region_P)
    for region in regions if len(regions) >= ENOUGH else ():
        inside, others = region_P == region, region_P != region
        outside = {name: one[others] for name, one in errors.items()}
        learnt = Mixture.learnt(outside, {name: one[others] for name, one in apart.items()})
        weights_AP[:, inside] = learnt.weights({n: d[inside] for n, d in apart.items()}, int(inside.sum()))
    return (weights_AP * errors_AP).sum(axis=0), weights_AP


def seen(values_P: np.ndarray) -> float:
    """The share of voxels that were restored."""
    return float(np.isfinite(values_P).mean()) if values_P.size else 0.0

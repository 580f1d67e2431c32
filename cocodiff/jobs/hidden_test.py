"""The test on hidden regions: what each axis and each method without a model made of them, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from cocodiff_eval.baseline import biharmonic
from cocodiff_eval.fusing import Intervals, choose_axes, fuse, weights_of
from cocodiff_eval.hidden import Hidden
from cocodiff_eval.metrics import psnr_db
from cocodiff_eval.smooth import SOLVERS, Window, in_cells, linear
from cocodiff_eval.turned import AXES

from cocodiff.jobs.volume import OWN, Verdict, Volume, along

# Methods without a model that work slice by slice, and the axis of their slices: lines along z lie in those along y.
IN_SLICES: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "linear across z": ("y", partial(linear, axis=0)),
    "linear across y": ("z", partial(linear, axis=0)),
    "linear across x": ("z", partial(linear, axis=1)),
    "biharmonic": ("z", biharmonic),
}
SEEN = 0.5  # of the hidden voxels that a method has to restore at least, for its figure to be told
LEAST_WEIGHT = 0.01  # of an axis that was asked for


class Tested:
    """What was restored at the voxels that are judged: those of the grid in which tested slices meet, [z, y, x].

    own: of the model along each axis, in each sample, float64 [S, *grid]; others: of methods without a model; NaN where
    nothing was restored. truth: normalised; judged: which voxels of the grid are hidden.
    """

    def __init__(self, hidden: Hidden, volume: Volume, task: Any, samples: int) -> None:
        self.hidden = hidden
        grid = [len(hidden.tested[axis]) for axis in AXES]
        self.own = {axis: np.full((volume.sampled(samples), *grid), np.nan) for axis in volume.axes}
        self.others = {name: np.full(grid, np.nan) for name in (*IN_SLICES, *SOLVERS)}
        self.judged = judged_grid(hidden, volume)
        inside = np.ix_(hidden.tested["y"], hidden.tested["x"])
        self.truth = np.stack([task.scale.normalise(task.stack.read(z)[inside]) for z in hidden.tested["z"]])

    def add(self, axis: str, indices: Sequence[int], sample: int, made: Mapping[str, np.ndarray]) -> None:
        """What was made of slices along an axis, each [slice, *grid without that axis]; without an axis [*grid]."""
        places: list[Any] = [slice(None)] * len(AXES)
        first = 0
        if axis:
            first = AXES.index(axis)
            places[first] = [self.hidden.tested[axis].index(index) for index in indices]
        for name, values in made.items():
            target = self.own[axis][sample] if name == OWN else self.others[name]
            target[tuple(places)] = np.moveaxis(values, 0, first)


def judged_grid(hidden: Hidden, volume: Volume) -> np.ndarray:
    """Which voxels of the grid in which tested slices meet are hidden, boolean [z, y, x]."""
    inside = np.ix_(hidden.tested["y"], hidden.tested["x"])
    return np.stack([hidden.mask("z", index, volume.read_mask)[inside] for index in hidden.tested["z"]])


def read_window(
    task: Any, volume: Volume, window: Window, hidden: Hidden | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A window of a volume, normalised, and of its mask, with what is hidden besides: [Z, Y, X] each."""
    indices = range(window[0].start, window[0].stop)
    image_ZYX = np.stack([task.stack.read(index)[window[1:]] for index in indices])
    masks = [volume.read_mask(index) for index in indices]
    if hidden is not None:
        masks = [mask | hidden.mask("z", n, volume.read_mask) for n, mask in zip(indices, masks, strict=True)]
    mask_ZYX = np.stack([mask[window[1:]] for mask in masks])
    known_ZYX = np.where(mask_ZYX, np.asarray(task.scale.low).astype(image_ZYX.dtype), image_ZYX)
    return np.clip(task.scale.normalise(known_ZYX), 0.0, 1.0), mask_ZYX


def solved_near(hidden: Hidden, volume: Volume, task: Any) -> dict[str, np.ndarray]:
    """What the methods in three dimensions make of the voxels that are judged, NaN elsewhere: [z, y, x] each."""
    judged = judged_grid(hidden, volume)
    points_P3 = np.stack(
        [np.array(hidden.tested[axis])[at] for axis, at in zip(AXES, judged.nonzero(), strict=True)], 1
    )
    read, found = partial(read_window, task, volume, hidden=hidden), {}
    for name, solver in SOLVERS.items():
        found[name] = np.full(judged.shape, np.nan)
        found[name][judged] = in_cells(solver, read, volume.census.shape, points_P3)
    return found


def slice_figures(axis: str, prepared: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> dict[str, Any]:
    """What the methods without a model make of slices along an axis, those that work in these."""
    pairs = [*zip(prepared, masks, strict=True)]
    return {name: [method(*pair) for pair in pairs] for name, (of, method) in IN_SLICES.items() if of == axis}


def judge_test(tested: Tested, volume: Volume, samples: int, best: bool) -> Verdict:
    """Weights of axes, figures of all methods at the voxels that they all restore, and the intervals of what is
    written. best: whether that is the best method, of those that restore every hidden voxel."""
    equal = Verdict(dict.fromkeys(volume.axes, 1 / len(volume.axes)))
    truth_P = tested.truth[tested.judged]
    own = {axis: values[:, tested.judged] for axis, values in tested.own.items()}
    others = {name: values[tested.judged] for name, values in tested.others.items()}
    own = {axis: values for axis, values in own.items() if seen(values[0]) >= SEEN}
    others = {name: values for name, values in others.items() if seen(values) >= SEEN}
    if not truth_P.size or not own or (volume.chosen and not volume.restores([*own])):
        return equal
    common_P = np.isfinite(np.stack([*(values[0] for values in own.values()), *others.values()])).all(axis=0)
    common_P &= np.isfinite(truth_P)
    if not common_P.any():
        return equal
    truth_P = truth_P[common_P]
    errors = {axis: values[:, common_P].mean(axis=0) - truth_P for axis, values in own.items()}
    weights = choose_axes(errors, samples, volume.restores) if volume.chosen else asked_weights(errors, volume.axes)
    taken = [axis for axis in weights if axis in own]
    values_SP = np.concatenate([own[axis][:, common_P] for axis in taken])
    shares = np.concatenate([np.full(len(own[axis]), weights[axis] / len(own[axis])) for axis in taken])
    mean_P, spread_P = fuse(values_SP, np.broadcast_to(shares[:, None], values_SP.shape))
    found = {OWN: mean_P - truth_P} | {name: values[common_P] - truth_P for name, values in others.items()}
    whole = {OWN, *(name for name, values in others.items() if seen(values) == 1)}
    if len(own) > 1:
        found |= {along(axis): errors[axis] for axis in own}
    figures = {name: psnr_db(float(np.square(error_P).mean())) for name, error_P in found.items()}
    figures = dict(sorted(figures.items(), key=lambda one: -one[1]))
    method = next(name for name in figures if name in whole) if best else OWN
    intervals = Intervals.calibrated(found[method], spread_P if method == OWN else np.zeros_like(spread_P))
    regions, voxels = len(tested.hidden.pieces), int(common_P.sum())
    return Verdict(weights, method, regions, voxels, figures, intervals)


def seen(values_P: np.ndarray) -> float:
    """The share of voxels that were restored."""
    return float(np.isfinite(values_P).mean()) if values_P.size else 0.0


def asked_weights(errors: Mapping[str, np.ndarray], axes: Sequence[str]) -> dict[str, float]:
    """Weights of all axes that were asked for: none is left out, and one of which the test has nothing counts as much
    as the others do on average."""
    known = dict(zip(errors, weights_of(np.stack([*errors.values()])).tolist(), strict=True))
    mean = sum(known.values()) / len(known)
    weights = {axis: max(LEAST_WEIGHT, known.get(axis, mean)) for axis in axes}
    return {axis: weight / sum(weights.values()) for axis, weight in weights.items()}

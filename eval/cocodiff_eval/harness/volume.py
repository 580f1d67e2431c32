"""What `--axes` and `--hidden_test` ask of a volume, and what is learnt of it before it is restored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError, check_choice
from cocodiff_eval.data.masks import Mask, depth
from cocodiff_eval.data.reoriented import AXES, MaskStatistics, reoriented_shape
from cocodiff_eval.data.slices import SMALLEST_SIDE
from cocodiff_eval.data.volume import Reader, Stack, format_shape
from cocodiff_eval.quality.fusing import Intervals, Lead, Mixture, choose_axes, spread_about, weights_of
from cocodiff_eval.quality.hidden import Hidden, Survey, hide
from cocodiff_eval.quality.metrics import psnr_db
from cocodiff_eval.restore.baseline import SMOOTH, SOLVERS, VARIATION, biharmonic, linear

AUTO = "auto"
OWN = "cocodiff"  # the mean, beside methods without a model
ALONE = "the model alone"  # its axes without the methods that have none
CUT = "; parts of the mask find too few places whole, so these regions are smaller: errors under it may be larger"
THROUGH = 0.9  # of the masked voxels see nothing known along z: other axes are not worth their time
TENTH = 10  # of the job's samples of slices, one in so many is made for the test
LEAST, MOST = 12, 32  # tested slices along each axis
# Methods without a model that work slice by slice, and the axis of their slices. Lines along z lie in slices along y.
LINES: dict[str, tuple[str, int]] = {
    "linear across z": ("y", 0),
    "linear across y": ("z", 0),
    "linear across x": ("z", 1),
}
BIHARMONIC = "biharmonic"
APART = ", ends"  # added to a line's name: how far the known voxels at its ends are apart
MEMBERS = (*LINES, BIHARMONIC, VARIATION, SMOOTH)  # of the mean, beside the model's axes
METHODS = (*LINES, BIHARMONIC, *SOLVERS)
SEEN = 0.5  # of the hidden voxels that a method has to restore at least, for its figure to be told
ENOUGH = 3  # regions: with fewer, errors are those of weights that were learnt on the same voxels


@dataclass(frozen=True)
class Volume:
    """A volume that is restored along several axes, or tested on hidden regions, or whose samples are kept.

    axes: those that may be taken; chosen: whether the test chooses among them, else all are; tested: whether regions
    are hidden; statistics, read_mask: of the mask as it is, also where a slice along z is masked wholly.
    """

    axes: tuple[str, ...]
    chosen: bool
    tested: bool
    statistics: MaskStatistics
    read_mask: Reader

    def restores(self, axes: Sequence[str]) -> bool:
        """Whether these axes restore every masked voxel: on one of them no slice is masked wholly."""
        return any(not self.statistics.full(axis).any() for axis in axes)

    def sampled(self, samples: int) -> int:
        """Samples of each slice that the test makes along each axis: as many as each of all axes has."""
        return max(1, round(samples / len(self.axes)))

    def regions(self, read: Reader, samples: int, seed: int) -> tuple[Hidden, ...]:
        """What is hidden in each round of the test; reads the volume and its mask once. read: a slice along z."""
        slices = len(self.statistics.restorable("z")) or self.statistics.shape[0]
        budget = samples * slices // (TENTH * self.sampled(samples) * len(self.axes))
        survey = Survey.of(read, self.read_mask, self.statistics.shape)
        return hide(survey, min(MOST, max(LEAST, budget)), seed, self.axes)


@dataclass(frozen=True)
class HiddenRegionReport:
    """What the test has shown of a volume. weights: of the axes that are taken and of the methods without a model, in
    the mean; regions, voxels: that were tested; psnr_db: of each method on the same voxels, from the best to the worst;
    intervals: of the mean; mixture: weights voxel by voxel; lead: of the mean over the best method without a model;
    cut: see `Hidden`; of: what was tested. Without a test weights alone."""

    weights: Mapping[str, float]
    regions: int = 0
    voxels: int = 0
    psnr_db: Mapping[str, float] | None = None
    intervals: Intervals | None = None
    mixture: Mixture | None = None
    lead: Lead | None = None
    cut: bool = False
    of: str = "volume"

    @property
    def axes(self) -> dict[str, float]:
        """Each axis's share of the model's part."""
        found = {axis: weight for axis, weight in self.weights.items() if axis in AXES}
        total = sum(found.values())
        return {axis: weight / total if total else 1 / len(found) for axis, weight in found.items()}

    @property
    def others(self) -> list[str]:
        """The methods without a model that the mean takes in."""
        return [name for name in self.weights if name not in AXES]

    def line(self, where: str) -> str:
        """What the user is told first."""
        figures = dict(self.psnr_db or {})
        if not figures:
            return f"{where}: no region of this {self.of} could be hidden: nothing is known of how good it is restored"
        others = [name for name in figures if name not in (OWN, ALONE, *map(along, AXES))]
        told = ", ".join(f"{name} {figures[name]:.1f}" for name in ([ALONE] if ALONE in figures else []) + others)
        found = f"on {self.regions} hidden regions of this {self.of}: {OWN} {figures[OWN]:.1f} dB, {told}"
        kind, lead = CUT if self.cut else "", self.lead
        if lead is None:
            return f"{where}: {found}{kind}"
        ahead, behind, low, high, wins = OWN, others[0], lead.low, lead.high, lead.wins
        if lead.db < 0:
            ahead, behind, low, high, wins = behind, ahead, -high, -low, lead.of - wins
        if self.mixture is not None and self.mixture.alone:
            return f"{where}: {found}; {self.mixture.alone} is written, as no mean with the model errs less{kind}"
        told = f"{found}; {ahead} is ahead of {behind} by {abs(lead.db):.1f} dB, in {wins} of {lead.of} regions"
        expected = "too few to tell what is so under the mask"
        if math.isfinite(low):
            expected = f"under the mask {low:.1f} to {high:.1f} dB are to be expected"
        return f"{where}: {told}; {expected}{'' if lead.is_clear else ': no clear winner'}{kind}"

    def weights_line(self, where: str) -> str:
        if self.mixture is not None and self.mixture.alone:
            return f"{where}: {self.mixture.alone} alone"
        slices = ", ".join(f"{axis} {weight:.2f}" for axis, weight in self.weights.items() if axis in AXES)
        others = [f"{name} {w:.2f}" for name, w in self.weights.items() if name not in AXES and w >= 0.005]
        return f"{where}: mean of slices along {', '.join([slices, *others])} (weights)"

    def record(self, name: str, mask: str) -> dict[str, Any]:
        """For metrics.json."""
        lead = self.lead
        return {
            "name": name,
            "mask": mask,
            "axes": {axis: round(weight, 4) for axis, weight in self.axes.items()},
            "weights": {one: round(weight, 4) for one, weight in self.weights.items()},
            "hidden_regions": self.regions,
            "hidden_voxels": self.voxels,
            "hidden_psnr_db": None if self.psnr_db is None else {one: round(db, 3) for one, db in self.psnr_db.items()},
            "better_in_regions": [lead.wins, lead.of] if lead else None,
            "lead_db": round(lead.db, 3) if lead else None,
            "expected_lead_db": [round(lead.low, 3), round(lead.high, 3)] if lead and math.isfinite(lead.low) else None,
            "intervals": None if self.intervals is None else self.intervals.record(),
            "verdict": self.line(f"{name}, mask {mask}") if self.psnr_db is not None else None,
        }


def along(axis: str) -> str:
    """The name of the model's restorations along one axis alone, among figures."""
    return f"{OWN} along {axis} alone"


def is_deep(stack: Stack) -> bool:
    """Whether a stack is a volume: it may have slices along each axis, is shown as one, and its slices are compared."""
    return stack.ndim == 3 and len(stack) >= SMALLEST_SIDE


def words_of(values: Mapping[str, Any]) -> list[str]:
    """What `--axes` names, `z y x` and `z,y,x` alike. Raises UserError for other words."""
    words = [word for one in values["axes"] or () for word in one.split(",") if word]
    for word in words:
        check_choice("axes", word, (*AXES, AUTO))
    if len(words) > 1 and AUTO in words:
        raise UserError(f"--axes {' '.join(words)}: {AUTO} chooses among all axes: name it alone, or axes without it")
    return list(dict.fromkeys(words))


def axes_of(values: Mapping[str, Any], stack: Stack) -> tuple[tuple[str, ...], bool]:
    """The axes of a stack's slices, and whether a test chooses among them. Raises UserError for too small slices."""
    words, deep = words_of(values), is_deep(stack)
    if not words and deep and values["samples"] > 1 and values["hidden_test"] is not False and not values["quality"]:
        words = [AUTO]
    if words == [AUTO]:
        return (tuple(AXES), True) if deep else (("z",), False)
    for axis in words:
        _, rows, columns = reoriented_shape(stack.shape, axis)
        if (stack.ndim == 2 and axis != "z") or min(rows, columns) < SMALLEST_SIDE:
            raise UserError(
                f"--axes {axis}: {stack.path} has {format_shape(stack.shape[-stack.ndim :])} voxels, and slices along "
                f"{axis} need {SMALLEST_SIDE} x {SMALLEST_SIDE} at least: restore it along z"
            )
    return tuple(words) or ("z",), False


def volume_of(values: Mapping[str, Any], stack: Stack, mask: Mask) -> tuple[Volume | None, Mask]:
    """How a stack is restored as a volume, if it is; and the mask of what its axes restore. Raises UserError."""
    axes, chosen = axes_of(values, stack)
    usual = is_deep(stack) and (chosen or (values["samples"] > 1 and not values["quality"]))
    tested = usual if values["hidden_test"] is None else values["hidden_test"]
    if chosen and not tested:
        raise UserError(f"--axes {AUTO} chooses by hidden regions: leave --hidden_test away, or name the axes")
    if values["samples"] < len(axes) and not chosen:
        raise UserError(f"--samples {values['samples']}: {len(axes)} axes need a sample each at least")
    if values["samples"] * len(AXES) > 1023 and (tested or axes != ("z",)):
        raise UserError(f"--samples {values['samples']}: at most {1023 // len(AXES)} are possible on several axes")
    if axes == ("z",) and not tested:
        return None, mask
    if values["quality"]:
        raise UserError(
            "--quality chooses a setting slice by slice: it goes with --axes z alone, without --hidden_test"
        )
    statistics = MaskStatistics.of(mask.reader, len(stack))
    if chosen and statistics.through >= THROUGH * statistics.total and not statistics.full("z").any():
        axes, chosen = ("z",), False
    volume = Volume(axes, chosen, tested, statistics, mask.reader)
    if axes == ("z",):
        return volume, mask
    if not volume.restores(axes):
        raise UserError(
            f"--axes {' '.join(axes)}: along each of them a slice is masked wholly, and where these meet nothing is "
            f"left to restore from: take another axis in, or leave these voxels out of the mask"
        )
    return volume, replace(mask, full=frozenset(), masked=tuple((statistics.counts("z") > 0).tolist()))


# The test on hidden regions: what each axis and each method without a model made of them, and what follows ------------


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

    def __init__(self, hidden: Hidden, volume: Volume, task: Any, samples: int) -> None:
        """samples: of the job."""
        self.hidden, self.judged = hidden, judged_grid(hidden, volume)
        grid = self.judged.shape
        self.own = {axis: np.full((volume.sampled(samples), *grid), np.nan) for axis in volume.axes}
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
    own = {axis: values for axis, values in own.items() if seen(values[0]) >= SEEN}
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
    mixture, error_P, weights_AP = mean_or_member(mixture, errors, members, ends, region_P)
    axes = [axis for axis in mixture.names if axis in AXES]
    # The deviation of the samples about what is written, each axis counted alike.
    values_SP = np.concatenate([own_SP[axis] for axis in axes])
    shares_SP = np.concatenate([np.full(own_SP[axis].shape, 1 / len(own_SP[axis])) for axis in axes])
    spread_P = spread_about(error_P + truth_P, values_SP, shares_SP / shares_SP.sum(axis=0))
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


def mean_or_member(
    mixture: Mixture,
    axes: Mapping[str, np.ndarray],
    others: Mapping[str, np.ndarray],
    apart: Mapping[str, np.ndarray],
    region_P: np.ndarray,
) -> tuple[Mixture, np.ndarray, np.ndarray]:
    """Return what errs least in regions that it was not learnt in: the mean, that of its axes with one other member or
    none, or this member alone.

    axes, others: errors of the model along each axis and of methods without a model, [P]. apart: as of
    `Mixture.learnt`. Returns the mixture, its errors [P] and its members' weights [A, P].
    """
    errors, kept = {**axes, **others}, [name for name in mixture.names if name in axes]
    tried = [mixture, Mixture.learnt({axis: axes[axis] for axis in kept}, apart)]
    for name in others:  # the axes stay, for the voxels that this member does not restore
        both = Mixture.learnt({one: errors[one] for one in (*kept, name)}, apart)
        tried += [both, replace(both, alone=name)]
    found = [(one, *_fused(one, {name: errors[name] for name in one.names}, apart, region_P)) for one in tried]
    return min(found, key=lambda one: float(np.square(one[1]).mean()))


def _fused(
    mixture: Mixture, errors: Mapping[str, np.ndarray], apart: Mapping[str, np.ndarray], region_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of the mean [P], in each region with weights that were learnt in the others, and those weights [A, P]."""
    errors_AP = np.stack([*errors.values()])
    weights_AP = mixture.weights(apart, region_P.size)
    regions = np.unique(region_P)
    for region in regions if len(regions) >= ENOUGH and mixture.alone is None else ():
        inside, others = region_P == region, region_P != region
        outside = {name: one[others] for name, one in errors.items()}
        learnt = Mixture.learnt(outside, {name: one[others] for name, one in apart.items()})
        weights_AP[:, inside] = learnt.weights({n: d[inside] for n, d in apart.items()}, int(inside.sum()))
    return (weights_AP * errors_AP).sum(axis=0), weights_AP


def seen(values_P: np.ndarray) -> float:
    """The share of voxels that were restored."""
    return float(np.isfinite(values_P).mean()) if values_P.size else 0.0

"""Volumes: their options `--axes` and `--hidden_test`, and the test on hidden regions before they are restored.

A volume may be restored in slices along several axes, whose results are averaged. The test hides regions of known
voxels like those of the mask. The model along each axis and methods without a model restore them. Their errors there
give the weights of the average, intervals, and the answer to whether the model helps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError, check_choice
from cocodiff.jobs.arrays import Outcome
from cocodiff_eval.data.masks import Mask, depth
from cocodiff_eval.data.reoriented import AXES, MaskStatistics, reoriented_shape
from cocodiff_eval.data.slices import SMALLEST_SIDE
from cocodiff_eval.data.volume import Reader, Stack, format_shape
from cocodiff_eval.quality.fusing import Intervals, Lead, mean_or_member, near_best, products_in_blocks, spread_about
from cocodiff_eval.quality.hidden import Hidden, Survey, hide
from cocodiff_eval.quality.metrics import psnr_db
from cocodiff_eval.restore.baseline import (
    AUTOREGRESSIONS,
    HARMONIC,
    METHODS,
    MOST_CELLS,
    SMALL,
    SMALL_HOLE,
    side_of_cells,
)

AUTO = "auto"  # value of `--axes` that lets the test choose
OWN = "cocodiff"  # name, among figures, of the average that is written
ALONE = "the model alone"  # name, among figures, of the model's mean without other methods
NOWHERE = "no known region like the mask's could be hidden"
CUT = "; parts of the mask find too few places whole, so these regions are smaller: errors under it may be larger"
# Share of masked voxels that lie on lines along z without any known voxel. From this share on, restoring along y and x
# is not worth its time.
THROUGH = 0.9
TENTH = 10  # the test makes one sample of a slice for every 10 that the job makes
LEAST, MOST = 12, 32  # least and most tested slices along each axis, if the job restores as many
MOST_TESTED = 3  # most samples of each tested slice
JUDGED = 2**15  # most voxels that a round is judged by
# Side in voxels of the cubes whose errors count as independent observations, and the most such cubes that are judged of
# a large volume.
BLOCK, BLOCKS = 24, 16
TINY = 1e-12  # added to mean squared errors before they are divided by each other
SEEN = 0.5  # least share of hidden voxels that a method must restore to be judged
# Beyond this many times the squared error of methods without a model, the model is dropped from the mean, unless it is
# near the best.
FAR = 4.0
CLEAR = 0.5  # least gain of the mean with the model, in standard errors, unless the model is near the best by itself
LEAST_WEIGHT = 0.05  # least weight of the model, of an axis, or of all other methods; below it they are left out
HOPELESS_DB = 0.5  # lead of the other methods over the model after one sample, in dB, that more samples cannot make up


@dataclass(frozen=True)
class Volume:
    """The plan for a volume that is restored along other axes than z, or tested on hidden regions.

    It also has the mask as the user gave it, with the slices that are masked wholly: `statistics` counts its voxels,
    and `read_mask` gives a slice of it along z.
    """

    axes: tuple[str, ...]  # axes along which slices may be restored, of "z", "y" and "x"
    chosen: bool  # True if the test chooses among these axes; else all are used
    tested: bool  # True if the test on hidden regions is made
    # The mask as the user gave it, with the slices that are masked wholly: its counts, and a function that gives a
    # slice of it along z.
    statistics: MaskStatistics
    read_mask: Reader

    @property
    def methods(self) -> list[str]:
        """The names of the methods without a model that are tried. Autoregressions are left out if they would take
        long."""
        masks, side = self.statistics, side_of_cells(self.statistics.shape)
        starts = [np.arange(0, length, side) for length in masks.shape]
        rows_ZY, columns_ZX = (np.add.reduceat(of, starts[0]) for of in (masks.rows_ZY, masks.columns_ZX))
        rows_ZY, columns_ZX = np.add.reduceat(rows_ZY, starts[1], 1), np.add.reduceat(columns_ZX, starts[2], 1)
        # Of the cells along x that a count of masked voxels lies in, so many at most can hold more than SMALL_HOLE.
        cells_ZY = np.minimum(rows_ZY // SMALL_HOLE, (columns_ZX > 0).sum(axis=1, keepdims=True))
        cells = int(cells_ZY.sum())
        return [name for name in METHODS if cells <= MOST_CELLS or name not in AUTOREGRESSIONS]

    def restores(self, axes: Sequence[str]) -> bool:
        """Return True if slices along some axes restore every masked voxel: along one of them no slice is masked
        wholly. Along z alone such slices are left as they are.

        Args:
            axes: some of "z", "y" and "x".
        """
        return self.axes == ("z",) or any(not self.statistics.full(axis).any() for axis in axes)

    def sampled(self, samples: int) -> int:
        """Return the number of samples that the test makes of each slice: at least 1 and at most 3.

        Args:
            samples: number of the job's samples, which are shared among the axes.
        """
        return min(MOST_TESTED, max(1, round(samples / len(self.axes))))

    def regions(self, read: Reader, samples: int, seed: int) -> tuple[Hidden, ...]:
        """Choose the hidden regions of each round of the test on hidden regions. The volume and its mask are read once.

        Args:
            read: function that returns the volume's slice with an index along z.
            samples: number of the job's samples.
            seed: seed of the random choices.
        """
        survey = Survey.of(read, self.read_mask, self.statistics.shape)
        return hide(survey, self.tested_slices(samples), seed, self.axes)

    def tested_slices(self, samples: int) -> int:
        """Return the largest number of slices along each axis that the test on hidden regions restores in each sample.

        The test never restores more slices than the job.

        Args:
            samples: number of the job's samples.
        """
        slices = len(self.statistics.restorable("z")) or self.statistics.shape[0]
        usual = samples * slices // (TENTH * self.sampled(samples) * len(self.axes))
        of_job = samples * sum(len(self.statistics.restorable(axis)) for axis in self.axes) // len(self.axes)
        most = max(1, of_job // (self.sampled(samples) * len(self.axes)))
        return min(MOST, max(LEAST, usual), most)

    def judged(self, hidden: Hidden) -> np.ndarray:
        """Return the hidden voxels that a round of the test is judged by: indices [z, y, x], int [P, 3] for P voxels.

        There are at most JUDGED. In a volume larger than SMALL they are those where tested slices along all three axes
        cross. If the round tests no slices, they lie in cubes at random places of the regions.

        Args:
            hidden: the hidden regions of the round.
        """
        shape, found, rng = self.statistics.shape, [np.zeros((0, 3), int)], np.random.default_rng(0)
        windows: list[tuple[Sequence[int], ...]] = [tuple(map(range, shape))]
        if math.prod(shape) > SMALL and hidden.tested:
            windows = [tuple(hidden.tested[axis] for axis in AXES)]
        elif math.prod(shape) > SMALL:
            windows = []
            for piece in (hidden.pieces[n] for n in rng.permutation(BLOCKS) % len(hidden.pieces)):
                ends = zip(piece.target, piece.shape, strict=True)
                starts = [at + int(rng.integers(max(1, side - BLOCK + 1))) for at, side in ends]
                windows.append(tuple(range(at, min(at + BLOCK, end)) for at, end in zip(starts, shape, strict=True)))
        for slices, rows, columns in windows:
            for index in slices:
                row, column = hidden.mask("z", index, self.read_mask)[np.ix_(rows, columns)].nonzero()
                places = np.full(len(row), index), np.asarray(rows)[row], np.asarray(columns)[column]
                found.append(np.stack(places, 1))
        points_P3 = np.unique(np.concatenate(found), axis=0)
        # Voxels where tested slices along several axes cross are preferred; ties are random.
        meet_P = sum(np.isin(points_P3[:, AXES.index(axis)], of_axis) for axis, of_axis in hidden.tested.items())
        order_P = np.argsort(rng.random(len(points_P3)) - meet_P)
        return points_P3[np.sort(order_P[:JUDGED])]


@dataclass(frozen=True)
class HiddenRegionReport:
    """The verdict of the test on hidden regions of a volume or slice: how well each method restores, and what to
    average.

    `weights` has the share of each axis ("z", "y", "x": the model) and of each method without a model in the mean that
    is written. Without axes the model is left out. A method of weight 0 restores only what the others leave. `psnr_db`
    has the PSNR of each method on the hidden voxels in dB, from the best to the worst; it is None without a test, or if
    nothing could be hidden.
    """

    # By axis and by method without a model, the weight in the mean that is written. Without axes the model is left out.
    # A method of weight 0 restores only what the others leave.
    weights: Mapping[str, float]
    regions: int = 0  # number of regions that judged the methods without a model
    voxels: int = 0  # number of voxels in them
    # PSNR of each method on these voxels in dB, from the best to the worst; None without a test, or if nothing could be
    # hidden. The model restores only some voxels: see `Evidence.figures`.
    psnr_db: Mapping[str, float] | None = None
    intervals: Intervals | None = None  # intervals around the mean that is written; None without a test
    lead: Lead | None = None  # lead of that mean over the best method without a model
    cut: bool = False  # True if hidden regions are smaller than the mask's parts, see `Hidden`
    of: str = "volume"  # the input's kind in messages: "volume" or "slice"

    @property
    def axes(self) -> dict[str, float]:
        """The share of each axis in the model's part of the mean. Shares sum to 1."""
        found = {axis: weight for axis, weight in self.weights.items() if axis in AXES}
        total = sum(found.values())
        return {axis: weight / total if total else 1 / len(found) for axis, weight in found.items()}

    @property
    def others(self) -> list[str]:
        """The methods without a model that are used. One of weight 0 restores only what the others leave."""
        return [name for name in self.weights if name not in AXES]

    @property
    def is_hopeless(self) -> bool:
        """True if the model is so far behind that more samples of the test would not bring it into the mean."""
        figures = self.psnr_db or {}
        return not self.axes and figures[ALONE] < figures[OWN] - HOPELESS_DB

    @property
    def outcome(self) -> Outcome:
        """The answer to whether the mean that is written is better than the best method without a model."""
        if self.lead is None:
            return Outcome(reason=NOWHERE)
        rival = next(name for name in self.psnr_db or {} if name in METHODS)
        return self.lead.outcome(rival, bool(self.axes))

    def line(self, where: str) -> str:
        """Return the line that tells the user the test's result: PSNR of each method, and the outcome.

        Args:
            where: the names of the input and the mask, which begin the line.
        """
        figures = dict(self.psnr_db or {})
        if not figures:
            return f"{where}: no region of this {self.of} could be hidden: nothing is known of how good it is restored"
        others = [name for name in figures if name not in (OWN, ALONE, *map(along, AXES))]
        told = ", ".join(f"{name} {figures[name]:.1f}" for name in ([ALONE] if ALONE in figures else []) + others)
        found = f"on {self.regions} hidden regions of this {self.of}: {OWN} {figures[OWN]:.1f} dB, {told}"
        return f"{where}: {found}; {self.outcome}{CUT if self.cut else ''}"

    def weights_line(self, where: str) -> str:
        """Return the line that tells the user the weights of the mean that is written.

        Args:
            where: the names of the input and the mask, which begin the line.
        """
        told = [f"{name} {weight:.2f}" for name, weight in self.weights.items() if weight]
        return f"{where}: mean of {'slices along ' * bool(self.axes)}{', '.join(told)} (weights)"

    def record(self, name: str, mask: str) -> dict[str, Any]:
        """Return the results of the test on hidden regions (known voxels that were masked too) as plain data.

        They are an entry of `volumes` in metrics.json.

        Args:
            name: the input's name.
            mask: the mask's name.
        """
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
    """Return the name of the model's restoration along one axis alone in the list of a test's PSNR.

    axis: "z", for example, gives "cocodiff along z alone"
    """
    return f"{OWN} along {axis} alone"


def is_deep(stack: Stack) -> bool:
    """Return True if a stack is treated as a volume: it has enough slices along z to be cut along other axes.

    Reports show a volume from three sides, and compare neighbouring slices.
    """
    return stack.ndim == 3 and len(stack) >= SMALLEST_SIDE


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return the axes that `--axes` names: "z y x" and "z,y,x" both give ["z", "y", "x"]. Raise UserError for other
    words.

    Args:
        values: the options' values, by name.
    """
    words = [word for one in values["axes"] or () for word in one.split(",") if word]
    for word in words:
        check_choice("axes", word, (*AXES, AUTO))
    if len(words) > 1 and AUTO in words:
        raise UserError(f"--axes {' '.join(words)}: {AUTO} chooses among all axes: name it alone, or axes without it")
    return list(dict.fromkeys(words))


def axes_of(values: Mapping[str, Any], stack: Stack) -> tuple[tuple[str, ...], bool]:
    """Return the axes along which a stack is restored, and True if the test on hidden regions chooses among them.

    Raise UserError if slices along an axis would be too small, or `--axes` is wrong.

    Args:
        values: the options' values, by name.
        stack: the slices along z.
    """
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
    """Return the plan for a stack that is restored as a volume, and the mask to restore it under.

    The plan is None if slices are restored one by one along z, without a test. Where other axes are used, slices that
    are masked wholly along z are restored too, and the returned mask includes them. Raise UserError if options do not
    fit together, or the axes cannot restore every masked voxel.

    Args:
        values: the options' values, by name.
        stack: the slices along z.
        mask: the mask as read.
    """
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
    if not chosen:  # slices along an axis that are all masked wholly or not at all restore nothing
        axes = tuple(axis for axis in axes if statistics.restorable(axis)) or axes
    volume = Volume(axes, chosen, tested, statistics, mask.reader)
    if axes == ("z",):
        return volume, mask
    if not volume.restores(axes):
        raise UserError(
            f"--axes {' '.join(axes)}: along each of them a slice is masked wholly, and where these meet nothing is "
            f"left to restore from: {'take another axis in, or ' * (len(axes) < len(AXES))}leave these voxels out of "
            f"the mask"
        )
    return volume, replace(mask, full=frozenset(), masked=tuple((statistics.counts("z") > 0).tolist()))


# The test on hidden regions: the restorations of each axis and method, and the verdict that follows -------------------


class HiddenRound:
    """The results of one round of a volume's test on hidden regions, at the P hidden voxels that it is judged by.

    The test hides known voxels too, and restores them by the model and by other methods. Results are NaN until they are
    added, and where nothing was restored.
    """

    def __init__(self, hidden: Hidden, points_P3: np.ndarray, volume: Volume, task: Any, samples: int) -> None:
        """Read the true values of the judged voxels from the volume.

        Args:
            hidden: the hidden regions.
            points_P3: indices [z, y, x] of the voxels, as `Volume.judged` returns them.
            volume: the plan for the volume.
            task: its `tasks.Task`, with the voxels and their scale.
            samples: number of the job's samples.
        """
        self.hidden, self.points_P3 = hidden, points_P3
        count, slices, (z_P, y_P, x_P) = len(self.points_P3), volume.statistics.shape[0], self.points_P3.T
        # The model's results by axis, [S, P] for S samples of the test, and those of methods without a model, [P] each.
        self.own = {axis: np.full((volume.sampled(samples), count), np.nan) for axis in volume.axes}
        self.others = {name: np.full(count, np.nan) for name in METHODS}
        # The normalised truth, and each voxel's distance from the nearest known one, as `depth` returns it.
        self.truth_P, self.deep_P = np.zeros(count), np.zeros(count)

        @lru_cache(8)
        def unknown(index: int) -> np.ndarray:
            """Return the masked and hidden voxels of a slice along z, boolean [Y, X]."""
            return volume.read_mask(index) | hidden.mask("z", index, volume.read_mask)

        for index in np.unique(z_P).tolist():
            here = z_P == index
            self.truth_P[here] = task.scale.normalise(task.stack.read(index)[y_P[here], x_P[here]])
            self.deep_P[here] = depth(unknown, index, slices)[y_P[here], x_P[here]]

    def along(self, axis: str, indices: Sequence[int]) -> np.ndarray:
        """Return a boolean for each judged voxel, [P]: True for those that lie in some slices along an axis.

        Args:
            axis: "z", "y" or "x"; empty to get True for all voxels.
            indices: indices of the slices along the axis.
        """
        return np.isin(self.points_P3[:, AXES.index(axis)], indices) if axis else np.ones(len(self.points_P3), bool)

    def add(self, axis: str, indices: Sequence[int], sample: int, made: Mapping[str, np.ndarray]) -> None:
        """Store the results of a unit of work of the test: restored values of judged voxels.

        Args:
            axis: axis of the unit's slices; empty for methods without a model, which restore all voxels.
            indices: its slices along that axis.
            sample: number of the model's sample.
            made: by method, or OWN for the model, the results at the voxels in these slices, in their order.
        """
        for name, values in made.items():
            (self.own[axis][sample] if name == OWN else self.others[name])[self.along(axis, indices)] = values

    def restored(self, axis: str) -> np.ndarray:
        """Return the mean of the model's samples along an axis that have been added so far, float64 [P].

        It is NaN for voxels without a sample.

        Args:
            axis: "z", "y" or "x".
        """
        made_S = np.isfinite(self.own[axis]).any(axis=1)
        return self.own[axis][made_S | ~made_S.any()].mean(axis=0)

    def blocks(self) -> np.ndarray:
        """Return the block of each judged voxel, int [P, 4]. The errors of different blocks count as independent.

        A block is named by the number of the hidden region, and the indices [z, y, x] of a cube of BLOCK voxels a side.
        """
        return np.column_stack([self.hidden.numbers(self.points_P3), self.points_P3 // BLOCK])


@dataclass(frozen=True)
class Evidence:
    """The results of all rounds of the test on hidden regions, at the P voxels that all methods without a model have
    restored.

    `own` has the model's results by axis, float64 [S, P] for S samples; NaN where it restored nothing. If slices along
    all axes cross anywhere, results are NaN at all other voxels, so that axes are judged at the same voxels.
    """

    truth_P: np.ndarray  # normalised values
    deep_P: np.ndarray  # distance in voxels from the nearest known one, as `depth` returns it
    region_P: np.ndarray  # number of the hidden region
    block_P: np.ndarray  # number of the block: the part of a region in one cube of BLOCK voxels a side
    # Results of the model by axis, float64 [S, P] for S samples; NaN where it restored nothing. If slices along all
    # axes cross anywhere, results are NaN at all other voxels, so that axes are judged at the same voxels.
    own: Mapping[str, np.ndarray]
    others: Mapping[str, np.ndarray]  # errors of each method without a model, [P]

    @classmethod
    def of(cls, rounds: Sequence[HiddenRound], volume: Volume) -> Evidence:
        """Collect the results of all rounds of a volume's test on hidden regions.

        Methods, and the model's axes, that restored less than half of their voxels are left out.

        Args:
            rounds: the rounds with their results.
            volume: the plan for the volume.
        """
        truth_P, deep_P = (np.concatenate([getattr(one, name) for one in rounds]) for name in ("truth_P", "deep_P"))
        others = {name: np.concatenate([one.others[name] for one in rounds]) for name in METHODS}
        others = {name: values_P for name, values_P in others.items() if seen(values_P) >= SEEN}
        at_P, own = np.isfinite(np.stack([truth_P, *others.values()])).all(axis=0), dict[str, np.ndarray]()
        for axis in volume.axes:
            asked_P = np.concatenate([one.along(axis, one.hidden.tested.get(axis, ())) for one in rounds])[at_P]
            values_SP = np.concatenate([one.own[axis] for one in rounds], axis=1)[:, at_P]
            values_SP = values_SP[np.isfinite(values_SP).any(axis=1)]
            if len(values_SP) and seen(values_SP[0, asked_P]) >= SEEN:
                own[axis] = values_SP
        meet_P = np.isfinite([values_SP.mean(axis=0) for values_SP in own.values()]).all(axis=0)
        if len(own) > 1 and meet_P.any():  # all axes are judged there
            own = {axis: np.where(meet_P, values_SP, np.nan) for axis, values_SP in own.items()}
        blocks = [np.insert(one.blocks(), 0, number, axis=1) for number, one in enumerate(rounds)]
        blocks_P5 = np.concatenate(blocks)[at_P]
        region_P, block_P = (np.unique(blocks_P5[:, :n], axis=0, return_inverse=True)[1].ravel() for n in (2, 5))
        errors = {name: values_P[at_P] - truth_P[at_P] for name, values_P in others.items()}
        return cls(truth_P[at_P], deep_P[at_P], region_P, block_P, own, errors)

    def errors(self, axes: Sequence[str]) -> np.ndarray:
        """Return the errors of the mean of the model's results over samples and axes, float64 [P]: results minus truth.

        An axis stands for the results of slices along it. Errors are NaN where nothing was restored along one of the
        axes.

        Args:
            axes: some of "z", "y" and "x", keys of `own`.
        """
        return np.mean([self.own[axis].mean(axis=0) for axis in axes], axis=0) - self.truth_P

    def without_model(self) -> tuple[dict[str, float], np.ndarray]:
        """Return the weights of the methods without a model in their mean, by name, and the errors of that mean, [P].

        Methods of weight 0 are left out. For each block of voxels the errors are those with weights learnt from other
        blocks.
        """
        errors_AP = np.stack([*self.others.values()])
        weights_A, each_AP = mean_or_member(errors_AP, self.block_P)
        weights = {name: weight for name, weight in zip(self.others, weights_A.tolist(), strict=True) if weight}
        return weights, (each_AP * errors_AP).sum(axis=0)

    def with_model(self, simple_P: np.ndarray, of_model_P: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the weight of the model in its mean with the other methods, 0 to 1, and the errors of that mean, [P].

        For each block of voxels the errors are those with weights learnt from other blocks. They are NaN where the
        model restored nothing, unless its weight is 0. If the model is far behind, or the mean gains too little to be
        clear, a member that is not near the best one gets the weight 0. The model alone is taken only where it is
        clearly better: else its plain mean with the others if that errs less, which learns no weight, or these alone.

        Args:
            simple_P: errors of the mean of methods without a model.
            of_model_P: errors of the model's mean; NaN where it restored nothing.
        """
        at_P = np.isfinite(of_model_P)
        both_2P = np.stack([simple_P, of_model_P])
        simple, of_model = np.square(both_2P[:, at_P]).sum(axis=1)
        _, block_P = np.unique(self.block_P[at_P], return_inverse=True)
        for drops in (of_model > FAR * simple, True):
            (_, share), shares_2P = mean_or_member(both_2P[:, at_P], block_P, drops)
            mean_P = (shares_2P * both_2P[:, at_P]).sum(axis=0)
            if not near_best(*products_in_blocks(np.stack([simple_P[at_P], mean_P]), block_P), CLEAR)[0]:
                break
        if share > 1 - LEAST_WEIGHT and near_best(*products_in_blocks(both_2P[:, at_P], block_P))[0]:
            mean_P = both_2P[:, at_P].mean(axis=0)
            share = 0.5 * (np.square(mean_P).sum() < of_model)
        if share < LEAST_WEIGHT or share > 1 - LEAST_WEIGHT:
            return round(share), both_2P[round(share)]
        error_P = np.full(at_P.shape, np.nan)
        error_P[at_P] = mean_P
        return float(share), error_P

    def figures(self, errors: Mapping[str, np.ndarray], simple_P: np.ndarray) -> dict[str, float]:
        """Return the PSNR of each method in dB, by name, from the best to the worst.

        The mean squared error of a method that restored only some voxels is scaled to all of them. The factor is the
        mean of squared `simple_P` at all voxels, divided by its mean at these voxels.

        Args:
            errors: errors of each method, [P]; NaN where it restored nothing.
            simple_P: errors of the mean of methods without a model.
        """
        found = {}
        for name, error_P in errors.items():
            at_P = np.isfinite(error_P)
            mse = float(np.square(error_P[at_P]).mean()) if at_P.any() else math.nan
            if not at_P.all():
                mse *= (np.square(simple_P).mean() + TINY) / (np.square(simple_P[at_P]).mean() + TINY)
            found[name] = psnr_db(mse)
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def choose_axes(self, allowed: Sequence[Sequence[str]]) -> Sequence[str]:
        """Return the set of axes along which the model's mean has the least squared error at hidden voxels.

        It is empty if the model has restored nothing. Sets that restore fewer voxels than others are not chosen.

        Args:
            allowed: the sets of axes to choose from, of "z", "y" and "x".
        """
        errors = [self.errors(axes) for axes in allowed]
        known = [error_P[np.isfinite(error_P)] for error_P in errors]
        most = max(map(len, known), default=0)
        worth = [float(np.square(one_P).mean()) if len(one_P) == most else math.inf for one_P in known if most]
        return allowed[int(np.argmin(worth))] if worth else ()

    def of_model(self, volume: Volume, samples: int) -> tuple[dict[str, float], np.ndarray]:
        """Return the weight of each axis in the model's mean, and the errors of that mean, [P].

        For each block of voxels the errors are those with weights learnt from other blocks. They are NaN where the
        model restored nothing. The weights are empty if it restored nothing at all, or if the axes along which it did
        leave a masked voxel out.

        Of axes that the user names, those along which the test restored have equal weights. Else weights are learnt. If
        they cannot be used, the axes of the best set have equal weights. That is so if no voxel is restored along all
        axes, or if the axes with a weight leave a masked voxel out, or outnumber the samples.

        Args:
            volume: the plan for the volume.
            samples: number of the job's samples. Each axis needs at least one.
        """
        counts = range(1, samples + 1)
        sets = [axes for count in counts for axes in combinations(self.own, count) if volume.restores(axes)]
        if not volume.chosen:
            sets = [tuple(self.own)] if self.own and volume.restores(tuple(self.own)) else []
        axes = self.choose_axes(sets)
        errors_AP = np.array([self.errors([axis]) for axis in self.own])
        at_P = np.isfinite(errors_AP).all(axis=0)
        if axes and volume.chosen and at_P.any():
            weights_A, each_AP = mean_or_member(errors_AP[:, at_P], self.block_P[at_P], drops=False)
            shares = {axis: one for axis, one in zip(self.own, weights_A.tolist(), strict=True) if one >= LEAST_WEIGHT}
            if tuple(shares) in sets:
                error_P = np.full(at_P.shape, np.nan)
                error_P[at_P] = (each_AP * errors_AP[:, at_P]).sum(axis=0)
                return {axis: one / sum(shares.values()) for axis, one in shares.items()}, error_P
        return dict.fromkeys(axes, 1 / max(1, len(axes))), self.errors(axes) if axes else np.full(at_P.shape, np.nan)


def judge_test(rounds: Sequence[HiddenRound], volume: Volume, samples: int) -> HiddenRegionReport:
    """Judge the test on hidden regions of a volume: decide how methods are weighted in the mean that is written.

    Return these weights with the methods' PSNR, intervals around the mean, and its lead over the best method without a
    model. First the methods without a model, such as interpolation, are weighted by their errors at all hidden voxels.
    Then their mean and the model's are weighted, at the voxels that the model has restored.

    Args:
        rounds: the results of all rounds of the test.
        volume: the plan for the volume.
        samples: number of the job's samples.
    """
    found = Evidence.of(rounds, volume)
    kind = "volume" if volume.statistics.shape[0] > 1 else "slice"
    axes, of_model_P = found.of_model(volume, samples)
    if not axes:
        return HiddenRegionReport(dict.fromkeys(volume.axes, 1 / len(volume.axes)), of=kind)
    weights, simple_P = found.without_model()
    share, error_P = found.with_model(simple_P, of_model_P)
    weights = {name: (1 - share) * weight for name, weight in weights.items() if share < 1}
    if not share and not any(METHODS[name].fills for name in weights):
        weights[HARMONIC] = 0.0  # restores voxels that the other methods leave
    weights = {axis: share * weight for axis, weight in axes.items() if share} | weights
    at_P = np.isfinite(error_P)
    values = [found.own[axis][:, at_P] for axis in axes if share]
    shares = [np.full(values_SP.shape, 1 / len(values_SP)) for values_SP in values]
    if not share:
        values, shares = [np.stack([*found.others.values()]) + found.truth_P], []
        shares = [np.repeat([[weights.get(name, 0.0)] for name in found.others], at_P.size, axis=1)]
    shares_SP = np.concatenate(shares)
    mean_P = (error_P + found.truth_P)[at_P]
    spread_P = spread_about(mean_P, np.concatenate(values), shares_SP / shares_SP.sum(axis=0))
    intervals = Intervals.calibrated(error_P[at_P], spread_P, found.deep_P[at_P])
    alone = {along(axis): found.errors([axis]) for axis in found.own if len(found.own) > 1}
    figures = found.figures({**found.others, OWN: error_P, ALONE: of_model_P, **alone}, simple_P)
    rival = next(name for name in figures if name in METHODS)
    parts = len({(piece.source, piece.shape) for one in rounds for piece in one.hidden.pieces})
    lead = Lead.found(error_P[at_P], found.others[rival][at_P], found.region_P[at_P], parts)
    if share:  # the range keeps its width, found at the model's voxels, and is centred on the lead at all voxels
        more = figures[OWN] - figures[rival] - lead.db
        lead = replace(lead, db=lead.db + more, low=lead.low + more, high=lead.high + more)
    regions, cut = int(found.region_P.max()) + 1, any(one.hidden.cut for one in rounds)
    return HiddenRegionReport(weights, regions, at_P.size, figures, intervals, lead, cut, kind)


def seen(values_P: np.ndarray) -> float:
    """Return the share of voxels that a method has restored, 0 to 1: those whose value is not NaN.

    values_P: restored values, or their errors, of P hidden voxels
    """
    return float(np.isfinite(values_P).mean()) if values_P.size else 0.0

"""How a volume is made: each kind of work that slices along its axes are, the files that these are kept in while a job
runs, and what is fused of them along z."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from cocodiff.jobs.replicas import Queue
from cocodiff.jobs.store import ROWS, Made
from cocodiff_eval.data.intensity import prepare_slice
from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES, Reoriented, Restored, reoriented_shape
from cocodiff_eval.harness.items import Cost, ItemSamples, evenly
from cocodiff_eval.harness.judging import SliceReview
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import (
    APART,
    BIHARMONIC,
    LINES,
    MEMBERS,
    OWN,
    HiddenRegionReport,
    Volume,
    in_slice,
    judged_grid,
    made_along,
)
from cocodiff_eval.quality.fusing import Intervals, Moments, fuse, samples_along
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.restore.baseline import CELL, SOLVERS, Window, in_cells

TRACE = 1e-9  # of weight, so that a voxel without any other is restored along an axis


class Making:
    """How one volume is made, and the files of what is made.

    modes    names of presets
    samples  of each voxel in all
    keeps    True if each of them is written
    hidden   what is hidden in each round of its test, if it is tested
    leads    True if this rank leads its replica, and writes
    verdict  that of the test, once it is done
    costs    of all works in each preset, once they are made
    """

    def __init__(
        self, session: Session, restorer: Restorer, number: int, task: Task, volume: Volume, hidden: Sequence[Hidden]
    ) -> None:
        """number: of the task"""
        values, self.folder = session.prepared.values, session.prepared.output.store.folder / "volumes"
        self.number, self.task, self.volume, self.restorer, self.hidden = number, task, volume, restorer, hidden
        self.modes, self.samples, self.keeps = [*session.prepared.presets], values["samples"], values["keep_samples"]
        self.leads, self.costs = session.replica.leads, dict[str, list[Cost]]()
        axes = volume.axes[: self.samples]
        axes = axes if volume.restores(axes) else volume.axes
        self.verdict = HiddenRegionReport(dict.fromkeys(axes, 1 / len(axes)))

    def groups(self, axis: str, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Slices along an axis, those that share the model's calls together."""
        return evenly(indices, self.restorer.together(reoriented_shape(self.task.stack.shape, axis)[1:]))

    @property
    def read_along(self) -> list[str]:
        """The axes along which slices are read: of a test also y, in which lines along z are seen."""
        wanted = {*self.volume.axes} | ({"y", "z"} if self.hidden else set())
        return [axis for axis in AXES if axis in wanted]

    def turned(self, axis: str) -> tuple[Reoriented, Reoriented]:
        stack, name = self.task.stack, self.folder / f"{self.number}-{axis}"
        voxels = Reoriented(name.with_suffix(".voxels"), axis, stack.shape, stack.dtype)
        return voxels, Reoriented(name.with_suffix(".mask"), axis, stack.shape, np.dtype(bool))

    def voxels(self, axis: str, index: int) -> np.ndarray:
        return self.task.stack.read(index) if axis == "z" else self.turned(axis)[0].read(index)

    def mask(self, axis: str, index: int) -> np.ndarray:
        return self.volume.read_mask(index) if axis == "z" else self.turned(axis)[1].read(index)

    def prepared(self, axis: str, indices: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Slices along an axis as they are given to the model, and their masks."""
        masks = [self.mask(axis, index) for index in indices]
        pairs = zip(indices, masks, strict=True)
        return [prepare_slice(self.voxels(axis, index), mask, self.task.scale) for index, mask in pairs], masks

    def draw(
        self, axis: str, sample: int, prepared: Sequence[np.ndarray], masks: Sequence[np.ndarray], mode: str
    ) -> list[ItemSamples]:
        """A sample of some slices, each axis with noise of its own; along z that of a job of this axis alone."""
        numbers = [sample + self.samples * AXES.index(axis)] * len(prepared)
        return self.restorer.run(prepared, masks, mode, self.task.scale.limits01, numbers)

    def file(self, name: str, axis: str, sample: int = 0) -> Restored:
        """Return the file of a sample in a preset, of a method without a model, or of a line's ends, by its name."""
        return Restored(self.folder / f"{self.number}-{name}-{axis}-{sample}.f32", axis, self.volume.statistics)

    def window(self, hidden: Hidden | None, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Of a tested volume, normalised, and of its mask with what is hidden: [Z, Y, X], from copies along y."""
        image_ZYX, mask_ZYX = (copy.window(window) for copy in self.turned("y"))
        if hidden is not None:
            indices = range(window[0].start, window[0].stop)
            mask_ZYX |= np.stack([hidden.mask("z", n, self.volume.read_mask)[window[1:]] for n in indices])
        return self.task.scale.known01(image_ZYX, mask_ZYX), mask_ZYX

    def intervals(self, index: int) -> Intervals | None:
        """Those of a slice along z, of a volume that was tested."""
        if not self.hidden:
            return None
        deep_YX = depth(self.volume.read_mask, index, self.volume.statistics.shape[0])
        return (self.verdict.intervals or Intervals.unknown()).at(deep_YX)

    def fused(self, seen: SliceReview, mode: str) -> ItemSamples:
        """A slice along z: all its samples, with the PSNR of each, and themselves where they are kept."""
        mask_YX, image_YX = seen.mask_YX, np.zeros(seen.mask_YX.shape)
        values_SP, weights_SP, drawn_SP = self._samples(seen.index, mode, mask_YX)
        mean_P, spread_P = fuse(values_SP, weights_SP, drawn_SP)
        drawn_S = (drawn_SP > 0).any(axis=1)
        samples, squares_YX = int(drawn_S.sum()), np.zeros(mask_YX.shape)
        image_YX[mask_YX], squares_YX[mask_YX] = mean_P, np.square(spread_P) * (samples - 1)
        cost = Cost.summed(self.costs.get(mode) or [Cost()]).shares(
            int((self.volume.statistics.counts("z") > 0).sum())
        )[0]
        psnr_db, kept = [], []
        for values_P, weights_P in zip(values_SP[drawn_S], drawn_SP[drawn_S], strict=True):
            sample_YX = image_YX.copy()
            sample_YX[mask_YX] = np.where(weights_P > 0, values_P, mean_P)
            one = ItemSamples(Moments.of(sample_YX), Cost())
            psnr_db.append(seen.psnr_db(one))
            kept += [seen.native(one)] if self.keeps else []
        return ItemSamples(Moments(samples, image_YX, squares_YX), cost, tuple(psnr_db), tuple(kept))

    def _samples(self, index: int, mode: str, mask_YX: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The masked voxels of a slice along z in all that is taken [S, P]; weights in mean and deviation."""
        verdict, statistics, count = self.verdict, self.volume.statistics, int(mask_YX.sum())

        def without_model(name: str) -> np.ndarray:
            file = self.file(name, made_along(name.removesuffix(APART)))
            return file.read_along_z(index, mask_YX).astype(np.float64)

        values, shares, drawn = [], [], []
        places = dict(zip(AXES, (np.full(count, index), *mask_YX.nonzero()), strict=True))
        counts, trace = samples_along(self.samples, verdict.axes), TRACE if verdict.mixture is not None else 0.0
        if verdict.mixture is None:
            weights = {axis: np.full(count, weight) for axis, weight in verdict.axes.items()}
        else:
            ends = {name: without_model(name + APART) for name in verdict.others if name in LINES}
            weights = dict(zip(verdict.mixture.names, verdict.mixture.weights(ends, count), strict=True))
        for axis, drawn_along in counts.items():
            seen_P = ~statistics.full(axis)[places[axis]]
            for sample in range(drawn_along):
                values.append(self.file(mode, axis, sample).read_along_z(index, mask_YX))
                shares.append(np.where(seen_P, (weights.get(axis, 0.0) + trace) / drawn_along, 0.0))
                drawn.append(seen_P / drawn_along if verdict.mixture is not None else shares[-1])
        for name in verdict.others:
            values.append(without_model(name))
            seen_P = np.isfinite(values[-1])
            if name not in SOLVERS:  # of a slice that is masked wholly nothing was written
                seen_P &= ~statistics.full(made_along(name))[places[made_along(name)]]
            shares.append(np.where(seen_P, weights[name], 0.0))
            drawn.append(np.zeros(count))
        return np.stack(values), np.stack(shares), np.stack(drawn)

    def lines(self) -> list[str]:
        """What the user is told of the verdict."""
        where = f"{self.task.stack.name}, mask {self.task.mask.name}"
        return [self.verdict.line(where)] * self.volume.tested + [self.verdict.weights_line(where)]


@dataclass(frozen=True)
class Work(ABC):
    """Slices along an axis that one replica makes together. counted: whether the bar counts them."""

    making: Making
    axis: str
    indices: tuple[int, ...]
    counted: ClassVar[bool] = True

    @abstractmethod
    def run(self, queue: Queue) -> Made:
        """Make it, on all ranks of a replica. Return what is saved of it, on the one that leads."""


class Restoring(Work):
    """Restores masked voxels, which go to `Restored` files."""

    @abstractmethod
    def results(self) -> dict[str, Restored]:
        """By the names of presets, or of what a method without a model makes."""

    @abstractmethod
    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        """Whether results are made of it."""

    def sums(self) -> list[int]:
        """Return checksums of what was made, as it is on the disk."""
        return [zlib.crc32(one.read(n).tobytes()) for one in self.results().values() for n in self.indices]


@dataclass(frozen=True)
class ByModel(Restoring):
    """A sample of each slice, in every preset."""

    sample: int

    def results(self) -> dict[str, Restored]:
        return {mode: self.making.file(mode, self.axis, self.sample) for mode in self.making.modes}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.sample < samples_along(self.making.samples, verdict.axes).get(self.axis, 0)

    def run(self, queue: Queue) -> Made:
        """As `Work.run`; in rows, of each preset the volume, its name and the cost."""
        making, (prepared, masks) = self.making, self.making.prepared(self.axis, self.indices)
        queue.bar.begin(len(masks), making.restorer.tile_steps(masks) * len(making.modes))
        made = {mode: making.draw(self.axis, self.sample, prepared, masks, mode) for mode in making.modes}
        if not making.leads:
            return ()
        for mode, file in self.results().items():
            for index, one, mask in zip(self.indices, made[mode], masks, strict=True):
                file.write(index, one.restored01_YX[mask])
        costs = {mode: Cost.summed([one.cost for one in drawn]) for mode, drawn in made.items()}
        rows = [[making.number, mode, vars(cost)] for mode, cost in costs.items()]
        return (ROWS, rows), ("sums", np.array(self.sums()))


@dataclass(frozen=True)
class Smoothed(Restoring):
    """A method without a model that works slice by slice."""

    method: str
    counted = False

    def results(self) -> dict[str, Restored]:
        names = (self.method, self.method + APART) if self.method in LINES else (self.method,)
        return {name: self.making.file(name, self.axis) for name in names}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.method in verdict.others

    def run(self, queue: Queue) -> Made:
        if not self.making.leads:
            return ()
        self.write()
        return (("sums", np.array(self.sums())),)

    def write(self) -> None:
        results, pairs = self.results(), self.making.prepared(self.axis, self.indices)
        for index, prepared, mask in zip(self.indices, *pairs, strict=True):
            for name, image in in_slice(self.method, prepared, mask).items():
                results[name].write(index, image[mask])


class Solved(Smoothed):
    """A method in three dimensions, in slices along z, some rows of all of them at once."""

    def write(self) -> None:
        making, (file,) = self.making, self.results().values()
        mask_NYX = np.stack([making.mask("z", index) for index in self.indices])
        shape, read = making.volume.statistics.shape, partial(making.window, None)
        made = [[np.zeros(0)] for _ in self.indices]
        for top in range(0, shape[1], CELL):
            numbers, rows, columns = mask_NYX[:, top : top + CELL].nonzero()
            points_P3 = np.stack([np.array(self.indices)[numbers], rows + top, columns], 1)
            found_P = in_cells(SOLVERS[self.method], read, shape, points_P3)
            ends = np.searchsorted(numbers, np.arange(1, len(made)))
            for of_slice, values_P in zip(made, np.split(found_P, ends), strict=True):
                of_slice.append(values_P)
        for index, of_slice in zip(self.indices, made, strict=True):
            file.write(index, np.concatenate(of_slice))


@dataclass(frozen=True)
class Trial(Work):
    """What the test on hidden regions restores in a round, at the voxels that are judged: of the methods in three
    dimensions, which have no axis."""

    round: int
    sample: int = 0

    @property
    def hidden(self) -> Hidden:
        return self.making.hidden[self.round]

    def run(self, queue: Queue) -> Made:
        """As `Work.run`. Arrays: by the names of methods [z, y, x] each, NaN where nothing is judged."""
        volume, hidden, found = self.making.volume, self.hidden, dict[str, Any]()
        judged = judged_grid(hidden, volume)
        points_P3, read = np.stack([at[judged] for at in hidden.grid], 1), partial(self.making.window, hidden)
        for name, solver in SOLVERS.items() if self.making.leads else ():
            found[name] = np.full(judged.shape, np.nan)
            found[name][judged] = in_cells(solver, read, volume.statistics.shape, points_P3)
        return found.items()


class SliceTrial(Trial):
    """Of the model, a sample of each slice, and with the first one of the methods that work slice by slice."""

    def run(self, queue: Queue) -> Made:
        making, hidden, reads = self.making, self.hidden, partial(self.making.mask, self.axis)
        original = [making.voxels(self.axis, index) for index in self.indices]
        masks = [reads(index) | hidden.mask(self.axis, index, reads) for index in self.indices]
        of_model, found = [mask for mask in masks if not mask.all()], dict[str, Any]()
        pairs = zip(original, masks, strict=True)
        prepared = [prepare_slice(image, mask, making.task.scale) for image, mask in pairs if not mask.all()]
        if prepared and self.axis in making.volume.axes:
            queue.bar.begin(len(prepared), making.restorer.tile_steps(of_model))
            drawn = making.draw(self.axis, self.sample, prepared, of_model, making.modes[0])
            found[OWN] = [one.restored01_YX for one in drawn]
        if not making.leads:
            return ()
        if self.sample == 0:
            for method in [one for one in (*LINES, BIHARMONIC) if made_along(one) == self.axis]:
                for pair in zip(prepared, of_model, strict=True):
                    for name, image in in_slice(method, *pair).items():
                        found.setdefault(name, []).append(image)
        tested = [hidden.tested[axis] for axis in AXES if axis != self.axis]
        grid, shape, made = np.ix_(*tested), [*map(len, tested)], {}
        for name, images in found.items():
            left = iter(images)
            made[name] = np.stack([np.full(shape, np.nan) if mask.all() else next(left)[grid] for mask in masks])
        return made.items()


def works_of(making: Making) -> list[Work]:
    """All that may have to be made of a volume, in an order that depends on the job's settings and masks alone."""
    volume, works, groups = making.volume, list[Work](), making.groups
    for place, hidden in enumerate(making.hidden):
        for axis in making.read_along:
            tested = groups(axis, hidden.tested[axis])
            samples = volume.sampled(making.samples) if axis in volume.axes else 1
            works += [SliceTrial(making, axis, group, place, n) for n in range(samples) for group in tested]
        works.append(Trial(making, "", (), place))
    for axis in volume.axes:
        restorable = groups(axis, volume.statistics.restorable(axis))
        works += [ByModel(making, axis, group, n) for n in range(making.samples) for group in restorable]
    for method in MEMBERS if making.hidden else ():
        axis = made_along(method)
        if method in SOLVERS:  # also where a slice along z is masked wholly
            masked = (volume.statistics.counts("z") > 0).nonzero()[0].tolist()
            cells = [tuple(group) for _, group in groupby(masked, lambda index: index // CELL)]
            works += [Solved(making, axis, group, method) for group in cells]
        else:
            restorable = groups(axis, volume.statistics.restorable(axis))
            works += [Smoothed(making, axis, group, method) for group in restorable]
    return works

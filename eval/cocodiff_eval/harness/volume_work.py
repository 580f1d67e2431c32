"""How a volume is made: each kind of work that slices along its axes are, the files that these are kept in while a job
runs, and what is fused of them along z."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import ClassVar

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
from cocodiff_eval.harness.volume import OWN, HiddenRegionReport, Volume
from cocodiff_eval.quality.fusing import Intervals, Moments, fuse, samples_along
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.restore.baseline import METHODS, SMALL, Window, in_cells, side_of_cells

TRACE = 1e-12  # of weight, so that a voxel without any other is restored, and no deviation is seen of it


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

    def file(self, name: str, axis: str = "z", sample: int = 0) -> Restored:
        """Return the file of a sample in a preset, or of a method without a model, by its name."""
        return Restored(self.folder / f"{self.number}-{name}-{axis}-{sample}.f32", axis, self.volume.statistics)

    def reader(self, hidden: Hidden | None = None) -> Callable[[Window], tuple[np.ndarray, np.ndarray]]:
        """Return what reads a part of a tested volume, normalised, and of its mask with what is hidden: [Z, Y, X] each.

        They come from copies along y; those of a small volume are read once.
        """

        def read(window: Window) -> tuple[np.ndarray, np.ndarray]:
            image_ZYX, mask_ZYX = (copy.window(window) for copy in self.turned("y"))
            if hidden is not None:
                indices = range(window[0].start, window[0].stop)
                mask_ZYX |= np.stack([hidden.mask("z", n, self.volume.read_mask)[window[1:]] for n in indices])
            return self.task.scale.known01(image_ZYX, mask_ZYX), mask_ZYX

        z, y, x = self.volume.statistics.shape
        if z * y * x > SMALL:
            return read
        image_ZYX, mask_ZYX = read((slice(0, z), slice(0, y), slice(0, x)))
        return lambda window: (image_ZYX[window], mask_ZYX[window])

    @cached_property
    def judged(self) -> list[np.ndarray]:
        """The voxels that each round of the test is judged by, [P, 3]."""
        return [*map(self.volume.judged, self.hidden)]

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
        pairs = [*zip(values_SP[drawn_S], drawn_SP[drawn_S], strict=True)]
        if not self.verdict.axes:  # nothing was drawn: each sample is what is written
            pairs = [(mean_P, np.ones(mean_P.shape))] * self.samples
        psnr_db, kept = [], []
        for values_P, weights_P in pairs:
            sample_YX = image_YX.copy()
            sample_YX[mask_YX] = np.where(weights_P > 0, values_P, mean_P)
            one = ItemSamples(Moments.of(sample_YX), Cost())
            psnr_db.append(seen.psnr_db(one))
            kept += [seen.native(one)] if self.keeps else []
        return ItemSamples(Moments(samples, image_YX, squares_YX), cost, tuple(psnr_db), tuple(kept))

    def _samples(self, index: int, mode: str, mask_YX: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the masked voxels of a slice along z in all that is taken [S, P], their weights in the mean, and in
        the deviation: of samples, or of methods without a model where none is drawn."""
        verdict, statistics, count = self.verdict, self.volume.statistics, int(mask_YX.sum())
        values, shares, drawn = [], [], []
        places = dict(zip(AXES, (np.full(count, index), *mask_YX.nonzero()), strict=True))
        tested = verdict.psnr_db is not None
        for axis, samples in samples_along(self.samples, verdict.axes).items():
            seen_P = ~statistics.full(axis)[places[axis]]
            for sample in range(samples):
                values.append(self.file(mode, axis, sample).read_along_z(index, mask_YX))
                shares.append(np.where(seen_P, (verdict.weights[axis] + TRACE * tested) / samples, 0.0))
                drawn.append(seen_P / samples if tested else shares[-1])
        for name in verdict.others:
            values.append(self.file(name).read(index).astype(np.float64))
            trace = 0.0 if verdict.axes or 0 in METHODS[name].reach else TRACE
            shares.append(np.where(np.isfinite(values[-1]), verdict.weights[name] + trace, 0.0))
            drawn.append(np.zeros(count) if verdict.axes else shares[-1])
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
class Solved(Restoring):
    """A method without a model, in slices along z, some rows of all of them at once."""

    method: str
    counted = False

    def results(self) -> dict[str, Restored]:
        return {self.method: self.making.file(self.method)}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.method in verdict.others

    def run(self, queue: Queue) -> Made:
        if not self.making.leads:
            return ()
        self.write()
        return (("sums", np.array(self.sums())),)

    def write(self) -> None:
        making, (file,) = self.making, self.results().values()
        mask_NYX = np.stack([making.mask("z", index) for index in self.indices])
        shape, read = making.volume.statistics.shape, making.reader()
        made, side = [[np.zeros(0)] for _ in self.indices], side_of_cells(shape)
        for top in range(0, shape[1], side):
            numbers, rows, columns = mask_NYX[:, top : top + side].nonzero()
            points_P3 = np.stack([np.array(self.indices)[numbers], rows + top, columns], 1)
            found_P = in_cells(METHODS[self.method], read, shape, points_P3)
            ends = np.searchsorted(numbers, np.arange(1, len(made)))
            for of_slice, values_P in zip(made, np.split(found_P, ends), strict=True):
                of_slice.append(values_P)
        for index, of_slice in zip(self.indices, made, strict=True):
            file.write(index, np.concatenate(of_slice))


@dataclass(frozen=True)
class Trial(Work):
    """What the test on hidden regions restores in a round, at the voxels that are judged: of the methods without a
    model, which have no axis."""

    round: int
    sample: int = 0

    def run(self, queue: Queue) -> Made:
        """As `Work.run`. Arrays: what methods made of the voxels [P], NaN where nothing, by their names."""
        if not self.making.leads:
            return ()
        points_P3, shape = self.making.judged[self.round], self.making.volume.statistics.shape
        read = self.making.reader(self.making.hidden[self.round])
        return ((name, in_cells(method, read, shape, points_P3)) for name, method in METHODS.items())


class SliceTrial(Trial):
    """Of the model: a sample of each slice, at the voxels that are judged in these."""

    def run(self, queue: Queue) -> Made:
        making, hidden, reads = self.making, self.making.hidden[self.round], partial(self.making.mask, self.axis)
        masks = {index: reads(index) | hidden.mask(self.axis, index, reads) for index in self.indices}
        masks = {index: mask for index, mask in masks.items() if not mask.all()}
        first, drawn = AXES.index(self.axis), list[ItemSamples]()
        points_P3 = making.judged[self.round]
        points_P3 = points_P3[np.isin(points_P3[:, first], self.indices)]
        if masks:
            queue.bar.begin(len(masks), making.restorer.tile_steps([*masks.values()]))
            prepared = [
                prepare_slice(making.voxels(self.axis, n), mask, making.task.scale) for n, mask in masks.items()
            ]
            drawn = making.draw(self.axis, self.sample, prepared, [*masks.values()], making.modes[0])
        if not making.leads:
            return ()
        found_P = np.full(len(points_P3), np.nan)
        for index, one in zip(masks, drawn, strict=True):
            here_P = points_P3[:, first] == index
            found_P[here_P] = one.restored01_YX[tuple(np.delete(points_P3[here_P], first, axis=1).T)]
        cost = Cost.summed([one.cost for one in drawn]) if drawn else Cost()
        # A job in any other preset would take as long for its test.
        spent = {name: getattr(cost, name) for name in ("seconds", "rank_seconds", "replica_seconds")}
        return (ROWS, [[making.number, mode, spent] for mode in making.modes]), (OWN, found_P)


def works_of(making: Making) -> list[Work]:
    """Return all that may have to be made of a volume, in an order that depends on the job's settings and masks alone.

    Of the test first what methods without a model make, then each sample of the model.
    """
    volume, works, groups = making.volume, list[Work](), making.groups
    rounds = [*enumerate(making.hidden)]
    works += [Trial(making, "", (), place) for place, _ in rounds]
    for sample in range(volume.sampled(making.samples)):
        for place, hidden in rounds:
            tested = [(axis, group) for axis in volume.axes for group in groups(axis, hidden.tested.get(axis, ()))]
            works += [SliceTrial(making, axis, group, place, sample) for axis, group in tested]
    for axis in volume.axes:
        restorable = groups(axis, volume.statistics.restorable(axis))
        works += [ByModel(making, axis, group, n) for n in range(making.samples) for group in restorable]
    masked, side = (volume.statistics.counts("z") > 0).nonzero()[0].tolist(), side_of_cells(volume.statistics.shape)
    cells = [tuple(group) for _, group in groupby(masked, lambda index: index // side)]
    works += [Solved(making, "z", group, name) for name in (METHODS if making.hidden else ()) for group in cells]
    return works

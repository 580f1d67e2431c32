"""The restoration of one volume: its units of work, the files that they fill, and the fusion of these to slices.

A unit is made by one replica. Units of the test restore hidden voxels. Units of the result restore masked voxels, which
go to a file for each preset, axis and sample. Slices along z are fused from these files.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import ClassVar

import numpy as np

from cocodiff.jobs.store import ROWS, Made
from cocodiff_eval.data.intensity import prepare_slice
from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES, Reoriented, RestoredFile, reoriented_shape
from cocodiff_eval.harness.items import Cost, ItemSamples, evenly
from cocodiff_eval.harness.judging import SliceReview
from cocodiff_eval.harness.replicas import Queue
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import OWN, HiddenRegionReport, HiddenRound, Volume
from cocodiff_eval.quality.fusing import Intervals, Moments, fuse, samples_along
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.restore.baseline import METHODS, SMALL, UNTESTED, Window, in_cells, side_of_cells

TRACE = 1e-12  # weight that is added so that a voxel without other weights gets a value; too small to change others


class VolumeRestoration:
    """The restoration of one volume, with the files that hold its parts until they are fused to slices.

    modes    Names of the presets.
    samples  Number of samples of each masked voxel, along all axes together.
    keeps    True if each sample is written as a result of its own.
    hidden   Hidden regions of each round of the test; empty without a test.
    leads    True on the rank of a replica that judges and writes.
    verdict  Weights of the result, and the test's findings. Until the test is judged, all axes have equal weights;
             if nothing can be hidden, methods without a model have, as nothing speaks for the model.
    costs    By preset, the cost of each unit of work of the result; filled when all are made.
    folder   Folder of the volume's files.
    """

    def __init__(
        self, session: Session, restorer: Restorer, number: int, task: Task, volume: Volume, hidden: Sequence[Hidden]
    ) -> None:
        """Take the restoration of a task's volume. Nothing is read or written.

        Args:
            session: the job on its ranks.
            restorer: restores slices with the model.
            number: the task's index.
            task: the stack and its mask.
            volume: the plan for the volume.
            hidden: the hidden regions of each round of the test; empty without a test.
        """
        values, self.folder = session.prepared.values, session.prepared.output.store.folder / "volumes"
        self.number, self.task, self.volume, self.restorer, self.hidden = number, task, volume, restorer, hidden
        self.modes, self.samples, self.keeps = [*session.prepared.presets], values["samples"], values["keep_samples"]
        self.leads, self.costs = session.replica.leads, dict[str, list[Cost]]()
        axes = volume.axes[: self.samples]
        axes = axes if volume.restores(axes) else volume.axes
        untested = [name for name in UNTESTED if name in volume.methods]
        members = untested if volume.tested and not hidden else axes
        self.verdict = HiddenRegionReport(dict.fromkeys(members, 1 / len(members)))

    def groups(self, axis: str, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Divide slices along an axis into groups that share calls of the model. Return the indices of each group.

        Args:
            axis: "z", "y" or "x".
            indices: the slices.
        """
        return evenly(indices, self.restorer.together(reoriented_shape(self.task.stack.shape, axis)[1:]))

    def turned(self, axis: str) -> tuple[Reoriented, Reoriented]:
        """Return two files with copies of the volume's voxels and of its mask, whose slices lie along another axis.

        Args:
            axis: "y" or "x", the axis of the slices.
        """
        stack, name = self.task.stack, self.folder / f"{self.number}-{axis}"
        voxels = Reoriented(name.with_suffix(".voxels"), axis, stack.shape, stack.dtype)
        return voxels, Reoriented(name.with_suffix(".mask"), axis, stack.shape, np.dtype(bool))

    def voxels(self, axis: str, index: int) -> np.ndarray:
        """Return a slice of the volume along an axis, in the input's dtype.

        Args:
            axis: "z", "y" or "x".
            index: the slice.
        """
        return self.task.stack.read(index) if axis == "z" else self.turned(axis)[0].read(index)

    def mask(self, axis: str, index: int) -> np.ndarray:
        """Return the mask of a slice along an axis, boolean.

        Args:
            axis: "z", "y" or "x".
            index: the slice.
        """
        return self.volume.read_mask(index) if axis == "z" else self.turned(axis)[1].read(index)

    def draw(
        self, axis: str, sample: int, masks: Mapping[int, np.ndarray], modes: Sequence[str]
    ) -> dict[str, list[ItemSamples]]:
        """Restore one sample of some slices along an axis. Return by preset the sample and cost of each slice.

        All ranks of a replica call it. Each axis has noise of its own. Along z it is the noise of a job that restores
        along z alone.

        Args:
            axis: "z", "y" or "x".
            sample: number of the sample.
            masks: by the index of each slice, True where to restore.
            modes: names of the presets.
        """
        prepared = [prepare_slice(self.voxels(axis, index), mask, self.task.scale) for index, mask in masks.items()]
        of_slices, limits = [*masks.values()], self.task.scale.limits01
        numbers = [sample + self.samples * AXES.index(axis)] * len(masks)
        return {mode: self.restorer.run(prepared, of_slices, mode, limits, numbers) for mode in modes}

    def file(self, name: str, axis: str = "z", sample: int = 0) -> RestoredFile:
        """Return the file that holds the volume's masked voxels as one preset, or one method without a model, restored.

        Args:
            name: a preset, or a method without a model, which has no axis and no samples.
            axis: axis of the preset's slices.
            sample: number of the preset's sample.
        """
        return RestoredFile(self.folder / f"{self.number}-{name}-{axis}-{sample}.f32", axis, self.volume.statistics)

    def reader(self, hidden: Hidden | None = None) -> Callable[[Window], tuple[np.ndarray, np.ndarray]]:
        """Return a function that reads a window (a box) of a tested volume, for methods without a model.

        That function returns the normalised voxels and the mask, [Z, Y, X] each. It reads the copies along y. A small
        volume is read only once, and its windows are views.

        Args:
            hidden: regions that are added to the mask, in a round of the test; None to restore the mask alone.
        """

        voxels, mask = self.turned("y")

        def read(window: Window) -> tuple[np.ndarray, np.ndarray]:
            """Read a window from the copies. Return its normalised voxels and its mask."""
            mask_ZYX = mask.window(window)
            if hidden is not None:
                mask_ZYX |= hidden.mask_in(window, mask.window)
            return self.task.scale.known01(voxels.window(window), mask_ZYX), mask_ZYX

        z, y, x = self.volume.statistics.shape
        if z * y * x > SMALL:
            return read
        image_ZYX, mask_ZYX = read((slice(0, z), slice(0, y), slice(0, x)))
        return lambda window: (image_ZYX[window], mask_ZYX[window])

    @cached_property
    def judged(self) -> list[np.ndarray]:
        """The hidden voxels by which each round of the volume's test is judged: for each their indices, int [P, 3]."""
        return [*map(self.volume.judged, self.hidden)]

    @cached_property
    def rounds(self) -> list[HiddenRound]:
        """The rounds of the test with their true values, to which results of units of work are added."""
        pairs = zip(self.hidden, self.judged, strict=True)
        return [HiddenRound(*pair, self.volume, self.task, self.samples) for pair in pairs]

    def intervals(self, index: int) -> Intervals | None:
        """Return the intervals around the restored voxels of a slice along z, by which their error is known.

        They are None without a test, and without ends (`Intervals.unknown`) if the test could not calibrate them.

        Args:
            index: the slice.
        """
        if not self.hidden:
            return None
        deep_YX = depth(self.volume.read_mask, index, self.volume.statistics.shape[0])
        return (self.verdict.intervals or Intervals.unknown()).at(deep_YX)

    def fused(self, seen: SliceReview, mode: str) -> ItemSamples:
        """Fuse a slice along z in a preset from the files of its parts.

        Return the weighted mean, the spread of the samples, the PSNR of each sample, and each sample if it is kept. The
        cost is an equal share of the volume's.

        Args:
            seen: the slice.
            mode: name of the preset.
        """
        mask_YX, image_YX = seen.mask_YX, np.zeros(seen.mask_YX.shape)
        values_SP, weights_SP, drawn_SP = self._samples(seen.index, mode, mask_YX)
        mean_P, spread_P = fuse(values_SP, weights_SP, drawn_SP)
        drawn_S = (drawn_SP > 0).any(axis=1)
        samples, squares_YX = int(drawn_S.sum()), np.zeros(mask_YX.shape)
        image_YX[mask_YX], squares_YX[mask_YX] = mean_P, np.square(spread_P) * (samples - 1)
        slices = int(np.count_nonzero(self.volume.statistics.counts("z")))
        cost = Cost.summed(self.costs.get(mode) or [Cost()]).shares(slices)[0]
        pairs = [*zip(values_SP[drawn_S], drawn_SP[drawn_S], strict=True)]
        if not self.verdict.axes:  # without the model nothing is random: all samples equal the mean
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
        """Return the S restorations of a slice along z, their weights in its mean, and their weights in its spread.

        All are [S, P] for P masked voxels. They are the model's samples along each axis, and those of methods without a
        model. The spread is that of the samples; without samples it is that of the methods.

        Args:
            index: the slice.
            mode: name of the preset.
            mask_YX: the slice's mask.
        """
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
            trace = TRACE if METHODS[name].fills and not verdict.axes else 0.0
            shares.append(np.where(np.isfinite(values[-1]), verdict.weights[name] + trace, 0.0))
            drawn.append(np.zeros(count) if verdict.axes else shares[-1])
        return np.stack(values), np.stack(shares), np.stack(drawn)

    def lines(self) -> list[str]:
        """Return the lines that tell the user the result of the test, if there was one, and the weights of the mean."""
        where = f"{self.task.stack.name}, mask {self.task.mask.name}"
        return [self.verdict.line(where)] * self.volume.tested + [self.verdict.weights_line(where)]


@dataclass(frozen=True)
class Work(ABC):
    """A unit of work in the restoration of a volume, such as some slices along one axis. One replica makes it."""

    making: VolumeRestoration  # the volume's restoration
    axis: str  # axis along which its slices lie; empty for a unit without slices
    indices: tuple[int, ...]  # indices of its slices along that axis
    counted: ClassVar[bool] = True  # True if the progress bar counts its slices

    @abstractmethod
    def run(self, queue: Queue) -> Made:
        """Make the unit of work. All ranks of a replica call it.

        Return what the store keeps of the unit, as (name, value); on ranks that do not lead their replica, nothing.

        Args:
            queue: the job's queue, whose progress bar is advanced.
        """


class Restoring(Work):
    """A unit of work that restores masked voxels for a volume's result.

    The voxels go to `RestoredFile` files, and the store keeps their checksums.
    """

    @abstractmethod
    def results(self) -> dict[str, RestoredFile]:
        """Return the files that the unit of work writes restored voxels to, by the name of the preset or method."""

    @abstractmethod
    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        """Return True if the unit of work is needed for the result: the mean gives its axis or method a weight.

        Args:
            verdict: the verdict of the test on hidden regions, with the weights of the mean.
        """

    def sums(self) -> list[int]:
        """Return checksums (CRC-32) of what the unit of work wrote: of each slice in each of its files on the disk.

        A resumed job compares them with the store's.
        """
        return [zlib.crc32(one.read(n).tobytes()) for one in self.results().values() for n in self.indices]


@dataclass(frozen=True)
class ModelUnit(Restoring):
    """A unit of work by the model for a volume's result: one sample of each of its slices, in every preset."""

    sample: int  # number of the sample along its axis

    def results(self) -> dict[str, RestoredFile]:
        return {mode: self.making.file(mode, self.axis, self.sample) for mode in self.making.modes}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.sample < samples_along(self.making.samples, verdict.axes).get(self.axis, 0)

    def run(self, queue: Queue) -> Made:
        """Restore the unit's slices and write their masked voxels to files. All ranks of a replica call it.

        Return what the store keeps: a row for each preset, with the volume's number, the preset and the cost, and the
        checksums. On ranks that do not lead their replica it is empty.

        Args:
            queue: the job's queue, whose progress bar is advanced.
        """
        making, masks = self.making, {index: self.making.mask(self.axis, index) for index in self.indices}
        queue.bar.begin(len(masks), making.restorer.tile_steps([*masks.values()]) * len(making.modes))
        made = making.draw(self.axis, self.sample, masks, making.modes)
        if not making.leads:
            return ()
        for mode, file in self.results().items():
            for (index, mask), one in zip(masks.items(), made[mode], strict=True):
                file.write(index, one.moments.mean_YX[mask])
        costs = {mode: Cost.summed([one.cost for one in drawn]) for mode, drawn in made.items()}
        rows = [[making.number, mode, vars(cost)] for mode, cost in costs.items()]
        return (ROWS, rows), ("sums", np.array(self.sums()))


@dataclass(frozen=True)
class MethodUnit(Restoring):
    """A unit of work for a volume's result by a method without a model, in slices along z."""

    method: str  # name of the method, a key of METHODS
    counted = False

    def results(self) -> dict[str, RestoredFile]:
        return {self.method: self.making.file(self.method)}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.method in verdict.others

    def run(self, queue: Queue) -> Made:
        """Restore the masked voxels of the unit's slices and write them to the method's file, on a replica's leader.

        Rows are taken in bands as high as the cells that a method solves at once, so that no cell is solved twice.

        Args:
            queue: the job's queue, not used.
        """
        making, (file,) = self.making, self.results().values()
        if not making.leads:
            return ()
        mask_NYX = np.stack([making.mask("z", index) for index in self.indices])
        shape, read, made = making.volume.statistics.shape, making.reader(), list[tuple[np.ndarray, np.ndarray]]()
        for top in range(0, shape[1], side_of_cells(shape)):
            index_P, row_P, column_P = mask_NYX[:, top : top + side_of_cells(shape)].nonzero()
            index_P = np.array(self.indices)[index_P]
            points_P3 = np.stack([index_P, row_P + top, column_P], 1)
            made.append((index_P, in_cells(METHODS[self.method], read, shape, points_P3)))
        index_P, restored_P = map(np.concatenate, zip(*made, strict=True))
        for index in self.indices:
            file.write(index, restored_P[index_P == index])
        return (("sums", np.array(self.sums())),)


@dataclass(frozen=True)
class HiddenTrial(Work):
    """A unit of work of the test on hidden regions: all methods without a model restore them, in one round of the test.

    It has no axis and no slices. The store keeps the restored values of the voxels that the round is judged by.
    """

    round: int  # number of the round
    sample: int = 0  # number of the model's sample; 0 for methods without a model

    def run(self, queue: Queue) -> Made:
        """Restore the round's hidden voxels with each method without a model. All ranks of a replica call it.

        Return an array under each method's name: the judged voxels, float64 [P]; NaN where it restores nothing. On
        ranks that do not lead their replica there is none.

        Args:
            queue: the job's queue, not used.
        """
        if not self.making.leads:
            return ()
        points_P3, shape = self.making.judged[self.round], self.making.volume.statistics.shape
        read = self.making.reader(self.making.hidden[self.round])
        return ((name, in_cells(METHODS[name], read, shape, points_P3)) for name in self.making.volume.methods)


class SliceTrial(HiddenTrial):
    """A unit of work of the test on hidden regions: the model restores one sample of some tested slices of a round."""

    def run(self, queue: Queue) -> Made:
        """Restore the tested slices in the first preset. All ranks of a replica call it.

        Return what the store keeps. It is an array OWN: the judged voxels in these slices, float64 [P]; NaN where
        nothing is restored. It is also a row for each preset, with the volume's number, the preset and the time. Slices
        that are hidden or masked wholly are left out. On ranks that do not lead their replica the result is empty.

        Args:
            queue: the job's queue, whose progress bar is advanced.
        """
        making, hidden, reads = self.making, self.making.hidden[self.round], partial(self.making.mask, self.axis)
        masks = {index: reads(index) | hidden.mask(self.axis, index, reads) for index in self.indices}
        masks = {index: mask for index, mask in masks.items() if not mask.all()}
        first, drawn = AXES.index(self.axis), list[ItemSamples]()
        points_P3 = making.judged[self.round]
        points_P3 = points_P3[np.isin(points_P3[:, first], self.indices)]
        if masks:
            queue.bar.begin(len(masks), making.restorer.tile_steps([*masks.values()]))
            drawn = making.draw(self.axis, self.sample, masks, making.modes[:1])[making.modes[0]]
        if not making.leads:
            return ()
        found_P = np.full(len(points_P3), np.nan)
        for index, one in zip(masks, drawn, strict=True):
            here_P = points_P3[:, first] == index
            found_P[here_P] = one.moments.mean_YX[tuple(np.delete(points_P3[here_P], first, axis=1).T)]
        cost = Cost.summed([one.cost for one in drawn]) if drawn else Cost()
        # Each preset is charged the time of the test, since a job in that preset alone would need it too.
        spent = {name: getattr(cost, name) for name in ("seconds", "rank_seconds", "replica_seconds")}
        return (ROWS, [[making.number, mode, spent] for mode in making.modes]), (OWN, found_P)


def works_of(making: VolumeRestoration) -> list[Work]:
    """Return all units of work that a volume may need. The list is the same whatever verdict the test will have.

    The order is: methods without a model in the test, the model's samples in the test, the model's samples of the
    result, and methods without a model for the result. Units of the result are listed for every axis and method that
    the verdict may choose. Only those that it does choose are run (`Restoring.is_wanted`).
    """
    volume, works, groups = making.volume, list[Work](), making.groups
    rounds = [*enumerate(making.hidden)]
    works += [HiddenTrial(making, "", (), place) for place, _ in rounds]
    for sample in range(volume.sampled(making.samples)):
        for place, hidden in rounds:
            tested = [(axis, group) for axis in volume.axes for group in groups(axis, hidden.tested.get(axis, ()))]
            works += [SliceTrial(making, axis, group, place, sample) for axis, group in tested]
    for axis in volume.axes:
        restorable = groups(axis, volume.statistics.restorable(axis))
        works += [ModelUnit(making, axis, group, n) for n in range(making.samples) for group in restorable]
    masked, side = (volume.statistics.counts("z") > 0).nonzero()[0].tolist(), side_of_cells(volume.statistics.shape)
    cells = [tuple(group) for _, group in groupby(masked, lambda index: index // side)]
    methods = volume.methods if volume.tested else ()
    works += [MethodUnit(making, "z", group, name) for name in methods for group in cells]
    return works

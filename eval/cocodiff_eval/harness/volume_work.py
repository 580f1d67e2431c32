"""How a volume is made: each kind of work that slices along its axes are, the files that these are kept in while a job
runs, and what is fused of them along z."""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cocodiff.config.files import flush
from cocodiff.jobs.replicas import Queue
from cocodiff_eval.data.intensity import prepare_slice
from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES, Reoriented, Restored, reoriented_shape
from cocodiff_eval.harness.items import Cost, ItemSamples, evenly
from cocodiff_eval.harness.judging import SliceReview
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import OWN, HiddenRegionReport, Volume
from cocodiff_eval.quality.fusing import Intervals, Moments, fuse, samples_along
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.restore.baseline import METHODS, SMALL, Window, in_cells, side_of_cells

TRACE = 1e-12  # of weight, so that a voxel without any other is restored, and no deviation is seen of it


@dataclass
class Making:
    """How one volume is made, and the files of what is made.

    number: of its task; modes: names of presets; samples: of each voxel in all; keeps: whether each of them is written;
    hidden: what is hidden in each round of its test, if it is tested; leads: whether this rank leads its replica, and
    writes. verdict: once the test is done, costs: of all samples in each preset, once they are made.
    """

    folder: Path
    volume: Volume
    number: int
    task: Task
    modes: Sequence[str]
    samples: int
    keeps: bool
    restorer: Restorer
    hidden: Sequence[Hidden]
    leads: bool
    verdict: HiddenRegionReport | None = None
    costs: Mapping[str, Cost] = field(default_factory=dict)

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

    def restored(self, mode: str, axis: str, sample: int) -> Restored:
        """The file of a sample."""
        path = self.folder / f"{self.number}-{self.modes.index(mode)}-{axis}-{sample}.f32"
        return Restored(path, axis, self.volume.statistics)

    def without_model(self, method: str) -> Restored:
        """Return the file of a method without a model."""
        path = self.folder / f"{self.number}-{[*METHODS].index(method)}.f32"
        return Restored(path, "z", self.volume.statistics)

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
        if not self.hidden or self.verdict is None:
            return None
        deep_YX = depth(self.volume.read_mask, index, self.volume.statistics.shape[0])
        return (self.verdict.intervals or Intervals.unknown()).at(deep_YX)

    def fused(self, seen: SliceReview, mode: str) -> ItemSamples:
        """A slice along z: all its samples, with the PSNR of each, and themselves where they are kept."""
        mask_YX, image_YX = seen.mask_YX, np.zeros(seen.mask_YX.shape)
        if not mask_YX.any():  # nothing to restore, or nothing to restore it from
            return ItemSamples(Moments.of(image_YX), Cost(), kept=(seen.original_YX,) * self.samples * self.keeps)
        values_SP, weights_SP, drawn_SP = self._samples(seen.index, mode, mask_YX)
        mean_P, spread_P = fuse(values_SP, weights_SP, drawn_SP)
        drawn_S = (drawn_SP > 0).any(axis=1)
        samples, squares_YX = int(drawn_S.sum()), np.zeros(mask_YX.shape)
        image_YX[mask_YX], squares_YX[mask_YX] = mean_P, np.square(spread_P) * (samples - 1)
        cost = self.costs.get(mode, Cost()).shares(int((self.volume.statistics.counts("z") > 0).sum()))[0]
        pairs = [*zip(values_SP[drawn_S], drawn_SP[drawn_S], strict=True)]
        if self.verdict is not None and not self.verdict.axes:  # nothing was drawn: each sample is what is written
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
        assert self.verdict is not None, "it is known which axes are taken"
        verdict, statistics, count = self.verdict, self.volume.statistics, int(mask_YX.sum())
        values, shares, drawn = [], [], []
        places = dict(zip(AXES, (np.full(count, index), *mask_YX.nonzero()), strict=True))
        tested = verdict.psnr_db is not None
        for axis, samples in samples_along(self.samples, verdict.axes).items():
            seen_P = ~statistics.full(axis)[places[axis]]
            for sample in range(samples):
                values.append(self.restored(mode, axis, sample).read_along_z(index, mask_YX))
                shares.append(np.where(seen_P, (verdict.weights[axis] + TRACE * tested) / samples, 0.0))
                drawn.append(seen_P / samples if tested else shares[-1])
        for name in verdict.others:
            values.append(self.without_model(name).read(index).astype(np.float64))
            trace = 0.0 if verdict.axes or 0 in METHODS[name].reach else TRACE
            shares.append(np.where(np.isfinite(values[-1]), verdict.weights[name] + trace, 0.0))
            drawn.append(np.zeros(count) if verdict.axes else shares[-1])
        return np.stack(values), np.stack(shares), np.stack(drawn)

    def lines(self) -> list[str]:
        """What the user is told of the verdict."""
        if self.verdict is None:
            return []
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
    def run(self, queue: Queue) -> list[Any]:
        """Makes it, on all ranks of a replica. Returns what rank 0 is to know of it, on the one that leads."""

    def sums(self) -> list[int]:
        """Checksums of what was made."""
        return []

    def holds(self, sums: Sequence[int]) -> bool:
        """Whether what an earlier start has made is there. Whatever is raised says that it is not."""
        return self.sums() == sums


class Restoring(Work):
    """Restores masked voxels, which go to `Restored` files."""

    @abstractmethod
    def results(self) -> dict[str, Restored]:
        """By the names of presets, or of what a method without a model makes."""

    @abstractmethod
    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        """Whether results are made of it."""

    def sums(self) -> list[int]:
        return [zlib.crc32(one.read(n).tobytes()) for one in self.results().values() for n in self.indices]


@dataclass(frozen=True)
class ByModel(Restoring):
    """A sample of each slice, in every preset."""

    sample: int

    def results(self) -> dict[str, Restored]:
        return {mode: self.making.restored(mode, self.axis, self.sample) for mode in self.making.modes}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.sample < samples_along(self.making.samples, verdict.axes).get(self.axis, 0)

    def run(self, queue: Queue) -> list[Any]:
        """Of each preset the volume, its name and the cost, whose drift may hold numbers that JSON has not."""
        making, (prepared, masks) = self.making, self.making.prepared(self.axis, self.indices)
        queue.begin(len(masks), making.restorer.tile_steps(masks) * len(making.modes))
        made = {mode: making.draw(self.axis, self.sample, prepared, masks, mode) for mode in making.modes}
        if not making.leads:
            return []
        for mode, file in self.results().items():
            for index, one, mask in zip(self.indices, made[mode], masks, strict=True):
                file.write(index, one.restored01_YX[mask])
        costs = {mode: Cost.summed([one.cost for one in drawn]) for mode, drawn in made.items()}
        return [[making.number, mode, json.dumps(vars(cost))] for mode, cost in costs.items()]


@dataclass(frozen=True)
class Solved(Restoring):
    """A method without a model, in slices along z, some rows of all of them at once."""

    method: str
    counted = False

    def results(self) -> dict[str, Restored]:
        return {self.method: self.making.without_model(self.method)}

    def is_wanted(self, verdict: HiddenRegionReport) -> bool:
        return self.method in verdict.others

    def run(self, queue: Queue) -> list[Any]:
        if self.making.leads:
            self.write()
        return []

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
    """The part of the test on hidden regions in which methods without a model restore a round's judged voxels.

    They have no axis.
    """

    round: int
    sample: int = 0

    @property
    def path(self) -> Path:
        place = "-".join(map(str, (self.making.number, self.round, self.axis, self.sample, *self.indices[:1])))
        return self.making.folder / f"{place}.npz"

    def read(self) -> dict[str, np.ndarray]:
        """What was made."""
        with np.load(self.path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}

    def holds(self, sums: Sequence[int]) -> bool:
        return bool(self.read())

    def run(self, queue: Queue) -> list[Any]:
        made, rows = self.make(queue)
        if self.making.leads:
            np.savez(self.path, **made)
            flush(self.path)
        return rows

    def make(self, queue: Queue) -> tuple[dict[str, Any], list[Any]]:
        """Return what methods made of the voxels [P], NaN where nothing, on the rank that leads; and what it cost."""
        if not self.making.leads:
            return {}, []
        points_P3, shape = self.making.judged[self.round], self.making.volume.statistics.shape
        read = self.making.reader(self.making.hidden[self.round])
        return {name: in_cells(method, read, shape, points_P3) for name, method in METHODS.items()}, []


class SliceTrial(Trial):
    """The part of the test in which the model draws a sample of each slice, read at the judged voxels."""

    def make(self, queue: Queue) -> tuple[dict[str, Any], list[Any]]:
        making, hidden, reads = self.making, self.making.hidden[self.round], partial(self.making.mask, self.axis)
        masks = {index: reads(index) | hidden.mask(self.axis, index, reads) for index in self.indices}
        masks = {index: mask for index, mask in masks.items() if not mask.all()}
        first, drawn = AXES.index(self.axis), list[ItemSamples]()
        points_P3 = making.judged[self.round]
        points_P3 = points_P3[np.isin(points_P3[:, first], self.indices)]
        if masks:
            queue.begin(len(masks), making.restorer.tile_steps([*masks.values()]))
            prepared = [
                prepare_slice(making.voxels(self.axis, n), mask, making.task.scale) for n, mask in masks.items()
            ]
            drawn = making.draw(self.axis, self.sample, prepared, [*masks.values()], making.modes[0])
        found_P = np.full(len(points_P3), np.nan)
        for index, one in zip(masks, drawn, strict=True) if making.leads else ():
            here_P = points_P3[:, first] == index
            found_P[here_P] = one.restored01_YX[tuple(np.delete(points_P3[here_P], first, axis=1).T)]
        cost = Cost.summed([one.cost for one in drawn]) if drawn else Cost()
        # A job in any other preset would take as long for its test.
        spent = {name: getattr(cost, name) for name in ("seconds", "rank_seconds", "replica_seconds")}
        return {OWN: found_P}, [[making.number, mode, json.dumps(spent)] for mode in making.modes]


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

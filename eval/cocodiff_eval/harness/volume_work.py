"""What is made of volumes slice by slice, before slices along z are fused: each kind of work, and the files that it is
kept in while a job runs."""

from __future__ import annotations

import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from cocodiff_eval.data.intensity import prepare_slice
from cocodiff_eval.data.reoriented import AXES, Reoriented, Restored
from cocodiff_eval.harness.hidden_test import (
    APART,
    LINES,
    METHODS,
    in_slice,
    made_along,
    read_window,
    slice_figures,
    solved_near,
)
from cocodiff_eval.harness.items import Cost, ItemSamples
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import OWN, HiddenRegionReport, Volume
from cocodiff_eval.quality.fusing import samples_along
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.restore.baseline import CELL, SOLVERS, Window, in_cells

if TYPE_CHECKING:
    from cocodiff.jobs.replicas import Queue

TRACE = 1e-9  # of weight, so that a voxel without any other is restored along an axis


@dataclass(frozen=True)
class Making:
    """What volumes are made with, and the files of what is made.

    modes: names of presets; samples: of each voxel in all; hidden: of the volumes that are tested, what is hidden in
    each round; leads: whether this rank leads its replica, and writes.
    """

    folder: Path
    tasks: Sequence[Task]
    modes: Sequence[str]
    samples: int
    restorer: Restorer
    hidden: Mapping[int, Sequence[Hidden]]
    leads: bool

    @cached_property
    def of(self) -> dict[int, Volume]:
        """The volumes, by the numbers of their tasks."""
        return {number: task.volume for number, task in enumerate(self.tasks) if task.volume is not None}

    def turned(self, task: int, axis: str) -> tuple[Reoriented, Reoriented]:
        stack = self.tasks[task].stack
        voxels = Reoriented(self.folder / f"{task}-{axis}.voxels", axis, stack.shape, stack.dtype)
        return voxels, Reoriented(self.folder / f"{task}-{axis}.mask", axis, stack.shape, np.dtype(bool))

    def voxels(self, task: int, axis: str, index: int) -> np.ndarray:
        return self.tasks[task].stack.read(index) if axis == "z" else self.turned(task, axis)[0].read(index)

    def mask(self, task: int, axis: str, index: int) -> np.ndarray:
        return self.of[task].read_mask(index) if axis == "z" else self.turned(task, axis)[1].read(index)

    def prepared(self, task: int, axis: str, indices: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Slices along an axis as they are given to the model, and their masks."""
        masks, scale = [self.mask(task, axis, index) for index in indices], self.tasks[task].scale
        pairs = zip(indices, masks, strict=True)
        return [prepare_slice(self.voxels(task, axis, index), mask, scale) for index, mask in pairs], masks

    def draw(
        self, work: Any, prepared: Sequence[np.ndarray], masks: Sequence[np.ndarray], mode: str
    ) -> list[ItemSamples]:
        """A sample of each of some slices along an axis, by the model. No two samples of different axes have the same
        noise; along z those of a job of this axis alone."""
        numbers = [work.sample + self.samples * AXES.index(work.axis)] * len(prepared)
        return self.restorer.run(prepared, masks, mode, self.tasks[work.task].scale.limits01, numbers)

    def restored(self, task: int, mode: str, axis: str, sample: int) -> Restored:
        """The file of a sample."""
        path = self.folder / f"{task}-{self.modes.index(mode)}-{axis}-{sample}.f32"
        return Restored(path, axis, self.of[task].statistics)

    def without_model(self, task: int, name: str) -> Restored:
        """The file of a method without a model, or of a line's ends."""
        method = name.removesuffix(APART)
        path = self.folder / f"{task}-{METHODS.index(method)}{'-ends' * (name != method)}.f32"
        return Restored(path, made_along(method), self.of[task].statistics)

    def window_reader(
        self, task: int, hidden: Hidden | None = None
    ) -> Callable[[Window], tuple[np.ndarray, np.ndarray]]:
        """Of a volume that is tested, for which there are copies along y: a window and its mask."""
        return partial(read_window, self.tasks[task], self.of[task], self.turned(task, "y"), hidden=hidden)

    def samples_of(
        self, task: int, index: int, mode: str, mask_YX: np.ndarray, verdict: HiddenRegionReport
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The masked voxels of a slice along z in all samples and by all methods that are taken [S, P], their weights
        in the mean, and in the deviation."""
        statistics, count = self.of[task].statistics, int(mask_YX.sum())

        def without_model(name: str) -> np.ndarray:
            return self.without_model(task, name).read_along_z(index, mask_YX).astype(np.float64)

        values, shares, drawn = [], [], []
        places = dict(zip(AXES, (np.full(count, index), *mask_YX.nonzero()), strict=True))
        counts, trace = samples_along(self.samples, verdict.axes), TRACE if verdict.mixture is not None else 0.0
        others = verdict.others
        if verdict.mixture is None:
            weights = {axis: np.full(count, weight) for axis, weight in verdict.axes.items()}
        else:
            ends = {name: without_model(name + APART) for name in others if name in LINES}
            weights = dict(zip(verdict.mixture.names, verdict.mixture.weights(ends, count), strict=True))
        for axis, drawn_along in counts.items():
            seen_P = ~statistics.full(axis)[places[axis]]
            for sample in range(drawn_along):
                values.append(self.restored(task, mode, axis, sample).read_along_z(index, mask_YX))
                shares.append(np.where(seen_P, (weights.get(axis, 0.0) + trace) / drawn_along, 0.0))
                drawn.append(seen_P / drawn_along if verdict.mixture is not None else shares[-1])
        for name in others:
            values.append(without_model(name))
            seen_P = np.isfinite(values[-1])
            if name not in SOLVERS:  # of a slice that is masked wholly nothing was written
                seen_P &= ~statistics.full(made_along(name))[places[made_along(name)]]
            shares.append(np.where(seen_P, weights[name], 0.0))
            drawn.append(np.zeros(count))
        return np.stack(values), np.stack(shares), np.stack(drawn)


def keep(path: Path, made: Mapping[str, Any]) -> None:
    """Writes what was made; it has its name when it is on the disk."""
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        if path.suffix == ".npz":
            np.savez(file, **made)
        else:
            file.write(json.dumps(made).encode())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


@dataclass(frozen=True)
class Work(ABC):
    """Slices along an axis that one replica makes together. suffix: of the file of what `run` gives; counted: whether
    the bar counts them."""

    task: int
    axis: str
    indices: tuple[int, ...]
    suffix: ClassVar[str]
    counted: ClassVar[bool] = True

    @abstractmethod
    def holds(self, making: Making, path: Path) -> bool:
        """Whether what an earlier start has made is there. Whatever is raised says that it is not."""

    @abstractmethod
    def run(self, making: Making, queue: Queue) -> Mapping[str, Any] | None:
        """Makes it, on all ranks of a replica; None on those that do not lead it."""


class Restoring(Work):
    """Restores masked voxels, which go to `Restored` files."""

    suffix = ".json"

    @abstractmethod
    def results(self, making: Making) -> dict[str, Restored]:
        """By the names of presets, or of what a method without a model makes."""

    @abstractmethod
    def is_wanted(self, verdict: HiddenRegionReport, samples: int) -> bool:
        """Whether results are made of it. samples: of each voxel in all."""

    def holds(self, making: Making, path: Path) -> bool:
        return bool(json.loads(path.read_text())["sums"] == self.sums(making))

    def sums(self, making: Making) -> list[int]:
        return [zlib.crc32(one.read(n).tobytes()) for one in self.results(making).values() for n in self.indices]


@dataclass(frozen=True)
class ByModel(Restoring):
    """A sample of each slice, in every preset."""

    sample: int

    def results(self, making: Making) -> dict[str, Restored]:
        return {mode: making.restored(self.task, mode, self.axis, self.sample) for mode in making.modes}

    def is_wanted(self, verdict: HiddenRegionReport, samples: int) -> bool:
        return self.sample < samples_along(samples, verdict.axes).get(self.axis, 0)

    def run(self, making: Making, queue: Queue) -> dict[str, Any] | None:
        prepared, masks = making.prepared(self.task, self.axis, self.indices)
        queue.begin(len(masks), making.restorer.tile_steps(masks) * len(making.modes))
        made = {mode: making.draw(self, prepared, masks, mode) for mode in making.modes}
        if not making.leads:
            return None
        for mode, file in self.results(making).items():
            for index, one, mask in zip(self.indices, made[mode], masks, strict=True):
                file.write(index, one.restored01_YX[mask])
        costs = {mode: vars(Cost.summed([one.cost for one in drawn])) for mode, drawn in made.items()}
        return {"costs": costs, "sums": self.sums(making)}


@dataclass(frozen=True)
class Smoothed(Restoring):
    """A method without a model that works slice by slice."""

    method: str
    counted = False

    def results(self, making: Making) -> dict[str, Restored]:
        names = (self.method, self.method + APART) if self.method in LINES else (self.method,)
        return {name: making.without_model(self.task, name) for name in names}

    def is_wanted(self, verdict: HiddenRegionReport, samples: int) -> bool:
        return self.method in verdict.others

    def run(self, making: Making, queue: Queue) -> dict[str, Any] | None:
        if not making.leads:
            return None
        self.write(making)
        return {"costs": {}, "sums": self.sums(making)}

    def write(self, making: Making) -> None:
        results, pairs = self.results(making), making.prepared(self.task, self.axis, self.indices)
        for index, prepared, mask in zip(self.indices, *pairs, strict=True):
            for name, image in in_slice(self.method, prepared, mask).items():
                results[name].write(index, image[mask])


class Solved(Smoothed):
    """A method in three dimensions, in slices along z, some rows of all of them at once."""

    def write(self, making: Making) -> None:
        mask_NYX = np.stack([making.mask(self.task, "z", index) for index in self.indices])
        shape, (file,) = making.of[self.task].statistics.shape, self.results(making).values()
        read, made = making.window_reader(self.task), [[np.zeros(0)] for _ in self.indices]
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
    suffix = ".npz"

    def holds(self, making: Making, path: Path) -> bool:
        with np.load(path, allow_pickle=False) as found:
            return all(found[name].size for name in found.files)  # reads all of it

    def run(self, making: Making, queue: Queue) -> dict[str, np.ndarray] | None:
        hidden = making.hidden[self.task][self.round]
        read = making.window_reader(self.task, hidden)
        return solved_near(hidden, making.of[self.task], read) if making.leads else None


class SliceTrial(Trial):
    """Of the model, a sample of each slice, and with the first one of the methods that work slice by slice."""

    def run(self, making: Making, queue: Queue) -> dict[str, np.ndarray] | None:
        hidden, reads = making.hidden[self.task][self.round], partial(making.mask, self.task, self.axis)
        original = [making.voxels(self.task, self.axis, index) for index in self.indices]
        masks = [reads(index) | hidden.mask(self.axis, index, reads) for index in self.indices]
        of_model, found = [mask for mask in masks if not mask.all()], dict[str, Any]()
        scale, pairs = making.tasks[self.task].scale, zip(original, masks, strict=True)
        prepared = [prepare_slice(image, mask, scale) for image, mask in pairs if not mask.all()]
        if prepared and self.axis in making.of[self.task].axes:
            queue.begin(len(prepared), making.restorer.tile_steps(of_model))
            found[OWN] = [one.restored01_YX for one in making.draw(self, prepared, of_model, making.modes[0])]
        if not making.leads:
            return None
        if self.sample == 0:
            found |= slice_figures(self.axis, prepared, of_model)
        tested = [hidden.tested[axis] for axis in AXES if axis != self.axis]
        grid, shape, made = np.ix_(*tested), [*map(len, tested)], {}
        for name, images in found.items():
            left = iter(images)
            made[name] = np.stack([np.full(shape, np.nan) if mask.all() else next(left)[grid] for mask in masks])
        return made

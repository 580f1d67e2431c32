"""Volumes among a job's tasks: slices along several axes are restored one by one, a test on hidden regions first, and
fused slice by slice along z.

Every restored slice goes to a file of its sample and axis, which holds the masked voxels alone. So a replica takes any
slice of any axis, a start that goes on finds what is there, and no more is in memory than the slices that share calls,
or one slice along z of all samples. On the disk, until the job ends: 4 bytes for each masked voxel, sample and preset,
and for each of y and x that is needed a copy of the volume and one byte a voxel of the mask.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cocodiff_eval.fusing import Intervals, dealt, fuse
from cocodiff_eval.hidden import Hidden
from cocodiff_eval.intensity import compose_native, prepare_slice
from cocodiff_eval.metrics import masked_psnr_db
from cocodiff_eval.smooth import SOLVERS, in_cells
from cocodiff_eval.turned import AXES, Restored, Turned, turn, turned_shape
from cocodiff_eval.uncertainty import Moments

from cocodiff.console.terminal import reading_bar
from cocodiff.jobs.cost import Cost
from cocodiff.jobs.hidden_test import IN_SLICES, Tested, judge_test, read_window, slice_figures, solved_near
from cocodiff.jobs.items import Batch, Drawn, evenly
from cocodiff.jobs.restoring import Restorer, slices_together
from cocodiff.jobs.tasks import BOUNDS, Task, kept_samples
from cocodiff.jobs.volume import OWN, Verdict, Volume

if TYPE_CHECKING:
    from cocodiff.jobs.replicas import Queue
    from cocodiff.jobs.session import Session

FUSED_TOGETHER = 8  # slices along z in a batch


@dataclass(frozen=True)
class Work:
    """Slices along an axis that are restored together, one sample of each. method: OWN, or the name of one without a
    model. test: whether hidden regions are restored. No indices: the test of methods in three dimensions."""

    task: int
    axis: str
    indices: tuple[int, ...]
    sample: int
    method: str = OWN
    test: bool = False


class Volumes:
    """hidden: of the volumes that are tested, by the number of the task, what is hidden."""

    def __init__(
        self, session: Session, restorer: Restorer, tasks: Sequence[Task], hidden: Mapping[int, Hidden | None]
    ) -> None:
        self.session, self.restorer, self.tasks, self.hidden = session, restorer, tasks, hidden
        self.samples: int = session.prepared.values["samples"]
        self.keeps: bool = session.prepared.values["keep_samples"]
        self.folder = session.prepared.output.journals.folder / "volumes"
        self.verdicts: dict[int, Verdict] = {}
        self.works = [work for number in self.of for work in self._works(number)]
        self._costs: dict[tuple[int, str], Cost] = {}

    @cached_property
    def of(self) -> dict[int, Volume]:
        """The volumes, by the numbers of their tasks."""
        return {number: task.volume for number, task in enumerate(self.tasks) if task.volume is not None}

    def tested(self, task: int) -> bool:
        return self.hidden.get(task) is not None

    def _works(self, number: int) -> list[Work]:
        """All that may have to be made of a volume, in an order that depends on the job's settings and masks alone."""
        volume, hidden, works = self.of[number], self.hidden.get(number), []
        if hidden is not None:
            for axis in self._read_along(number):
                groups = evenly(hidden.tested[axis], self._together(number, axis))
                samples = volume.sampled(self.samples) if axis in volume.axes else 1
                works += [Work(number, axis, group, n, test=True) for n in range(samples) for group in groups]
            works.append(Work(number, "", (), 0, test=True))
        makers = [(OWN, axis, self.samples) for axis in volume.axes]
        if hidden is not None and self.session.prepared.values["method"] != OWN:
            makers += [(name, axis, 1) for name, (axis, _) in IN_SLICES.items()]
        for method, axis, samples in makers:
            groups = evenly(volume.census.restorable(axis), self._together(number, axis))
            works += [Work(number, axis, group, n, method) for n in range(samples) for group in groups]
        return works

    def _together(self, task: int, axis: str) -> int:
        """Slices along an axis that share the model's calls."""
        rows_columns = turned_shape(self.tasks[task].stack.shape, axis)[1:]
        return slices_together(rows_columns, self.restorer.inpainter.native_size, self.restorer.batch)

    def _read_along(self, task: int) -> list[str]:
        """The axes along which slices are read: of a test also y, in which lines along z are seen."""
        wanted = {*self.of[task].axes} | ({"y", "z"} if self.tested(task) else set())
        return [axis for axis in AXES if axis in wanted]

    def further(self, task: int) -> list[str]:
        """What is added to presets' names for further files of results."""
        if task not in self.of:
            return []
        return [*(BOUNDS if self.tested(task) else ()), *(kept_samples(self.samples) if self.keeps else ())]

    def intervals(self, task: int) -> Intervals | None:
        """Those of a volume that was tested."""
        return (self.verdicts[task].intervals or Intervals.unknown()) if self.tested(task) else None

    @property
    def sizes(self) -> list[int]:
        return [len(work.indices) if work.method == OWN else 0 for work in self.works]

    def batches(self, task: int) -> list[Batch]:
        """The slices of a volume along z, which are fused when those along all axes are there."""
        groups = evenly(range(len(self.tasks[task].stack)), FUSED_TOGETHER)
        samples = tuple(range(self.samples))
        return [Batch(task, group, False, samples, self.samples, copied=True) for group in groups]

    # Reading and files ------------------------------------------------------------------------------------------------

    def _turned(self, task: int, axis: str) -> tuple[Turned, Turned]:
        stack = self.tasks[task].stack
        voxels = Turned(self.folder / f"{task}-{axis}.voxels", axis, stack.shape, stack.dtype)
        return voxels, Turned(self.folder / f"{task}-{axis}.mask", axis, stack.shape, np.dtype(bool))

    def voxels(self, task: int, axis: str, index: int) -> np.ndarray:
        return self.tasks[task].stack.read(index) if axis == "z" else self._turned(task, axis)[0].read(index)

    def mask(self, task: int, axis: str, index: int) -> np.ndarray:
        return self.of[task].read_mask(index) if axis == "z" else self._turned(task, axis)[1].read(index)

    def _restored(self, task: int, mode: str, axis: str, sample: int, method: str = OWN) -> Restored:
        """The file of a sample. Methods without a model have one for each preset as well, as results have."""
        place, kind = self._modes.index(mode), [OWN, *IN_SLICES].index(method)
        return Restored(self.folder / f"{task}-{place}-{axis}-{sample}-{kind}.f32", axis, self.of[task].census)

    @property
    def _modes(self) -> list[str]:
        return [*self.session.prepared.presets]

    def _files(self, work: Work) -> dict[str, Restored]:
        return {mode: self._restored(work.task, mode, work.axis, work.sample, work.method) for mode in self._modes}

    def holds(self, number: int) -> bool:
        """Whether what an earlier start has made is there. Whatever is raised says that it is not."""
        work, path = self.works[number], self._path(number)
        try:
            if work.test:
                with np.load(path, allow_pickle=False) as found:
                    return bool([found[name] for name in found.files])
            return bool(json.loads(path.read_text())["sums"] == self._sums(work))
        except Exception:  # numpy, zipfile and json raise many kinds for a damaged file
            return False

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.{'npz' if self.works[number].test else 'json'}"

    def _sums(self, work: Work) -> list[int]:
        return [zlib.crc32(one.read(n).tobytes()) for one in self._files(work).values() for n in work.indices]

    # Before batches ---------------------------------------------------------------------------------------------------

    def make(self, queue: Queue, first: int) -> None:
        """Tests, decides and restores, on all ranks. first: the queue's number of the first work."""
        whole = self.session.replica.whole
        if whole.rank == 0:
            self.folder.mkdir(exist_ok=True)
            for task in self.of:
                copies = [self._turned(task, axis) for axis in self._read_along(task) if axis != "z"]
                bar, name = reading_bar(not self.session.prepared.values["quiet"]), self.tasks[task].stack.name
                turn(partial(self.voxels, task, "z"), [voxels for voxels, _ in copies], bar, name)
                turn(partial(self.mask, task, "z"), [mask for _, mask in copies], bar, f"the mask of {name}")
        whole.broadcast_object(None)  # the copies are there
        tests = [number for number, work in enumerate(self.works) if work.test]
        queue.expect([first + number for number in (*tests, *self._likely())])
        self._run(queue, first, tests)
        self.verdicts = whole.broadcast_object(
            {task: self._verdict(task) for task in self.of} if whole.rank == 0 else None
        )
        wanted = [number for number, work in enumerate(self.works) if not work.test and self._is_wanted(work)]
        if whole.rank == 0:
            for line in self.lines():
                queue.bar.say(line)
            for file in {file.path: file for n in wanted for file in self._files(self.works[n]).values()}.values():
                file.create()
        whole.broadcast_object(None)  # the files are there
        queue.expect([first + number for number in (*tests, *wanted)])
        self._run(queue, first, wanted)
        self._costs = whole.broadcast_object(self._read_costs(wanted) if whole.rank == 0 else None)

    def _likely(self) -> list[int]:
        """What is restored if all axes are taken: for the time left to be shown before it is known."""
        even = {task: dict.fromkeys(volume.axes[: self.samples], 1.0) for task, volume in self.of.items()}
        deals = {task: dealt(self.samples, axes) for task, axes in even.items()}
        own = [n for n, work in enumerate(self.works) if not work.test and work.method == OWN]
        return [n for n in own if self.works[n].sample < deals[self.works[n].task].get(self.works[n].axis, 0)]

    def _run(self, queue: Queue, first: int, numbers: Sequence[int]) -> None:
        for place in queue.take([first + number for number in numbers]):
            number = place - first
            work = self.works[number]
            made = self._test(work, queue) if work.test else self._restore(work, queue)
            if self.session.replica.leads:
                _keep(self._path(number), made)
                queue.add(place, [])

    def _is_wanted(self, work: Work) -> bool:
        verdict = self.verdicts[work.task]
        if verdict.method != OWN:
            return work.method == verdict.method
        return work.method == OWN and work.sample < dealt(self.samples, verdict.weights).get(work.axis, 0)

    def sample_number(self, axis: str, sample: int) -> int:
        """No two samples of different axes have the same noise; along z those of a job of this axis alone."""
        return sample + self.samples * AXES.index(axis)

    def _restore(self, work: Work, queue: Queue) -> dict[str, Any] | None:
        scale = self.tasks[work.task].scale
        masks = [self.mask(work.task, work.axis, index) for index in work.indices]
        originals = [self.voxels(work.task, work.axis, index) for index in work.indices]
        prepared = [prepare_slice(*pair, scale) for pair in zip(originals, masks, strict=True)]
        costs = {}
        if work.method == OWN:
            queue.begin(len(masks), self.restorer.tile_steps(masks) * len(self._modes))
        for mode, file in self._files(work).items():
            if work.method != OWN:
                found = [IN_SLICES[work.method][1](*pair) for pair in zip(prepared, masks, strict=True)]
                costs[mode] = Cost()
            else:
                numbers = [self.sample_number(work.axis, work.sample)] * len(masks)
                drawn = self.restorer.run(prepared, masks, mode, scale.limits01, numbers)
                found, costs[mode] = [one.restored01_YX for one in drawn], Cost.summed([one.cost for one in drawn])
            if self.session.replica.leads:
                for index, restored, mask in zip(work.indices, found, masks, strict=True):
                    file.write(index, restored[mask])
        if not self.session.replica.leads:
            return None
        return {"costs": {mode: vars(cost) for mode, cost in costs.items()}, "sums": self._sums(work)}

    def _read_costs(self, numbers: Sequence[int]) -> dict[tuple[int, str], Cost]:
        """Of all samples of a volume in each preset."""
        found: dict[tuple[int, str], list[Cost]] = {}
        for number in numbers:
            for mode, cost in json.loads(self._path(number).read_text())["costs"].items():
                found.setdefault((self.works[number].task, mode), []).append(Cost(**cost))
        return {key: Cost.summed(costs) for key, costs in found.items()}

    # The test ---------------------------------------------------------------------------------------------------------

    def _test(self, work: Work, queue: Queue) -> dict[str, np.ndarray] | None:
        """What the test has restored, at the voxels that are judged."""
        task, hidden, leads = self.tasks[work.task], self.hidden[work.task], self.session.replica.leads
        assert hidden is not None
        if not work.indices:
            return solved_near(hidden, self.of[work.task], task) if leads else None
        reads = partial(self.mask, work.task, work.axis)
        original = [self.voxels(work.task, work.axis, index) for index in work.indices]
        masks = [reads(index) | hidden.mask(work.axis, index, reads) for index in work.indices]
        restores, found = [not mask.all() for mask in masks], {}
        prepared = [prepare_slice(o, m, task.scale) for o, m, yes in zip(original, masks, restores, strict=True) if yes]
        of_model = [mask for mask, yes in zip(masks, restores, strict=True) if yes]
        if prepared and work.axis in self.of[work.task].axes:
            queue.begin(len(prepared), self.restorer.tile_steps(of_model))
            numbers = [self.sample_number(work.axis, work.sample)] * len(prepared)
            drawn = self.restorer.run(prepared, of_model, self._modes[0], task.scale.limits01, numbers)
            found[OWN] = [one.restored01_YX for one in drawn]
        if not leads:
            return None
        if work.sample == 0:
            found |= slice_figures(work.axis, prepared, of_model)
        grid = np.ix_(*[hidden.tested[axis] for axis in AXES if axis != work.axis])
        shape = [len(hidden.tested[axis]) for axis in AXES if axis != work.axis]
        made = {}
        for name, images in found.items():
            left = iter(images)
            made[name] = np.stack([next(left)[grid] if yes else np.full(shape, np.nan) for yes in restores])
        return made

    def _verdict(self, task: int) -> Verdict:
        volume, hidden = self.of[task], self.hidden.get(task)
        if hidden is None:
            axes = volume.axes[: self.samples]
            axes = axes if volume.restores(axes) else volume.axes
            return Verdict(dict.fromkeys(axes, 1 / len(axes)))
        tested = Tested(hidden, volume, self.tasks[task], self.samples)
        for number, work in enumerate(self.works):
            if work.test and work.task == task:
                with np.load(self._path(number)) as found:
                    tested.add(work.axis, work.indices, work.sample, {name: found[name] for name in found.files})
        return judge_test(tested, volume, self.samples, self.session.prepared.values["method"] != OWN)

    # Fusing -----------------------------------------------------------------------------------------------------------

    def fused(self, batch: Batch, mode: str) -> list[Drawn]:
        """Slices along z with all their samples."""
        return [self._fused(batch.task, index, mode) for index in batch.indices]

    def _fused(self, task: int, index: int, mode: str) -> Drawn:
        mask_YX, census = self.mask(task, "z", index), self.of[task].census
        image_YX = np.zeros(mask_YX.shape)
        if not self.tasks[task].mask.read(index).any():  # nothing to restore, or nothing to restore it from
            kept = (self.voxels(task, "z", index),) * self.samples if self.keeps else ()
            return Drawn(Moments.of(image_YX), Cost(), kept=kept)
        values_SP, weights_SP = self._samples(task, index, mode, mask_YX)
        mean_P, spread_P = fuse(values_SP, weights_SP)
        squares_YX = image_YX.copy()
        image_YX[mask_YX], squares_YX[mask_YX] = mean_P, np.square(spread_P) * (len(values_SP) - 1)
        slices = int((census.counts("z") > 0).sum())
        cost = self._costs.get((task, mode), Cost()).shares(slices)[0]
        drawn = Drawn(Moments(len(values_SP), image_YX, squares_YX), cost)
        return self._judged_alone(task, index, mask_YX, values_SP, weights_SP, drawn)

    def _judged_alone(
        self, task: int, index: int, mask_YX: np.ndarray, values_SP: np.ndarray, weights_SP: np.ndarray, drawn: Drawn
    ) -> Drawn:
        """With the PSNR of each sample, and the samples themselves where they are kept."""
        one, psnr_db, kept = self.tasks[task], [], []
        truth_YX = one.truth.read(index) if one.truth is not None else None
        original_YX = one.stack.read(index)
        for values_P, weights_P in zip(values_SP, weights_SP, strict=True):
            image_YX = drawn.restored01_YX.copy()
            image_YX[mask_YX] = np.where(weights_P > 0, values_P, image_YX[mask_YX])
            native_YX = compose_native(original_YX, image_YX, mask_YX, one.scale)
            known = truth_YX is not None
            psnr_db.append(masked_psnr_db(one.scale, truth_YX, native_YX, mask_YX) if known else None)
            kept += [native_YX] if self.keeps else []
        kept = (kept * self.samples)[: self.samples]  # a method without a model makes one
        return Drawn(drawn.moments, drawn.cost, tuple(psnr_db), tuple(kept))

    def _samples(self, task: int, index: int, mode: str, mask_YX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The masked voxels of a slice along z in all samples [S, P], and each one's weight."""
        volume, verdict = self.of[task], self.verdicts[task]
        if verdict.method in SOLVERS:
            points_P3 = np.argwhere(mask_YX[None]) + np.array([index, 0, 0])
            read = partial(read_window, self.tasks[task], volume)
            values_P = in_cells(SOLVERS[verdict.method], read, volume.census.shape, points_P3)
            return values_P[None], np.ones((1, len(values_P)))
        if verdict.method != OWN:
            file = self._restored(task, mode, IN_SLICES[verdict.method][0], 0, verdict.method)
            return file.read_along_z(index, mask_YX)[None], np.ones((1, int(mask_YX.sum())))
        values, weights = [], []
        places = dict(zip(AXES, (np.full(int(mask_YX.sum()), index), *mask_YX.nonzero()), strict=True))
        for axis, count in dealt(self.samples, verdict.weights).items():
            blind_P = volume.census.full(axis)[places[axis]]
            for sample in range(count):
                values.append(self._restored(task, mode, axis, sample).read_along_z(index, mask_YX))
                weights.append(np.where(blind_P, 0.0, verdict.weights[axis] / count))
        return np.stack(values), np.stack(weights)

    # What is told -----------------------------------------------------------------------------------------------------

    def _where(self, task: int) -> str:
        return f"{self.tasks[task].stack.name}, mask {self.tasks[task].mask.name}"

    def lines(self) -> list[str]:
        found = []
        for task, verdict in self.verdicts.items():
            if self.of[task].tested:
                found.append(verdict.line(self._where(task)))
            if verdict.method == OWN:
                found.append(verdict.axes_line(self._where(task)))
        return found

    def records(self) -> list[dict[str, Any]]:
        """For metrics.json."""
        return [
            verdict.record(self.tasks[task].stack.name, self.tasks[task].mask.name, self._where(task))
            for task, verdict in self.verdicts.items()
        ]


def _keep(path: Path, made: Mapping[str, Any]) -> None:
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

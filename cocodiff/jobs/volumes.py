"""Volumes among a job's tasks: slices along several axes are restored one by one, a test on hidden regions first, and
fused slice by slice along z.

Every restored slice goes to a file of its sample and axis, which holds the masked voxels alone. So a replica takes any
slice of any axis, a start that goes on finds what is there, and no more is in memory than the slices that share calls,
or one slice along z of all samples. On the disk, until the job ends: 4 bytes for each masked voxel, sample and preset,
and for each of y and x that is needed a copy of the volume and one byte a voxel of the mask.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cocodiff_eval.baseline import CELL, SOLVERS, in_cells
from cocodiff_eval.fusing import Intervals, Moments, dealt, fuse
from cocodiff_eval.hidden import Hidden
from cocodiff_eval.intensity import compose_native, prepare_slice
from cocodiff_eval.metrics import masked_psnr_db
from cocodiff_eval.turned import AXES, Restored, turn, turned_shape

from cocodiff.console.terminal import reading_bar
from cocodiff.jobs.hidden_test import (
    APART,
    LINES,
    METHODS,
    Tested,
    in_slice,
    judge_test,
    made_along,
    slice_figures,
    solved_near,
)
from cocodiff.jobs.items import Batch, Cost, Drawn, evenly
from cocodiff.jobs.restoring import Restorer, slices_together
from cocodiff.jobs.tasks import BOUNDS, Task, kept_samples
from cocodiff.jobs.volume import OWN, Verdict, Volume
from cocodiff.jobs.volume_files import VolumeFiles, keep

if TYPE_CHECKING:
    from cocodiff.jobs.replicas import Queue
    from cocodiff.jobs.session import Session

FUSED_TOGETHER = 8  # slices along z in a batch


@dataclass(frozen=True)
class Work:
    """Slices along an axis that are restored together, one sample of each. method: OWN, or the name of one without a
    model. test: the round of the test whose hidden regions are restored, if any. No indices: the test of methods in
    three dimensions."""

    task: int
    axis: str
    indices: tuple[int, ...]
    sample: int
    method: str = OWN
    test: int | None = None


class Volumes:
    """hidden: of the volumes that are tested, by the number of the task, what is hidden in each round."""

    def __init__(
        self, session: Session, restorer: Restorer, tasks: Sequence[Task], hidden: Mapping[int, Sequence[Hidden]]
    ) -> None:
        self.session, self.restorer, self.tasks, self.hidden = session, restorer, tasks, hidden
        self.samples: int = session.prepared.values["samples"]
        self.keeps: bool = session.prepared.values["keep_samples"]
        self.files = VolumeFiles(
            session.prepared.output.journals.folder / "volumes", tasks, [*session.prepared.presets], self.samples
        )
        self.verdicts: dict[int, Verdict] = {}
        self.works = [work for number in self.of for work in self._works(number)]
        self._costs: dict[tuple[int, str], Cost] = {}

    @property
    def of(self) -> dict[int, Volume]:
        """The volumes, by the numbers of their tasks."""
        return self.files.of

    def tested(self, task: int) -> bool:
        return bool(self.hidden.get(task))

    def _works(self, number: int) -> list[Work]:
        """All that may have to be made of a volume, in an order that depends on the job's settings and masks alone."""
        volume, tested, works = self.of[number], self.tested(number), []
        for place, hidden in enumerate(self.hidden.get(number) or ()):
            for axis in self._read_along(number):
                groups = evenly(hidden.tested[axis], self._together(number, axis))
                samples = volume.sampled(self.samples) if axis in volume.axes else 1
                works += [Work(number, axis, group, n, test=place) for n in range(samples) for group in groups]
            works.append(Work(number, "", (), 0, test=place))
        for axis in volume.axes:
            groups = evenly(volume.census.restorable(axis), self._together(number, axis))
            works += [Work(number, axis, group, n) for n in range(self.samples) for group in groups]
        for method in METHODS if tested else ():
            axis = made_along(method)
            if method in SOLVERS:  # also where a slice along z is masked wholly
                masked = (volume.census.counts("z") > 0).nonzero()[0].tolist()
                groups = [tuple(group) for _, group in groupby(masked, lambda index: index // CELL)]
            else:
                groups = evenly(volume.census.restorable(axis), self._together(number, axis))
            works += [Work(number, axis, group, 0, method) for group in groups]
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

    def intervals(self, task: int, index: int) -> Intervals | None:
        """Those of a slice along z, of a volume that was tested."""
        if not self.tested(task):
            return None
        return (self.verdicts[task].intervals or Intervals.unknown()).at(self.files.depth(task, index))

    @property
    def sizes(self) -> list[int]:
        return [len(work.indices) if work.method == OWN else 0 for work in self.works]

    def batches(self, task: int) -> list[Batch]:
        """The slices of a volume along z, which are fused when those along all axes are there."""
        groups = evenly(range(len(self.tasks[task].stack)), FUSED_TOGETHER)
        samples = tuple(range(self.samples))
        return [Batch(task, group, False, samples, self.samples, copied=True) for group in groups]

    # Files ------------------------------------------------------------------------------------------------------------

    def _files(self, work: Work) -> dict[str, Restored]:
        """By the names of presets, or of what a method without a model makes."""
        if work.method == OWN:
            return {mode: self.files.restored(work.task, mode, work.axis, work.sample) for mode in self.files.modes}
        names = (work.method, work.method + APART) if work.method in LINES else (work.method,)
        return {name: self.files.without_model(work.task, name) for name in names}

    def holds(self, number: int) -> bool:
        """Whether what an earlier start has made is there. Whatever is raised says that it is not."""
        work, path = self.works[number], self._path(number)
        try:
            if work.test is not None:
                with np.load(path, allow_pickle=False) as found:
                    return all(found[name].size for name in found.files)  # reads all of it
            return bool(json.loads(path.read_text())["sums"] == self._sums(work))
        except Exception:  # numpy, zipfile and json raise many kinds for a damaged file
            return False

    def _path(self, number: int) -> Path:
        return self.files.folder / f"{number}.{'json' if self.works[number].test is None else 'npz'}"

    def _sums(self, work: Work) -> list[int]:
        return [zlib.crc32(one.read(n).tobytes()) for one in self._files(work).values() for n in work.indices]

    # Before batches ---------------------------------------------------------------------------------------------------

    def make(self, queue: Queue, first: int) -> None:
        """Tests, decides and restores, on all ranks. first: the queue's number of the first work."""
        whole = self.session.replica.whole
        if whole.rank == 0:
            self.files.folder.mkdir(exist_ok=True)
            for task in self.of:
                copies = [self.files.turned(task, axis) for axis in self._read_along(task) if axis != "z"]
                bar, name = reading_bar(not self.session.prepared.values["quiet"]), self.tasks[task].stack.name
                turn(partial(self.files.voxels, task, "z"), [voxels for voxels, _ in copies], bar, name)
                turn(partial(self.files.mask, task, "z"), [mask for _, mask in copies], bar, f"the mask of {name}")
        whole.broadcast_object(None)  # the copies are there
        tests = [number for number, work in enumerate(self.works) if work.test is not None]
        queue.expect([first + number for number in (*tests, *self._likely())])
        self._run(queue, first, tests)
        self.verdicts = whole.broadcast_object(
            {task: self._verdict(task) for task in self.of} if whole.rank == 0 else None
        )
        wanted = [number for number, work in enumerate(self.works) if work.test is None and self._is_wanted(work)]
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
        own = [n for n, work in enumerate(self.works) if work.test is None and work.method == OWN]
        return [n for n in own if self.works[n].sample < deals[self.works[n].task].get(self.works[n].axis, 0)]

    def _run(self, queue: Queue, first: int, numbers: Sequence[int]) -> None:
        for place in queue.take([first + number for number in numbers]):
            number = place - first
            work = self.works[number]
            tests = work.test is not None
            made: Mapping[str, Any] | None = self._test(work, queue) if tests else self._restore(work, queue)
            if made is not None:
                keep(self._path(number), made)
                queue.add(place, [])

    def _is_wanted(self, work: Work) -> bool:
        verdict = self.verdicts[work.task]
        if work.method != OWN:
            return work.method in verdict.others
        return verdict.method == OWN and work.sample < dealt(self.samples, verdict.axes).get(work.axis, 0)

    def sample_number(self, axis: str, sample: int) -> int:
        """No two samples of different axes have the same noise; along z those of a job of this axis alone."""
        return sample + self.samples * AXES.index(axis)

    def _restore(self, work: Work, queue: Queue) -> dict[str, Any] | None:
        leads, costs = self.session.replica.leads, {}
        if work.method != OWN and not leads:
            return None
        if work.method in SOLVERS:
            self._solve(work)
            return {"costs": {}, "sums": self._sums(work)}
        scale, files = self.tasks[work.task].scale, self._files(work)
        masks = [self.files.mask(work.task, work.axis, index) for index in work.indices]
        originals = [self.files.voxels(work.task, work.axis, index) for index in work.indices]
        prepared = [prepare_slice(*pair, scale) for pair in zip(originals, masks, strict=True)]
        found: dict[str, list[np.ndarray]] = {}
        if work.method == OWN:
            queue.begin(len(masks), self.restorer.tile_steps(masks) * len(self.files.modes))
            numbers = [self.sample_number(work.axis, work.sample)] * len(masks)
            for mode in files:
                drawn = self.restorer.run(prepared, masks, mode, scale.limits01, numbers)
                found[mode], costs[mode] = (
                    [one.restored01_YX for one in drawn],
                    Cost.summed([one.cost for one in drawn]),
                )
        else:
            made = [in_slice(work.method, *pair) for pair in zip(prepared, masks, strict=True)]
            found = {name: [one[name] for one in made] for name in files}
        if not leads:
            return None
        for name, file in files.items():
            for index, restored, mask in zip(work.indices, found[name], masks, strict=True):
                file.write(index, restored[mask])
        return {"costs": {mode: vars(cost) for mode, cost in costs.items()}, "sums": self._sums(work)}

    def _solve(self, work: Work) -> None:
        """A method in three dimensions, in slices along z, some rows of all of them at once."""
        mask_NYX = np.stack([self.files.mask(work.task, "z", index) for index in work.indices])
        shape, (file,) = self.of[work.task].census.shape, self._files(work).values()
        read, made = self.files.window_reader(work.task), [[np.zeros(0)] for _ in work.indices]
        for top in range(0, shape[1], CELL):
            numbers, rows, columns = mask_NYX[:, top : top + CELL].nonzero()
            points_P3 = np.stack([np.array(work.indices)[numbers], rows + top, columns], 1)
            found_P = in_cells(SOLVERS[work.method], read, shape, points_P3)
            ends = np.searchsorted(numbers, np.arange(1, len(made)))
            for of_slice, values_P in zip(made, np.split(found_P, ends), strict=True):
                of_slice.append(values_P)
        for index, of_slice in zip(work.indices, made, strict=True):
            file.write(index, np.concatenate(of_slice))

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
        assert work.test is not None, "a work of the test"
        task, hidden, leads = self.tasks[work.task], self.hidden[work.task][work.test], self.session.replica.leads
        if not work.indices:
            read = self.files.window_reader(work.task, hidden)
            return solved_near(hidden, self.of[work.task], read) if leads else None
        reads = partial(self.files.mask, work.task, work.axis)
        original = [self.files.voxels(work.task, work.axis, index) for index in work.indices]
        masks = [reads(index) | hidden.mask(work.axis, index, reads) for index in work.indices]
        restores, found = [not mask.all() for mask in masks], {}
        prepared = [prepare_slice(o, m, task.scale) for o, m, yes in zip(original, masks, restores, strict=True) if yes]
        of_model = [mask for mask, yes in zip(masks, restores, strict=True) if yes]
        if prepared and work.axis in self.of[work.task].axes:
            queue.begin(len(prepared), self.restorer.tile_steps(of_model))
            numbers = [self.sample_number(work.axis, work.sample)] * len(prepared)
            drawn = self.restorer.run(prepared, of_model, self.files.modes[0], task.scale.limits01, numbers)
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
        volume = self.of[task]
        if not self.tested(task):
            axes = volume.axes[: self.samples]
            axes = axes if volume.restores(axes) else volume.axes
            return Verdict(dict.fromkeys(axes, 1 / len(axes)))
        rounds = [Tested(hidden, volume, self.tasks[task]) for hidden in self.hidden[task]]
        for number, work in enumerate(self.works):
            if work.test is not None and work.task == task:
                with np.load(self._path(number)) as found:
                    rounds[work.test].add(
                        work.axis, work.indices, work.sample, {name: found[name] for name in found.files}
                    )
        return judge_test(rounds, volume, self.samples, self.session.prepared.values["method"] != OWN)

    # Fusing -----------------------------------------------------------------------------------------------------------

    def fused(self, batch: Batch, mode: str) -> list[Drawn]:
        """Slices along z with all their samples."""
        return [self._fused(batch.task, index, mode) for index in batch.indices]

    def _fused(self, task: int, index: int, mode: str) -> Drawn:
        mask_YX, census = self.files.mask(task, "z", index), self.of[task].census
        image_YX = np.zeros(mask_YX.shape)
        if not self.tasks[task].mask.read(index).any():  # nothing to restore, or nothing to restore it from
            kept = (self.files.voxels(task, "z", index),) * self.samples if self.keeps else ()
            return Drawn(Moments.of(image_YX), Cost(), kept=kept)
        values_SP, weights_SP, drawn_SP = self.files.samples_of(task, index, mode, mask_YX, self.verdicts[task])
        mean_P, spread_P = fuse(values_SP, weights_SP, drawn_SP)
        drawn_P = (drawn_SP > 0).any(axis=1)
        samples, squares_YX = int(drawn_P.sum()), image_YX.copy()
        image_YX[mask_YX], squares_YX[mask_YX] = mean_P, np.square(spread_P) * (samples - 1)
        slices = int((census.counts("z") > 0).sum())
        cost = self._costs.get((task, mode), Cost()).shares(slices)[0]
        drawn = Drawn(Moments(samples, image_YX, squares_YX), cost)
        return self._judged_alone(task, index, mask_YX, values_SP[drawn_P], drawn_SP[drawn_P], drawn)

    def _judged_alone(
        self, task: int, index: int, mask_YX: np.ndarray, values_SP: np.ndarray, weights_SP: np.ndarray, drawn: Drawn
    ) -> Drawn:
        """With the PSNR of each sample, and the samples themselves where they are kept."""
        one, kept = self.tasks[task], []
        truth_YX = one.truth.read(index) if one.truth is not None else None
        psnr_db: list[float | None] = [] if truth_YX is not None else [None] * len(values_SP)
        original_YX = one.stack.read(index)
        for values_P, weights_P in zip(values_SP, weights_SP, strict=True):
            image_YX = drawn.restored01_YX.copy()
            image_YX[mask_YX] = np.where(weights_P > 0, values_P, image_YX[mask_YX])
            native_YX = compose_native(original_YX, image_YX, mask_YX, one.scale)
            if truth_YX is not None:
                psnr_db.append(masked_psnr_db(one.scale, truth_YX, native_YX, mask_YX))
            kept += [native_YX] if self.keeps else []
        kept = (kept * self.samples)[: self.samples]  # a method without a model makes one
        return Drawn(drawn.moments, drawn.cost, tuple(psnr_db), tuple(kept))

    # What is told -----------------------------------------------------------------------------------------------------

    def _where(self, task: int) -> str:
        return f"{self.tasks[task].stack.name}, mask {self.tasks[task].mask.name}"

    def lines(self) -> list[str]:
        found = []
        for task, verdict in self.verdicts.items():
            if self.of[task].tested:
                found.append(verdict.line(self._where(task)))
            if verdict.method == OWN:
                found.append(verdict.weights_line(self._where(task)))
        return found

    def provenance(self, task: int) -> dict[str, Any]:
        """For the results' own metadata."""
        verdict = self.verdicts.get(task)
        return (
            {}
            if verdict is None
            else {"axes": verdict.axes, "weights": dict(verdict.weights), "method": verdict.method}
        )

    def records(self) -> list[dict[str, Any]]:
        """For metrics.json."""
        return [
            verdict.record(self.tasks[task].stack.name, self.tasks[task].mask.name, self._where(task))
            for task, verdict in self.verdicts.items()
        ]

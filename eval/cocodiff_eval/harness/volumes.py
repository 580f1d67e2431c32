"""Volumes among a job's tasks: slices along several axes are restored one by one, a test on hidden regions first, and
fused slice by slice along z.

Every restored slice goes to a file of its sample and axis, which holds the masked voxels alone. So a replica takes any
slice of any axis, a start that goes on finds what is there, and no more is in memory than the slices that share calls,
or one slice along z of all samples. On the disk, until the job ends: 4 bytes for each masked voxel, sample and preset,
and for each of y and x that is needed a copy of the volume and one byte a voxel of the mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cocodiff.jobs.terminal import reading_bar
from cocodiff_eval.data.intensity import compose_native
from cocodiff_eval.data.masks import depth
from cocodiff_eval.data.reoriented import AXES, reoriented_shape, turn
from cocodiff_eval.harness.hidden_test import MEMBERS, Tested, judge_test, made_along
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, evenly
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import HiddenRegionReport
from cocodiff_eval.harness.volume_work import (
    ByModel,
    Making,
    Restoring,
    SliceTrial,
    Smoothed,
    Solved,
    Trial,
    Work,
    keep,
)
from cocodiff_eval.quality.fusing import Intervals, Moments, fuse
from cocodiff_eval.quality.hidden import Hidden
from cocodiff_eval.quality.metrics import masked_psnr_db
from cocodiff_eval.restore.baseline import CELL, SOLVERS

if TYPE_CHECKING:
    from cocodiff.jobs.replicas import Queue
    from cocodiff_eval.harness.session import Session

FUSED_TOGETHER = 8  # slices along z in a batch


class Volumes:
    """hidden: of the volumes that are tested, by the number of the task, what is hidden in each round; of: all
    volumes, by the numbers of their tasks."""

    def __init__(
        self, session: Session, restorer: Restorer, tasks: Sequence[Task], hidden: Mapping[int, Sequence[Hidden]]
    ) -> None:
        self.session, self.restorer, self.tasks, self.hidden = session, restorer, tasks, hidden
        prepared, leads = session.prepared, session.replica.leads
        self.samples: int = prepared.values["samples"]
        self.keeps: bool = prepared.values["keep_samples"]
        folder, modes = prepared.output.journals.folder / "volumes", [*prepared.presets]
        self.making = Making(folder, tasks, modes, self.samples, restorer, hidden, leads)
        self.of = self.making.of
        self.verdicts: dict[int, HiddenRegionReport] = {}
        self.works = [work for number in self.of for work in self._works(number)]
        self._costs: dict[tuple[int, str], Cost] = {}

    def tested(self, task: int) -> bool:
        return bool(self.hidden.get(task))

    def _works(self, number: int) -> list[Work]:
        """All that may have to be made of a volume, in an order that depends on the job's settings and masks alone."""
        volume, tested, works = self.of[number], self.tested(number), list[Work]()
        for place, hidden in enumerate(self.hidden.get(number) or ()):
            for axis in self._read_along(number):
                groups = self._groups(number, axis, hidden.tested[axis])
                samples = volume.sampled(self.samples) if axis in volume.axes else 1
                works += [SliceTrial(number, axis, group, place, n) for n in range(samples) for group in groups]
            works.append(Trial(number, "", (), place))
        for axis in volume.axes:
            groups = self._groups(number, axis, volume.statistics.restorable(axis))
            works += [ByModel(number, axis, group, n) for n in range(self.samples) for group in groups]
        for method in MEMBERS if tested else ():
            axis = made_along(method)
            if method in SOLVERS:  # also where a slice along z is masked wholly
                masked = (volume.statistics.counts("z") > 0).nonzero()[0].tolist()
                cells = [tuple(group) for _, group in groupby(masked, lambda index: index // CELL)]
                works += [Solved(number, axis, group, method) for group in cells]
            else:
                groups = self._groups(number, axis, volume.statistics.restorable(axis))
                works += [Smoothed(number, axis, group, method) for group in groups]
        return works

    def _groups(self, task: int, axis: str, indices: Sequence[int]) -> list[tuple[int, ...]]:
        """Slices along an axis, those that share the model's calls together."""
        return evenly(indices, self.restorer.together(reoriented_shape(self.tasks[task].stack.shape, axis)[1:]))

    def _read_along(self, task: int) -> list[str]:
        """The axes along which slices are read: of a test also y, in which lines along z are seen."""
        wanted = {*self.of[task].axes} | ({"y", "z"} if self.tested(task) else set())
        return [axis for axis in AXES if axis in wanted]

    def intervals(self, task: int, index: int) -> Intervals | None:
        """Those of a slice along z, of a volume that was tested."""
        if not self.tested(task):
            return None
        deep_YX = depth(self.of[task].read_mask, index, self.of[task].statistics.shape[0])
        return (self.verdicts[task].intervals or Intervals.unknown()).at(deep_YX)

    def batches(self, task: int) -> list[Batch]:
        """The slices of a volume along z, which are fused when those along all axes are there."""
        groups, samples = evenly(range(len(self.tasks[task].stack)), FUSED_TOGETHER), tuple(range(self.samples))
        return [Batch(task, group, False, samples, self.samples, copied=True) for group in groups]

    def holds(self, number: int) -> bool:
        """Whether what an earlier start has made is there."""
        try:
            return self.works[number].holds(self.making, self._path(number))
        except Exception:  # numpy, zipfile and json raise many kinds for a damaged file
            return False

    def _path(self, number: int) -> Path:
        return self.making.folder / f"{number}{self.works[number].suffix}"

    # Before batches ---------------------------------------------------------------------------------------------------

    def make(self, queue: Queue, first: int) -> None:
        """Tests, decides and restores, on all ranks. first: the queue's number of the first work."""
        whole = self.session.replica.whole
        if whole.rank == 0:
            self.making.folder.mkdir(exist_ok=True)
            for task in self.of:
                copies = [self.making.turned(task, axis) for axis in self._read_along(task) if axis != "z"]
                bar, name = reading_bar(not self.session.prepared.values["quiet"]), self.tasks[task].stack.name
                turn(partial(self.making.voxels, task, "z"), [voxels for voxels, _ in copies], bar, name)
                turn(partial(self.making.mask, task, "z"), [mask for _, mask in copies], bar, f"the mask of {name}")
        whole.broadcast_object(None)  # the copies are there
        tests = [number for number, work in enumerate(self.works) if isinstance(work, Trial)]
        queue.expect([first + number for number in (*tests, *self._likely())])
        self._run(queue, first, tests)
        self.verdicts = whole.broadcast_object(
            {task: self._verdict(task) for task in self.of} if whole.rank == 0 else None
        )
        wanted = {
            number: work
            for number, work in enumerate(self.works)
            if isinstance(work, Restoring) and work.is_wanted(self.verdicts[work.task], self.samples)
        }
        if whole.rank == 0:
            for line in self.lines():
                queue.bar.say(line)
            results = [file for work in wanted.values() for file in work.results(self.making).values()]
            for file in {file.path: file for file in results}.values():
                file.create()
        whole.broadcast_object(None)  # the files are there
        queue.expect([first + number for number in (*tests, *wanted)])
        self._run(queue, first, [*wanted])
        self._costs = whole.broadcast_object(self._read_costs([*wanted]) if whole.rank == 0 else None)

    def _likely(self) -> list[int]:
        """What is restored if all axes are taken: for the time left to be shown before it is known."""
        axes = {task: volume.axes[: self.samples] for task, volume in self.of.items()}
        even = {task: HiddenRegionReport(dict.fromkeys(of_task, 1.0)) for task, of_task in axes.items()}
        own = [(n, work) for n, work in enumerate(self.works) if isinstance(work, ByModel)]
        return [n for n, work in own if work.is_wanted(even[work.task], self.samples)]

    def _run(self, queue: Queue, first: int, numbers: Sequence[int]) -> None:
        for place in queue.take([first + number for number in numbers]):
            made = self.works[place - first].run(self.making, queue)
            if made is not None:
                keep(self._path(place - first), made)
                queue.add(place, [])

    def _read_costs(self, numbers: Sequence[int]) -> dict[tuple[int, str], Cost]:
        """Of all samples of a volume in each preset."""
        found: dict[tuple[int, str], list[Cost]] = {}
        for number in numbers:
            for mode, cost in json.loads(self._path(number).read_text())["costs"].items():
                found.setdefault((self.works[number].task, mode), []).append(Cost(**cost))
        return {key: Cost.summed(costs) for key, costs in found.items()}

    # The test ---------------------------------------------------------------------------------------------------------

    def _verdict(self, task: int) -> HiddenRegionReport:
        volume = self.of[task]
        if not self.tested(task):
            axes = volume.axes[: self.samples]
            axes = axes if volume.restores(axes) else volume.axes
            return HiddenRegionReport(dict.fromkeys(axes, 1 / len(axes)))
        rounds = [Tested(hidden, volume, self.tasks[task]) for hidden in self.hidden[task]]
        for number, work in enumerate(self.works):
            if isinstance(work, Trial) and work.task == task:
                with np.load(self._path(number)) as found:
                    made = {name: found[name] for name in found.files}
                rounds[work.round].add(work.axis, work.indices, work.sample, made)
        return judge_test(rounds, volume, self.samples)

    # Fusing -----------------------------------------------------------------------------------------------------------

    def fused(self, task: int, index: int, mode: str) -> ItemSamples:
        """A slice along z: all its samples, with the PSNR of each, and themselves where they are kept."""
        one, mask_YX = self.tasks[task], self.making.mask(task, "z", index)
        original_YX = one.stack.read(index)
        image_YX = np.zeros(mask_YX.shape)
        if not one.mask.read(index).any():  # nothing to restore, or nothing to restore it from
            return ItemSamples(Moments.of(image_YX), Cost(), kept=(original_YX,) * self.samples * self.keeps)
        values_SP, weights_SP, drawn_SP = self.making.samples_of(task, index, mode, mask_YX, self.verdicts[task])
        mean_P, spread_P = fuse(values_SP, weights_SP, drawn_SP)
        drawn_S = (drawn_SP > 0).any(axis=1)
        samples, squares_YX = int(drawn_S.sum()), np.zeros(mask_YX.shape)
        image_YX[mask_YX], squares_YX[mask_YX] = mean_P, np.square(spread_P) * (samples - 1)
        slices = int((self.of[task].statistics.counts("z") > 0).sum())
        cost = self._costs.get((task, mode), Cost()).shares(slices)[0]
        truth_YX, psnr_db, kept = one.truth.read(index) if one.truth is not None else None, [], []
        for values_P, weights_P in zip(values_SP[drawn_S], drawn_SP[drawn_S], strict=True):
            sample_YX = image_YX.copy()
            sample_YX[mask_YX] = np.where(weights_P > 0, values_P, mean_P)
            native_YX = compose_native(original_YX, sample_YX, mask_YX, one.scale)
            psnr_db.append(None if truth_YX is None else masked_psnr_db(one.scale, truth_YX, native_YX, mask_YX))
            kept += [native_YX] if self.keeps else []
        return ItemSamples(Moments(samples, image_YX, squares_YX), cost, tuple(psnr_db), tuple(kept))

    # What is told -----------------------------------------------------------------------------------------------------

    def _where(self, task: int) -> str:
        return f"{self.tasks[task].stack.name}, mask {self.tasks[task].mask.name}"

    def lines(self) -> list[str]:
        found = []
        for task, verdict in self.verdicts.items():
            if self.of[task].tested:
                found.append(verdict.line(self._where(task)))
            found.append(verdict.weights_line(self._where(task)))
        return found

    def provenance(self, task: int) -> dict[str, Any]:
        """For the results' own metadata."""
        verdict = self.verdicts.get(task)
        return {} if verdict is None else {"axes": verdict.axes, "weights": dict(verdict.weights)}

    def records(self) -> list[dict[str, Any]]:
        """For metrics.json."""
        return [
            verdict.record(self.tasks[task].stack.name, self.tasks[task].mask.name, self._where(task))
            for task, verdict in self.verdicts.items()
        ]

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
from typing import Any

from cocodiff.jobs.replicas import Queue
from cocodiff.jobs.terminal import reading_bar
from cocodiff_eval.data.reoriented import turn
from cocodiff_eval.harness.items import Batch, Cost, evenly
from cocodiff_eval.harness.job import Stage
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import HiddenRegionReport, HiddenRound, judge_test
from cocodiff_eval.harness.volume_work import ByModel, Making, Restoring, Trial, works_of
from cocodiff_eval.quality.hidden import Hidden

FUSED_TOGETHER = 8  # slices along z in a batch


class Volumes(Stage):
    """of: how each volume is made, by the number of its task; hidden: of tested ones, in each round; works: of all."""

    def __init__(
        self, session: Session, restorer: Restorer, tasks: Sequence[Task], hidden: Mapping[int, Sequence[Hidden]]
    ) -> None:
        prepared, leads = session.prepared, session.replica.leads
        self.quiet, self.folder = prepared.values["quiet"], prepared.output.journals.folder / "volumes"
        modes, samples, keeps = [*prepared.presets], prepared.values["samples"], prepared.values["keep_samples"]
        self.of = {
            number: Making(
                self.folder, task.volume, number, task, modes, samples, keeps, restorer, hidden.get(number, ()), leads
            )
            for number, task in enumerate(tasks)
            if task.volume is not None
        }
        self.works = [work for making in self.of.values() for work in works_of(making)]
        self.counts = [len(work.indices) * work.counted for work in self.works]

    def holds(self, number: int, sums: Sequence[int]) -> bool:
        return self.works[number].holds(sums)

    def batches(self, number: int) -> list[Batch]:
        """The slices of a volume along z, which are fused when those along all axes are there."""
        making = self.of[number]
        groups, samples = evenly(range(len(making.task.stack)), FUSED_TOGETHER), tuple(range(making.samples))
        return [Batch(number, group, False, samples, making.samples, copied=True) for group in groups]

    def run(self, queue: Queue, first: int) -> None:
        """Tests, decides and restores, on all ranks."""
        whole, makings = queue.replica.whole, self.of.values()
        if whole.rank == 0:
            self.folder.mkdir(exist_ok=True)
            for making in makings:
                copies = [making.turned(axis) for axis in making.read_along if axis != "z"]
                bar, name = reading_bar(not self.quiet), making.task.stack.name
                turn(partial(making.voxels, "z"), [voxels for voxels, _ in copies], bar, name)
                turn(partial(making.mask, "z"), [mask for _, mask in copies], bar, f"the mask of {name}")
        whole.broadcast_object(None)  # the copies are there
        trials = {number: work for number, work in enumerate(self.works) if isinstance(work, Trial)}
        tests = [number for number, work in trials.items() if work.sample == 0]
        further = [number for number, work in trials.items() if work.sample > 0]
        # For the time left to be shown before it is known which axes are taken: all of them.
        even = {
            number: HiddenRegionReport(dict.fromkeys(making.volume.axes[: making.samples], 1.0))
            for number, making in self.of.items()
        }
        likely = [n for n in self._wanted(even) if isinstance(self.works[n], ByModel)]
        queue.expect([first + number for number in (*trials, *likely)])
        self._run(queue, first, tests)
        verdicts = self._verdicts(whole, tests)
        more = [number for number in further if not verdicts[trials[number].making.number].is_hopeless]
        tests += more
        if more:
            self._run(queue, first, more)
            verdicts = self._verdicts(whole, tests)
        for number, making in self.of.items():
            making.verdict = verdicts[number]
        wanted = self._wanted(verdicts)
        if whole.rank == 0:
            for line in [line for making in makings for line in making.lines()]:
                queue.bar.say(line)
            for file in {file.path: file for work in wanted.values() for file in work.results().values()}.values():
                file.create()
        whole.broadcast_object(None)  # the files are there
        queue.expect([first + number for number in (*tests, *wanted)])
        self._run(queue, first, [*wanted])
        told = queue.rows([first + number for number in (*tests, *wanted)]) if whole.rank == 0 else []
        costs = whole.broadcast_object(self._costs(told) if whole.rank == 0 else None)
        for number, making in self.of.items():
            making.costs = costs[number]

    def _wanted(self, verdicts: Mapping[int, HiddenRegionReport]) -> dict[int, Restoring]:
        """The works that results are made of, by their numbers."""
        works = {number: work for number, work in enumerate(self.works) if isinstance(work, Restoring)}
        return {number: work for number, work in works.items() if work.is_wanted(verdicts[work.making.number])}

    def _run(self, queue: Queue, first: int, numbers: Sequence[int]) -> None:
        for place in queue.take([first + number for number in numbers]):
            work = self.works[place - first]
            rows = work.run(queue)
            if work.making.leads:
                queue.add(place, rows, work.sums())

    def _costs(self, rows: Sequence[Any]) -> dict[int, dict[str, Cost]]:
        """Of all samples of each volume in each preset, by what works have told of theirs."""
        found: dict[int, dict[str, list[Cost]]] = {number: {} for number in self.of}
        for number, mode, cost in rows:
            found[number].setdefault(mode, []).append(Cost(**json.loads(cost)))
        return {n: {mode: Cost.summed(costs) for mode, costs in of.items()} for n, of in found.items()}

    def _verdicts(self, whole: Any, tests: Sequence[int]) -> dict[int, HiddenRegionReport]:
        """Return that of each volume by some trials, as rank 0 finds it, on all ranks."""
        found = None
        if whole.rank == 0:
            found = {number: self._verdict(making, tests) for number, making in self.of.items()}
        return dict(whole.broadcast_object(found))

    def _verdict(self, making: Making, tests: Sequence[int]) -> HiddenRegionReport:
        volume = making.volume
        if not making.hidden:
            axes = volume.axes[: making.samples]
            axes = axes if volume.restores(axes) else volume.axes
            return HiddenRegionReport(dict.fromkeys(axes, 1 / len(axes)))
        rounds = [HiddenRound(hidden, volume, making.task, making.samples) for hidden in making.hidden]
        for work in (self.works[number] for number in tests):
            if isinstance(work, Trial) and work.making is making:
                rounds[work.round].add(work.axis, work.indices, work.sample, work.read())
        return judge_test(rounds, volume, making.samples)

    def records(self) -> list[dict[str, Any]]:
        """For metrics.json."""
        found = [(making.verdict, making.task) for making in self.of.values()]
        return [verdict.record(task.stack.name, task.mask.name) for verdict, task in found if verdict is not None]

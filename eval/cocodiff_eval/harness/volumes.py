"""The restoration of the volumes among a job's tasks.

The test on hidden regions comes first. Then slices along several axes are restored, and fused slice by slice along z.

Masked voxels of restored slices go to a file for each sample and axis. So a replica can take any slice of any axis, and
a resumed job finds what was made. In memory are at most the slices that share calls of the model, or one slice along z
of all samples.

Until the job ends, the files take 4 bytes of disk for each masked voxel, sample and preset. Each of the axes y and x
that is needed takes a copy of the volume, and one byte a voxel for the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from cocodiff.jobs.store import ROWS
from cocodiff.jobs.terminal import reading_bar
from cocodiff_eval.data.reoriented import turn
from cocodiff_eval.harness.items import Batch, Cost, evenly
from cocodiff_eval.harness.job import Presets
from cocodiff_eval.harness.replicas import Queue
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.harness.volume import HiddenRegionReport, judge_test
from cocodiff_eval.harness.volume_work import HiddenTrial, Restoring, VolumeRestoration, works_of
from cocodiff_eval.quality.hidden import Hidden

FUSED_TOGETHER = 8  # most slices along z in a batch that is fused


class Volumes(Presets):
    """The restoration of a job's volumes before its batches: slices along several axes, and the test on hidden regions.

    Batches are then made as by `Presets`: they fuse what was restored to slices along z.

    of      The restoration of each volume, by the index of its task.
    works   All units of work that the volumes may need.
    counts  For each unit the number of its slices that the progress bar counts.
    """

    def __init__(
        self, session: Session, restorer: Restorer, tasks: Sequence[Task], hidden: Mapping[int, Sequence[Hidden]]
    ) -> None:
        """Take the volumes among a job's tasks. Nothing is restored yet.

        Args:
            session: the job on its ranks.
            restorer: restores slices with the model.
            tasks: all tasks of the job.
            hidden: by a task's index, the hidden regions of each round of its volume's test.
        """
        super().__init__(session.prepared.presets, session.exact)
        self.quiet, self.store = session.prepared.values["quiet"], session.prepared.output.store
        self.of = {
            number: VolumeRestoration(session, restorer, number, task, task.volume, hidden.get(number, ()))
            for number, task in enumerate(tasks)
            if task.volume is not None
        }
        self.works = [work for making in self.of.values() for work in works_of(making)]
        self.counts = [len(work.indices) * work.counted for work in self.works]

    def holds(self, number: int, made: Mapping[str, np.ndarray]) -> bool:
        """Return True if the files that a unit of work wrote are unchanged on the disk, or if it writes none.

        Args:
            number: index of the unit in `works`.
            made: arrays of the unit in the store, with the checksums of its slices.
        """
        work = self.works[number]
        return not isinstance(work, Restoring) or work.sums() == made["sums"].tolist()

    def batches(self, number: int) -> list[Batch]:
        """Return batches of the masked slices along z of a volume. They are fused when all units of work are made.

        Args:
            number: index of the volume's task.
        """
        making = self.of[number]
        masked = [index for index, has_mask in enumerate(making.task.mask.masked) if has_mask]
        groups, samples = evenly(masked, FUSED_TOGETHER), tuple(range(making.samples))
        return [Batch(number, group, False, samples, making.samples, fused=True) for group in groups]

    def run(self, queue: Queue, first: int) -> None:
        """Make the units of work of all volumes: test each, decide the weights of its result, and restore that.

        All ranks call it. The test's first sample is made and judged alone. Further ones are made only for volumes in
        which the model is not hopelessly behind. Rank 0 prints the verdicts.

        Args:
            queue: the job's queue of units.
            first: number of the first of these units in the queue.
        """
        if not self.of:
            return
        whole, makings = queue.replica.whole, self.of.values()
        if whole.rank == 0:
            for making in makings:
                making.folder.mkdir(exist_ok=True)
                stack, volume, bar = making.task.stack, making.volume, reading_bar(not self.quiet)
                # Methods without a model, in a test, read windows of the copy whose slices lie along y.
                pairs = [making.turned(axis) for axis in "yx" if axis in volume.axes or (axis == "y" and volume.tested)]
                turn(stack.read, [voxels for voxels, _ in pairs], bar, stack.name)
                turn(volume.read_mask, [mask for _, mask in pairs], bar, f"the mask of {stack.name}")
        whole.broadcast_value(None)  # other ranks wait until the copies are made
        trials = {number: work for number, work in enumerate(self.works, first) if isinstance(work, HiddenTrial)}
        queue.expect([*trials, *self._wanted(first)])  # all axes are expected until the test chooses among them
        tests = dict[int, HiddenTrial]()
        for is_further in (False, True):
            more = {
                number: work
                for number, work in trials.items()
                if (work.sample > 0) is is_further and not work.making.verdict.is_hopeless
            }
            if more:
                queue.run({number: partial(work.run, queue) for number, work in more.items()})
                tests |= more
                found = [self._judged(making, more) for making in makings] if whole.rank == 0 else None
                for making, verdict in zip(makings, whole.broadcast_value(found), strict=True):
                    making.verdict = verdict
        wanted = self._wanted(first)
        if whole.rank == 0:
            for line in [line for making in makings for line in making.lines()]:
                queue.bar.say(line)
            for file in {file.path: file for work in wanted.values() for file in work.results().values()}.values():
                file.create()
        whole.broadcast_value(None)  # other ranks wait until the files exist
        queue.expect([*tests, *wanted])
        queue.run({number: partial(work.run, queue) for number, work in wanted.items()})
        for number, mode, cost in self.store.rows([*tests, *wanted]) if queue.replica.leads else ():
            self.of[number].costs.setdefault(mode, []).append(Cost(**cost))

    def _wanted(self, first: int) -> dict[int, Restoring]:
        """Return by number the units of work that are part of the result, as the tests' verdicts weight its parts.

        Args:
            first: number of the first of the volumes' units in the queue.
        """
        works = {first + n: work for n, work in enumerate(self.works) if isinstance(work, Restoring)}
        return {number: work for number, work in works.items() if work.is_wanted(work.making.verdict)}

    def _judged(self, making: VolumeRestoration, more: Mapping[int, HiddenTrial]) -> HiddenRegionReport:
        """Return the verdict on a volume after further units of tests are made. Called on rank 0.

        Args:
            making: the volume's restoration.
            more: the finished units of the tests of all volumes, by number.
        """
        if not making.hidden:
            return making.verdict
        for number, work in more.items():
            if work.making is making:
                with self.store.open(number) as made:
                    found = {name: made[name] for name in made.files if name != ROWS}
                making.rounds[work.round].add(work.axis, work.indices, work.sample, found)
        return judge_test(making.rounds, making.volume, making.samples)

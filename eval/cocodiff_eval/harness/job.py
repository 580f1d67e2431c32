"""The interface of jobs, `Job`, and `run_batches`, which runs any of them.

Replicas take batches from one queue and keep their results in one store, so that a job that was stopped can go on.
`Presets` makes every batch in every preset. `Trials` chooses one setting for each batch, by a bound on quality.
Jobs are restored slices (`slices.py`), generated images (`images.py`) and the slices of a sweep (`sweep.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cocodiff.config.config import Config
from cocodiff.config.grouping import by_key
from cocodiff.jobs.store import ROWS, Made, Store
from cocodiff_eval.harness.items import Batch, ItemSamples, packed, unpacked
from cocodiff_eval.harness.quality import Bound, CandidateTrial, Figure, Quality, SettingGroup, Slices
from cocodiff_eval.harness.replicas import JobRecord, Queue, Replica

EXACT_RUN = "exact run"  # name of the exact result of a batch that was made in trials
Row = list[Any]  # number of the task, index of the item, and a row of metrics.json


class BatchSettings(NamedTuple):
    """The names of the results that a batch has, and the engine's settings that make each of them."""

    settings: Mapping[str, str]  # for the name of each result, the name of the setting that makes it
    exact: str | None  # name of the result that others are compared with; None to compare with none


class Presets:
    """The usual way to make a job's batches: each in every preset, and in the exact mode if its items are compared.

    A subclass may make units of its own before the batches: `Trials` tries settings, `Volumes` restores slices along
    several axes.
    """

    counts: Sequence[int] = ()  # number of items in each unit made before the batches, but numbered after them
    tried: Collection[int] = ()  # numbers of batches that such units have made; see `made`

    def __init__(self, presets: Mapping[str, Config], exact: str | None) -> None:
        """Take the settings of each preset.

        Args:
            presets: settings by the presets' names.
            exact: name of the mode to compare with, one of the presets or a further mode; None to compare with none.
        """
        self.presets, self.exact = presets, exact

    def run(self, queue: Queue, first: int) -> None:
        """Do the work that a subclass needs before the job's batches, such as tries of settings; here none.

        All ranks call it. The work is divided into units, each with a number in the queue.

        Args:
            queue: the job's queue of units of work, which replicas share.
            first: number of the first of these units.
        """

    def holds(self, number: int, made: Mapping[str, np.ndarray]) -> bool:
        """Return True if the files that a unit of work wrote outside the store are unchanged. A resumed job asks for
        it.

        An exception, such as of a file that is missing, counts as False.

        Args:
            number: index of the unit in `counts`.
            made: arrays of the unit in the store.
        """
        return True

    @property
    def bounds(self) -> list[dict[str, Any]]:
        """The records of a bound on quality and how it was kept, for metrics.json; empty without a bound."""
        return []

    def batch_settings(self, number: int, batch: Batch) -> BatchSettings:
        """Return the results that a batch has and the setting of each.

        Args:
            number: number of the batch.
            batch: the batch.
        """
        names = dict.fromkeys([*self.presets, *([self.exact] if self.exact is not None and batch.compared else ())])
        return BatchSettings({name: name for name in names}, self.exact if self.exact in names else None)

    def made(self, number: int, batch: Batch, settings: Sequence[str]) -> Mapping[str, Sequence[ItemSamples]]:
        """Return the restored samples of a batch that were made before the job's batches, as in a try of settings.

        They are listed by setting, for each item of the batch. It is only called for batches whose number is in
        `tried`.

        Args:
            number: number of the batch.
            batch: the batch.
            settings: names of settings that it was made with.
        """
        raise NotImplementedError("no batch is made before")

    def configs(self, task: int) -> Mapping[str, Config]:
        """Return the engine's settings that a task's results are made with, by the results' names.

        Args:
            task: index of the task.
        """
        return self.presets


@dataclass(frozen=True)
class ItemResult:
    """The results of one item of a job, such as a slice, in the form in which they are stored for a resumed run."""

    rows: list[dict[str, Any]]  # rows of metrics.json, one for each preset
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # restored voxels and others, by the job's names


class JobResult(NamedTuple):
    """The results of all items of a finished job."""

    rows: list[Row]  # on rank 0 the rows of all items, sorted by task and index; empty on others
    bounds: list[dict[str, Any]]  # records of a bound on quality, for metrics.json; empty without a bound
    configs: Mapping[int, Mapping[str, Config]]  # settings of each result, by task and the result's name
    store: Store  # holds the items' arrays
    units: Mapping[tuple[int, int], int]  # number of the unit of the store that holds an item, by its task and index

    def read(self, task: int, index: int, name: str) -> np.ndarray:
        """Return an array of an item from the store.

        Args:
            task: index of the item's task.
            index: index of the item in it.
            name: key in `ItemResult.arrays`.
        """
        return np.asarray(self.store.array(self.units[task, index], f"{index} {name}"))


class Job(ABC):
    """The items that a command makes, such as restored slices or generated images, divided into batches.

    All ranks of a replica make a batch together. Its leader then judges the items and keeps their results.
    """

    unit: str  # plural name of the items, for messages
    batches: Sequence[Batch]  # all batches of the job, the same on every rank and at every start
    way: Presets | None = None  # makes the batches; None for `Presets` itself
    tile_steps: int = 0  # number of denoising steps of all tiles of the job, estimated; 0 if unknown

    def settings(self) -> dict[str, Any]:
        """Return the settings that results depend on but that only the loaded model determines, as plain data. Here
        none."""
        return {}

    def begin(self, first: bool) -> None:
        """Prepare for the batches, after the units of work that precede them. All ranks call it.

        Args:
            first: True on rank 0.
        """
        return

    def watched(self, advance: Callable[[int], None]) -> None:
        """Take the function by which to report progress while batches are made. Here nothing is reported.

        Args:
            advance: takes the number of denoising steps that were done since its last call.
        """
        return

    def steps(self, batch: Batch) -> int:
        """Return the number of denoising steps that a batch takes with each setting, for the progress bar."""
        return 0

    @abstractmethod
    def make(self, settings: Sequence[str], batch: Batch) -> Mapping[str, Sequence[ItemSamples]]:
        """Make a batch with each of some settings of the engine, on all ranks of a replica.

        Return for each setting the samples of the batch's items, in order. On ranks that do not lead the replica the
        lists are empty.

        Args:
            settings: names of settings: presets, candidates of a bound on quality, or the exact run.
            batch: the batch.
        """

    @abstractmethod
    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        """Return the results of one item, on the leader of a replica.

        Args:
            batch: the item's batch.
            place: the item's place in `batch.indices`.
            drawn: the item's samples, by the names of results.
            exact: name of the result to compare with, as in `BatchSettings`.
        """

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the text to print when a batch is finished, "" for none.

        Args:
            rows: rows of metrics.json of the batch's items.
        """
        return ""

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Write the finished job's files, on rank 0. Return further keyword arguments of `session.finish`.

        Args:
            done: the results of all items.
        """
        return {"pictures": ()}

    def groups(self, quality: Quality) -> dict[int, SettingGroup]:
        """Return, by task, the group of items that a bound on quality chooses one setting for.

        By default there is one task, whose items are a batch each, and one group of all items.

        Args:
            quality: the bound and its candidate settings.
        """
        slices = Slices.chosen(len(self.batches), quality.slices, quality.every)
        names = {number: self.name(number) for number in range(len(self.batches))}
        return {0: SettingGroup(self.unit, slices, names, {number: (number,) for number in slices.checks})}

    def name(self, number: int) -> str:
        """Return the name of the item in batch `number`, for jobs whose batches have one item each."""
        return str(number)

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        """Return the figure in dB that a bound on quality limits, for one item. None stands for equal bits.

        It is the PSNR against the exact run, or the PSNR lost against the truth.

        Args:
            bound: the bound on quality.
            batch: the item's batch.
            place: the item's place in `batch.indices`.
            exact: the item's samples in the exact run.
            one: its samples with the setting on trial.
        """
        raise NotImplementedError(f"a bound on quality of {self.unit}")


# How any job is run ---------------------------------------------------------------------------------------------------


def run_batches(
    job: Job,
    way: Presets,
    replica: Replica,
    output: Any,
    settings: Callable[[], dict[str, Any]],
    shows_bar: bool = False,
) -> JobResult:
    """Make, judge and store all results of a job that the store does not have yet. All ranks call it.

    Raise UserError if the store holds results of other settings.

    Args:
        job: the job.
        way: object that decides which settings each batch is made with.
        replica: this rank's replica.
        output: the `OutputFolder`, which has the store.
        settings: returns all settings that results depend on; called on rank 0.
        shows_bar: True to show a progress bar.
    """
    first, batches, store = replica.whole.rank == 0, job.batches, output.store

    def holds(number: int) -> bool:
        """Return False if a unit precedes the batches and its files outside the store are changed."""
        with store.open(number) as made:
            place = number - len(batches)
            return place not in range(len(way.counts)) or way.holds(place, made)

    divided = by_key(((batch.task, batch.indices), n) for n, batch in enumerate(batches) if not batch.whole)
    counts = [*(batch.size for batch in batches), *way.counts, *[0] * len(divided)]
    record = JobRecord(output, settings, counts, job.unit, holds, shows_bar)
    queue = Queue(replica, record, len(batches))
    with queue.bar, torch.no_grad():
        job.watched(queue.bar.advance)
        queue.bar.expect_steps(job.tile_steps // replica.count)
        way.run(queue, len(batches))
        job.begin(first)
        queue.run({number: partial(make_batch, job, queue, way, number) for number in range(len(batches))})
        groups = dict(enumerate(divided.values(), len(counts) - len(divided)))
        queue.run({number: partial(put_together, job, queue, way, parts) for number, parts in groups.items()})
    units = {(batch.task, index): number for number, batch in enumerate(batches) for index in batch.indices}
    units |= {(batches[parts[0]].task, index): n for n, parts in groups.items() for index in batches[parts[0]].indices}
    rows = store.rows(dict.fromkeys(units.values())) if first else []
    configs = {task: way.configs(task) for task in {batch.task for batch in batches}}
    return JobResult(sorted(rows, key=lambda row: row[:2]), way.bounds, configs, store, units)


def make_batch(job: Job, queue: Queue, way: Presets, number: int) -> Made:
    """Make a batch, on all ranks of a replica. Return (name, value) pairs for the store.

    There are none on ranks that do not lead the replica. They are the results of its items, or their samples if other
    batches have further samples of the items.

    Args:
        job: the job.
        queue: the job's queue.
        way: object that decides which settings the batch is made with.
        number: number of the batch.
    """
    batch = job.batches[number]
    settings, exact = way.batch_settings(number, batch)
    wanted, made = [*dict.fromkeys(settings.values())], dict[str, Sequence[ItemSamples]]()
    if number not in way.tried:
        queue.bar.begin(batch.size, job.steps(batch) * len(settings))
        made |= job.make(wanted, batch)
    if not queue.replica.leads:
        return ()
    if number in way.tried:
        made |= way.made(number, batch, wanted)
    drawn = {name: made[setting] for name, setting in settings.items()}
    items = ({name: of[place] for name, of in drawn.items()} for place in range(len(batch.indices)))
    return judged(job, queue, batch, exact, items) if batch.whole else packed(batch, drawn)


def put_together(job: Job, queue: Queue, way: Presets, numbers: Sequence[int]) -> Made:
    """Judge the items whose samples are divided among several batches. Return their results as pairs for the store.

    Args:
        job: the job.
        queue: the job's queue.
        way: object with which the batches were made.
        numbers: numbers of the batches, which have the same items.
    """
    batch = job.batches[numbers[0]]
    items = (unpacked(queue.store, numbers, index) for index in batch.indices)
    return judged(job, queue, batch, way.batch_settings(numbers[0], batch).exact, items)


def judged(
    job: Job, queue: Queue, batch: Batch, exact: str | None, items: Iterable[Mapping[str, ItemSamples]]
) -> Iterator[tuple[str, Any]]:
    """Judge a batch's items one by one. Yield what the store keeps of each as (name, value), then print the job's line.

    Args:
        job: the job.
        queue: the job's queue.
        batch: the batch.
        exact: name of the result to compare with, as in `BatchSettings`.
        items: for each item of the batch all its samples, by the names of results.
    """
    rows: list[dict[str, Any]] = []
    for place, (index, drawn) in enumerate(zip(batch.indices, items, strict=True)):
        found = job.judge(batch, place, drawn, exact)
        rows += found.rows
        yield ROWS, [[batch.task, index, row] for row in found.rows]
        yield from ((f"{index} {name}", array) for name, array in found.arrays.items())
    if told := job.told(rows):
        queue.bar.say(told)


# A bound on quality around it -----------------------------------------------------------------------------------------


class Trials(Presets):
    """The way to make a job's batches for `--quality`: first a setting is chosen by trials, then batches are made.

    A setting is chosen for each group of items (all slices under a mask, or all images). It is the cheapest candidate
    that keeps the bound on quality, tried on some of the group's items. Every batch is made with its group's setting.

    A trial makes some batches with a candidate. Each batch with each candidate is a unit of the job's queue,
    numbered after the batches. So replicas divide trials as they divide batches, and a job that goes on does not repeat
    finished ones. The samples of trials are stored until the job ends. Those with the chosen setting become results.
    """

    def __init__(self, job: Job, quality: Quality, store: Store) -> None:
        """Take a job and the candidate settings for it. Nothing is tried yet.

        Args:
            job: the job.
            quality: the bound and its candidates.
            store: the job's store.
        """
        self.job, self.quality, self.store, self.count = job, quality, store, len(job.batches)
        self.settings = [*quality.candidates]
        self.counts = [batch.size for batch in job.batches] * len(self.settings)
        self.groups: Mapping[int, SettingGroup] = {}

    def number(self, candidate: int, batch: int) -> int:
        """Return the number, in the job's queue, of the unit of work that makes a batch with a candidate.

        Args:
            candidate: index of the candidate setting.
            batch: number of the batch.
        """
        return (1 + candidate) * self.count + batch

    def run(self, queue: Queue, first: int) -> None:
        """Try candidates until each group has a setting, the same on all ranks. All ranks call it.

        Args:
            queue: the job's queue.
            first: not used.
        """
        self.groups, whole = self.job.groups(self.quality), queue.replica.whole
        groups = self._groups()
        while trials := [(group, trial) for group in groups if (trial := group.next(self.quality)) is not None]:
            self._make(trials, queue)
            found = [self._figures(group, trial) for group, trial in (trials if whole.rank == 0 else [])]
            for (group, trial), figures in zip(trials, whole.broadcast_value(found), strict=True):
                group.figures.setdefault(trial.candidate, {}).update(figures)
                if whole.rank == 0:
                    queue.bar.say(f"quality: {group.line(self.quality, trial)}")
        if whole.rank == 0:
            for group in groups:
                queue.bar.say(f"quality: {group.taken_line(self.quality)}")
        batches = [(group, batch) for group in groups for batch in group.batches]
        self.tried = {batch for group, batch in batches if self.number(group.taken, batch) in queue.done}
        queue.expect(range(self.count))

    def _groups(self) -> list[SettingGroup]:
        """Return every group of items once; several tasks may share one."""
        return [*{id(group): group for group in self.groups.values()}.values()]

    @property
    def bounds(self) -> list[dict[str, Any]]:
        return [group.record(self.quality) for group in self._groups()]

    def _setting(self, task: int) -> str:
        """Return the name of the candidate setting that is chosen for a task, which is given by its index."""
        return self.settings[self.groups[task].taken]

    def batch_settings(self, number: int, batch: Batch) -> BatchSettings:
        setting, preset, exact = self._setting(batch.task), self.quality.preset, self.quality.exact
        if number in self.tried:
            return BatchSettings({preset: setting, EXACT_RUN: exact}, EXACT_RUN)
        return BatchSettings({preset: setting}, preset if setting == exact else None)

    def made(self, number: int, batch: Batch, settings: Sequence[str]) -> dict[str, list[ItemSamples]]:
        return {one: [self._samples(one, [number], index) for index in batch.indices] for one in settings}

    def _samples(self, setting: str, numbers: Sequence[int], index: int) -> ItemSamples:
        """Return all samples of an item that were made in trials with one setting.

        Args:
            setting: name of the setting.
            numbers: numbers of the batches that the item's samples are divided among.
            index: the item's index in its task.
        """
        candidate = self.settings.index(setting)
        return unpacked(self.store, [self.number(candidate, number) for number in numbers], index)[setting]

    def configs(self, task: int) -> dict[str, Config]:
        return {self.quality.preset: self.quality.candidates[self._setting(task)]}

    def _make(self, trials: Sequence[tuple[SettingGroup, CandidateTrial]], queue: Queue) -> None:
        """Make the batches of some trials, each with its candidate and the exact setting, unless the store has them.

        Args:
            trials: each trial with the group of items that it is for.
            queue: the job's queue.
        """
        wanted = {
            (batch, candidate)
            for group, trial in trials
            for batch in group.batches_of(trial.slices)
            for candidate in (trial.candidate, len(self.settings) - 1)
        }
        numbers = [self.number(candidate, batch) for batch, candidate in sorted(wanted)]
        queue.expect([*numbers, *range(self.count)])
        queue.run({number: partial(self._try, queue, number) for number in numbers})

    def _try(self, queue: Queue, number: int) -> Made:
        """Make one batch with one candidate setting. Return what the store keeps of it, as (name, value) pairs.

        Args:
            queue: the job's queue.
            number: number of the unit of work, from which the batch and the candidate follow.
        """
        candidate, place = divmod(number - self.count, self.count)
        batch = self.job.batches[place]
        queue.bar.begin(batch.size, self.job.steps(batch))
        return packed(batch, self.job.make([self.settings[candidate]], batch))

    def _figures(self, group: SettingGroup, trial: CandidateTrial) -> dict[int, Figure]:
        """Return the quality and bytes of each item of a trial, by its place in the group.

        Args:
            group: the group of items.
            trial: the candidate that was tried, and the items.
        """
        setting, exact = self.settings[trial.candidate], self.quality.exact
        tried = [(n, *one) for n in group.batches_of(trial.slices) for one in enumerate(group.batches[n])]
        of_items = by_key((place, (number, at)) for number, at, place in tried)
        figures = {}
        for place, parts in sorted(of_items.items()):
            numbers, (_, at) = [number for number, _ in parts], parts[0]
            first = self.job.batches[numbers[0]]
            pair = [self._samples(name, numbers, first.indices[at]) for name in (exact, setting)]
            db = self.job.figure_db(self.quality.bound, first, at, *pair)
            figures[place] = Figure.of(db, pair[1].cost)
        return figures

"""The one interface of jobs: what a job is made of, how it is made, judged and written; and what runs any of them.

Replicas take batches from one queue and keep what they make in one store, another start goes on with it, and a bound on
quality chooses the setting of each batch. Restored slices (`slices.py`), generated images (`images.py`) and the slices
of a sweep (`sweep.py`) are jobs.
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
from cocodiff_eval.harness.quality import Bound, Figure, Group, Quality, Slices, Trial
from cocodiff_eval.harness.replicas import JobRecord, Queue, Replica

EXACT_RUN = "exact run"  # the name of what a batch that was tried is compared with
Row = list[Any]  # task, index and what is reported, by the names of metrics.json


class BatchSettings(NamedTuple):
    """How a batch is made. settings: by the name of each result, the name of the setting that it is made with; exact:
    the name of the result that others are compared with, None where there is none."""

    settings: Mapping[str, str]
    exact: str | None


class Presets:
    """How the batches of a job are made: every one in every preset, and in the exact one if its items are compared.
    `Trials` tries settings first, `Volumes` restores slices along several axes first.

    exact   one of the presets, or one mode more; None to compare with none
    counts  the items of each unit that is made before the batches; these units are numbered after them
    tried   numbers of batches that were made before, which `made` gives
    """

    counts: Sequence[int] = ()
    tried: Collection[int] = ()

    def __init__(self, presets: Mapping[str, Config], exact: str | None) -> None:
        self.presets, self.exact = presets, exact

    def run(self, queue: Queue, first: int) -> None:
        """Make what is made before the batches, on all ranks. first: the number of the first of these units."""

    def holds(self, number: int, made: Mapping[str, np.ndarray]) -> bool:
        """Return True if what lies beside one of these units (`made`) is there; an exception says that it is not."""
        return True

    @property
    def bounds(self) -> list[dict[str, Any]]:
        """How a bound on quality was kept, for metrics.json; none without a bound."""
        return []

    def batch_settings(self, number: int, batch: Batch) -> BatchSettings:
        names = dict.fromkeys([*self.presets, *([self.exact] if self.exact is not None and batch.compared else ())])
        return BatchSettings({name: name for name in names}, self.exact if self.exact in names else None)

    def made(self, number: int, batch: Batch, settings: Sequence[str]) -> Mapping[str, Sequence[ItemSamples]]:
        """Return every item of a batch that was `tried`, with each of some settings."""
        raise NotImplementedError("no batch is made before")

    def configs(self, task: int) -> Mapping[str, Config]:
        """By the names of results, the settings that those of a task are made with."""
        return self.presets


@dataclass(frozen=True)
class ItemResult:
    """What an item turned out to be.

    rows    what is reported of it
    arrays  what is kept of it, by names of the job's own
    """

    rows: list[dict[str, Any]]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class JobResult(NamedTuple):
    """A job that is done.

    rows     on rank 0 what is reported of its items, by task and index
    bounds   how a bound on quality was kept, for metrics.json; none without one
    configs  by tasks and the names of results, the settings that these were made with
    store    what is kept of its items
    units    the unit of each item in the store, by its task and index
    """

    rows: list[Row]
    bounds: list[dict[str, Any]]
    configs: Mapping[int, Mapping[str, Config]]
    store: Store
    units: Mapping[tuple[int, int], int]

    def read(self, task: int, index: int, name: str) -> np.ndarray:
        """Return an array of an item, by the name in its `ItemResult`."""
        with self.store.open(self.units[task, index]) as arrays:
            return np.asarray(arrays[f"{index} {name}"])


class Job(ABC):
    """Items in batches. All ranks of a replica make a batch together; its leader judges and keeps its items.

    unit: what items are called; batches: all of them, the same on every rank and at every start; way: how they are
    made, unless as `Presets` does.
    """

    unit: str
    batches: Sequence[Batch]
    way: Presets | None = None
    tile_steps: int = 0  # about how many denoising steps its tiles take in all; 0 where that is not known

    def settings(self) -> dict[str, Any]:
        """What the results depend on and a loaded model alone tells, as plain data."""
        return {}

    def begin(self, first: bool) -> None:
        """Called on every rank once it is known how batches are made. first: on rank 0, which others wait for."""
        return

    def watched(self, advance: Callable[[int], None]) -> None:
        """advance: to be called with the number of steps that have been done."""
        return

    def steps(self, batch: Batch) -> int:
        """So many steps a batch takes with each setting."""
        return 0

    @abstractmethod
    def make(self, settings: Sequence[str], batch: Batch) -> Mapping[str, Sequence[ItemSamples]]:
        """Every item of a batch with each of some settings; no items on ranks that do not lead their replica."""

    @abstractmethod
    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        """An item, by its place in the batch. drawn: by the names of results; exact: as in `BatchSettings`."""

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """What is said of a batch that is done, by the leader of its replica."""
        return ""

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Called on rank 0 when everything is made. Returns what `session.finish` takes besides the rows."""
        return {"pictures": ()}

    def groups(self, quality: Quality) -> dict[int, Group]:
        """What a bound chooses one setting for, by tasks: all items, where each is a batch and there is one task."""
        slices = Slices.chosen(len(self.batches), quality.slices, quality.every)
        names = {number: self.name(number) for number in range(len(self.batches))}
        return {0: Group(self.unit, slices, names, {number: (number,) for number in slices.checks})}

    def name(self, number: int) -> str:
        """Of an item that has a batch of its own, by the batch's number."""
        return str(number)

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        """As `Bound.keeps` takes it: of an item beside its exact run."""
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
    """Makes, judges and keeps what is missing of a job's results; all ranks call it.

    way: how batches are made; output: the `OutputFolder`, with the store; settings: all that results depend on.
    Raises UserError where those of an earlier start were others.
    """
    first, batches, store = replica.whole.rank == 0, job.batches, output.store

    def holds(number: int) -> bool:
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
    """Make a batch, on all ranks of a replica. Where its items have samples in other batches, samples are its unit."""
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
    """Judge the items whose samples are divided among batches of these numbers."""
    batch = job.batches[numbers[0]]
    items = (unpacked(queue.store, numbers, index) for index in batch.indices)
    return judged(job, queue, batch, way.batch_settings(numbers[0], batch).exact, items)


def judged(
    job: Job, queue: Queue, batch: Batch, exact: str | None, items: Iterable[Mapping[str, ItemSamples]]
) -> Iterator[tuple[str, Any]]:
    """Yield what is saved of a batch's results, item by item, and say what is to be said of it.

    exact: as in `BatchSettings`
    items: all samples of each item of the batch, by the names of results
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
    """Settings of a ladder are tried on some of a job's items until each group has one that keeps the bound; then every
    batch is made with the one that its task's group has chosen.

    Every trial is a unit of the job's queue, numbered after those of results: replicas share trials as they share
    results, and a job that goes on does not repeat those it has finished. What they made is kept until the job ends;
    with the setting that is taken, it is the result. store: of the job.
    """

    def __init__(self, job: Job, quality: Quality, store: Store) -> None:
        self.job, self.quality, self.store, self.count = job, quality, store, len(job.batches)
        self.settings, self.counts = (
            [*quality.candidates],
            [batch.size for batch in job.batches] * len(quality.candidates),
        )
        self.groups: Mapping[int, Group] = {}

    def number(self, candidate: int, batch: int) -> int:
        return (1 + candidate) * self.count + batch

    def run(self, queue: Queue, first: int) -> None:
        """Tries until a setting is chosen for each group, on all ranks alike."""
        self.groups, whole = self.job.groups(self.quality), queue.replica.whole
        groups = self._groups()
        while trials := [(group, trial) for group in groups if (trial := group.next(self.quality)) is not None]:
            self._make(trials, queue)
            found = [self._figures(group, trial) for group, trial in (trials if whole.rank == 0 else [])]
            for (group, trial), figures in zip(trials, whole.broadcast_object(found), strict=True):
                group.figures.setdefault(trial.candidate, {}).update(figures)
                if whole.rank == 0:
                    queue.bar.say(f"quality: {group.line(self.quality, trial)}")
        if whole.rank == 0:
            for group in groups:
                queue.bar.say(f"quality: {group.taken_line(self.quality)}")
        batches = [(group, batch) for group in groups for batch in group.batches]
        self.tried = {batch for group, batch in batches if self.number(group.taken, batch) in queue.done}
        queue.expect(range(self.count))

    def _groups(self) -> list[Group]:
        return [*{id(group): group for group in self.groups.values()}.values()]

    @property
    def bounds(self) -> list[dict[str, Any]]:
        return [group.record(self.quality) for group in self._groups()]

    def _setting(self, task: int) -> str:
        return self.settings[self.groups[task].taken]

    def batch_settings(self, number: int, batch: Batch) -> BatchSettings:
        setting, preset, exact = self._setting(batch.task), self.quality.preset, self.quality.exact
        if number in self.tried:
            return BatchSettings({preset: setting, EXACT_RUN: exact}, EXACT_RUN)
        return BatchSettings({preset: setting}, preset if setting == exact else None)

    def made(self, number: int, batch: Batch, settings: Sequence[str]) -> dict[str, list[ItemSamples]]:
        return {one: [self._samples(one, [number], index) for index in batch.indices] for one in settings}

    def _samples(self, setting: str, numbers: Sequence[int], index: int) -> ItemSamples:
        """Return the samples of an item of some batches that were made in trials of a setting."""
        candidate = self.settings.index(setting)
        return unpacked(self.store, [self.number(candidate, number) for number in numbers], index)[setting]

    def configs(self, task: int) -> dict[str, Config]:
        return {self.quality.preset: self.quality.candidates[self._setting(task)]}

    def _make(self, trials: Sequence[tuple[Group, Trial]], queue: Queue) -> None:
        """Makes what is missing of the batches of some trials, each with the exact setting as well."""
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
        candidate, place = divmod(number - self.count, self.count)
        batch = self.job.batches[place]
        queue.bar.begin(batch.size, self.job.steps(batch))
        return packed(batch, self.job.make([self.settings[candidate]], batch))

    def _figures(self, group: Group, trial: Trial) -> dict[int, Figure]:
        """What a trial has shown, by the places of items in their group."""
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

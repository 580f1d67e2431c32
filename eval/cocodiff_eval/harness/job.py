"""The one interface of jobs: what a job is made of, how it is made, judged and written; and what runs any of them.

Replicas take batches from one queue, a journal tells what is finished, another start goes on with it, and a bound on
quality chooses the setting of each batch. Restored slices (`slices.py`), generated images (`images.py`) and the slices
of a sweep (`sweep.py`) are jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cocodiff.config.config import Config
from cocodiff.config.grouping import by_key
from cocodiff.jobs.journal import Entry
from cocodiff.jobs.replicas import JobRecord, Queue, Replica
from cocodiff.jobs.terminal import reading_bar
from cocodiff_eval.harness.items import Batch, ItemSamples, Parts
from cocodiff_eval.harness.quality import Bound, Figure, Group, Quality, Slices, Trial

EXACT_RUN = "exact run"  # the name of what a batch that was tried is compared with
Row = list[Any]  # task, index and what is reported, by the names of metrics.json


class BatchSettings(NamedTuple):
    """How a batch is made. settings: by the name of each result, the name of the setting that it is made with; exact:
    the name of the result that others are compared with, None where there is none."""

    settings: Mapping[str, str]
    exact: str | None


class Presets:
    """How the batches of a job are made: every one in every preset, and in the exact one if its items are compared.
    `Trials` tries settings first.

    exact: one of the presets, or one mode more; None to compare with none. kept: the numbers of batches that are made
    before, and only have to be judged and written.
    """

    kept: frozenset[int] = frozenset()

    def __init__(self, presets: Mapping[str, Config], exact: str | None) -> None:
        self.presets, self.exact = presets, exact

    @property
    def records(self) -> list[dict[str, Any]]:
        """How a bound on quality was kept, for metrics.json; none without a bound."""
        return []

    def of(self, batch: Batch) -> BatchSettings:
        names = dict.fromkeys([*self.presets, *([self.exact] if self.exact is not None and batch.compared else ())])
        return BatchSettings({name: name for name in names}, self.exact if self.exact in names else None)

    def made(self, batches: Sequence[Batch], index: int) -> tuple[str | None, dict[str, ItemSamples]]:
        """What an item of batches that are `kept` is compared with, and all its samples."""
        raise NotImplementedError("no batch is made before")

    def configs(self, task: int) -> Mapping[str, Config]:
        """By the names of results, the settings that those of a task are made with."""
        return self.presets

    def names(self, batch: Batch) -> list[str]:
        """Of a batch's results."""
        return [*self.of(batch).settings]


class Stage(ABC):
    """What is made before the batches of a job, in parts of so many items (`counts`), numbered after them."""

    counts: Sequence[int]

    @abstractmethod
    def run(self, queue: Queue, first: int) -> None:
        """Makes it, on all ranks. first: the queue's number of the first part."""

    @abstractmethod
    def holds(self, number: int, sums: Sequence[int]) -> bool:
        """Whether what an earlier start has made of a part is there, with these checksums. As of `Job.holds`."""


@dataclass(frozen=True)
class ItemResult:
    """What an item turned out to be. rows: what is reported of it; result: what is written of it."""

    rows: list[dict[str, Any]]
    result: Any = None


class JobResult(NamedTuple):
    """A job that is done. rows: on rank 0 what is reported of its items, by task and index; bounds: how a bound on
    quality was kept, for metrics.json, none without one; configs: by tasks and the names of results, the settings that
    these were made with."""

    rows: list[Row]
    bounds: list[dict[str, Any]]
    configs: Mapping[int, Mapping[str, Config]]


class Job(ABC):
    """Items in batches. All ranks of a replica make a batch together; its leader judges and writes its items.

    unit: what items are called; batches: all of them, the same on every rank and at every start; before: of them.
    """

    unit: str
    batches: Sequence[Batch]
    before: Stage | None = None

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

    @abstractmethod
    def write(self, batch: Batch, place: int, result: Any) -> None:
        """Puts what `judge` gave of an item on the disk."""

    def sums(self, batch: Batch) -> list[int]:
        """Checksums of a batch's results, as they are on the disk."""
        return []

    def holds(self, batch: Batch, sums: Sequence[int]) -> bool:
        """Whether an earlier start's results are there, with these checksums. Any exception says that they are not."""
        return self.sums(batch) == sums

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """What is said of a batch that is done, by the leader of its replica."""
        return ""

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Called on all ranks when everything is made. Returns what `session.finish` takes besides the rows."""
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
    """Makes, judges and writes what is missing of a job's results; all ranks call it.

    way: how batches are made; output: the `OutputFolder`, with the journals; settings: all that results depend on.
    Raises UserError where those of an earlier start were others.
    """
    first, batches = replica.whole.rank == 0, job.batches
    before: Stage | None = way if isinstance(way, Trials) else job.before  # never both, as `volume_of` says
    parts = Parts(output.journals.folder / "samples")

    def is_whole(entry: Entry) -> bool:
        number, sums = entry.number, entry.sums
        try:
            if number >= len(batches):
                return before is not None and before.holds(number - len(batches), sums)
            batch = batches[number]
            return job.holds(batch, sums) if batch.whole else parts.holds(batch, way.names(batch))
        except Exception:  # numpy, zipfile, json and each format raise kinds of their own for a damaged file
            return False

    counts = [*(batch.size for batch in batches), *(before.counts if before is not None else ())]
    record = JobRecord(output, settings, counts, job.unit, is_whole, shows_bar)
    with Queue(replica, record, len(batches)) as queue, torch.no_grad():
        job.watched(queue.bar.advance)
        if before is not None:
            before.run(queue, len(batches))
        if first:
            parts.folder.mkdir(exist_ok=True)
        job.begin(first)
        replica.whole.broadcast_object(None)  # the files are there
        make_batches(job, queue, way, parts)
    rows = queue.rows(range(len(batches))) + put_together(job, way, parts, reading_bar(shows_bar)) if first else []
    configs = {task: way.configs(task) for task in {batch.task for batch in batches}}
    return JobResult(sorted(rows, key=lambda row: row[:2]), way.records, configs)


def make_batches(job: Job, queue: Queue, way: Presets, parts: Parts) -> None:
    """The batches that this replica takes. What has samples in other batches is kept in `parts` until all are there."""
    for number in queue.take([number for number in range(len(job.batches)) if number not in way.kept]):
        batch = job.batches[number]
        settings, exact = way.of(batch)
        queue.begin(batch.size, job.steps(batch) * len(settings))
        made = job.make([*dict.fromkeys(settings.values())], batch)
        if not queue.replica.leads:
            continue
        drawn = {name: made[setting] for name, setting in settings.items()}
        if not batch.whole:
            parts.keep(batch, drawn)
            queue.add(number, [])
            continue
        rows = []
        for place in range(len(batch.indices)):
            rows += finish_item(job, batch, place, {name: items[place] for name, items in drawn.items()}, exact)
        queue.add(number, rows, job.sums(batch))
        if told := job.told([row for *_, row in rows]):
            queue.bar.say(told)


def finish_item(job: Job, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> list[Row]:
    """Judges and writes an item whose samples are all there."""
    judged = job.judge(batch, place, drawn, exact)
    job.write(batch, place, judged.result)
    return [[batch.task, batch.indices[place], row] for row in judged.rows]


def put_together(job: Job, way: Presets, parts: Parts, progress: Callable[..., Any]) -> list[Row]:
    """On rank 0, when all batches are done: the items whose samples were divided, and those that were made before."""
    left = [(number in way.kept, batch) for number, batch in enumerate(job.batches)]
    groups = by_key(((batch.task, batch.indices, kept), batch) for kept, batch in left if kept or not batch.whole)
    divided, rows = [*groups.items()], []
    for number in progress(range(len(divided)), f"putting {job.unit} together"):
        (*_, kept), batches = divided[number]
        for place, index in enumerate(batches[0].indices):
            if kept:
                exact, drawn = way.made(batches, index)
            else:
                exact, drawn = way.of(batches[0]).exact, parts.merged(batches, index)
            rows += finish_item(job, batches[0], place, drawn, exact)
    return rows


# A bound on quality around it -----------------------------------------------------------------------------------------


class Trials(Presets, Stage):
    """Settings of a ladder are tried on some of a job's items until each group has one that keeps the bound; then every
    batch is made with the one that its task's group has chosen.

    Every trial is a batch of the job's queue, numbered after those of results: replicas share trials as they share
    results, and a job that goes on does not repeat those it has finished. What they made is kept until the job ends;
    with the setting that is taken, it is the result. folder: of the job's journals.
    """

    def __init__(self, job: Job, quality: Quality, folder: Path) -> None:
        self.job, self.quality, self.count = job, quality, len(job.batches)
        self.settings, self.counts = [*quality.rungs], [batch.size for batch in job.batches] * len(quality.rungs)
        self.parts = {name: Parts(folder / f"trials-{number}") for number, name in enumerate(self.settings)}
        self.groups: Mapping[int, Group] = {}

    def names(self, batch: Batch) -> list[str]:
        return [self.quality.preset]

    def number(self, rung: int, batch: int) -> int:
        return (1 + rung) * self.count + batch

    def holds(self, number: int, sums: Sequence[int]) -> bool:
        rung, batch = divmod(number, self.count)
        return self.parts[self.settings[rung]].holds(self.job.batches[batch], [self.settings[rung]])

    def run(self, queue: Queue, first: int) -> None:
        """Tries until a setting is chosen for each group, on all ranks alike."""
        self.groups, whole = self.job.groups(self.quality), queue.replica.whole
        groups = self._groups()
        if whole.rank == 0:
            for parts in self.parts.values():
                parts.folder.mkdir(exist_ok=True)
        whole.broadcast_object(None)  # the folders are there
        while trials := [(group, trial) for group in groups if (trial := group.next(self.quality)) is not None]:
            self._make(trials, queue)
            found = [self._figures(group, trial) for group, trial in (trials if whole.rank == 0 else [])]
            for (group, trial), figures in zip(trials, whole.broadcast_object(found), strict=True):
                group.figures.setdefault(trial.rung, {}).update(figures)
                if whole.rank == 0:
                    queue.bar.say(f"quality: {group.line(self.quality, trial)}")
        if whole.rank == 0:
            for group in groups:
                queue.bar.say(f"quality: {group.taken_line(self.quality)}")
        self.kept = frozenset(
            batch for group in groups for batch in group.batches if queue.is_done(self.number(group.taken, batch))
        )
        queue.expect([batch for batch in range(self.count) if batch not in self.kept])

    def _groups(self) -> list[Group]:
        return [*{id(group): group for group in self.groups.values()}.values()]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [group.record(self.quality) for group in self._groups()]

    def _setting(self, task: int) -> str:
        return self.settings[self.groups[task].taken]

    def of(self, batch: Batch) -> BatchSettings:
        setting, preset = self._setting(batch.task), self.quality.preset
        return BatchSettings({preset: setting}, preset if setting == self.quality.exact else None)

    def made(self, batches: Sequence[Batch], index: int) -> tuple[str | None, dict[str, ItemSamples]]:
        settings = {self.quality.preset: self._setting(batches[0].task), EXACT_RUN: self.quality.exact}
        drawn = {name: self.parts[one].merged(batches, index)[one] for name, one in settings.items()}
        return EXACT_RUN, drawn

    def configs(self, task: int) -> dict[str, Config]:
        return {self.quality.preset: self.quality.rungs[self._setting(task)]}

    def _make(self, trials: Sequence[tuple[Group, Trial]], queue: Queue) -> None:
        """Makes what is missing of the batches of some trials, each with the exact setting as well."""
        wanted = {
            (batch, rung)
            for group, trial in trials
            for batch in group.batches_of(trial.slices)
            for rung in (trial.rung, len(self.settings) - 1)
        }
        numbers = [self.number(rung, batch) for batch, rung in sorted(wanted)]
        queue.expect([*numbers, *range(self.count)])
        for number in queue.take(numbers):
            rung, place = divmod(number - self.count, self.count)
            batch, setting = self.job.batches[place], self.settings[rung]
            queue.begin(batch.size, self.job.steps(batch))
            drawn = self.job.make([setting], batch)
            if queue.replica.leads:
                self.parts[setting].keep(batch, drawn)
                queue.add(number, [])

    def _figures(self, group: Group, trial: Trial) -> dict[int, Figure]:
        """What a trial has shown, by the places of items in their group."""
        setting, exact = self.settings[trial.rung], self.quality.exact
        tried = [(n, *one) for n in group.batches_of(trial.slices) for one in enumerate(group.batches[n])]
        of_items = by_key((place, (self.job.batches[number], at)) for number, at, place in tried)
        figures = {}
        for place, parts in sorted(of_items.items()):
            batches, (first, at) = [batch for batch, _ in parts], parts[0]
            pair = [self.parts[name].merged(batches, first.indices[at])[name] for name in (exact, setting)]
            db = self.job.figure_db(self.quality.bound, first, at, *pair)
            figures[place] = Figure.of(db, pair[1].cost)
        return figures

"""The one interface of jobs: what a job is made of, how it is made, judged and written.

`running.run_batches` runs any of them: replicas take batches from one queue, a journal tells what is finished, another
start goes on with it, and a bound on quality chooses the setting of each batch. Restored slices (`slices.py`),
generated images (`images.py`) and the slices of a sweep (`sweep.py`) are jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cocodiff.config.config import Config
from cocodiff.jobs.replicas import Queue
from cocodiff_eval.harness.items import Batch, ItemSamples
from cocodiff_eval.harness.quality import Bound, Group, Quality, Slices

Row = list[Any]  # task, index and what is reported, by the names of metrics.json


class BatchSettings(NamedTuple):
    """How a batch is made. settings: by the name of each result, the name of the setting that it is made with; exact:
    the name of the result that others are compared with, None where there is none."""

    settings: Mapping[str, str]
    exact: str | None


class Presets:
    """How the batches of a job are made: every one in every preset, and in the exact one if its items are compared.
    `running.Trials` tries settings first.

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

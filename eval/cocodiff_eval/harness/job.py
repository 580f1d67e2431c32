"""The one interface of jobs: what a job is made of, how it is made, judged and written.

`running.run_batches` runs any of them: replicas take batches from one queue, a journal tells what is finished, another
start goes on with it, and a bound on quality chooses the setting of each batch. Restored slices (`slices.py`),
generated images (`images.py`) and the slices of a sweep (`sweep.py`) are jobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from cocodiff_eval.harness.bound import Bound, Slices
from cocodiff_eval.harness.items import Batch
from cocodiff_eval.harness.quality import Group

if TYPE_CHECKING:
    from cocodiff.config.config import Config
    from cocodiff.jobs.replicas import Queue, Replica
    from cocodiff_eval.harness.items import ItemSamples
    from cocodiff_eval.harness.quality import Quality


B = TypeVar("B", bound=Batch)
Row = list[Any]  # task, index and what is reported, by the names of metrics.json


class BatchSettings(NamedTuple):
    """How a batch is made. settings: by the name of each result, the name of the setting that it is made with; exact:
    the name of the result that others are compared with, None where there is none."""

    settings: Mapping[str, str]
    exact: str | None


class BatchPolicy(ABC):
    """How the batches of a job are made: in the presets as they are asked for (`running.Presets`), or in settings that
    are tried first (`trials.Trials`). tried: so many settings may be tried on each batch; kept: the numbers of batches
    that are made by then, and only have to be judged and written."""

    tried: int = 0
    kept: frozenset[int] = frozenset()

    def choose(self, queue: Queue, replica: Replica) -> None:
        """All ranks call it before batches are made; what follows is known, but for `names` and `holds`, after it."""
        return

    @property
    def records(self) -> list[dict[str, Any]]:
        """How a bound on quality was kept, for metrics.json; none without a bound."""
        return []

    @abstractmethod
    def of(self, batch: Any) -> BatchSettings:
        """Maps a batch to its modes."""

    def made(self, batches: Sequence[Batch], index: int) -> tuple[BatchSettings, dict[str, ItemSamples]]:
        """An item of batches that are `kept`, whose samples they are."""
        raise NotImplementedError("no batch is made before")

    @abstractmethod
    def configs(self, task: int) -> Mapping[str, Config]:
        """By the names of results, the settings that those of a task are made with."""

    @abstractmethod
    def names(self, batch: Batch) -> list[str]:
        """Of a batch's results."""

    def holds(self, number: int) -> bool:
        """Whether what an earlier start has made in a trial is there, whole; number: of its entry in the journals."""
        return False


@dataclass(frozen=True)
class ItemResult:
    """What an item turned out to be. rows: what is reported of it; result: what is written of it."""

    rows: list[dict[str, Any]]
    result: Any = None


class JobResult(NamedTuple):
    """A job that is done. rows: on rank 0 what is reported of its items, by task and index; bounds: how a bound on
    quality was kept, for metrics.json, none without one."""

    rows: list[Row]
    bounds: list[dict[str, Any]]


class Job(ABC, Generic[B]):
    """Items in batches. All ranks of a replica make a batch together; its leader judges and writes its items.

    unit: what items are called; batches: all of them, the same on every rank and at every start; before: what is made
    before any batch, how many items each.
    """

    unit: str
    batches: Sequence[B]
    before: Sequence[int] = ()

    def settings(self) -> dict[str, Any]:
        """What the results depend on, beside the settings of the command, as plain data."""
        return {}

    def make_before(self, queue: Queue, first: int) -> None:
        """Makes what batches need, on all ranks. first: the queue's number of the first of `before`."""
        return

    def holds_before(self, number: int) -> bool:
        """Whether what an earlier start has made of `before` is there, whole."""
        return False

    def begin(self, way: BatchPolicy, first: bool) -> None:
        """Called on every rank once it is known how batches are made. first: on rank 0, which others wait for."""
        return

    def watched(self, advance: Callable[[int], None]) -> None:
        """advance: to be called with the number of steps that have been done."""
        return

    def steps(self, batch: B) -> int:
        """So many steps a batch takes with each setting."""
        return 0

    @abstractmethod
    def make(self, settings: Sequence[str], batch: B) -> Mapping[str, Sequence[ItemSamples]]:
        """Every item of a batch with each of some settings; no items on ranks that do not lead their replica."""

    @abstractmethod
    def judge(self, batch: B, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        """An item, by its place in the batch. drawn: by the names of results; exact: as in `BatchSettings`."""

    @abstractmethod
    def write(self, batch: B, place: int, result: Any) -> None:
        """Puts what `judge` gave of an item on the disk."""

    def sums(self, batch: B) -> list[int]:
        """Checksums of a batch's results, as they are on the disk."""
        return []

    def holds(self, batch: B, sums: Sequence[int]) -> bool:
        """Whether an earlier start's results are there as they were written, with these checksums. Any exception says
        that they are not."""
        return self.sums(batch) == sums

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """What is said of a batch that is done, by the leader of its replica."""
        return ""

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Called on all ranks when everything is made. Returns what `session.finish` takes besides the rows."""
        return {"pictures": ()}

    def groups(self, quality: Quality) -> dict[int, Group]:
        """What a bound on quality chooses one setting for, by the numbers of tasks: all items, where each has a batch
        of its own and there is one task."""
        slices = Slices.chosen(len(self.batches), quality.slices, quality.every)
        names = {number: self.name(number) for number in range(len(self.batches))}
        return {0: Group(self.unit, slices, names, {number: (number,) for number in slices.checks})}

    def name(self, number: int) -> str:
        """Of an item that has a batch of its own, by the batch's number."""
        return str(number)

    def figure_db(self, bound: Bound, batch: B, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        """As `Bound.keeps` takes it: of an item beside its exact run."""
        raise NotImplementedError(f"a bound on quality of {self.unit}")

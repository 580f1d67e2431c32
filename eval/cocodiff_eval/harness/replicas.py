"""The replicas of a job: sets of ranks, each of which takes the next unit of work when it is free.

`Queue` divides a job's units among replicas. `JobRecord` begins or continues the job's store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import detect
from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.jobs.folder import OutputFolder, storage_faults
from cocodiff.jobs.record import first_difference
from cocodiff.jobs.store import Made
from cocodiff.jobs.terminal import JobBar, reading_bar, say
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes

VISIBLE_S = 10.0  # seconds that a shared file system may take to show a new file on another host


def topology_of(machine: str, ranks: int) -> Topology:
    """Return the places of a job's ranks on a machine.

    Args:
        machine: the machine's name or file.
        ranks: number of ranks.
    """
    return Topology.build(load_machine(machine), ranks, detect().local_size)


def axes_of(machine: str, ranks: int, replicas: int, guidance: int = 1) -> Axes:
    """Return the division of a job's ranks into replicas, and of each replica into parts for guidance's branches.

    Raise UserError for numbers that do not divide the ranks.

    Args:
        machine: the machine's name or file.
        ranks: number of all ranks.
        replicas: number of replicas.
        guidance: number of parts of each replica.
    """
    return Axes.build(topology_of(machine, ranks), replica=replicas, guidance=guidance)


def topology_of_replica(values: dict[str, Any], ranks: int, replicas: int) -> Topology:
    """Return the places of the first replica's ranks on the machine.

    Args:
        values: options by name, of which `machine` is read.
        ranks: number of all ranks.
        replicas: number of replicas.
    """
    axes = axes_of(values["machine"], ranks, replicas)
    return axes.topology.part(axes.replica(0))


class Replica:
    """The replica that this rank belongs to: a set of ranks that makes images or slices of its own.

    whole      The connections to all ranks.
    count      The number of replicas.
    number     The number of this replica, from 0.
    transport  The connections to this replica's ranks.
    topology   The places of this replica's ranks.
    leads      True on the one rank of the replica that claims units of work and saves them.
    """

    def __init__(self, whole: Any, machine: str, replicas: int) -> None:
        """Divide all ranks into replicas. Raise UserError if that does not go evenly.

        Args:
            whole: this rank's connection to all ranks.
            machine: name or file of the machine.
            replicas: number of replicas.
        """
        self.whole, self.count = whole, replicas
        axes = axes_of(machine, whole.size, replicas)
        self.number = axes.coordinates(whole.rank).replica
        ranks = axes.replica(whole.rank)
        self.transport: Any = whole if replicas == 1 else whole.part(ranks)
        self.topology = axes.topology.part(ranks)
        self.leads = self.transport.rank == 0

    def splits_weights(self, split: tuple[str, int | None], parts: int) -> Callable[[Sequence[Any]], Any]:
        """Return the function by which `load_model` divides transformers' weights among this replica's ranks.

        It takes a list of models and returns the object that gathers their weights (`split_for_good`).

        Args:
            split: the ranks that share a block's weights ("card" or "node"), and the number of such blocks; None for
                all.
            parts: number of parts of the replica that compute a guidance branch each.
        """
        from cocodiff.engine.weights import split_for_good

        return partial(split_for_good, topology=self.topology, transport=self.transport, split=split, parts=parts)

    def say_ready(self, started: float) -> None:
        """Print the number of ranks and replicas, and the time since the command began.

        Args:
            started: value of `time.monotonic()` when the command began.
        """
        in_replicas = f" in {self.count} replicas" if self.count > 1 else ""
        say(f"{self.whole.size} rank(s){in_replicas} ready after {time.monotonic() - started:.1f} s")

    def take(self, numbers: Sequence[int], claim: Callable[[int], bool]) -> Iterator[int]:
        """Yield the numbers of the units of work that this replica is to do, one at a time.

        All its ranks iterate together. With several replicas, each unit is claimed by the leader when it is asked for.

        Args:
            numbers: numbers of all units that are to be done, in order.
            claim: function that claims the unit with a number; it returns False if another replica has claimed it.
        """
        if self.count == 1:
            yield from numbers
            return
        free = iter(numbers)
        while True:
            own = next((number for number in free if claim(number)), None) if self.leads else None
            number = self.transport.broadcast_value(own)
            if number is None:
                return
            yield number

    def check_shared(self, folder: Path, out: str, patience_s: float = VISIBLE_S) -> None:
        """Raise UserError on every rank if the leader of a replica does not see a folder that rank 0 has made.

        All ranks call it. With one replica nothing is checked.

        Args:
            folder: the folder that rank 0 has made.
            out: value of the option `out`, for the error.
            patience_s: seconds that a leader waits for it.
        """
        if self.count == 1:
            return
        seen = self.whole.all_gather_values(not self.leads or _appears(folder, patience_s))
        blind = [rank for rank, saw in enumerate(seen) if not saw]
        if blind:
            unseen = f"rank(s) {', '.join(map(str, blind))} do not see what rank 0 writes there"
            raise UserError(f"--out {out}: {unseen}: choose a folder that all hosts share, or --replicas 1")


def _appears(folder: Path, patience_s: float) -> bool:
    """Wait until a folder exists, for at most `patience_s` seconds. Return True if it does."""
    deadline = time.monotonic() + patience_s
    while not folder.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Queue:
    """The units of work of a job, which replicas take one by one. Units that an earlier start has finished are left
    out.

    Every rank has one. All ranks call `run`, or iterate over `take`.

    store  The job's store.
    done   The numbers of finished units: those of an earlier start, and those of each `take` that has ended.
    bar    The job's progress bar.
    """

    def __init__(self, replica: Replica, record: JobRecord, expected: int) -> None:
        """Begin the job's store on rank 0, or continue it. All ranks call it.

        Raise UserError if the store was begun with other settings, or is not visible to all replicas.

        Args:
            replica: this rank's replica, the ranks that make units of work together.
            record: the job's units and settings.
            expected: number of units, from the first on, that are sure to be needed. They set the progress bar's total
                until `expect` is called.
        """
        self.replica, self._counts, self.store = replica, record.counts, record.output.store
        total, whole = sum(self._counts[:expected]), replica.whole
        if whole.rank == 0:
            record.begin(total)
        begun = (self.store.finished(), self.store.open_claims()) if whole.rank == 0 else None
        self.done, claims = whole.broadcast_value(begun)
        replica.check_shared(self.store.folder / claims, record.output.out)
        self._claim = partial(self.store.claim, claims)
        self.bar = JobBar(total, record.unit, record.done, record.shows_bar)

    def take(self, numbers: Sequence[int]) -> Iterator[int]:
        """Yield the numbers of the units of work that this replica is to do, without those that are finished already.

        It ends when all the given units are done on all replicas. All ranks iterate together.

        Args:
            numbers: numbers of units of work, in order.
        """
        missing = [number for number in numbers if number not in self.done]
        yield from self.replica.take(missing, self._claim)
        # Rank 0's bar goes on until all replicas are done. The others wait too, since they read all results next.
        self.replica.whole.reduce_values(None, len, "the end of units of work")
        self.done |= {*numbers}

    def expect(self, numbers: Sequence[int]) -> None:
        """Correct the job's size, for the progress bar and the store, once it is known which units are needed.

        All ranks call it.

        Args:
            numbers: numbers of all units that are needed, besides those that are done.
        """
        self.bar.total = sum(self._counts[number] for number in {*numbers, *self.done})
        if self.replica.whole.rank == 0:
            self.store.expect(self.bar.total)

    def run(self, units: Mapping[int, Callable[[], Made]]) -> None:
        """Make and save the units that this replica is to do. Return when all units given are done on all replicas.

        All ranks call it.

        Args:
            units: for each unit's number, the function that makes it, on all ranks of a replica. What it returns on the
                leader is saved.
        """
        for number in self.take([*units]):
            made = units[number]()
            if self.replica.leads:
                self.add(number, made)

    def add(self, number: int, made: Made) -> None:
        """Save the results of a unit of work in the job's store. Raise OwnRankError if the disk is full or fails.

        Args:
            number: number of the unit.
            made: its results, (name, value) pairs as `Store.add` takes them.
        """
        with storage_faults(f"a file of {self.store.folder}"):
            self.store.add(number, made)
        self.bar.begin(0, 0)


@dataclass(frozen=True)
class JobRecord:
    """The units of work of a job and the settings that its results depend on, with the store that keeps both."""

    output: OutputFolder  # the folder of results, whose hidden folder has the store
    settings: Callable[[], dict[str, Any]]  # returns all settings that results depend on; called on rank 0
    counts: Sequence[int]  # number of items in each unit
    unit: str  # plural name of the items
    holds: Callable[[int], bool]  # takes a unit's number; False if files that it wrote outside the store changed
    shows_bar: bool  # True to show progress bars

    def begin(self, total: int) -> None:
        """Begin the job's store, or continue that of an earlier start without its damaged units.

        Print what is continued. Raise UserError, with the first setting that differs, if the store is of other
        settings.

        Args:
            total: number of items that the job has as far as is known.
        """
        store, settings = self.output.store, self.settings()
        header = store.header()
        found = first_difference(header["settings"], settings) if header is not None else None
        if found is not None:
            told = "{}: {} there, {} now".format(*found)
            remedy = "--resume goes on with the same ones; start afresh with --overwrite"
            raise UserError(f"--out {self.output.out}: the run that did not end had other settings ({told}): {remedy}")
        if header is None:
            store.begin(settings, self.counts, total, self.unit, self.output.overwrite)
        self._drop_what_is_gone()
        if self.output.resume:
            kept = store.kept()
            say(f"going on: {kept} are there already" if kept else "nothing to resume: starting afresh")

    def _drop_what_is_gone(self) -> None:
        """Remove units of work from the store that are damaged or not of this job. Print that they are done again."""
        store, known = self.output.store, range(len(self.counts))
        found = sorted(store.finished())
        order = reading_bar(self.shows_bar)(range(len(found)), "checking results")
        lost = [n for n in (found[place] for place in order) if n not in known or not store.is_whole(n, self.holds)]
        for number in lost:
            store.drop(number)
        if lost:
            say(f"results of {len(lost)} finished batch(es) are damaged or gone: these are done again")

    def done(self) -> int:
        """Return the number of items, such as slices, that are finished by now, on all replicas."""
        return sum(self.counts[number] for number in self.output.store.finished())

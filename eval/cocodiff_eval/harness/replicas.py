"""Replicas: sets of ranks that each take the next batch of a job when they are free, and write what they finish."""

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

VISIBLE_S = 10.0  # what a shared file system may take to show a new file on another host


def topology_of(machine: str, ranks: int) -> Topology:
    return Topology.build(load_machine(machine), ranks, detect().local_size)


def axes_of(machine: str, ranks: int, replicas: int, guidance: int = 1) -> Axes:
    """Raises UserError for replicas that do not divide the ranks."""
    return Axes.build(topology_of(machine, ranks), replica=replicas, guidance=guidance)


def topology_of_replica(values: dict[str, Any], ranks: int, replicas: int) -> Topology:
    """Where the ranks of the first replica sit."""
    axes = axes_of(values["machine"], ranks, replicas)
    return axes.topology.part(axes.replica(0))


class Replica:
    """This rank's replica. transport: of its ranks; leads: whether this rank claims batches and writes."""

    def __init__(self, whole: Any, machine: str, replicas: int) -> None:
        from cocodiff.comm.transport import SubTransport  # torch

        self.whole, self.count = whole, replicas
        axes = axes_of(machine, whole.size, replicas)
        self.number = axes.coordinates(whole.rank).replica
        ranks = axes.replica(whole.rank)
        self.transport: Any = whole if replicas == 1 else SubTransport(whole, ranks)
        self.topology = axes.topology.part(ranks)
        self.leads = self.transport.rank == 0

    def splits_weights(self, split: tuple[str, int | None], parts: int) -> Callable[[Sequence[Any]], None]:
        """What splits models' weights among these ranks, see `Config.split`. parts: of guidance."""
        from cocodiff.engine.weights import split_for_good

        return partial(split_for_good, topology=self.topology, transport=self.transport, split=split, parts=parts)

    def say_ready(self, started: float) -> None:
        """started: `time.monotonic()` when the command began."""
        in_replicas = f" in {self.count} replicas" if self.count > 1 else ""
        say(f"{self.whole.size} rank(s){in_replicas} ready after {time.monotonic() - started:.1f} s")

    def take(self, numbers: Sequence[int], claim: Callable[[int], bool]) -> Iterator[int]:
        """The units that this replica is to do, each when it is asked for. All its ranks ask together."""
        if self.count == 1:
            yield from numbers
            return
        free = iter(numbers)
        while True:
            own = next((number for number in free if claim(number)), None) if self.leads else None
            number = self.transport.broadcast_object(own)
            if number is None:
                return
            yield number

    def check_shared(self, folder: Path, out: str, patience_s: float = VISIBLE_S) -> None:
        """All ranks call it. Raises UserError where a leader does not see a folder of rank 0 within `patience_s`."""
        if self.count == 1:
            return
        seen = self.whole.values_of_all(not self.leads or _appears(folder, patience_s))
        blind = [rank for rank, saw in enumerate(seen) if not saw]
        if blind:
            unseen = f"rank(s) {', '.join(map(str, blind))} do not see what rank 0 writes there"
            raise UserError(f"--out {out}: {unseen}: choose a folder that all hosts share, or --replicas 1")


def _appears(folder: Path, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not folder.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Queue:
    """The units of a job, which replicas take one by one; those that an earlier start has finished are left out.

    All ranks make one, and each iterates over the numbers of the units that its replica takes. The leader of the
    replica calls `add` with what a unit has made. done: what an earlier start has done, or `take` has ended with.
    """

    def __init__(self, replica: Replica, record: JobRecord, expected: int) -> None:
        """expected: how many units, the first, are to be done by now. Raises UserError for other settings."""
        self.replica, self._counts, self.store = replica, record.counts, record.output.store
        total, whole = sum(self._counts[:expected]), replica.whole
        if whole.rank == 0:
            record.begin(total)
        begun = (self.store.finished(), self.store.open_claims()) if whole.rank == 0 else None
        self.done, claims = whole.broadcast_object(begun)
        replica.check_shared(self.store.folder / claims, record.output.out)
        self._claim = partial(self.store.claim, claims)
        self.bar = JobBar(total, record.unit, record.done, record.shows_bar)

    def take(self, numbers: Sequence[int]) -> Iterator[int]:
        """Those of some units that this replica is to do; it ends when all of them are done, on all replicas."""
        missing = [number for number in numbers if number not in self.done]
        yield from self.replica.take(missing, self._claim)
        self.replica.whole.gather_object(None)  # the bar goes on until all replicas are done
        self.done |= {*numbers}

    def expect(self, numbers: Sequence[int]) -> None:
        """All ranks say which units are still to be done, of those that may be."""
        self.bar.total = sum(self._counts[number] for number in {*numbers, *self.done})
        if self.replica.whole.rank == 0:
            self.store.expect(self.bar.total)

    def run(self, units: Mapping[int, Callable[[], Made]]) -> None:
        """Make and save those of some units that this replica is to do; all are done when it returns.

        units: by number what makes a unit, on all ranks of a replica. What its leader returns is saved.
        """
        for number in self.take([*units]):
            made = units[number]()
            if self.replica.leads:
                self.add(number, made)

    def add(self, number: int, made: Made) -> None:
        """Save what a unit has made, as `Store.add`. Raise OwnRankError where the disk is full or fails."""
        with storage_faults(f"a file of {self.store.folder}"):
            self.store.add(number, made)
        self.bar.begin(0, 0)


@dataclass(frozen=True)
class JobRecord:
    """The units of a job in the hidden folder of its results, beside all that the results depend on.

    settings: what the results depend on, and holds, whether what lies elsewhere of a unit is still there as it was
    written: both asked for on rank 0; counts: the items (`unit`) of each unit of work."""

    output: OutputFolder
    settings: Callable[[], dict[str, Any]]
    counts: Sequence[int]
    unit: str
    holds: Callable[[int], bool]
    shows_bar: bool

    def begin(self, total: int) -> None:
        """Raises UserError for the first setting in which a job to go on with differs."""
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
        """Remove the units of which something is damaged or gone, which are done again."""
        store, known = self.output.store, range(len(self.counts))
        found = sorted(store.finished())
        order = reading_bar(self.shows_bar)(range(len(found)), "checking results")
        lost = [n for n in (found[place] for place in order) if n not in known or not store.is_whole(n, self.holds)]
        for number in lost:
            store.drop(number)
        if lost:
            say(f"results of {len(lost)} finished batch(es) are damaged or gone: these are done again")

    def done(self) -> int:
        """Return how many items are finished by now, on all replicas."""
        return sum(self.counts[number] for number in self.output.store.finished())

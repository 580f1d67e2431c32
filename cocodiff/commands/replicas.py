"""Replicas: sets of ranks that each take the next batch of a job when they are free, and write what they finish."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from cocodiff.comm.launch import detect
from cocodiff.commands.journal import Entry, Journals, Reader
from cocodiff.commands.outputs import storage_faults
from cocodiff.commands.record import as_read, first_difference
from cocodiff.commands.terminal import JobBar, reading_bar, say
from cocodiff.config import load_machine
from cocodiff.errors import UserError
from cocodiff.topology.axes import Axes
from cocodiff.topology.machine import Topology

IsWhole = Callable[[Entry], bool]  # whether the results of a finished batch are still there as they were written
VISIBLE_S = 10.0  # what a shared file system may take to show a new file on another host


def axes_of(machine: str, ranks: int, replicas: int) -> Axes:
    """Raises UserError for replicas that do not divide the ranks."""
    return Axes.build(Topology.build(load_machine(machine), ranks, detect().local_size), replica=replicas)


def topology_of_replica(values: dict[str, Any], ranks: int, replicas: int) -> Topology:
    """Where the ranks of the first replica sit."""
    axes = axes_of(values["machine"], ranks, replicas)
    return axes.topology.part(axes.replica(0))


class Replica:
    """This rank's replica. number: which it is; transport: that of its ranks; seats: where they sit; leads: whether
    this rank is the one that claims batches and writes."""

    def __init__(self, whole: Any, machine: str, replicas: int) -> None:
        from cocodiff.comm.part import Part  # torch

        self.whole, self.count = whole, replicas
        axes = axes_of(machine, whole.size, replicas)
        self.number = axes.coordinates(whole.rank).replica
        self.seats = axes.topology.part(axes.replica(whole.rank)).seats
        self.transport: Any = whole if replicas == 1 else Part(whole, axes.replica(whole.rank))
        self.leads = self.transport.rank == 0

    def take(self, numbers: Sequence[int], journals: Journals) -> Iterator[int]:
        """The batches that this replica is to do, one after the other, each when it is asked for. All its ranks ask
        together."""
        if self.count == 1:
            yield from numbers
            return
        free = iter(numbers)
        while True:
            own = next((number for number in free if journals.claim(number)), None) if self.leads else None
            number = self.transport.broadcast_object(own)
            if number is None:
                return
            yield number

    def check_shared(self, journals: Journals, out: str, patience_s: float = VISIBLE_S) -> None:
        """All ranks call it. Raises UserError where a leader does not see within `patience_s` what rank 0 writes."""
        if self.count == 1:
            return
        token = f"seen-{os.getpid()}-{time.time_ns()}" if self.whole.rank == 0 else ""
        if token:
            journals.show(token)
        token = self.whole.broadcast_object(token)
        seen = self.whole.gather_object(not self.leads or _appears(journals, token, patience_s))
        blind = [rank for rank, saw in enumerate(seen or []) if not saw]
        blind = self.whole.broadcast_object(blind)
        if blind:
            raise UserError(
                f"--out {out}: rank(s) {', '.join(map(str, blind))} do not see what rank 0 writes there: choose a "
                f"folder that all hosts share, or --replicas 1"
            )


def _appears(journals: Journals, token: str, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not journals.sees(token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Queue:
    """The batches of a job, which replicas take one by one; those that an earlier start has finished are left out.

    All ranks make one, and each iterates over the numbers of the batches that its replica takes. The leader of the
    replica calls `add` when a batch's results are on the disk.
    """

    def __init__(
        self,
        replica: Replica,
        output: Any,
        settings: Callable[[], dict[str, Any]],
        counts: Sequence[int],
        unit: str,
        is_whole: IsWhole,
        shows_bar: bool,
        expected: int | None = None,
    ) -> None:
        """settings: what the results depend on, and is_whole: both asked for on rank 0; counts: the slices or prompts
        (`unit`) of each batch. expected: so many of the batches, the first, are to be done by now; `expect` tells of
        others.
        Raises UserError where another start's settings were others."""
        self._replica, self._counts = replica, counts
        self.journals: Journals = output.journals
        whole = replica.whole
        total = sum(counts[:expected])
        if whole.rank == 0:
            _begin(output, as_read(settings()), total, unit)
            _go_on(output, counts, is_whole, shows_bar)
        self._done = set(whole.broadcast_object(set(self.journals.finished()) if whole.rank == 0 else None))
        replica.check_shared(self.journals, output.out)
        reader = Reader(self.journals.folder)
        self._counted = 0

        def count_done() -> int:
            self._counted += sum(entry.size for entry in reader.entries())
            return self._counted

        self.bar = JobBar(total, unit, count_done, shows_bar)

    @cached_property
    def _journal(self) -> Any:
        return self.journals.open_journal(f"{time.time_ns()}-{self._replica.whole.rank}")

    def __enter__(self) -> Queue:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def __iter__(self) -> Iterator[int]:
        return self.take(range(len(self._counts)))

    def take(self, numbers: Sequence[int]) -> Iterator[int]:
        """Those of some batches that this replica is to do; it ends when all of them are done, on all replicas."""
        yield from self._replica.take([number for number in numbers if not self.is_done(number)], self.journals)
        self._replica.whole.gather_object(None)  # the bar goes on until all replicas are done
        self._done |= {*numbers}

    def is_done(self, number: int) -> bool:
        """Whether a batch was done by an earlier start, or is among those that `take` has ended with."""
        return number in self._done

    def expect(self, numbers: Sequence[int]) -> None:
        """All ranks say which batches are still to be done, of those that may be."""
        total = sum(self._counts[number] for number in {*numbers, *self._done})
        self.bar.total = total
        if self._replica.whole.rank == 0:
            self.journals.expect(total)

    def add(self, number: int, rows: list[Any], sums: Sequence[int] = ()) -> None:
        """Returns when it is on the disk that a batch is done. rows: what rank 0 is to know of it at the end; sums:
        checksums of its results, where a later start is to know by them that they are there."""
        with storage_faults(f"a line of {self.journals.folder}"):
            self._journal.add(Entry(number, self._counts[number], rows, sums))
        self.bar.begin(0, 0)

    def rows(self) -> list[Any]:
        """The rows of all batches in their order, when all are done."""
        entries = self.journals.finished()
        return [row for number in sorted(entries) for row in entries[number].rows]


def _begin(output: Any, settings: dict[str, Any], total: int, unit: str) -> None:
    """On rank 0: the journals of a new job, or those of one to go on with. Raises UserError for the first setting in
    which that one differs."""
    journals: Journals = output.journals
    header = journals.header()
    found = first_difference(header["settings"], settings) if header is not None else None
    if found is not None:
        name, old, new = found
        raise UserError(
            f"--out {output.out}: the run that did not end had other settings ({name}: {old} there, {new} now): "
            f"--resume goes on with the same ones; start afresh with --overwrite"
        )
    if header is None:
        journals.begin(settings, total, unit, output.overwrite)


def _go_on(output: Any, counts: Sequence[int], is_whole: IsWhole, shows_bar: bool) -> None:
    """On rank 0: drops from the journals the batches whose results are no longer there, which are done again."""
    journals: Journals = output.journals
    found = [*journals.finished().values()]
    fitting = [entry for entry in found if entry.number in range(len(counts)) and entry.size == counts[entry.number]]
    whole = [
        fitting[n] for n in reading_bar(shows_bar)(range(len(fitting)), "checking results") if is_whole(fitting[n])
    ]
    if len(whole) < len(found):
        journals.keep(whole)
        say(f"results of {len(found) - len(whole)} finished batch(es) are damaged or gone: these are done again")
    if output.resume:
        kept = journals.kept()
        say(f"going on: {kept} are there already" if kept else "nothing to resume: starting afresh")
    journals.open_claims()

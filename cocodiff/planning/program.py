"""A rank's program: the operations of its main thread and of the jobs on its lanes. Plain data.

A *strand* is a list of operations that follow one another. Strand 0 is the rank's main thread, every other one a job
of a lane. Operations are tuples whose first entry says what they are:

    (COMPUTE, seconds, launches)   the device computes: so long, and so many kernels are launched
    (POST, sends, receives)        messages, by number, that may leave and arrive from now on
    (AWAIT, messages)              until these have arrived or left
    (SUBMIT, job), (JOIN, job)     a job is given to its lane; until a job is done
    (BEGIN, span), (END, span)     moments that are to be known
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COMPUTE, POST, AWAIT, SUBMIT, JOIN, BEGIN, END = range(7)
Operation = tuple[Any, ...]


class Label(NamedTuple):
    """A span's name, lane and layer, as in `trace.Span`."""

    name: str
    lane: str
    layer: str


@dataclass
class Program:
    """One rank's strands. lane_of: the lane of every job. labels: of every span."""

    rank: int
    strands: list[list[Operation]] = field(default_factory=lambda: [[]])
    lane_of: list[str] = field(default_factory=lambda: ["main"])
    labels: list[Label] = field(default_factory=list)

    def compute_s(self, launch_s: float = 0.0, within: str | None = None) -> float:
        """Seconds that the main thread computes; within: the last span of this name alone."""
        operations = self.strands[0]
        if within is not None:
            number = max(n for n, label in enumerate(self.labels) if label.name == within)
            operations = operations[operations.index((BEGIN, number)) : operations.index((END, number))]
        return sum(op[1] + op[2] * launch_s for op in operations if op[0] == COMPUTE)


@dataclass
class Message:
    """A message that both ends have named; `number` is its place in the world's list."""

    number: int
    sender: int
    receiver: int
    size: int


class Recorder:
    """Writes one rank's program. What is done inside `job` goes to that job's strand."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._program = Program(rank)
        self._strand = 0

    def write(self, *operation: Any) -> None:
        self._program.strands[self._strand].append(operation)

    def compute(self, seconds: float, launches: int = 0) -> None:
        """The device computes; pieces that follow one another become one."""
        strand = self._program.strands[self._strand]
        if strand and strand[-1][0] == COMPUTE:
            seconds, launches = seconds + strand[-1][1], launches + strand[-1][2]
            strand.pop()
        if seconds or launches:
            strand.append((COMPUTE, seconds, launches))

    def submit(self, lane: str) -> int:
        """A new job of a lane; its number."""
        self._program.strands.append([])
        self._program.lane_of.append(lane)
        job = len(self._program.strands) - 1
        self.write(SUBMIT, job)
        return job

    @contextmanager
    def job(self, number: int) -> Iterator[None]:
        before, self._strand = self._strand, number
        try:
            yield
        finally:
            self._strand = before

    @contextmanager
    def span(self, label: Label) -> Iterator[None]:
        self._program.labels.append(label)
        number = len(self._program.labels) - 1
        self.write(BEGIN, number)
        try:
            yield
        finally:
            self.write(END, number)

    @contextmanager
    def apart(self) -> Iterator[Program]:
        """What is done inside goes to a program of its own, and is awaited inside."""
        assert self._strand == 0, "a job is being recorded"
        kept, self._program = self._program, Program(self.rank)
        try:
            yield self._program
        finally:
            self._program = kept

    def cut(self) -> Program:
        """The program since the last cut, or since the start. Nothing may be under way."""
        assert self._strand == 0, "a job is being recorded"
        program, self._program = self._program, Program(self.rank)
        return program

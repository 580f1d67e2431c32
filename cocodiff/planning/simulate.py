"""Runs the programs of all ranks together on a fluid network: when everything begins and ends. Pure arithmetic.

A message is under way once both ends have posted it. It starts after the network's latency, and after those that its
sender started before it, one every so often (the o of LogGP); then its bytes share the links with all others, max-min
fair. What a lane computes does not slow down what the main thread computes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from cocodiff.planning.fluid import FluidNetwork
from cocodiff.planning.program import AWAIT, BEGIN, COMPUTE, JOIN, POST, SUBMIT, Message, Operation, Program
from cocodiff.topology.links import Network
from cocodiff.topology.machine import Machine
from cocodiff.trace import Span

SLACK_S, SLACK = 5e-7, 2e-4  # seconds, and parts of the time that has passed: what ends so near ends together


class Latencies(NamedTuple):
    """Seconds: of a message before its first byte; between two messages of one sender; of a kernel's launch; that each
    message blocks the host of either end, whichever lane posts it."""

    latency_s: float = 0.0
    message_s: float = 0.0
    launch_s: float = 0.0
    blocked_s: float = 0.0

    @classmethod
    def of(cls, machine: Machine) -> Latencies:
        """As the machine file has them."""
        links = machine.links
        of_links = links.latency_us, links.message_us, machine.device.launch_us, links.blocked_us
        return cls(*(us / 1e6 for us in of_links))


@dataclass
class Outcome:
    """end_s: when every rank's main thread is through. spans: of each rank, times in nanoseconds from the start."""

    end_s: list[float]
    spans: list[list[Span]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(self.end_s)


class _Strand:
    __slots__ = ("at", "awaited", "job", "operations", "rank")

    def __init__(self, rank: int, job: int, operations: list[Operation]) -> None:
        self.rank, self.job, self.operations, self.at, self.awaited = rank, job, operations, 0, 0


class Simulation:
    """One run. Raises RuntimeError where ranks wait for each other for ever."""

    def __init__(
        self, programs: Sequence[Program], messages: Sequence[Message], network: Network, latencies: Latencies
    ) -> None:
        self._programs, self._messages, self._ways, self._latencies = programs, messages, network, latencies
        self._fluid = FluidNetwork([way.gb_s * 1e9 for way in network.links])
        self._now = 0.0
        self._events: list[
            tuple[float, int, object]
        ] = []  # (time, order, a strand that goes on or messages that start)
        self._order = count()
        self._posted, self._arrived = bytearray(len(messages)), bytearray(len(messages))
        self._awaiting: dict[int, list[_Strand]] = {}
        self._joining: dict[tuple[int, int], list[_Strand]] = {}
        self._done: set[tuple[int, int]] = set()
        self._queues: dict[tuple[int, str], deque[int]] = {}
        self._busy: set[tuple[int, str]] = set()
        self._free_s = [0.0] * len(programs)  # when a rank may start its next message
        self._host_s = [0.0] * len(programs)  # until when its host is blocked
        self._ready: deque[_Strand] = deque()
        self._starting: list[int] = []
        self._marks: list[list[list[float]]] = [[[0.0, 0.0] for _ in program.labels] for program in programs]
        self._end_s: dict[int, float] = {}

    def run(self) -> Outcome:
        self._ready.extend(_Strand(i, 0, program.strands[0]) for i, program in enumerate(self._programs))
        while True:
            while self._ready:
                self._go_on(self._ready.popleft())
            if self._starting:
                self._start(self._starting)
                self._starting = []
                continue
            timed = self._events[0][0] if self._events else float("inf")
            moment = min(timed, self._fluid.next_end())
            if moment == float("inf"):
                break
            self._move(moment)
        if len(self._end_s) < len(self._programs):
            stuck = sorted(set(range(len(self._programs))) - set(self._end_s))
            raise RuntimeError(f"ranks {stuck[:12]} wait for messages or jobs that never come")
        spans = [
            [
                Span(label.name, label.lane, round(begin * 1e9), round(end * 1e9), label.layer)
                for label, (begin, end) in zip(program.labels, marks, strict=True)
            ]
            for program, marks in zip(self._programs, self._marks, strict=True)
        ]
        return Outcome([self._end_s[rank] for rank in range(len(self._programs))], spans)

    def _move(self, moment: float) -> None:
        """On to the next moment at which something ends; what ends within the slack ends with it."""
        slack = min(SLACK_S, SLACK * moment)
        through = self._fluid.advance(moment, slack)
        self._now = moment
        while self._events and self._events[0][0] <= moment + slack:
            event = heapq.heappop(self._events)[2]
            if isinstance(event, _Strand):
                self._ready.append(event)
            else:
                self._starting.append(event)  # type: ignore[arg-type]
        for number in through:
            self._arrive(number)

    def _later(self, seconds: float, event: object) -> None:
        heapq.heappush(self._events, (seconds, next(self._order), event))

    def _go_on(self, strand: _Strand) -> None:
        """Runs a strand up to where it has to wait."""
        while strand.at < len(strand.operations):
            operation = strand.operations[strand.at]
            strand.at += 1
            kind = operation[0]
            if kind == COMPUTE:
                seconds = operation[1] + operation[2] * self._latencies.launch_s
                if seconds > 0:
                    self._later(self._now + seconds, strand)
                    return
            elif kind == POST:
                numbers = (*operation[1], *operation[2])
                for number in numbers:
                    self._post(number)
                if self._latencies.blocked_s:
                    host_s = max(self._now, self._host_s[strand.rank])
                    self._host_s[strand.rank] = host_s + len(numbers) * self._latencies.blocked_s
                    self._later(self._host_s[strand.rank], strand)
                    return
            elif kind == AWAIT:
                open_ = [number for number in operation[1] if not self._arrived[number]]
                if open_:
                    strand.awaited = len(open_)
                    for number in open_:
                        self._awaiting.setdefault(number, []).append(strand)
                    return
            elif kind == SUBMIT:
                self._submit(strand.rank, operation[1])
            elif kind == JOIN:
                if (strand.rank, operation[1]) not in self._done:
                    self._joining.setdefault((strand.rank, operation[1]), []).append(strand)
                    return
            else:
                self._marks[strand.rank][operation[1]][kind != BEGIN] = self._now
        self._finish(strand)

    def _finish(self, strand: _Strand) -> None:
        if strand.job == 0:
            self._end_s[strand.rank] = self._now
            return
        self._done.add((strand.rank, strand.job))
        self._ready.extend(self._joining.pop((strand.rank, strand.job), ()))
        lane = (strand.rank, self._programs[strand.rank].lane_of[strand.job])
        self._busy.discard(lane)
        self._next_job(lane)

    def _submit(self, rank: int, job: int) -> None:
        lane = (rank, self._programs[rank].lane_of[job])
        self._queues.setdefault(lane, deque()).append(job)
        self._next_job(lane)

    def _next_job(self, lane: tuple[int, str]) -> None:
        if lane not in self._busy and self._queues.get(lane):
            self._busy.add(lane)
            job = self._queues[lane].popleft()
            self._ready.append(_Strand(lane[0], job, self._programs[lane[0]].strands[job]))

    def _post(self, number: int) -> None:
        self._posted[number] += 1
        if self._posted[number] < 2:
            return
        sender = self._messages[number].sender
        latency_s, message_s, *_ = self._latencies
        self._free_s[sender] = max(self._now, self._free_s[sender]) + message_s
        start = self._free_s[sender] + latency_s
        if start > self._now:
            self._later(start, number)
        else:
            self._starting.append(number)

    def _start(self, numbers: list[int]) -> None:
        some = [self._messages[number] for number in numbers]
        self._fluid.start([(m.number, self._ways.path(m.sender, m.receiver), float(m.size)) for m in some])

    def _arrive(self, number: int) -> None:
        self._arrived[number] = 1
        for strand in self._awaiting.pop(number, ()):
            strand.awaited -= 1
            if not strand.awaited:
                self._ready.append(strand)


def simulate(
    programs: Sequence[Program], messages: Sequence[Message], network: Network, latencies: Latencies | None = None
) -> Outcome:
    """When the programs of all ranks, started together, are through."""
    return Simulation(programs, messages, network, latencies or Latencies()).run()

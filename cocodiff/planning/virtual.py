"""A transport that writes down instead of sending: ranks without a machine, for `cocodiff plan`.

Every rank runs the real strategies, as a thread of one process and one rank at a time, on tensors of the meta device,
which have a size and no numbers. What it computes, sends and waits for becomes a program (`program.py`); its clock is
virtual: `simulate.py` runs the programs of all ranks together on a network. Jobs of a lane are recorded when they are
submitted, so a job may wait for earlier ones only. Tensors on the CPU do carry numbers and are delivered: what the
control flow depends on, as V-Major's scores, is real.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from cocodiff.comm.health import Health
from cocodiff.comm.loopback import run_threads
from cocodiff.comm.transport import Group, LanePending, Pending, Transport
from cocodiff.errors import PeerLost
from cocodiff.planning.program import AWAIT, JOIN, POST, Label, Message, Program, Recorder
from cocodiff.trace import Trace

T = TypeVar("T")
Key = tuple[Any, ...]


class VirtualWorld:
    """Shared by the ranks: the turn, messages that one or both ends have named, and what those on the CPU hold."""

    def __init__(self, size: int, receives_ahead: bool) -> None:
        self.size, self.receives_ahead = size, receives_ahead
        self.messages: list[Message] = []
        self._by_key: dict[Key, Message] = {}
        self._wake = [threading.Semaphore(0) for _ in range(size)]
        self._able = deque(range(size))  # who may run, in the order in which they became able to
        self._delivered: dict[Key, Any] = {}
        self._awaited: dict[int, Key] = {}
        self._failure: str | None = None
        self._contexts: dict[Key, int] = {}

    def message(self, context: int, sender: int, receiver: int, number: int, size: int) -> Message:
        """The message between two ranks that each of them named as its `number`-th in this context."""
        key = (context, sender, receiver, number)
        known = self._by_key.get(key)
        if known is None:
            known = self._by_key[key] = Message(len(self.messages), sender, receiver, size)
            self.messages.append(known)
        elif known.size != size:
            raise ValueError(f"ranks {sender} and {receiver} disagree on a message: {known.size} and {size} bytes")
        return known

    def context(self, members: tuple[int, ...], number: int) -> int:
        """A short name of the `number`-th group of these members, the same for all of them."""
        return self._contexts.setdefault((members, number), len(self._contexts))

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """One rank runs at a time, until it waits for another's data; always in the same order, so that a plan has the
        same figures each time."""
        self._wake[rank].acquire()
        try:
            yield
        except BaseException as error:
            self._fail(f"rank {rank}: {type(error).__name__}: {error}")
            raise
        finally:
            self.run_next()

    def deliver(self, to: int, key: Key, value: Any) -> None:
        self._delivered[key] = value
        if self._awaited.get(to) == key:
            del self._awaited[to]
            self._able.append(to)

    def take(self, rank: int, key: Key, source: int) -> Any:
        """Returns the value delivered under this key; lets other ranks run until it is there."""
        if key not in self._delivered and self._failure is None:
            self._awaited[rank] = key
            self.run_next()
            self._wake[rank].acquire()
        if key not in self._delivered:
            raise PeerLost(source, self._failure or "")
        return self._delivered.pop(key)

    def run_next(self) -> None:
        """Lets another rank run: the caller does not go on, or not before it is woken."""
        if not self._able and self._awaited:
            self._fail(f"ranks {sorted(self._awaited)} all wait for data that nobody sends")
        if self._able:
            self._wake[self._able.popleft()].release()

    def _fail(self, reason: str) -> None:
        """Whoever waits, or will, is told."""
        self._failure = self._failure or reason
        self._able.extend(self._awaited)
        self._awaited.clear()


class Arrivals:
    """Messages that were posted together, and where those of the CPU are put."""

    def __init__(
        self, world: VirtualWorld, recorder: Recorder, numbers: list[int], real: list[tuple[Tensor, Key, int]]
    ) -> None:
        self._world, self._recorder, self._numbers, self._real = world, recorder, numbers, real

    def wait(self) -> None:
        if self._numbers:
            self._recorder.write(AWAIT, self._numbers)
        for tensor, key, source in self._real:
            value = self._world.take(self._recorder.rank, key, source)
            if value is None:
                raise ValueError(f"rank {source} sends a tensor without numbers where numbers are awaited")
            with torch._C.DisableTorchFunction():
                tensor.copy_(value)
        self._numbers, self._real = [], []


class VirtualGroup(Group):
    def __init__(self, world: VirtualWorld, recorder: Recorder, context: int, ranks: tuple[int, ...]) -> None:
        self._world, self._recorder, self._context = world, recorder, context
        self.ranks, self.index = ranks, ranks.index(recorder.rank)
        self.receives_ahead = world.receives_ahead
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def send_recv(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        with torch._C.DisableTorchFunction():  # writing it down is no work of the rank's
            return self._post(sends, recvs)

    def _post(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        world, own = self._world, self._recorder.rank
        leaving, coming, real = [], [], []
        for tensor, peer in sends:
            if tensor.numel():
                self._sent[peer] += 1
                to, number = self.ranks[peer], self._sent[peer]
                leaving.append(world.message(self._context, own, to, number, tensor.nbytes).number)
                value = None if tensor.device.type == "meta" else tensor.clone()
                if value is not None:
                    world.deliver(to, (self._context, own, to, number), value)
        for tensor, peer in recvs:
            if tensor.numel():
                self._received[peer] += 1
                source, number = self.ranks[peer], self._received[peer]
                coming.append(world.message(self._context, source, own, number, tensor.nbytes).number)
                if tensor.device.type != "meta":
                    real.append((tensor, (self._context, source, own, number), source))
        if leaving or coming:
            self._recorder.write(POST, leaving, coming)
        return Arrivals(world, self._recorder, leaving + coming, real)


class VirtualPending(LanePending[T]):
    """The result of a job that was recorded already; waiting for it is an operation like any other."""

    def __init__(self, recorder: Recorder, job: int, value: T | None, error: BaseException | None) -> None:
        self._recorder, self._job, self._value, self._error = recorder, job, value, error

    def wait(self) -> T:
        self._recorder.write(JOIN, self._job)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


class VirtualLane:
    """An ordered background worker whose jobs are recorded as they are submitted."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self._recorder = name, recorder

    def submit(self, work: Callable[..., T], *given: Any) -> LanePending[T]:
        number = self._recorder.submit(self.name)
        value, error = None, None
        with self._recorder.job(number):
            try:
                value = work(*given)
            except Exception as caught:
                error = caught
        return VirtualPending(self._recorder, number, value, error)

    submit_inline = submit

    def close(self) -> None:
        return


class VirtualTransport(Transport):
    """One rank of a VirtualWorld. `recorder` holds what it did."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self.device = torch.device("meta")
        self.health = Health()
        self.recorder = Recorder(rank)
        self._world = world
        self._contexts: dict[tuple[int, ...], int] = defaultdict(int)
        self._objects = 0
        self.control = self.lane("control")
        self.world = self.group(range(world.size))

    def group(self, ranks: Sequence[int]) -> VirtualGroup:
        key = tuple(ranks)
        self._contexts[key] += 1
        return VirtualGroup(self._world, self.recorder, self._world.context(key, self._contexts[key]), key)

    def lane(self, name: str) -> Any:
        return VirtualLane(name, self.recorder)

    def gather_object(self, value: Any) -> list[Any] | None:
        self._objects += 1
        self._world.deliver(0, ("gather", self.rank, self._objects), value)
        if self.rank:
            return None
        return [self._world.take(0, ("gather", rank, self._objects), rank) for rank in range(self.size)]

    def broadcast_object(self, value: Any) -> Any:
        self._objects += 1
        if self.rank == 0:
            for rank in range(self.size):
                self._world.deliver(rank, ("broadcast", rank, self._objects), value)
        return self._world.take(self.rank, ("broadcast", self.rank, self._objects), 0)

    def close(self) -> None:
        return


class VirtualTrace(Trace):
    """A trace whose spans become marks of the program: their times are known after it was simulated."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder.rank)
        self._recorder = recorder

    @contextmanager
    def span(self, name: str, lane: str = "main", layer: str = "", late_bytes: int = 0) -> Iterator[None]:
        with self._recorder.span(Label(name, lane, layer)):
            yield


def record(
    size: int, work: Callable[[VirtualTransport], T], receives_ahead: bool = True
) -> tuple[list[T], list[Program], list[Message]]:
    """Runs `work(transport)` once per rank. Returns its results and the programs, in rank order, and the messages.

    receives_ahead: as gloo's and MPI's groups have it (`Group`); a device's have not.
    Raises as `run_threads`.
    """
    world = VirtualWorld(size, receives_ahead)
    transports = [VirtualTransport(world, rank) for rank in range(size)]

    def rank_main(rank: int) -> T:
        with world.turn(rank):
            return work(transports[rank])

    world.run_next()
    results = run_threads(size, rank_main, "virtual rank")
    return results, [transport.recorder.cut() for transport in transports], world.messages

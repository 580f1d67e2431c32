"""A transport whose ranks are threads of one process: any number of ranks starts in seconds, for tests and trials."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from cocodiff.comm.health import CALL, Health
from cocodiff.comm.lane import CHECK_S
from cocodiff.comm.peers import STILL_S, CallTable, OwnProgress, find_stalled
from cocodiff.comm.transport import Group, LaneOwner, Messages, Pending, PostedMessages, not_empty
from cocodiff.config.errors import PeerLost, UserError

T = TypeVar("T")


class LoopbackWorld:
    """The common state of ranks that are threads of one process: their messages, and the first failure."""

    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.failure: PeerLost | UserError | None = None
        self._mailboxes: dict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()
        self.calls, self.left = CallTable(), set[int]()
        self.progress = [OwnProgress(time.monotonic, time.monotonic()) for _ in range(size)]

    def mailbox(self, *key: Any) -> queue.SimpleQueue[Any]:
        """Return the queue of messages with a key; it is made at its first use.

        Args:
            key: communication context, sender and receiver.
        """
        with self._lock:
            return self._mailboxes[key]

    def fail(self, failure: PeerLost | UserError | None) -> None:
        """Record a failure, which every rank will raise, if it is the first. None is not recorded."""
        with self._lock:
            self.failure = self.failure or failure

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def take(self, mailbox: queue.SimpleQueue[Any], peer: int) -> Any:
        """Return the next message of a mailbox: the name of the call that sent it, and the tensor.

        Raise PeerLost if a rank failed, or if `peer`, the sender, sent nothing for `timeout_s`.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return mailbox.get(timeout=CHECK_S)
            except queue.Empty:
                self.check()
                if time.monotonic() > deadline:
                    raise PeerLost(peer, f"sent nothing for {self.timeout_s:g} s") from None


class _Inbox:
    """The receives of one rank from one peer, in the order in which they were posted.

    Messages are matched in that order, regardless of which receive is waited for first. Several threads may wait at the
    same time: one of them takes messages for all.
    """

    def __init__(self, world: LoopbackWorld, peer: int, mailbox: queue.SimpleQueue[Any]) -> None:
        self._world, self._peer, self._mailbox = world, peer, mailbox
        self._posted: deque[tuple[str, Tensor]] = deque()  # each with the call that it is for
        self._numbers = count()
        self._delivered = 0
        self._changed = threading.Condition()
        self._taken_by_another = False

    def post(self, tensor: Tensor) -> int:
        """Post a receive into `tensor`. Return its number, for `wait`."""
        self._posted.append((CALL.get(), tensor))
        return next(self._numbers)

    def wait(self, number: int) -> None:
        """Block until the receive with this number has its message."""
        with self._changed:
            while self._delivered <= number:
                if self._taken_by_another:
                    self._changed.wait()
                else:
                    self._deliver()

    def _deliver(self) -> None:
        """Take the next message of the peer and copy it into the tensor of the oldest receive without one.

        Raise PeerLost if the two belong to different calls. Other threads may look at what has arrived meanwhile.
        """
        self._taken_by_another = True
        self._changed.release()
        try:
            (call, message), (own_call, tensor) = self._world.take(self._mailbox, self._peer), self._posted.popleft()
            if call != own_call:
                differ = f"sent {call}, and {own_call} was awaited: ranks make different calls"
                self._world.fail(PeerLost(self._peer, differ))
                self._world.check()
            if message.shape != tensor.shape or message.dtype != tensor.dtype:
                came = f"{message.dtype} {tuple(message.shape)}"
                raise ValueError(f"rank {self._peer} sent {came}, {tuple(tensor.shape)} awaited")
            tensor.copy_(message)
        finally:
            self._changed.acquire()
            self._taken_by_another = False
            self._changed.notify_all()
        self._delivered += 1


class LoopbackGroup(Group):
    """A group of ranks that are threads of this process."""

    def __init__(self, world: LoopbackWorld, context: Any, ranks: tuple[int, ...], rank: int) -> None:
        self._world, self._context = world, context
        self.ranks, self.index = ranks, ranks.index(rank)
        self._inboxes = [_Inbox(world, ranks[p], world.mailbox(context, p, self.index)) for p in range(len(ranks))]

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        for tensor, peer in not_empty(sends):
            self._world.mailbox(self._context, self.index, peer).put((CALL.get(), tensor.clone()))
        inboxes = [(self._inboxes[peer], tensor) for tensor, peer in not_empty(recvs)]
        return PostedMessages(*(partial(inbox.wait, inbox.post(tensor)) for inbox, tensor in inboxes))

    def barrier(self) -> None:
        among = self.ranks if len(self.ranks) < self._world.size else ()
        LoopbackHealth(self._world, self.ranks[self.index]).arrive("a barrier", among)
        super().barrier()


class LoopbackHealth(Health):
    """The watch over lost ranks, for one of the ranks that are threads of a `LoopbackWorld`. A failure of the world is
    every rank's.

    Waits for a mailbox check for it, and `run_ranks` raises it.
    """

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def check(self) -> None:
        self._world.check()

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        super().arrive(at, among)
        own = self._world.progress[self._rank]
        own.arrive(at, among)
        other_call = self._world.calls.find_other_call(self._rank, own.take_calls())
        self._world.fail(other_call and PeerLost(*other_call))
        self._world.check()

    def still_waiting(self) -> None:
        world, now = self._world, time.monotonic()
        world.progress[self._rank].still_waiting()
        seen = {rank: own.seen(now, rank in world.left) for rank, own in enumerate(world.progress)}
        stalled = find_stalled(seen, world.timeout_s, STILL_S / 2)
        world.fail(stalled and PeerLost(*stalled))
        world.check()

    def close(self) -> None:
        self._world.left.add(self._rank)

    def fail(self, reason: str, mistake: bool = False) -> None:
        self._world.fail(UserError(reason) if mistake else PeerLost(self._rank, f"failed: {reason}"))


class LoopbackTransport(LaneOwner):
    """The transport of one rank of a LoopbackWorld."""

    def __init__(self, world: LoopbackWorld, rank: int, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"), LoopbackHealth(world, rank))
        self.rank, self.size = rank, world.size
        self._world = world
        self._contexts: dict[tuple[int, ...], int] = defaultdict(int)
        self.world = self.group(range(world.size))

    def new_group(self, ranks: tuple[int, ...]) -> LoopbackGroup:
        self._contexts[ranks] += 1
        return LoopbackGroup(self._world, (ranks, self._contexts[ranks]), ranks, self.rank)


def run_ranks(size: int, work: Callable[[LoopbackTransport], T], timeout_s: float = 120.0) -> list[T]:
    """Run `work(transport)` on a thread for each rank and return the results in rank order. Tests and trials use it.

    If ranks fail, raise the exception of one, with its number in a note: of the lowest that failed otherwise than by
    losing another rank, or if there is none, of the lowest.

    Args:
        size: number of ranks.
        work: a rank's program.
        timeout_s: longest wait for a message.
    """
    world, errors = LoopbackWorld(size, timeout_s), dict[int, BaseException]()
    results: list[Any] = [None] * size
    # Python runs one thread at a time, and switches between threads of one core in half the time.
    core = random.choice(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_setaffinity") else None

    def run(rank: int) -> None:
        try:
            if core is not None:
                os.sched_setaffinity(0, {core})  # for this thread and those that it starts
            # Threads do not inherit the caller's mode.
            with torch.no_grad(), closing(LoopbackTransport(world, rank)) as transport:
                try:
                    results[rank] = work(transport)
                except BaseException as error:
                    transport.health.fail(f"{type(error).__name__}: {error}")
                    raise
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        culprit = next((rank for rank, e in sorted(errors.items()) if not isinstance(e, PeerLost)), min(errors))
        errors[culprit].add_note(f"in rank {culprit} of {size}")
        raise errors[culprit]
    return results

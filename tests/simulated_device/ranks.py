"""Ranks as threads of one process, a simulated device each, that talk through the product's code for device backends.

What stands in torch.distributed's place keeps the order of NCCL and XCCL and promises no more than they do: a group has
a stream of its own, which first waits for the caller's; a batch is one operation there; `wait` orders the caller's
stream behind it and does not block the host; and tensors are only held until then, by whoever waits.

It has the habits of oneCCL as well (its src/coll/group; torch-xpu-ops 2688, 3022): a process posts one batch at a time,
under one mutex; a receive blocks the host until the peer has come to its send; batches of sends or of receives alone
never end; a message has bytes; the first call of a communicator is one of all its members. Whatever would never end
there raises `NeverEnds` here, at once or after the world's `timeout_s`.

With `each_alone` it has the habit of torch 2.10's XCCL, which makes a group of each operation (torch-xpu-ops,
release/2.10, ProcessGroupXCCL.cpp:990): the operations of a batch go alone, in the order in which they are posted; the
host goes on when the peer has come to the operation's other end; and a batch returns when its copies are done.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from seams import meet
from torch import Tensor

from cocodiff.comm import loopback, torch_dist
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld
from cocodiff.comm.torch_dist import TorchDistGroup
from cocodiff.config.errors import PeerLost
from simulated_device import host_view, launch

T = TypeVar("T")


class NeverEnds(RuntimeError):
    """What a run would wait for without end."""


class SentMessage(NamedTuple):
    """members: of the group that carried it, as ranks."""

    members: tuple[int, ...]
    sender: int
    receiver: int
    size: int  # in bytes


class Process:
    """What one rank's process has of the library."""

    def __init__(self, late_s: float, seed: int, each_alone: bool) -> None:
        """late_s: seconds that it may take to come to a batch, at random. each_alone: see above."""
        self.sent: list[SentMessage] = []
        self.together: list[tuple[tuple[int, ...], list[int]]] = []  # of its all-to-alls the ranks, and bytes to each
        self.posting, self.each_alone = threading.Lock(), each_alone
        self._late_s, self._random = late_s, random.Random(seed)

    def check(self, group: _ProcessGroup, messages: list[_Message]) -> None:
        """Comes to a batch, late. Raises NeverEnds for what never ends, whatever other ranks do."""
        time.sleep(self._random.uniform(0, self._late_s))
        sends = sum(message.way == "send" for message in messages)
        if not 0 < sends < len(messages):
            raise NeverEnds(f"a batch of {sends} sends and {len(messages) - sends} receives")
        if not all(message.tensor.numel() for message in messages):
            raise NeverEnds("a message without bytes")
        if not group.met:
            raise NeverEnds("the first call of a communicator is not one of all its members")


class _Work:
    """A message under way: one operation of a library's stream."""

    def __init__(self, stream: torch.Stream, name: str, reads: list[Tensor], writes: list[Tensor], work: Any) -> None:
        module = torch.get_device_module(stream.device)
        self._current = partial(module.current_stream, stream.device)
        ready, self.done = module.Event(), module.Event()
        ready.record(self._current())
        stream.wait_event(ready)
        launch(stream, name, reads, writes, work)
        self.done.record(stream)
        self._held = [*reads, *writes]

    def wait(self) -> None:
        self._current().wait_event(self.done)
        self._held = []


class _ProcessGroup:
    """One rank's end of a communicator. Its messages go through the mailboxes of a loopback world."""

    met = False  # whether its members have made the communicator

    def __init__(
        self, world: LoopbackWorld, context: Any, ranks: tuple[int, ...], index: int, device: Any, process: Process
    ) -> None:
        self._world, self._context, self._ranks, self._index, self._device = world, context, ranks, index, device
        self._process = process
        self._stream = torch.get_device_module(device).Stream(device)

    def batch(self, messages: list[_Message]) -> list[_Work]:
        """Posts messages: all as one operation, or each as one of its own."""
        self._process.check(self, messages)
        with self._process.posting:
            if not self._process.each_alone:
                self._come(messages)
                return [self._start(messages)]
            works = []
            for message in messages:
                self._come([message], both_ways=True)
                works.append(self._start([message]))
        for work in works:
            work.done.synchronize()
        return works

    def _start(self, messages: list[_Message]) -> _Work:
        views = [(message, host_view(message.tensor)) for message in messages]
        own, peers = self._ranks[self._index], [(self._ranks[m.group_peer], m) for m in messages if m.way == "send"]
        self._process.sent += [SentMessage(self._ranks, own, peer, message.tensor.nbytes) for peer, message in peers]

        def exchange() -> None:
            for message, x in views:
                if message.way == "send":
                    self._mailbox(self._index, message.group_peer).put(x.clone())
            for message, x in views:
                if message.way == "receive":
                    came = self._world.take(
                        self._mailbox(message.group_peer, self._index), self._ranks[message.group_peer]
                    )
                    assert came.shape == x.shape and came.dtype == x.dtype
                    x.copy_(came)

        reads, writes = ([m.tensor for m in messages if m.way == way] for way in ("send", "receive"))
        return _Work(self._stream, "messages", reads, writes, exchange)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, recv_splits: list[int], send_splits: list[int], _options: Any
    ) -> _Work:
        """A collective: every member calls it, with sizes of one byte at least."""
        if not all(recv_splits) or not all(send_splits):
            raise NeverEnds("an all-to-all with a size of zero")
        self.met = True
        self._process.together.append((self._ranks, send_splits))
        messages = [
            _Message(way, x, self, peer)
            for way, flat, splits in (("send", sent, send_splits), ("receive", received, recv_splits))
            for peer, x in enumerate(flat.split(splits))
        ]
        self._process.check(self, messages)
        with self._process.posting:
            self._come(messages)
            return self._start(messages)

    def _come(self, messages: list[_Message], both_ways: bool = False) -> None:
        """Blocks the host until the peers have come to what is received. both_ways: also to what is sent."""
        here, there = ("send", "receive")
        for message in messages:
            self._mailbox(self._index, message.group_peer, message.way).put(None)
        for message in messages:
            if message.way == there or both_ways:
                peer, other = message.group_peer, here if message.way == there else there
                try:
                    self._world.take(self._mailbox(peer, self._index, other), self._ranks[peer])
                except PeerLost as error:
                    raise NeverEnds(f"rank {self._ranks[self._index]} posts a {message.way}: {error}") from error

    def one(self) -> Tensor:
        return torch.ones(1, device=self._device)

    def all_reduce(self, x: Tensor) -> _Work:
        self.met = True
        host, peers = host_view(x), range(len(self._ranks))

        def add() -> None:
            for peer in peers:
                self._mailbox(self._index, peer, "sum").put(host.clone())
            parts = [self._world.take(self._mailbox(peer, self._index, "sum"), self._ranks[peer]) for peer in peers]
            host.copy_(torch.stack(parts).sum(0))

        return _Work(self._stream, "all_reduce", [x], [x], add)

    def _mailbox(self, *key: Any) -> Any:
        return self._world.mailbox(self._context, *key)


class _Message(NamedTuple):
    way: str
    tensor: Tensor
    group: _ProcessGroup
    group_peer: int


class _Library:
    """What TorchDistGroup asks of torch.distributed."""

    P2POp, isend, irecv = _Message, "send", "receive"
    AllToAllOptions = staticmethod(lambda: None)

    @staticmethod
    def batch_isend_irecv(messages: list[_Message]) -> list[_Work]:
        return messages[0].group.batch(messages)

    @staticmethod
    def all_reduce(x: Tensor, group: _ProcessGroup, async_op: bool) -> _Work:
        assert async_op
        return group.all_reduce(x)

    @staticmethod
    def barrier(group: _ProcessGroup) -> None:
        group.all_reduce(group.one()).done.synchronize()


class SimulatedTransport(LoopbackTransport):
    """One rank of a loopback world whose tensors are a simulated device's."""

    one_thread = True
    late_s = 0.0  # see `Process`
    each_alone = False  # a habit of the library, whatever is believed of it
    timeout_s = 120.0

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        device = torch.device("sim", rank)
        torch.get_device_module(device).set_device(device)
        self.process = Process(self.late_s, rank, self.each_alone)
        self.carrier = LoopbackTransport(world, rank)
        super().__init__(world, rank, device)

    def new_group(self, members: tuple[int, ...]) -> Any:
        self._contexts[members] += 1
        context, index = ("device", members, self._contexts[members]), members.index(self.rank)
        library = _ProcessGroup(self._world, context, members, index, self.device, self.process)
        meet(self, library, members)
        return TorchDistGroup(library, members, self.rank, self.device)


def run_ranks(
    size: int, work: Callable[[LoopbackTransport], T], kind: type[SimulatedTransport] = SimulatedTransport
) -> list[T]:
    """As `cocodiff.comm.loopback.run_ranks`, on devices 0 to size - 1, which the caller has made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loopback, "LoopbackTransport", kind)
        patch.setattr(torch_dist, "dist", _Library)
        return loopback.run_ranks(size, work, kind.timeout_s)

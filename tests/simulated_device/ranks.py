"""Ranks as threads of one process, a simulated device each, that talk through the product's code for device backends.

What stands in torch.distributed's place keeps the order of NCCL and XCCL and promises no more than they do: a group has
a stream of its own, which first waits for the caller's; a batch is one operation there; `wait` orders the caller's
stream behind it and does not block the host; and tensors are only held until then, by whoever waits.

It has the habits of oneCCL as well (its src/coll/group; torch-xpu-ops 2688, 3022): a process posts one batch at a time,
under one mutex; a receive blocks the host until the peer has come to its send; batches of sends or of receives alone
never end; a message has bytes; the first call of a communicator is one of all its members. Whatever would never end
there raises `NeverEnds` here, at once or after the world's `timeout_s`.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
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


class Process:
    """What one rank's process has of the library. late_s: seconds that it may take to come to a batch, at random."""

    def __init__(self, late_s: float, seed: int) -> None:
        self.together = 0  # all-to-alls that it has posted
        self._posting, self._late_s, self._random = threading.Lock(), late_s, random.Random(seed)

    def post(self, group: _ProcessGroup, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> None:
        """Returns when every peer that something is received from has come to send it."""
        time.sleep(self._random.uniform(0, self._late_s))
        if not sends or not recvs:
            raise NeverEnds(f"a batch of {len(sends)} sends and {len(recvs)} receives")
        if not all(x.numel() for x, _ in sends + recvs):
            raise NeverEnds("a message without bytes")
        if not group.met:
            raise NeverEnds("the first call of a communicator is not one of all its members")
        with self._posting:
            group.come(sends, recvs)


class _Work:
    """A message under way: one operation of a library's stream."""

    def __init__(self, stream: torch.Stream, name: str, reads: list[Tensor], writes: list[Tensor], work: Any) -> None:
        module = torch.get_device_module(stream.device)
        self._current = partial(module.current_stream, stream.device)
        ready, self._done = module.Event(), module.Event()
        ready.record(self._current())
        stream.wait_event(ready)
        launch(stream, name, reads, writes, work)
        self._done.record(stream)
        self._held = [*reads, *writes]

    def wait(self) -> None:
        self._current().wait_event(self._done)
        self._held = []


class _ProcessGroup:
    """One rank's end of a communicator. Its messages go through the mailboxes of a loopback world."""

    met = False  # whether its members have made the communicator

    def __init__(
        self, world: LoopbackWorld, context: Any, ranks: tuple[int, ...], index: int, device: Any, process: Process
    ) -> None:
        self._world, self._context, self._ranks, self._index, self._device = world, context, ranks, index, device
        self._process = process
        self._streams: dict[Any, torch.Stream] = defaultdict(lambda: torch.get_device_module(device).Stream(device))

    def batch(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]], of: Any = None) -> _Work:
        """of: what has a stream of its own, by default the group."""
        self._process.post(self, sends, recvs)
        out = [(host_view(x), self._mailbox(self._index, peer)) for x, peer in sends]
        into = [(host_view(x), self._mailbox(peer, self._index), self._ranks[peer]) for x, peer in recvs]

        def exchange() -> None:
            for x, mailbox in out:
                mailbox.put(x.clone())
            for x, mailbox, rank in into:
                message = self._world.take(mailbox, rank)
                assert message.shape == x.shape and message.dtype == x.dtype
                x.copy_(message)

        return _Work(self._streams[of], "messages", [x for x, _ in sends], [x for x, _ in recvs], exchange)

    def alltoall_base(
        self, received: Tensor, sent: Tensor, recv_splits: list[int], send_splits: list[int], _options: Any
    ) -> _Work:
        """A collective: every member calls it, with sizes of one byte at least."""
        if not all(recv_splits) or not all(send_splits):
            raise NeverEnds("an all-to-all with a size of zero")
        self.met = True
        self._process.together += 1
        sends, recvs = (
            [(x, peer) for peer, x in enumerate(flat.split(splits))]
            for flat, splits in ((sent, send_splits), (received, recv_splits))
        )
        return self.batch(sends, recvs)

    def come(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> None:
        for _, peer in sends:
            self._mailbox(self._index, peer, "come").put(None)
        for _, peer in recvs:
            try:
                self._world.take(self._mailbox(peer, self._index, "come"), self._ranks[peer])
            except PeerLost as error:
                raise NeverEnds(f"rank {self._ranks[self._index]} posts a receive: {error}") from error

    def all_reduce(self, x: Tensor) -> _Work:
        self.met = True
        host, peers = host_view(x), range(len(self._ranks))

        def add() -> None:
            for peer in peers:
                self._mailbox(self._index, peer, "sum").put(host.clone())
            parts = [self._world.take(self._mailbox(peer, self._index, "sum"), self._ranks[peer]) for peer in peers]
            host.copy_(torch.stack(parts).sum(0))

        return _Work(self._streams[None], "all_reduce", [x], [x], add)

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
        sends, recvs = ([(m.tensor, m.group_peer) for m in messages if m.way == way] for way in ("send", "receive"))
        assert [m.way for m in messages] == ["send"] * len(sends) + ["receive"] * len(recvs), "sends come first"
        return [messages[0].group.batch(sends, recvs)]

    @staticmethod
    def all_reduce(x: Tensor, group: _ProcessGroup, async_op: bool) -> _Work:
        assert async_op
        return group.all_reduce(x)


class SimulatedTransport(LoopbackTransport):
    """One rank of a loopback world whose tensors are a simulated device's."""

    one_thread = True
    late_s = 0.0  # see `Process`
    timeout_s = 120.0

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        device = torch.device("sim", rank)
        torch.get_device_module(device).set_device(device)
        self.process = Process(self.late_s, rank)
        self.carrier = LoopbackTransport(world, rank)
        super().__init__(world, rank, device)

    def _new_group(self, members: tuple[int, ...]) -> Any:
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

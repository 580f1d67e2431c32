"""A checksum beside every message: wrong bits become an error that names both ranks, instead of a wrong image."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cocodiff.comm.health import Health
from cocodiff.comm.transport import Group, LaneOwner, Messages, Pending, not_empty
from cocodiff.config.errors import PeerLost
from cocodiff.kernels.device import digest

# Bytes that are summed at a time, which takes several times as much memory: on a CPU they stay in a core's cache, on
# other devices they need few launches.
PIECE = {"cpu": 2**18, "other": 2**26}


class WrongMessage(PeerLost):
    """The error for a message that arrived with other bits than it was sent with."""


class CheckedMessage(NamedTuple):
    """A message that is to be received, with the checksum that its sender computed."""

    tensor: Tensor  # the message
    total: Tensor  # its checksum, int64 [1]
    peer: int  # index of the sender in the group
    number: int  # from 1 on, among the messages from this peer in this group
    lane: str  # name of the thread that posted it

    @property
    def both(self) -> Messages:
        """The message and its checksum, as two messages."""
        return [(self.tensor, self.peer), (self.total, self.peer)]


class CheckedGroup(Group):
    """A group in which every message is followed by its checksum, 8 bytes in the same batch.

    Checksums are computed and compared on the message's device. They include the message's number, so that the next
    message cannot pass for a lost one.
    """

    def __init__(self, group: Group, health: Health) -> None:
        self._group, self._health = group, health
        self.ranks, self.index, self.receives_ahead = group.ranks, group.index, group.receives_ahead
        self.at_once = group.at_once
        self._sent, self._awaited = Counter[int](), Counter[int]()

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        return self._checked(self._group.send_recv, sends, recvs)

    def collective(self, sends: Messages, recvs: Messages) -> Pending:
        return self._checked(self._group.collective, sends, recvs)

    def _checked(self, post: Callable[..., Pending], sends: Messages, recvs: Messages) -> Pending:
        leaving, coming = [], []
        for tensor, peer in not_empty(sends):
            self._sent[peer] += 1
            leaving += [(tensor, peer), (checksum(tensor, self._sent[peer]), peer)]
        for tensor, peer in not_empty(recvs):
            self._awaited[peer] += 1
            total = torch.empty(1, dtype=torch.int64, device=tensor.device)
            coming.append(CheckedMessage(tensor, total, peer, self._awaited[peer], threading.current_thread().name))
        if not self.receives_ahead:
            both = [one for message in coming for one in message.both]
            return CheckedPending(self, [(post(leaving, both), coming)])
        received = [(post([], message.both), [message]) for message in coming]
        return CheckedPending(self, [*received, (post(leaving, []), [])])

    def barrier(self) -> None:
        self._group.barrier()

    def await_from(self, peers: set[int]) -> None:
        """Tell the watch over lost ranks which peers this rank waits for, so that an error can name a missing sender.

        Args:
            peers: their indices in the group; empty if the wait is over.
        """
        self._health.awaits(tuple(sorted(self.ranks[peer] for peer in peers)))

    def refuse(self, message: CheckedMessage) -> WrongMessage:
        """Tell all ranks that a message has arrived with wrong bits, and return the error to raise."""
        tensor, own, sender = message.tensor, self.ranks[self.index], self.ranks[message.peer]
        form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        lane = f" on {message.lane.replace('-', ' ')}" if message.lane.startswith("lane-") else ""
        ranks = f"{len(self.ranks)} ranks from {min(self.ranks)} to {max(self.ranks)}"
        reason = (
            f"received other bytes than rank {sender} sent to it: message {message.number} between them{lane} in a "
            f"group of {ranks}, {tensor.nbytes} bytes, {form}; trust no result, and try another --transport"
        )
        self._health.fail(reason)
        return WrongMessage(own, f"failed: {reason}")


def check_messages(transport: LaneOwner) -> None:
    """Send a checksum with every message from now on. All ranks call this before they make groups."""
    transport.around = partial(CheckedGroup, health=transport.health)
    for owner in filter(None, (transport, transport.carrier)):  # the world group of each carries values
        owner.world = transport.around(owner.world)


class CheckedPending:
    """The messages of one call in flight, with their checksums.

    The first `wait` compares the checksums. On accelerators the host waits for that.
    """

    def __init__(self, group: CheckedGroup, transfers: list[tuple[Pending, list[CheckedMessage]]]) -> None:
        """Hold the messages of one call.

        Args:
            group: the group that they pass in.
            transfers: pairs of messages in flight and those of them that this rank receives (empty for sends).
        """
        self._group, self._transfers = group, transfers

    def wait(self) -> None:
        for pending, messages in self._transfers:
            self._group.await_from({message.peer for message in messages})
            pending.wait()
        self._group.await_from(set())
        came = [message for _, messages in self._transfers for message in messages]
        self._transfers = [(pending, []) for pending, _ in self._transfers]
        if came:
            found = torch.cat([checksum(message.tensor, message.number) for message in came])
            wrong = (found != torch.cat([message.total for message in came])).tolist()
            if any(wrong):
                raise self._group.refuse(came[wrong.index(True)])


def checksum(message: Tensor, number: int) -> Tensor:
    """Return the checksum of a message's bits and of its number, int64 [1], on the message's device.

    Args:
        number: counts the messages from one rank to another, so that none is taken for another.
    """
    bits = message.view(-1).view(torch.uint8)
    whole = len(bits) // 8 * 8  # the remaining bytes are summed one by one, which takes eight times the memory
    piece = PIECE["cpu" if message.device.type == "cpu" else "other"]
    sums = [digest(bits[start : min(start + piece, whole)], start // 8) for start in range(0, whole, piece)]
    return torch.stack([*sums, digest(bits[whole:], -len(bits))]).sum().view(1) + number

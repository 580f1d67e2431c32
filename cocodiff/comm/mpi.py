"""A transport over MPI, through mpi4py: for CPU tensors, in jobs that have MPI.

MPI libraries make no progress in the background, so a lane's thread stays in the wait and polls. It sleeps between
polls: with more ranks than cores, a busy wait would starve the rank that it waits for. MPI accepts a shorter message
than awaited without an error, and its error for a longer one names no rank. So lengths are compared when messages have
arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.checked import WrongMessage
from cocodiff.comm.health import Health, call_tag
from cocodiff.comm.mpi_start import initialised_mpi
from cocodiff.comm.transport import Group, LaneOwner, Messages, Pending, PostedMessages, not_empty

SPINS = 20  # polls before a wait begins to sleep
SLEEP_S = (20e-6, 500e-6)  # shortest and longest sleep between polls


def bits_of(tensor: Tensor) -> Any:
    """Return a CPU tensor's memory as an array, uint8 [n], without a copy. Raise ValueError if the tensor is not
    contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pack it first")
    return tensor.view(-1).view(torch.uint8).numpy()


def wait_until(done: Callable[[], bool], health: Health) -> None:
    """Poll `done` until it is true, with pauses. Each poll lets the MPI library make progress.

    Args:
        health: the watch over lost ranks, which ends the wait with PeerLost.
    """
    polls, pause, checked = 0, SLEEP_S[0], time.monotonic()
    while not done():
        polls += 1
        if polls <= SPINS:
            time.sleep(0)
            continue
        time.sleep(pause)
        pause = min(2 * pause, SLEEP_S[1])
        if time.monotonic() - checked > 0.25:
            health.still_waiting()
            checked = time.monotonic()


class MpiGroup(Group):
    """A group of ranks that have a communicator of MPI for their messages."""

    def __init__(self, mpi: Any, communicator: Any, ranks: tuple[int, ...], health: Health) -> None:
        self._mpi, self._communicator, self.health = mpi, communicator, health
        self.ranks, self.index = ranks, communicator.Get_rank()

    def _posted(self, sends: Messages, recvs: Messages) -> list[Any]:
        """Post messages and return MPI's requests for them, receives first."""
        byte, tag = self._mpi.BYTE, call_tag(15)  # the most bits that every library supports
        requests = [self._communicator.Irecv([bits_of(t), byte], peer, tag) for t, peer in recvs]
        return requests + [self._communicator.Isend([bits_of(t), byte], peer, tag) for t, peer in sends]

    def send_recv(self, sends: Messages, recvs: Messages) -> Pending:
        sends, recvs = not_empty(sends), not_empty(recvs)
        return PostedMessages(partial(self._complete, self._posted(sends, recvs), recvs, sends))

    def _complete(self, requests: list[Any], recvs: Messages, _sends: Messages) -> None:
        """Wait until MPI's requests have ended. Raise WrongMessage if a received message has a wrong length.

        Args:
            requests: the requests, those of `recvs` first.
            recvs: the messages that are received, whose tensors have the right lengths.
            _sends: the messages that are sent, whose tensors have to be kept until then.
        """
        statuses = [self._mpi.Status() for _ in recvs]
        try:
            wait_until(lambda: self._mpi.Request.Testall(requests, statuses), self.health)
        except self._mpi.Exception:
            for status, (tensor, peer) in zip(statuses, recvs, strict=False):
                if self._mpi.Get_error_class(status.Get_error()) == self._mpi.ERR_TRUNCATE:
                    raise self.refused(peer, f"more than {tensor.nbytes}", tensor.nbytes) from None
            raise
        for status, (tensor, peer) in zip(statuses, recvs, strict=False):  # the library appends the statuses of sends
            if (came := status.Get_count(self._mpi.BYTE)) != tensor.nbytes:
                raise self.refused(peer, came, tensor.nbytes)

    def refused(self, peer: int, came: int | str, awaited: int) -> WrongMessage:
        """Tell all ranks that a message has arrived with a wrong length, and return the error to raise.

        Args:
            peer: index of the sender in the group.
            came: its length in bytes, or a phrase for it.
            awaited: the length in bytes that this rank expected.
        """
        reason = (
            f"received a message of {came} bytes from rank {self.ranks[peer]} where it awaited one of {awaited}, in a "
            f"group of {len(self.ranks)} ranks from {min(self.ranks)} to {max(self.ranks)}; trust no result: these "
            "ranks do not make the same calls"
        )
        self.health.fail(reason)
        return WrongMessage(self.ranks[self.index], f"failed: {reason}")

    def barrier(self) -> None:
        self.health.arrive("a barrier", self.ranks)
        self._complete([self._communicator.Ibarrier()], [], [])


class MpiTransport(LaneOwner):
    """A transport over MPI's two-sided messages, for CPU tensors."""

    library = "mpi"

    def __init__(self, health: Health) -> None:
        super().__init__(torch.device("cpu"), health)
        self._mpi = initialised_mpi()
        world = self._mpi.COMM_WORLD
        self._communicator = world.Dup()
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self._communicators: list[Any] = []
        self.world = self._over(self._communicator, tuple(range(self.size)))

    def new_group(self, members: tuple[int, ...]) -> MpiGroup:
        def meet() -> MpiGroup:  # called by the members only
            communicator = self._communicator.Create_group(self._communicator.Get_group().Incl(list(members)))
            self._communicators.append(communicator)
            return self._over(communicator, members)

        return self.blocking(meet, among=members)

    def _over(self, communicator: Any, members: tuple[int, ...]) -> MpiGroup:
        """Make a group over a communicator of MPI. All its ranks call this.

        Args:
            members: the ranks of the communicator, in its order.
        """
        return MpiGroup(self._mpi, communicator, members, self.health)

    def _release(self) -> None:
        for communicator in [*self._communicators, self._communicator]:
            communicator.Free()

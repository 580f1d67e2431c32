"""MPI as transport, through mpi4py: for CPU tensors, where a job has MPI anyway.

MPI libraries make no progress in the background, so a lane's thread sits in the wait and polls. It sleeps between
polls: with more ranks than cores a spinning wait starves the rank it waits for.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.health import Health
from cocodiff.comm.lane_owner import LaneOwner
from cocodiff.comm.transport import Group, Pending

SPINS = 20
SLEEP_S = (20e-6, 500e-6)


def initialised_mpi() -> Any:
    """mpi4py's MPI module, started with full thread support. `cocodiff.comm.connect` sees to its end: after a fault
    MPI_Finalize would wait for the dead.

    Raises RuntimeError when the library grants less than MPI_THREAD_MULTIPLE.
    """
    import mpi4py

    mpi4py.rc.finalize = False
    mpi4py.rc.threads = True
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(f"{MPI.Get_library_version().splitlines()[0]} grants no MPI_THREAD_MULTIPLE: use gloo")
    return MPI


def broadcast_over_mpi(world: Any, text: str | None) -> str:
    """Rank 0's text, None elsewhere, on every rank. mpi4py's own calls for objects would unpickle what comes."""
    content = bytearray((text or "").encode())
    length = array("q", [len(content)])
    world.Bcast(length)
    content = content or bytearray(length[0])
    world.Bcast(content)
    return content.decode()


def bits_of(tensor: Tensor) -> Any:
    """A tensor's memory, uint8 [n]."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pack it first")
    return tensor.view(-1).view(torch.uint8).numpy()


def wait_until(done: Callable[[], bool], health: Health) -> None:
    """Polls `done`, which has the library make progress, with pauses."""
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


class _Requests:
    def __init__(self, mpi: Any, requests: list[Any], health: Health, kept: list[Tensor]) -> None:
        self._test_all, self._requests, self._health, self._kept = mpi.Request.Testall, requests, health, kept

    def wait(self) -> None:
        if self._requests:
            wait_until(lambda: self._test_all(self._requests), self._health)
        self._requests, self._kept = [], []


class MpiGroup(Group):
    def __init__(self, mpi: Any, communicator: Any, ranks: tuple[int, ...], health: Health) -> None:
        self._mpi, self._communicator, self._health = mpi, communicator, health
        self.ranks, self.index = ranks, communicator.Get_rank()

    def _buffer(self, tensor: Tensor) -> list[Any]:
        return [bits_of(tensor), self._mpi.BYTE]

    def _posted(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> list[Any]:
        requests = [self._communicator.Irecv(self._buffer(t), peer) for t, peer in recvs if t.numel()]
        return requests + [self._communicator.Isend(self._buffer(t), peer) for t, peer in sends if t.numel()]

    def send_recv(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        return _Requests(self._mpi, self._posted(sends, recvs), self._health, [t for t, _ in sends + recvs])

    def barrier(self) -> None:
        _Requests(self._mpi, [self._communicator.Ibarrier()], self._health, []).wait()


class MpiTransport(LaneOwner):
    library = "mpi"

    def __init__(self, health: Health) -> None:
        super().__init__(torch.device("cpu"), health)
        self._mpi = initialised_mpi()
        world = self._mpi.COMM_WORLD
        self._communicator = world.Dup()
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self._communicators: list[Any] = []
        self.world = self._over(self._communicator, tuple(range(self.size)))

    def _new_group(self, members: tuple[int, ...]) -> MpiGroup:
        def meet() -> MpiGroup:  # only the members do
            communicator = self._communicator.Create_group(self._communicator.Get_group().Incl(list(members)))
            self._communicators.append(communicator)
            return self._over(communicator, members)

        return self.blocking(meet, among=members)

    def _over(self, communicator: Any, members: tuple[int, ...]) -> MpiGroup:
        """A group of the ranks of a communicator, who all call this."""
        return MpiGroup(self._mpi, communicator, members, self.health)

    def _release(self) -> None:
        for communicator in [*self._communicators, self._communicator]:
            communicator.Free()

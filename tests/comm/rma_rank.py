"""One rank of an MPI job, over windows: what the contract does not come to. Every rank of a small world runs `main`.

With a transport and two numbers of bytes rank 1 sends rank 2 a message of the first, where rank 2 awaits one of the
second.
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import torch

from cocodiff.comm import rma
from cocodiff.comm.health import Health
from cocodiff.comm.launch import detect
from cocodiff.comm.rma import RmaTransport
from cocodiff.comm.transport import Group, Transport
from cocodiff.config.config import Config
from cocodiff.jobs.ranks import run_ranks


def disagree(transport: Transport, sent: int, awaited: int) -> None:
    group = transport.group(range(transport.size))
    sends = [(torch.zeros(sent, dtype=torch.uint8), 2)] if transport.rank == 1 else []
    recvs = [(torch.zeros(awaited, dtype=torch.uint8), 1)] if transport.rank == 2 else []
    transport.lane("plane").submit(lambda: group.send_recv(sends, recvs).wait()).wait()
    transport.gather_values("done")
    transport.broadcast_value("done")


class Unordered:
    """A window over links that keep no order: what is put arrives when it is waited for, the last first."""

    def __init__(self, window: Any) -> None:
        self._window, self._puts = window, list[tuple[Any, int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)

    def Put(self, content: Any, number: int, at: int) -> None:
        self._puts.append((content, number, at))

    def Flush(self, number: int) -> None:
        theirs = [put for put in self._puts if put[1] == number]
        self._puts = [put for put in self._puts if put[1] != number]
        for put in reversed(theirs):
            self._window.Put(*put)
            self._window.Flush(number)

    Flush_local = Flush


def fill(transport: Transport, group: Group, next_one: int, before: int, capacity: int) -> None:
    # A ring is filled several times before anything is read: what has no room waits, and nothing is overwritten.
    sent = [torch.full((capacity // 3,), 16 * transport.rank + n, dtype=torch.uint8) for n in range(11)]
    leaving = group.send_recv([(tensor, next_one) for tensor in sent], [])
    came = [torch.empty_like(tensor) for tensor in sent]
    coming = [group.send_recv([], [(tensor, before)]) for tensor in came]
    coming[-1].wait()
    leaving.wait()
    assert [tensor.unique().tolist() for tensor in came] == [[16 * before + n] for n in range(11)]


def main() -> int:
    transport = RmaTransport(Health())
    assert transport.library == "mpi-rma" and not transport.drawback, transport.drawback
    group, plain = transport.group(range(transport.size)), rma.RmaGroup
    next_one, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    capacity = rma.WINDOW_BYTES // transport.size
    fill(transport, group, next_one, before, capacity)
    rma.RmaGroup = lambda owner, mpi, communicator, window, members: plain(  # type: ignore[assignment, misc]
        owner, mpi, communicator, Unordered(window), members
    )
    fill(transport, transport.group(range(transport.size)), next_one, before, capacity)
    rma.RmaGroup = plain  # type: ignore[misc]

    # Up to a ring, just over it (two-sided), and a small one behind: each in its own place, and in order.
    sizes = (capacity, capacity + 1, 5, 4 * capacity, 1)
    sent = [torch.full((size,), transport.rank + n, dtype=torch.uint8) for n, size in enumerate(sizes)]
    came = [torch.empty_like(tensor) for tensor in sent]
    group.send_recv([(tensor, next_one) for tensor in sent], [(tensor, before) for tensor in came]).wait()
    assert [tensor.unique().tolist() for tensor in came] == [[before + n] for n in range(len(sizes))]

    # A message is through for its sender, and is there, before its receiver has asked for it.
    if transport.rank == 0:
        started = time.monotonic()
        group.send_recv([(torch.arange(1000), 1)], []).wait()
        assert time.monotonic() - started < 1.0
    if transport.rank == 1:
        time.sleep(2.0)
        late = torch.empty(1000, dtype=torch.int64)
        group.send_recv([], [(late, 0)]).wait()
        assert torch.equal(late, torch.arange(1000))
    group.barrier()

    # Without windows that fit it is two-sided MPI on all ranks: if one alone has no memory for any, or all not enough.
    free, usual = shutil.disk_usage(rma.SHARED_MEMORY).free, rma.SHARED_BYTES
    for needed in (2**60 if transport.rank == 1 else usual, free // 2):
        rma.SHARED_BYTES = needed
        other = RmaTransport(Health())
        assert other.library == "mpi" and "messages go by mpi" in other.drawback, other.drawback
        other.world.barrier()
        other.close()
    transport.close()
    print("windows hold")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(main())
    config, sizes = Config(transport=sys.argv[1], device="cpu", timeout_s=20.0), map(int, sys.argv[2:])
    sys.exit(run_ranks(None, detect(), config, {}, lambda opened: disagree(opened, *sizes)))

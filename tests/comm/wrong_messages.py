"""Groups that spoil or lose a message. As a program: `wrong_messages.py FAULT` forks 3 ranks that check messages; what
rank 1 sends to rank 2 in their last call has the fault."""

from __future__ import annotations

import sys

import torch
from seams import put_behind_checksums

from cocodiff.comm.checked import CheckedGroup
from cocodiff.comm.launch import Launch
from cocodiff.comm.transport import Group, Pending, Transport
from cocodiff.config.config import Config
from cocodiff.jobs.ranks import run_ranks

RANKS, CALLS = 3, 4
SENDER, RECEIVER = 1, 2


class Faulty(Group):
    """A group whose n-th message to a peer comes with one bit flipped, or not at all, nor does its checksum."""

    def __init__(self, group: Group, fault: str, peer: int, number: int, unchecked: int = 0) -> None:
        """unchecked: messages that come before, without checksums."""
        self._group, self._fault, self._peer, self._left = group, fault, peer, 2 * number + unchecked
        self.ranks, self.index, self.receives_ahead = group.ranks, group.index, group.receives_ahead

    def send_recv(self, sends: list[tuple[torch.Tensor, int]], recvs: list[tuple[torch.Tensor, int]]) -> Pending:
        found = []
        for tensor, peer in sends:
            self._left -= peer == self._peer  # a message, then its checksum
            if peer == self._peer and self._left in (0, 1) and self._fault == "lost":
                continue
            if peer == self._peer and self._left == 1:
                tensor = tensor.clone()
                tensor.view(-1).view(torch.uint8)[-1] ^= 16
            found.append((tensor, peer))
        return self._group.send_recv(found, recvs)

    def barrier(self) -> None:
        self._group.barrier()


def spoil(group: CheckedGroup, fault: str, peer: int, number: int) -> None:
    """Has a message of a checked group go wrong on its way, behind the checksums' back."""
    put_behind_checksums(group, lambda plain: Faulty(plain, fault, peer, number))


def work(fault: str, transport: Transport) -> None:
    group = transport.group(range(RANKS))
    assert isinstance(group, CheckedGroup)
    if transport.rank == SENDER:
        spoil(group, fault, RECEIVER, CALLS)
    for _ in range(CALLS):
        transport.health.arrive("exchange")
        parts = [torch.empty(33) for _ in range(RANKS)]
        transport.lane("plane").submit(lambda into=parts: group.all_gather(torch.ones(33), into).wait()).wait()
    transport.broadcast_value("done")


def main() -> int:
    config = Config(transport="gloo", device="cpu", check_messages=True, timeout_s=4.0, stall_timeout_s=3.0)
    return run_ranks(RANKS, Launch(), config, {}, lambda transport: work(sys.argv[1], transport))

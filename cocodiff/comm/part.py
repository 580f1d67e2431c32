"""Some of a transport's ranks as a transport of their own, with ranks numbered from 0: an engine runs on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cocodiff.comm.transport import Group, Lane, Pending, Transport


class PartGroup(Group):
    """Members of a group under the part's numbers, in the part's order: all of the group or some of it."""

    def __init__(self, group: Group, ranks: tuple[int, ...], members: Sequence[int], device: torch.device) -> None:
        """members: the index in `group` of each of `ranks`."""
        self._group, self._members, self.ranks, self.device = group, tuple(members), ranks, device
        self.index, self.receives_ahead = self._members.index(group.index), group.receives_ahead

    def send_recv(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        return self._group.send_recv(
            [(tensor, self._members[peer]) for tensor, peer in sends],
            [(tensor, self._members[peer]) for tensor, peer in recvs],
        )

    def barrier(self) -> None:
        if len(self.ranks) == len(self._group.ranks):
            self._group.barrier()
        else:
            super().barrier()


class Part(Transport):
    """The ranks `ranks` of a transport, in that order, this one among them. Lanes, control lane and world group are the
    whole's, so a part costs no threads and no communicators until it makes groups.

    The ranks of a part make its groups alike, as often and in the same order (see `Ranks.group`). What one part does is
    independent of the others. Closing a part leaves the whole open.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size, self.control = self._ranks.index(whole.rank), len(self._ranks), whole.control
        self.device = whole.device
        self.health = whole.health  # a rank lost anywhere ends the part too, and is named by its number in the run
        self.world = PartGroup(whole.world, tuple(range(self.size)), self._ranks, self.device)

    @property
    def closed(self) -> bool:
        return self._closed or self._whole.closed

    @property
    def run_ranks(self) -> tuple[int, ...]:
        of_whole = self._whole.run_ranks
        return tuple(of_whole[rank] for rank in self._ranks)

    @property
    def run_size(self) -> int:
        return self._whole.run_size

    def group(self, ranks: Sequence[int]) -> PartGroup:
        members = [self._ranks[rank] for rank in ranks]
        ascending = sorted(members)  # as libraries keep them
        indices = [ascending.index(rank) for rank in members]
        return PartGroup(self._whole.group(ascending), tuple(ranks), indices, self.device)

    def lane(self, name: str) -> Lane:
        return self._whole.lane(name)

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        self.health.arrive(at, among or self.run_ranks)

    def close(self) -> None:
        self._closed = True

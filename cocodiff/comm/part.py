"""Some of a transport's ranks as ranks of their own, numbered from 0."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from cocodiff.comm.transport import Done, Group, Lane, PeerGroup, Pending, Ranks


class PartGroup(PeerGroup):
    """Members of a group under the part's numbers, in the part's order: all of the group or some of it."""

    def __init__(self, group: Group, ranks: tuple[int, ...], members: Sequence[int]) -> None:
        """members: the index in `group` of each of `ranks`."""
        self._group, self._members, self.ranks = group, tuple(members), ranks
        self.index, self.receives_ahead = self._members.index(group.index), group.receives_ahead

    def send_recv(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        return self._group.send_recv(
            [(tensor, self._members[peer]) for tensor, peer in sends],
            [(tensor, self._members[peer]) for tensor, peer in recvs],
        )

    def all_reduce(self, tensor: Tensor) -> Pending:
        if len(self.ranks) == len(self._group.ranks):
            return self._group.all_reduce(tensor)
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self.all_gather(tensor, parts).wait()
        tensor.copy_(torch.stack(parts).sum(0))
        return Done()

    def barrier(self) -> None:
        if len(self.ranks) == len(self._group.ranks):
            self._group.barrier()
        else:
            self.all_reduce(torch.zeros(1)).wait()


class Part:
    """The ranks `ranks` of a transport, in that order, this one among them. All parts of a run make groups alike, as
    often and in the same order (see `Ranks.group`)."""

    def __init__(self, whole: Ranks, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size = self._ranks.index(whole.rank), len(self._ranks)

    @property
    def control(self) -> Lane:
        return self._whole.control

    @cached_property
    def world(self) -> PartGroup:
        """Over the whole's: parts talk at the same time, and need no communicators of their own for it."""
        return PartGroup(self._whole.world, tuple(range(self.size)), self._ranks)

    def group(self, ranks: Sequence[int]) -> PartGroup:
        members = [self._ranks[rank] for rank in ranks]
        ascending = sorted(members)
        return PartGroup(self._whole.group(ascending), tuple(ranks), [ascending.index(rank) for rank in members])

    def lane(self, name: str) -> Lane:
        return self._whole.lane(name)

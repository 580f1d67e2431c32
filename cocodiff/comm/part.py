"""Some of a transport's ranks as a transport of their own, with ranks numbered from 0: an engine runs on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from cocodiff.comm.objects import broadcast_value, gather_values
from cocodiff.comm.transport import Group, Health, Lane, Pending, Transport

T = TypeVar("T")


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


class Part:
    """The ranks `ranks` of a transport, in that order, this one among them. Lanes, control lane and world group are the
    whole's, so a part costs no threads and no communicators until it makes groups.

    The ranks of a part make its groups alike, as often and in the same order (see `Ranks.group`). What one part does is
    independent of the others. Closing a part leaves the whole open.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole, self._ranks, self._closed = whole, tuple(ranks), False
        self.rank, self.size = self._ranks.index(whole.rank), len(self._ranks)

    @cached_property
    def run_ranks(self) -> tuple[int, ...]:
        of_whole = self._whole.run_ranks
        return tuple(of_whole[rank] for rank in self._ranks)

    @property
    def run_size(self) -> int:
        return self._whole.run_size

    @cached_property
    def device(self) -> torch.device:
        return self._whole.device

    @property
    def health(self) -> Health:
        """That of the whole run. A rank lost anywhere ends the part too, and is named by its number in the run."""
        return self._whole.health

    @property
    def closed(self) -> bool:
        return self._closed or self._whole.closed

    @property
    def control(self) -> Lane:
        return self._whole.control

    @cached_property
    def world(self) -> PartGroup:
        return PartGroup(self._whole.world, tuple(range(self.size)), self._ranks, self.device)

    def group(self, ranks: Sequence[int]) -> PartGroup:
        members = [self._ranks[rank] for rank in ranks]
        ascending = sorted(members)  # as libraries keep them
        indices = [ascending.index(rank) for rank in members]
        return PartGroup(self._whole.group(ascending), tuple(ranks), indices, self.device)

    def lane(self, name: str) -> Lane:
        return self._whole.lane(name)

    def arrive(self, at: str) -> None:
        self.health.arrive(at, self.run_ranks)

    def gather_object(self, value: Any) -> list[Any] | None:
        """The values of all ranks of the part on its rank 0, None elsewhere."""
        return self._blocking(gather_values, value, "gather_object")

    def broadcast_object(self, value: Any) -> Any:
        """The value of the part's rank 0."""
        return self._blocking(broadcast_value, value, "broadcast_object")

    def _blocking(self, pass_on: Callable[[Group, torch.device, Any], T], value: Any, at: str) -> T:
        self.arrive(at)
        found: list[T] = []
        self.control.submit(lambda: found.append(pass_on(self.world, self.device, value))).wait()
        return found[0]

    def close(self) -> None:
        self._closed = True

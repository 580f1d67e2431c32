"""Some of a transport's ranks as ranks of their own, numbered from 0."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cocodiff.comm.transport import Group, Lane, Pending, Ranks


class PartGroup:
    """A group whose ranks have the part's numbers, in the part's order. Libraries keep theirs ascending."""

    def __init__(self, group: Group, ranks: tuple[int, ...], inner: Sequence[int]) -> None:
        """inner: where in `group` each of `ranks` is."""
        self._group, self._inner, self.ranks = group, inner, ranks
        self.index, self.receives_ahead = list(inner).index(group.index), group.receives_ahead

    def all_to_all(self, sends: list[Tensor], recvs: list[Tensor]) -> Pending:
        return self._group.all_to_all(self._ordered(sends), self._ordered(recvs))

    def send_recv(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> Pending:
        return self._group.send_recv(
            [(tensor, self._inner[peer]) for tensor, peer in sends],
            [(tensor, self._inner[peer]) for tensor, peer in recvs],
        )

    def all_gather(self, send: Tensor, recvs: list[Tensor]) -> Pending:
        return self._group.all_gather(send, self._ordered(recvs))

    def all_reduce(self, tensor: Tensor) -> Pending:
        return self._group.all_reduce(tensor)

    def barrier(self) -> None:
        self._group.barrier()

    def _ordered(self, tensors: list[Tensor]) -> list[Tensor]:
        """One for each peer, in the group's own order."""
        found = list(tensors)
        for tensor, place in zip(tensors, self._inner, strict=True):
            found[place] = tensor
        return found


class Part:
    """The ranks `ranks` of a transport, in that order, this one among them. All parts of a run make groups alike, as
    often and in the same order (see `Ranks.group`)."""

    def __init__(self, whole: Ranks, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size = self._ranks.index(whole.rank), len(self._ranks)

    def group(self, ranks: Sequence[int]) -> PartGroup:
        members = [self._ranks[rank] for rank in ranks]
        ascending = sorted(members)
        return PartGroup(self._whole.group(ascending), tuple(ranks), [ascending.index(rank) for rank in members])

    def lane(self, name: str) -> Lane:
        return self._whole.lane(name)

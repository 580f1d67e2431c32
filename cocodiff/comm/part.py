"""Some of a transport's ranks as a transport of their own, with ranks numbered from 0: an engine runs on it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cocodiff.comm.transport import Done, Group, Health, Lane, PeerGroup, Pending, Transport


class PartGroup(PeerGroup):
    """Members of a group under the part's numbers, in the part's order: all of the group or some of it."""

    def __init__(
        self, group: Group, ranks: tuple[int, ...], members: Sequence[int], device: torch.device | None = None
    ) -> None:
        """members: the index in `group` of each of `ranks`. device: of messages, needed for a barrier of some only."""
        self._group, self._members, self.ranks, self._device = group, tuple(members), ranks, device
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
            one = torch.ones(1, device=self._device)
            self.all_reduce(one).wait()
            one.item()  # on accelerators the wait has ordered streams only


class PartHealth:
    """The health of the whole run, for calls that only the part's ranks make. A rank lost anywhere ends the part too,
    and is named by its number in the whole run."""

    def __init__(self, whole: Health, run_ranks: tuple[int, ...]) -> None:
        self._whole, self._run_ranks = whole, run_ranks

    def check(self) -> None:
        self._whole.check()

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        self._whole.arrive(at, among or self._run_ranks)

    def still_waiting(self) -> None:
        self._whole.still_waiting()

    def blame(self, error: BaseException) -> BaseException:
        return self._whole.blame(error)

    def fail(self, reason: str, mistake: bool = False) -> None:
        self._whole.fail(reason, mistake)

    def when_lost(self, action: Callable[[BaseException], None]) -> None:
        self._whole.when_lost(action)

    def blocking(self) -> AbstractContextManager[None]:
        return self._whole.blocking()

    def close(self) -> None:
        """The whole run goes on."""


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

    @cached_property
    def health(self) -> PartHealth:
        return PartHealth(self._whole.health, self.run_ranks)

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
        return PartGroup(self._whole.group(ascending), tuple(ranks), [ascending.index(rank) for rank in members])

    def lane(self, name: str) -> Lane:
        return self._whole.lane(name)

    def gather_object(self, value: Any) -> list[Any] | None:
        """The picklable values of all ranks of the part on its rank 0, None elsewhere."""
        others = range(1, self.size)
        if self.rank:
            self._pass_objects({0: value}, (), "gather_object")
            return None
        received = self._pass_objects({}, others, "gather_object")
        return [value, *(received[rank] for rank in others)]

    def broadcast_object(self, value: Any) -> Any:
        """The picklable value of the part's rank 0."""
        if self.rank:
            return self._pass_objects({}, (0,), "broadcast_object")[0]
        self._pass_objects(dict.fromkeys(range(1, self.size), value), (), "broadcast_object")
        return value

    def close(self) -> None:
        self._closed = True

    def _pass_objects(self, sent: dict[int, Any], sources: Iterable[int], at: str) -> dict[int, Any]:
        """Sends each rank its object and returns those of `sources`: first their sizes, then their bytes."""
        contents = {to: _as_bytes(value).to(self.device) for to, value in sent.items()}
        objects: dict[int, Any] = {}

        def exchange(contents: dict[int, Tensor]) -> None:
            lengths = {to: torch.tensor([len(content)], device=self.device) for to, content in contents.items()}
            expected = {source: torch.empty(1, dtype=torch.int64, device=self.device) for source in sources}
            self.world.send_recv(_by_peer(lengths), _by_peer(expected)).wait()
            found = {
                source: torch.empty(int(length), dtype=torch.uint8, device=self.device)
                for source, length in expected.items()
            }
            self.world.send_recv(_by_peer(contents), _by_peer(found)).wait()
            objects.update({source: pickle.loads(x.cpu().numpy().tobytes()) for source, x in found.items()})

        self.health.arrive(at)
        self.control.submit(exchange, contents).wait()
        return objects


def _as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _by_peer(tensors: dict[int, Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, peer) for peer, tensor in tensors.items()]

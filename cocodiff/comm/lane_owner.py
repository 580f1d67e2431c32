"""What transports have in common, whatever carries their messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from cocodiff.comm.objects import broadcast_value, gather_values
from cocodiff.comm.transport import Group, Health, Lane

T = TypeVar("T")


class LaneOwner(ABC):
    """The lanes of a transport by their names. Set-up traffic goes over the control lane, so that a lost peer ends the
    wait for it."""

    rank: int
    size: int
    world: Group
    library = "none"  # what carries messages, in words
    _checks = False

    def __init__(self, device: torch.device, health: Health) -> None:
        self.device, self.health = device, health
        self.closed = False
        self._lanes: dict[str, Lane] = {}
        self.control = self.lane("control")

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(name, self.device, self.health)
        return self._lanes[name]

    def group(self, ranks: Sequence[int]) -> Group:
        group = self._new_group(tuple(ranks))
        return self._checked(group) if self._checks else group

    def check_messages(self) -> None:
        """Has a checksum travel with every message from now on: a wrong message is an error that names both ranks. All
        ranks call it, before they make groups."""
        self._checks, self.world = True, self._checked(self.world)

    def _checked(self, group: Group) -> Group:
        from cocodiff.comm.checked import CheckedGroup

        return CheckedGroup(group, self.health)

    @property
    def run_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    @property
    def run_size(self) -> int:
        return self.size

    def arrive(self, at: str) -> None:
        self.health.arrive(at)

    def blocking(self, job: Callable[[], T], at: str = "set-up", among: tuple[int, ...] = ()) -> T:
        """What `job` returns, which all ranks call, or all of `among`: no tensors of a device. at: its name."""
        self.health.arrive(at, among if len(among) < self.size else ())
        found: list[T] = []
        self.control.submit(lambda: found.append(job())).wait()
        return found[0]

    def gather_object(self, value: Any) -> list[Any] | None:
        return self.blocking(lambda: gather_values(self.world, self.device, value), "gather_object")

    def broadcast_object(self, value: Any) -> Any:
        return self.blocking(lambda: broadcast_value(self.world, self.device, value), "broadcast_object")

    def close(self) -> None:
        """Leaves the run in good order. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        self.health.close()
        for lane in self._lanes.values():
            lane.close()
        self._release()

    @abstractmethod
    def _new_group(self, ranks: tuple[int, ...]) -> Group: ...

    @abstractmethod
    def _release(self) -> None:
        """Gives back what the communication library holds."""

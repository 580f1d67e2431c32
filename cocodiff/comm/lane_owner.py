"""The lanes and groups of a whole run, whatever carries their messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from cocodiff.comm.health import Health
from cocodiff.comm.transport import Group, Lane, Transport


class LaneOwner(Transport):
    """Owns the lanes of all ranks of a run, by their names."""

    library = "none"  # what carries messages, in words
    drawback = ""  # what is wrong with the transport that was asked for, in words
    _checks = False

    def __init__(self, device: torch.device, health: Health) -> None:
        self.device, self.health = device, health
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

    def close(self) -> None:
        if self.closed:
            return
        self._closed = True
        self.health.close()
        for lane in self._lanes.values():
            lane.close()
        self._release()

    @abstractmethod
    def _new_group(self, ranks: tuple[int, ...]) -> Group: ...

    @abstractmethod
    def _release(self) -> None:
        """Gives back what the communication library holds."""

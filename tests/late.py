"""Transports whose messages, groups and lanes are late now and then."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from cocodiff.comm.transport import Transport


def dawdle() -> None:
    time.sleep(random.choice((0.0, 0.0, 0.001, 0.004)))


class Late:
    """pause: is called where something may be late."""

    def __init__(self, transport: Any, pause: Callable[[], None] = dawdle) -> None:
        self._transport, self._pause = transport, pause
        self.control, self.world = LateLane(transport.control, pause), LateGroup(transport.world, pause)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def group(self, ranks: Sequence[int], together: bool = False) -> LateGroup:
        return LateGroup(self._transport.group(ranks, together), self._pause)

    part = Transport.part

    def lane(self, name: str) -> LateLane:
        return LateLane(self._transport.lane(name), self._pause)


class LateLane:
    def __init__(self, lane: Any, pause: Callable[[], None]) -> None:
        self._lane, self._pause = lane, pause

    def submit(self, work: Callable[..., Any], *given: Any) -> Any:
        return self._lane.submit(lambda *given: (self._pause(), work(*given))[1], *given)


class LateGroup:
    def __init__(self, group: Any, pause: Callable[[], None]) -> None:
        self._group, self._pause = group, pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send_recv(self, sends: Any, recvs: Any) -> LatePending:
        self._pause()
        return LatePending(self._group.send_recv(sends, recvs), self._pause)

    collective = send_recv


class LatePending:
    def __init__(self, pending: Any, pause: Callable[[], None]) -> None:
        self._pending, self._pause = pending, pause
        pause()

    def wait(self) -> None:
        self._pending.wait()
        self._pause()

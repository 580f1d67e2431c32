"""The baseline that serves one peer at a time: a transport whose groups take their peers in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SerialTransport:
    """A transport whose groups serve one peer at a time: at step s they send to the rank s further on and receive from
    the rank s before."""

    def __init__(self, transport: Any) -> None:
        self._inner, self.world = transport, SerialGroup(transport.world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def group(self, ranks: Sequence[int]) -> Any:
        return SerialGroup(self._inner.group(ranks))


class SerialGroup:
    receives_ahead = False  # a call lists all its peers, so that they can take turns

    def __init__(self, group: Any) -> None:
        self._inner, self.ranks, self.index = group, group.ranks, group.index

    def send_recv(self, sends: list[tuple[Any, int]], recvs: list[tuple[Any, int]]) -> Any:
        size, pending = len(self.ranks), self._inner.send_recv([], [])
        for step in range(1, size):
            to, source = (self.index + step) % size, (self.index - step) % size
            sent, received = ([one for one in some if one[1] == peer] for some, peer in ((sends, to), (recvs, source)))
            pending = self._inner.send_recv(sent, received)
            pending.wait()
        return pending

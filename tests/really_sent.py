"""Counts what ranks of a loopback world hand to each other, below everything that keeps accounts of it."""

from __future__ import annotations

from collections import Counter

import pytest

from cocodiff.comm.loopback import LoopbackGroup
from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.comm.transport import Messages, Pending
from cocodiff.topology import Topology


class ReallySent:
    """Bytes of tensors by sender and receiver, from here on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[int, int, int]] = []
        plain = LoopbackGroup.send_recv

        def send_recv(group: LoopbackGroup, sends: Messages, recvs: Messages) -> Pending:
            self.sent += [(group.ranks[group.index], group.ranks[peer], tensor.nbytes) for tensor, peer in sends]
            return plain(group, sends, recvs)

        monkeypatch.setattr(LoopbackGroup, "send_recv", send_recv)

    def by_link(self, topology: Topology, rank: int | None = None) -> dict[str, int]:
        """By link class, of one sender or of all."""
        found = Counter[str]()
        for sender, receiver, count in self.sent:
            if rank in (None, sender) and sender != receiver:
                found[str(topology.link_class(sender, receiver))] += count
        return {link: found[link] for link in LINK_CLASSES}

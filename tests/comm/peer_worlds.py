"""Ranks that know of each other, in a time of their own, without sockets or threads."""

from __future__ import annotations

from cocodiff.comm.peers import ROUND_S, Limits, Message, Peers


class World:
    """Ranks that hear each other at once. stopped: these do nothing, and find their messages when they go on."""

    def __init__(
        self, size: int, settings: dict[int, dict[str, str]] | None = None, join: bool = True, **limits
    ) -> None:
        self.now = 100.0
        self.alike = {rank: (settings or {}).get(rank, {"preset": "tapa"}) for rank in range(size)}
        self.ranks = [Peers(rank, size, self.alike[rank], Limits(**limits), lambda: self.now) for rank in range(size)]
        self.stopped, self.left = set[int](), set[int]()
        self._unread: list[tuple[int, int, Message]] = []
        for rank in range(1, size) if join else ():
            self.join(rank)

    def join(self, rank: int) -> None:
        self.send(rank, [{"settings": self.alike[rank]}])

    def send(self, sender: int, messages: list[Message]) -> None:
        for message in messages:
            for to in [0] if sender else range(1, len(self.ranks)):
                self._unread.append((sender, to, message))
        self._deliver()

    def _deliver(self) -> None:
        unread, self._unread = self._unread, [one for one in self._unread if one[1] in self.stopped]
        for sender, to, message in unread:
            if to not in self.stopped:
                self.send(to, self.ranks[to].hear(sender, message, self.ranks[to].own.now()))

    def leave(self, rank: int) -> None:
        self.left.add(rank)
        self.send(rank, self.ranks[rank].goodbye())

    def die(self, victim: int) -> None:
        self.stopped.add(victim)
        for rank in [0] if victim else range(1, len(self.ranks)):
            self.send(rank, self.ranks[rank].gone(victim, self.ranks[rank].own.now()))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / ROUND_S)):
            self.now += ROUND_S
            going = [peers for peers in self.ranks if peers.rank not in self.stopped]
            times = [peers.wake(self.now) for peers in going]
            self._deliver()
            for peers, now in zip(going, times, strict=True):
                self.send(peers.rank, peers.look(now))

    def errors(self, but: int | None = None) -> set[str]:
        return {str(peers.lost) for peers in self.ranks if peers.rank != but}

"""Watches over real sockets, in threads of this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from seams import peers_of

from cocodiff.comm.health import Watch
from cocodiff.comm.peers import Limits
from cocodiff.config.errors import PeerLost, UserError


class Watches:
    """Opens watches, which are closed with the test. last_words: of ranks that would have ended their process."""

    KEY = "a word of this run"

    def __init__(self) -> None:
        self.last_words: list[str] = []
        self._open: list[Watch] = []

    def open(
        self,
        ranks: range,
        size: int,
        port: int | None = None,
        settings: dict[int, dict[str, str]] | None = None,
        meet: Callable[[int], None] = lambda port: None,
        start_s: float = 60.0,
    ) -> list[Watch | BaseException]:
        """Side by side; what an opening raised stands in its place. port: of a rank 0 elsewhere. meet: called with the
        port before the ranks join."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=size + 64) if 0 in ranks else None
        address = ("127.0.0.1", port if listener is None else listener.getsockname()[1])
        meet(address[1])

        def open_one(rank: int) -> Watch | BaseException:
            endpoint = listener if rank == 0 and listener is not None else address
            alike = (settings or {}).get(rank, {"preset": "tapa"})
            limits = Limits(timeout_s=60.0, start_s=start_s)
            try:
                watch = Watch(rank, size, endpoint, self.KEY, alike, limits, end=self.last_words.append)
            except (PeerLost, UserError) as error:
                return error
            self._open.append(watch)
            return watch

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(open_one, ranks))

    def close(self) -> None:
        """Rank 0 last, which waits for the others' goodbyes."""
        for watch in sorted(self._open, key=lambda watch: -watch.rank):
            watch.close()


def awaited(found: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.02)


def awaited_error(watch: Watch) -> BaseException:
    """The error that a rank's next check raises, once it has come."""
    awaited(lambda: peers_of(watch).lost)
    with pytest.raises((PeerLost, UserError)) as error:
        watch.check()
    return error.value

"""Who may join a watch: rank 0's listening socket until every rank of the job is connected.

Anybody who reaches the port may connect, so nothing that is sent before the job's secret is trusted: it must come as
one short line within a few seconds, strangers wait beside the ranks and not before them, and only so many of them.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HELLO_S = 5.0  # within which a connection must have said who it is
HELLO_BYTES = 4096
LINE_BYTES = 64 << 20  # of a rank that was admitted; its settings may list many files
SEND_S = 5.0  # a peer that reads nothing for so long is not waited for
STRANGERS = 32  # connections beside the job's own that may be undecided at a time


class Line:
    """JSON messages over a socket, one a line."""

    def __init__(self, connection: socket.socket, rest: bytes = b"") -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_S)
        self.socket = connection
        self._rest = rest
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived, None when the other side is gone or sends what no rank does."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data or len(self._rest) + len(data) > LINE_BYTES:
            return None
        self._rest += data
        return self.waiting_messages()

    def waiting_messages(self) -> list[dict[str, Any]] | None:
        """The whole messages among what was received."""
        if b"\n" not in self._rest:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            return None


@dataclass(eq=False)
class _Undecided:
    """A connection that has not said who it is."""

    connection: socket.socket
    deadline: float = field(default_factory=lambda: time.monotonic() + HELLO_S)
    data: bytes = b""


class Admission:
    """Admits ranks 1 to size - 1, each once, that know the job's secret; all on the selector of the watch's thread."""

    def __init__(self, listener: socket.socket, key: str, size: int, selector: selectors.BaseSelector) -> None:
        self._listener, self._key, self._selector = listener, key, selector
        self._capacity = size + STRANGERS
        self.missing = set(range(1, size))
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    def progress(self, key: selectors.SelectorKey) -> Iterator[tuple[int, Line]]:
        """Handles one of the selector's events of the listener or of an undecided connection; yields whom it admits."""
        if key.fileobj is self._listener:
            self._accept()
            return
        undecided = key.data
        try:
            data = undecided.connection.recv(HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        undecided.data += data
        if data and b"\n" not in undecided.data and len(undecided.data) < HELLO_BYTES:
            return
        self._selector.unregister(undecided.connection)
        hello, _, rest = undecided.data.partition(b"\n")
        rank = self._rank_of(hello)
        if rank is None:
            undecided.connection.close()
            return
        self.missing.discard(rank)
        yield rank, Line(undecided.connection, rest)

    def expire(self) -> None:
        """Turns away who has not said in time who it is."""
        now = time.monotonic()
        for undecided in self._undecided():
            if now > undecided.deadline:
                self._turn_away(undecided)

    def close(self) -> None:
        for undecided in self._undecided():
            self._turn_away(undecided)
        self._selector.unregister(self._listener)
        self._listener.close()

    def handles(self, key: selectors.SelectorKey) -> bool:
        return key.data is self or isinstance(key.data, _Undecided)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it left before its turn came
        connection.setblocking(False)
        undecided = self._undecided()
        if len(undecided) >= self._capacity:  # ranks say at once who they are: the oldest of these is none
            self._turn_away(min(undecided, key=lambda one: one.deadline))
        self._selector.register(connection, selectors.EVENT_READ, _Undecided(connection))

    def _undecided(self) -> list[_Undecided]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, _Undecided)]

    def _turn_away(self, undecided: _Undecided) -> None:
        self._selector.unregister(undecided.connection)
        undecided.connection.close()

    def _rank_of(self, hello: bytes) -> int | None:
        """The rank that a first line is from; None for a stranger, and for a rank that is there already."""
        try:
            message = json.loads(hello)
            rank, key = message["hello"], message["key"]
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        if type(rank) is not int or type(key) is not str or rank not in self.missing:
            return None
        return rank if hmac.compare_digest(key.encode(errors="replace"), self._key.encode()) else None

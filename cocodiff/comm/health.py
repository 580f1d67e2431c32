"""Who is alive: a watch that turns a dead, failed or silent rank into an error that names it, on every survivor.

Rank 0 keeps a socket to every other rank. A rank that dies closes its socket and is noticed at once; one that fails
says so before it leaves; one that hangs misses its heartbeats and is given up after `timeout_s`. A busy rank is not
lost: heartbeats come from a thread of their own. What rank 0 learns it tells everybody; when rank 0 itself goes, every
rank sees its own socket close. The watch is apart from the transport, whose own errors name no rank or never come.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from cocodiff.errors import PeerLost, UserError

BLAME_S = 3.0  # a transport error and the notice of the death behind it travel apart
BLOCKED_S = 0.5  # how long after a loss a library's wait may take to end with an error of its own


class Alone:
    """The health of a run of one rank."""

    def check(self) -> None:
        return

    def blame(self, error: BaseException) -> BaseException:
        return error

    def fail(self, reason: str, mistake: bool = False) -> None:
        return

    def when_lost(self, action: Callable[[BaseException], None]) -> None:
        return

    def blocking(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        return


class _Line:
    """JSON messages over a socket, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.heard = time.monotonic()
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived, None when the other side is gone."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Watch:
    """One rank's end of the watch; on rank 0 also its hub. Use `Watch.open`."""

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._lost: PeerLost | UserError | None = None
        self._lines: dict[int, _Line] = {}
        self._gone: set[int] = set()  # ranks that said goodbye
        self._changed = threading.Condition()
        self._closing = False
        self._agreed = False
        self._beat_s = min(5.0, timeout_s / 4)
        self._actions: list[Callable[[BaseException], None]] = []
        self._blocked = False  # the main thread is in a library that cannot be interrupted

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        endpoint: socket.socket | tuple[str, int],
        key: str,
        settings: dict[str, str],
        timeout_s: float,
    ) -> Watch:
        """Connects all ranks and compares their settings.

        endpoint: rank 0's listening socket; elsewhere its (host, port).
        key: the run's own word, so that a stranger on the port is turned away.
        settings: name -> value; a rank whose settings differ from rank 0's is refused on every rank, with the name.
        Raises UserError for different settings, PeerLost when a rank does not show up.
        """
        watch = cls(rank, size, timeout_s)
        if isinstance(endpoint, socket.socket):
            watch._accept(endpoint, key, settings)
        else:
            watch._join(endpoint, key, settings)
        threading.Thread(target=watch._listen, name="watch", daemon=True).start()
        threading.Thread(target=watch._beat, name="watch-beat", daemon=True).start()
        with watch._changed:
            # Rank 0 waits as long for whoever is missing, and knows who it is.
            patience_s = timeout_s + BLAME_S
            ready = watch._changed.wait_for(lambda: watch._lost or watch._agreed, timeout=patience_s)
        if not ready:
            raise PeerLost(0, "did not answer at the start")
        watch.check()
        return watch

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def when_lost(self, action: Callable[[BaseException], None]) -> None:
        """Calls `action` with the error, from the watch's thread, at the moment of a loss: launchers kill the whole job
        soon after one of its processes, and the main thread may be deep in a computation."""
        self._actions.append(action)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        self.check()
        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread hears of the loss itself
            return
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def blame(self, error: BaseException) -> BaseException:
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout=BLAME_S)
        return self._lost or error

    def fail(self, reason: str, mistake: bool = False) -> None:
        """Tells everybody that this rank is about to leave with an error; a user's mistake is one on every rank."""
        if self._lost is None:
            self._tell(**({"mistake": reason} if mistake else {"lost": self.rank, "reason": f"failed: {reason}"}))

    def close(self) -> None:
        """Says goodbye. Rank 0 stays until the others have said theirs, so that a late failure still reaches them."""
        self._closing = True
        self._tell(bye=self.rank)
        if self.rank == 0:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._lost is not None or len(self._gone) == self.size - 1, timeout=self.timeout_s
                )
        for line in self._lines.values():
            line.socket.close()

    # Start-up -------------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, key: str, settings: dict[str, str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        refused: tuple[int, str] | None = None
        while len(self._lines) < self.size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = min(set(range(1, self.size)) - set(self._lines))
                self._lost = PeerLost(missing, f"did not start within {self.timeout_s:g} s")
                self._tell(lost=missing, reason=self._lost.reason)
                break
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = _Line(connection)
            hello = self._hello(line)
            if hello is None or hello.get("key") != key:
                connection.close()
                continue
            self._lines[hello["hello"]] = line
            difference = describe_difference(settings, hello["settings"])
            if difference and refused is None:
                refused = (hello["hello"], difference)
        listener.close()
        if refused:
            self._tell(refused=refused[0], reason=refused[1])
            self._settle(_refusal(*refused))
        elif self._lost is None:
            self._tell(agreed=True)
            self._agreed = True

    def _hello(self, line: _Line) -> dict[str, Any] | None:
        line.socket.settimeout(5.0)
        messages: list[dict[str, Any]] = []
        while not messages:
            try:
                received = line.receive()
            except ValueError:
                return None  # no JSON: no rank of ours
            if received is None:
                return None
            messages += received
        line.socket.settimeout(None)
        hello = messages[0]
        return hello if isinstance(hello, dict) and isinstance(hello.get("hello"), int) else None

    def _join(self, address: tuple[str, int], key: str, settings: dict[str, str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                connection = socket.create_connection(address, timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(0, f"does not answer at {address[0]}:{address[1]} ({error})") from error
                time.sleep(0.1)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines[0] = _Line(connection)
        self._lines[0].send(hello=self.rank, key=key, settings=settings)

    # Running --------------------------------------------------------------------------------------------------------

    def _tell(self, **message: Any) -> None:
        for line in list(self._lines.values()):
            try:
                line.send(**message)
            except OSError:
                continue  # the listener notices who is gone

    def _settle(self, lost: PeerLost | UserError) -> None:
        with self._changed:
            first, self._lost = self._lost is None, self._lost or lost
            self._changed.notify_all()
        if first:
            for action in self._actions:
                action(lost)
            threading.Thread(target=self._end_if_blocked, name="watch-end", daemon=True).start()

    def _end_if_blocked(self) -> None:
        """A dead peer's connections close, which ends every wait for it. A silent one's stay open."""
        time.sleep(BLOCKED_S)
        if self._blocked:
            os.write(2, f"cocodiff: [rank {self.rank}] {self._lost}; this rank was waiting for it and ends\n".encode())
            os._exit(1)

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for rank, line in self._lines.items():
            selector.register(line.socket, selectors.EVENT_READ, rank)
        while selector.get_map() and (self.rank == 0 or not self._closing):
            try:
                events = selector.select(timeout=0.2)
            except (OSError, ValueError):
                return  # closed under us at the end of the run
            for key, _ in events:
                messages = self._lines[key.data].receive()
                if messages is None:
                    selector.unregister(key.fileobj)
                    self._left(key.data)
                for message in messages or []:
                    self._hear(key.data, message)
            self._check_silence(selector)

    def _check_silence(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for key in list(selector.get_map().values()):
            if now - self._lines[key.data].heard > self.timeout_s and key.data not in self._gone:
                selector.unregister(key.fileobj)
                self._spread(key.data, f"has been silent for {self.timeout_s:g} s")

    def _left(self, rank: int) -> None:
        if rank not in self._gone and not self._closing:
            self._spread(rank, "died: its connection closed")
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _spread(self, rank: int, reason: str) -> None:
        if self._lost is None and self.rank == 0:
            self._tell(lost=rank, reason=reason)
        self._settle(PeerLost(rank, reason))

    def _hear(self, sender: int, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._spread(message["lost"], message["reason"])
        elif "mistake" in message:
            if self.rank == 0:
                self._tell(mistake=message["mistake"])
            self._settle(UserError(message["mistake"]))
        elif "refused" in message:
            self._settle(_refusal(message["refused"], message["reason"]))
        elif "agreed" in message:
            with self._changed:
                self._agreed = True
                self._changed.notify_all()
        elif "bye" in message:
            with self._changed:
                self._gone.add(sender)
                self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closing and self._lost is None:
            self._tell(beat=1)
            time.sleep(self._beat_s)


def _refusal(rank: int, difference: str) -> UserError:
    return UserError(f"rank {rank} was started differently from rank 0: {difference}; start every rank alike")


def describe_difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The first setting that differs, "" when none does."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} on rank 0"
    return ""

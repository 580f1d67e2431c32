"""Who is alive: a watch that turns a dead, failed or silent rank into an error that names it, on every survivor.

Rank 0 keeps a socket to every other rank. A rank that dies closes its socket and is noticed at once; one that fails
says so before it leaves; one that is stopped misses its heartbeats and is given up after `timeout_s`. Heartbeats come
from a thread of their own, so a rank that is busy, or whose main thread hangs, still sends them: they tell which call
its main thread has come to, and a rank that others have waited for as long as `stall_s` is given up as well. What
rank 0 learns it tells everybody; when rank 0 itself goes, every rank sees its own socket close. The watch is apart from
the transport, whose own errors name no rank or never come. Here are its sockets and its thread; what follows from a
message, or from none, is decided in `peers.py`.

Anybody who reaches rank 0's port may connect, so nothing that is sent before the run's secret is trusted: it must come
as one short line within a few seconds, strangers wait beside the ranks and not before them, and only so many of them.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any
from zlib import crc32

from cocodiff.comm.peers import BLAME_S, ROUND_S, Limits, Message, Peers
from cocodiff.config.errors import PeerLost, UserError

REFUSED_S = 10.0  # how long rank 0 may be out of reach, a full backlog or a slow network
LEAVE_S = 10.0  # how long a rank that fails waits for the others' last words
HELLO_S = 5.0  # within which a connection must have said who it is
HELLO_BYTES = 4096
LINE_BYTES = 64 << 20  # of a rank that was admitted; its settings may list many files
SEND_S = 5.0  # a peer that reads nothing for so long is not waited for
STRANGERS = 32  # connections beside the run's own that may be undecided at a time
OnLoss = Callable[[BaseException], None]
CALL = ContextVar("CALL", default="the start")  # the call that a thread works for: a lane's jobs have their submitter's


def call_tag(bits: int) -> int:
    """Return the number of the current call's name, which its messages carry: no other call's receive takes them."""
    return crc32(CALL.get().encode()) >> (32 - bits)


class Health:
    """Knows whether a peer was lost. This one is of a run of one rank, which has none; see `Watch`."""

    def check(self) -> None:
        """Raises PeerLost when a rank died, failed or fell silent."""

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        """Note that this thread begins a call, named `at`, that all ranks make, or all of `among`, as often, in one
        order and by the same name. A rank that others wait for in it, and that does not come, is lost in the end.
        Raises PeerLost where this rank has been told of a loss before: who has caught that does not go on."""
        CALL.set(at)

    def still_waiting(self) -> None:
        """Notes that this thread waits for other ranks; called again and again meanwhile. Raises PeerLost."""

    def awaits(self, ranks: tuple[int, ...]) -> None:
        """Notes whose messages this thread waits for, by numbers in the whole run, for the error should none come."""

    def blame(self, error: BaseException) -> BaseException:
        """The PeerLost behind a transport error, when one turns up shortly; else the error itself."""
        return error

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """A library whose connection to a rank comes to nothing does not know why: the watch does, in a moment."""
        try:
            yield
        except (PeerLost, UserError):
            raise
        except Exception as error:
            blamed = self.blame(error)
            if blamed is error:
                raise
            raise blamed from error

    def fail(self, reason: str, mistake: bool = False) -> None:
        """Tells all peers that this rank leaves with an error, or has found a user's mistake, which is every rank's."""

    def when_lost(self, action: OnLoss) -> None:
        """Calls `action` with the error at once when a peer is lost, from a thread of its own."""

    def blocking(self) -> AbstractContextManager[None]:
        """For a call into a library that no error reaches: should a peer be lost and the main thread not come back
        from it soon, the process ends with the loss as its last words. Raises PeerLost when one is lost already."""
        return nullcontext()

    def leave(self) -> None:
        """Before this process ends with an error: waits until all peers have come here too or are gone, for ten seconds
        at most. A launcher kills a job at its first bad exit."""

    def close(self) -> None:
        """Leaves in good order, after the peers' last messages."""


def end_process(last_words: str) -> None:
    os.write(2, last_words.encode())
    os._exit(1)


class Line:
    """JSON messages over a socket, one a line. rank: at its other end, None while it has not shown that it is one."""

    def __init__(self, connection: socket.socket, rank: int | None = None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_S)
        self.socket, self.rank, self.deadline = connection, rank, time.monotonic() + HELLO_S
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """The whole messages that have arrived, None when the other side is gone or sends what no rank does."""
        at_once, most = (HELLO_BYTES, HELLO_BYTES) if self.rank is None else (1 << 16, LINE_BYTES)
        try:
            data = self.socket.recv(at_once)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data or len(self._rest) + len(data) > most:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):
            return None


class Watch(Health):
    """One rank's end of the watch; on rank 0 also its hub."""

    def __init__(
        self,
        rank: int,
        size: int,
        endpoint: socket.socket | tuple[str, int],
        key: str,
        settings: dict[str, str],
        limits: Limits,
        on_loss: Sequence[OnLoss] = (),
        end: Callable[[str], None] = end_process,
    ) -> None:
        """Connects all ranks and compares their settings.

        endpoint: rank 0's listening socket; elsewhere its (host, port).
        key: the run's own word, so that a stranger on the port is turned away.
        settings: name -> value; a rank whose settings differ from rank 0's is refused on every rank, with the name.
        on_loss: see `when_lost`; told from the first moment on.
        end: ends this process, with its last words, where a loss does not reach its main thread.
        Raises UserError for different settings, PeerLost when a rank does not show up within `limits.start_s`.
        """
        self.rank, self._end, self._actions, self._key = rank, end, list(on_loss), key
        self._peers = peers = Peers(rank, size, settings, limits, time.monotonic)
        self._lines: dict[int, Line] = {}
        self._missing = set(range(1, size))  # on rank 0: who has not joined
        self._changed = threading.Condition()  # guards the peers
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._listener = endpoint if isinstance(endpoint, socket.socket) else None
        if isinstance(endpoint, socket.socket):
            endpoint.setblocking(False)
            self._selector.register(endpoint, selectors.EVENT_READ)
        else:
            self._lines[0] = self._join(endpoint, settings)
            self._selector.register(self._lines[0].socket, selectors.EVENT_READ, self._lines[0])
        threading.Thread(target=self._listen, name="watch", daemon=True).start()
        with self._changed:
            # Rank 0 waits for whoever is missing, and knows who it is; the others wait a little longer.
            patience_s = limits.start_s + (BLAME_S if rank else 0.0)
            ready = self._changed.wait_for(lambda: peers.lost or peers.agreed, timeout=patience_s)
        if not ready:
            self._update(peers.lose, peers.late_start(), peers.own.now())
        self.check()

    @property
    def ongoing(self) -> bool:
        """True once the ranks have met, until the run has failed or ended."""
        return self._peers.lost is None and not self._peers.closing

    def check(self) -> None:
        if self._peers.lost is not None:
            with self._changed:  # the others have been told by then
                self._peers.raised = True
            raise self._peers.lost

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        super().arrive(at, among)
        self._peers.own.arrive(at, among)
        if self._peers.raised:
            self.check()

    def still_waiting(self) -> None:
        self._peers.own.still_waiting()
        self.check()

    def awaits(self, ranks: tuple[int, ...]) -> None:
        self._peers.own.awaits(ranks)

    def when_lost(self, action: OnLoss) -> None:
        self._actions.append(action)  # launchers kill a job soon, and the main thread may be deep in a computation

    @contextmanager
    def blocking(self) -> Iterator[None]:
        self.check()
        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread hears of the loss itself
            return
        own = self._peers.own
        own.blocked_since = own.now()
        try:
            yield
        finally:
            own.blocked_since = None

    def blame(self, error: BaseException) -> BaseException:
        peers = self._peers
        with self._changed:
            self._changed.wait_for(lambda: peers.lost is not None, timeout=BLAME_S)
        if peers.left and not peers.closing:
            reason = f"left the run while rank {self.rank} was still in it"
            self._update(peers.lose, PeerLost(min(peers.left), reason), peers.own.now())
        peers.raised = peers.lost is not None
        return peers.lost or error

    def fail(self, reason: str, mistake: bool = False) -> None:
        self._peers.raised = True
        error = UserError(reason) if mistake else PeerLost(self.rank, f"failed: {reason}")
        self._update(self._peers.lose, error, self._peers.own.now())

    def leave(self) -> None:
        self._tell([{"left": self.rank}])
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._peers.all_left, timeout=LEAVE_S)

    def close(self) -> None:
        """Says goodbye. Rank 0 stays until the others have said theirs, so that a late failure still reaches them, and
        the watch finds who never would."""
        if self._peers.closing:
            return
        self._tell(self._peers.goodbye())
        if self.rank == 0:
            peers = self._peers
            with self._changed:
                self._changed.wait_for(lambda: peers.lost or peers.all_left)
        self._ended = True
        for line in list(self._lines.values()):
            line.socket.close()

    # Start-up -------------------------------------------------------------------------------------------------------

    def _join(self, address: tuple[str, int], settings: dict[str, str]) -> Line:
        """This rank's line to rank 0, which may not be listening yet."""
        deadline, error = time.monotonic() + self._peers.limits.start_s, ""
        refused_until = deadline
        while time.monotonic() < min(deadline, refused_until):
            try:
                line = Line(socket.create_connection(address, timeout=5.0), rank=0)
                line.send(hello=self.rank, key=self._key)
                line.send(settings=settings)
                welcome = line.receive()
                while welcome == [] and time.monotonic() < deadline:
                    welcome = line.receive()
            except OSError as refused:
                welcome, error = None, f" ({refused})"
            if welcome:
                for message in welcome:
                    self._update(self._peers.hear, 0, message, self._peers.own.now())
                return line
            # It listened before its address was known: who is refused for long comes too late, or it is gone.
            refused_until = min(refused_until, time.monotonic() + REFUSED_S)
            time.sleep(0.1)
        raise PeerLost(0, f"does not answer at {address[0]}:{address[1]}{error}")

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it left before its turn came
            line = Line(listener.accept()[0])
            self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _admit(self, line: Line, messages: list[Message]) -> list[Message] | None:
        """What comes behind the first message, where that is of a missing rank that knows the run's secret; else None:
        it is a stranger's, or a rank is there already."""
        hello, *more = messages
        rank, key = hello.get("hello"), hello.get("key")
        if type(rank) is not int or type(key) is not str or rank not in self._missing:
            return None
        if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            return None
        self._missing.discard(rank)
        line.rank, self._lines[rank] = rank, line
        with suppress(OSError):  # the next look at it tells that it is gone
            line.send(welcome=True)
            for message in self._peers.known_loss():  # from before this rank came
                line.send(**message)
        return more

    def _turn_away_strangers(self, everybody: bool) -> None:
        """Those who have not said in time who they are, and the oldest of too many: ranks say so at once."""
        now, lines = time.monotonic(), [key.data for key in self._selector.get_map().values()]
        undecided = [line for line in lines if line is not None and line.rank is None]
        too_many = len(undecided) - self._peers.size - STRANGERS
        for number, line in enumerate(undecided):
            if everybody or number < too_many or now > line.deadline:
                self._turn_away(line)

    def _turn_away(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()

    # Running --------------------------------------------------------------------------------------------------------

    def _tell(self, messages: list[Message]) -> None:
        for message in messages:
            for line in list(self._lines.values()):
                with suppress(OSError):  # the listener notices who is gone
                    line.send(**message)

    def _update(self, change: Callable[..., list[Message]], *arguments: object) -> None:
        """Changes what is known of the peers, and tells them, and those who wait for a loss here, what follows."""
        with self._changed:
            heeded = self._peers.lost is None and not self._peers.raised
            self._tell(change(*arguments))
            self._changed.notify_all()
        if heeded and self._peers.lost is not None:
            for action in self._actions:
                action(self._peers.lost)

    def _listen(self) -> None:
        until = time.monotonic() + self._peers.limits.start_s
        with self._selector:
            while not self._ended:
                events = self._selector.select(timeout=ROUND_S)
                now = self._peers.wake(time.monotonic())  # a stop of this process in a round is seen in the next one
                for key, _ in events:
                    if key.data is not None:
                        self._hear(key.data, now)
                    elif self._listener is not None:
                        self._accept(self._listener)
                if self._listener is not None:
                    over = not self._missing or (self._peers.lost is not None and time.monotonic() > until)
                    self._turn_away_strangers(everybody=over)
                    if over:
                        self._selector.unregister(self._listener)
                        self._listener.close()
                        self._listener = None
                self._update(self._peers.look, now)
                last_words = self._peers.last_words(now)
                if last_words:
                    self._end(f"cocodiff: [rank {self.rank}] {last_words}\n")
                    return

    def _hear(self, line: Line, now: float) -> None:
        messages = line.receive()
        if messages and line.rank is None:
            messages = self._admit(line, messages)
        if messages is None and line.rank is None:
            self._turn_away(line)
        elif messages is None:
            self._selector.unregister(line.socket)
            self._update(self._peers.gone, line.rank, now)
        for message in messages or []:
            self._update(self._peers.hear, line.rank, message, now)

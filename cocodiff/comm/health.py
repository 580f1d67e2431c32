"""The watch, which turns a dead, failed or silent rank into an error that names it, on every surviving rank.

Rank 0 keeps a socket to every other rank. If a rank dies its socket closes, which is noticed at once. A rank that fails
reports it before it leaves. A rank that is stopped misses its heartbeats, and is given up after `timeout_s`. Heartbeats
come from a separate thread, so a rank that is busy, or whose main thread hangs, still sends them. They name the call
that its main thread is in. A rank that others have waited for as long as `stall_s` is given up as well.

Rank 0 passes on to all ranks what it learns. If rank 0 itself is lost, every rank sees its own socket close. The watch
is separate from the transport, whose own errors name no rank or never occur. This module has its sockets and its
thread; `peers.py` decides what follows from a message, or from none.

Any process that reaches rank 0's port may connect, so nothing that is sent before the run's secret is trusted. The
secret must arrive as one short line within a few seconds. Ranks do not wait for unknown connections, and the number of
these is limited.
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

# Times in seconds and sizes in bytes.
REFUSED_S = 10.0  # longest time in which rank 0 may refuse connections: a full backlog or a slow network
LEAVE_S = 10.0  # longest time that a failing rank waits for the others to leave
HELLO_S = 5.0  # longest time until a connection identifies itself
HELLO_BYTES = 4096  # longest message that identifies a connection
LINE_BYTES = 64 << 20  # longest message of an admitted rank; its settings may list many files
SEND_S = 5.0  # longest time that a send waits for a peer to read
STRANGERS = 32  # most unidentified connections at a time, besides the run's own
OnLoss = Callable[[BaseException], None]  # called by the watch's thread as soon as a peer is lost
CALL = ContextVar("CALL", default="the start")  # the call that a thread works for; lanes take it from the submitter


def call_tag(bits: int) -> int:
    """Return the tag that messages of the current call carry, so that no other call receives them.

    It is a number of `bits` bits, made from the name of the call.
    """
    return crc32(CALL.get().encode()) >> (32 - bits)


class Health:
    """The watch over a run's ranks, as their code uses it. This base class is for runs of one rank, which has no peers.

    `Watch` is the one for several ranks.
    """

    def check(self) -> None:
        """Raise the error by which the run has failed: PeerLost if a rank died, failed or fell silent."""

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        """Report that this thread begins a call that all ranks make, or all of `among`.

        They make such calls in the same order and by the same names. A rank that others wait for in a call, and that
        never makes it, is reported as lost in the end. Raise PeerLost if this rank's code has got the error of a lost
        rank before: it must not continue.

        Args:
            at: name of the call.
            among: the ranks that make it, by numbers in the whole run; () for all.
        """
        CALL.set(at)

    def still_waiting(self) -> None:
        """Report that this thread waits for other ranks. It is called several times a second during a wait.

        Raise PeerLost if a rank was lost.
        """

    def awaits(self, ranks: tuple[int, ...]) -> None:
        """Report the ranks whose messages this thread waits for. If none arrives, the error names them.

        Args:
            ranks: numbers in the whole run; () if the wait is over.
        """

    def blame(self, error: BaseException) -> BaseException:
        """Return the PeerLost that caused a communication library's error, if the watch finds one within seconds; else
        the error itself."""
        return error

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Raise PeerLost in place of an error of a communication library in the `with` block, if a lost rank caused it.

        The watch over lost ranks gets a few seconds to find that rank. Other errors are passed on.
        """
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
        """Tell all peers that this rank leaves with an error. They raise it too.

        Args:
            reason: the error's text.
            mistake: True if the error is the user's mistake, which ends every rank with the same UserError.
        """

    def when_lost(self, action: OnLoss) -> None:
        """Register a function to call with the error as soon as a peer is lost. It is called on another thread."""

    def blocking(self) -> AbstractContextManager[None]:
        """Mark a `with` block as a call into a library that no error can interrupt. Raise PeerLost if a peer is lost
        already.

        If a peer is lost and the main thread does not return from the call soon, the process ends and prints the loss.
        """
        return nullcontext()

    def leave(self) -> None:
        """Wait, before this process ends with an error, until all peers have left too, for at most ten seconds.

        A launcher ends a job at its first bad exit code.
        """

    def close(self) -> None:
        """Leave the run without an error, after the peers' last messages."""


def end_process(last_words: str) -> None:
    """Print a message to stderr and end the process."""
    os.write(2, last_words.encode())
    os._exit(1)


class Line:
    """A connection between two ranks for JSON messages, one on each line of text."""

    def __init__(self, connection: socket.socket, rank: int | None = None) -> None:
        """Prepare a connected socket.

        Args:
            rank: the rank at the other end; None until it has identified itself.
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_S)
        self.socket, self.rank, self.deadline = connection, rank, time.monotonic() + HELLO_S
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message, whose entries are the arguments."""
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Wait for data, for at most SEND_S, and return the messages that are complete by now, perhaps none.

        Return None if the other end has closed or breaks the protocol.
        """
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
    """The watch over lost ranks on one rank of a run of several, with a thread of its own.

    All ranks are connected to rank 0, which passes on what it learns.
    """

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
        """Connect all ranks and compare their settings.

        Raise UserError if settings differ, and PeerLost if a rank does not start within `limits.start_s`.

        Args:
            endpoint: rank 0's listening socket; on other ranks its (host, port).
            key: the run's secret, by which unknown connections are refused.
            settings: values by name. If a rank's differ from rank 0's, every rank is refused, with the name.
            on_loss: see `when_lost`; called from the start on.
            end: ends this process with a message if a loss does not reach its main thread.
        """
        self.rank, self._end, self._actions, self._key = rank, end, list(on_loss), key
        self._peers = peers = Peers(rank, size, settings, limits, time.monotonic)
        self._lines: dict[int, Line] = {}
        self._missing = set(range(1, size))  # on rank 0: ranks that have not joined
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
            # Rank 0 waits for missing ranks and can name them; the others wait a little longer for its message.
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
            with self._changed:  # by then the others know it
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
        self._actions.append(action)  # launchers end a job soon, and the main thread may be busy

    @contextmanager
    def blocking(self) -> Iterator[None]:
        self.check()
        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread gets the error itself
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
        """Leave the run without an error.

        Rank 0 stays until all others have left, so that a failure at the end still reaches them, and the watch finds
        ranks that never leave.
        """
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
        """Connect this rank to rank 0 and send it this rank's settings, for comparison. Return the connection.

        Rank 0 may not be listening yet. Raise PeerLost if it does not answer in time.

        Args:
            address: host and port of rank 0's watch.
            settings: values by name, for the comparison with the other ranks'.
        """
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
            # Rank 0 listens before its address is known. If it refuses for long, it has left or this rank is too late.
            refused_until = min(refused_until, time.monotonic() + REFUSED_S)
            time.sleep(0.1)
        raise PeerLost(0, f"does not answer at {address[0]}:{address[1]}{error}")

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection, on rank 0, and listen to it. The rank at its other end is not known yet."""
        with suppress(OSError):  # it closed before it was accepted
            line = Line(listener.accept()[0])
            self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _admit(self, line: Line, messages: list[Message]) -> list[Message] | None:
        """Identify a connection by its first message, on rank 0. Return the messages after it.

        Return None if it is not from a missing rank that knows the run's secret.
        """
        hello, *more = messages
        rank, key = hello.get("hello"), hello.get("key")
        if type(rank) is not int or type(key) is not str or rank not in self._missing:
            return None
        if not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            return None
        self._missing.discard(rank)
        line.rank, self._lines[rank] = rank, line
        with suppress(OSError):  # a closed connection is noticed at the next receive
            line.send(welcome=True)
            for message in self._peers.known_loss():  # losses from before this rank joined
                line.send(**message)
        return more

    def _turn_away_strangers(self, everybody: bool) -> None:
        """Close connections that did not identify themselves as ranks in time, and the oldest if too many wait.

        Ranks identify themselves at once.

        Args:
            everybody: True to close all that have not identified themselves.
        """
        now, lines = time.monotonic(), [key.data for key in self._selector.get_map().values()]
        undecided = [line for line in lines if line is not None and line.rank is None]
        too_many = len(undecided) - self._peers.size - STRANGERS
        for number, line in enumerate(undecided):
            if everybody or number < too_many or now > line.deadline:
                self._turn_away(line)

    def _turn_away(self, line: Line) -> None:
        """Close a connection and listen to it no longer."""
        self._selector.unregister(line.socket)
        line.socket.close()

    # Running --------------------------------------------------------------------------------------------------------

    def _tell(self, messages: list[Message]) -> None:
        """Send messages to all ranks that this one is connected to."""
        for message in messages:
            for line in list(self._lines.values()):
                with suppress(OSError):  # the listening thread notices closed connections
                    line.send(**message)

    def _update(self, change: Callable[..., list[Message]], *arguments: object) -> None:
        """Change what is known of the other ranks, and report the consequences to them, to waiting threads and to the
        functions of `when_lost`.

        Args:
            change: a method of `Peers`, which returns the messages to send.
            arguments: its arguments.
        """
        with self._changed:
            heeded = self._peers.lost is None and not self._peers.raised
            self._tell(change(*arguments))
            self._changed.notify_all()
        if heeded and self._peers.lost is not None:
            for action in self._actions:
                action(self._peers.lost)

    def _listen(self) -> None:
        """Run the loop of the watch's thread until the run ends.

        It receives messages, accepts connections, sends heartbeats and looks for ranks that are silent too long.
        """
        until = time.monotonic() + self._peers.limits.start_s
        with self._selector:
            while not self._ended:
                events = self._selector.select(timeout=ROUND_S)
                now = self._peers.wake(time.monotonic())  # the next round notices if this process was stopped
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
        """Receive and handle the messages of one connection, or its end.

        Args:
            now: the time of this round, by `OwnProgress.now`.
        """
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

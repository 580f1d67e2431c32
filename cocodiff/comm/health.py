"""Who is alive: a watch that turns a dead, failed or silent rank into an error that names it, on every survivor.

Rank 0 keeps a socket to every other rank. A rank that dies closes its socket and is noticed at once; one that fails
says so before it leaves; one that is stopped misses its heartbeats and is given up after `timeout_s`. Heartbeats come
from a thread of their own, so a rank that is busy, or whose main thread hangs, still sends them: they tell which call
its main thread has come to, and a rank that others have waited for as long as `stall_s` is given up as well. What
rank 0 learns it tells everybody; when rank 0 itself goes, every rank sees its own socket close. The watch is apart from
the transport, whose own errors name no rank or never come. Here are its sockets and its thread; what follows from a
message, or from none, is decided in `peers.py`.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from cocodiff.comm.admission import Admission, Line
from cocodiff.comm.peers import BLAME_S, ROUND_S, Limits, Message, Peers
from cocodiff.errors import PeerLost, UserError

REFUSED_S = 10.0  # how long rank 0 may be out of reach, a full backlog or a slow network
LEAVE_S = 10.0  # how long a rank that fails waits for the others' last words
OnLoss = Callable[[BaseException], None]


class Health:
    """Knows whether a peer was lost. This one is of a run of one rank, which has none; see `Watch`."""

    def check(self) -> None:
        """Raises PeerLost when a rank died, failed or fell silent."""

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        """Notes that this rank's main thread begins a call, named `at`, that all ranks make, or all of `among`, as
        often and in the same order. A rank that others wait for in it, and that does not come, is lost in the end."""

    def still_waiting(self) -> None:
        """Notes that this thread waits for other ranks; called again and again meanwhile. Raises PeerLost."""

    def awaits(self, ranks: tuple[int, ...]) -> None:
        """Notes whose messages this thread waits for, by numbers in the whole run, for the error should none come."""

    def blame(self, error: BaseException) -> BaseException:
        """The PeerLost behind a transport error, when one turns up shortly; else the error itself."""
        return error

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
        self.rank, self._end, self._actions = rank, end, list(on_loss)
        self._peers = peers = Peers(rank, size, settings, limits, time.monotonic)
        self._lines: dict[int, Line] = {}
        self._changed = threading.Condition()  # guards the peers
        self._ended = False
        self._selector = selectors.DefaultSelector()
        admission = None
        if isinstance(endpoint, socket.socket):
            admission = Admission(endpoint, key, size, self._selector)
        else:
            self._lines[0] = self._join(endpoint, key, settings, limits.start_s)
            self._selector.register(self._lines[0].socket, selectors.EVENT_READ, 0)
        threading.Thread(target=self._listen, args=(admission,), name="watch", daemon=True).start()
        with self._changed:
            # Rank 0 waits for whoever is missing, and knows who it is; the others wait a little longer.
            patience_s = limits.start_s + (BLAME_S if rank else 0.0)
            ready = self._changed.wait_for(lambda: peers.lost or peers.agreed, timeout=patience_s)
        if not ready:
            self._update(peers.lose, peers.late_start(), peers.own.now())
        self.check()

    def check(self) -> None:
        if self._peers.lost is not None:
            with self._changed:  # the others have been told by then
                self._peers.raised = True
            raise self._peers.lost

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        self._peers.own.arrive(at, among)

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
        before = own.blocked_since  # a wait may run another one's job, which waits in turn
        own.blocked_since = own.now() if before is None else before
        try:
            yield
        finally:
            own.blocked_since = before

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
        """Says goodbye. Rank 0 stays until the others have said theirs, so that a late failure still reaches them."""
        if self._peers.closing:
            return
        self._peers.closing = True
        self._tell([{"left": self.rank}])
        if self.rank == 0:
            peers = self._peers
            with self._changed:
                self._changed.wait_for(lambda: peers.lost or peers.all_left, timeout=peers.limits.timeout_s)
        self._ended = True
        for line in list(self._lines.values()):
            line.socket.close()

    # Start-up -------------------------------------------------------------------------------------------------------

    def _join(self, address: tuple[str, int], key: str, settings: dict[str, str], start_s: float) -> Line:
        """This rank's line to rank 0, which may not be listening yet."""
        deadline, error = time.monotonic() + start_s, ""
        refused_until = deadline
        while time.monotonic() < min(deadline, refused_until):
            try:
                line = Line(socket.create_connection(address, timeout=5.0))
                line.send(hello=self.rank, key=key)
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

    def _admit(self, rank: int, line: Line, now: float) -> None:
        self._lines[rank] = line
        self._selector.register(line.socket, selectors.EVENT_READ, rank)
        with suppress(OSError):  # the next look at it tells that it is gone
            line.send(welcome=True)
            for message in self._peers.known_loss():  # from before this rank came
                line.send(**message)
            self._hear_all(rank, line.waiting_messages(), now)

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

    def _listen(self, admission: Admission | None) -> None:
        until = time.monotonic() + self._peers.limits.start_s
        with self._selector:
            while not self._ended:
                events = self._selector.select(timeout=ROUND_S)
                now = self._peers.wake(time.monotonic())  # a stop of this process in a round is seen in the next one
                for key, _ in events:
                    if admission is not None and admission.handles(key):
                        for rank, line in admission.progress(key):
                            self._admit(rank, line, now)
                    elif key.data in self._lines:
                        self._hear_all(key.data, self._lines[key.data].receive(), now)
                if admission is not None:
                    admission.expire()
                    if not admission.missing or (self._peers.lost is not None and time.monotonic() > until):
                        admission.close()
                        admission = None
                self._update(self._peers.look, now)
                last_words = self._peers.last_words(now)
                if last_words:
                    self._end(f"cocodiff: [rank {self.rank}] {last_words}\n")
                    return

    def _hear_all(self, rank: int, messages: list[Message] | None, now: float) -> None:
        if messages is None:
            self._selector.unregister(self._lines[rank].socket)
            self._update(self._peers.gone, rank, now)
        for message in messages or []:
            self._update(self._peers.hear, rank, message, now)

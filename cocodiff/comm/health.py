"""Who is alive: a watch that turns a dead, failed or silent rank into an error that names it, on every survivor.

Rank 0 keeps a socket to every other rank. A rank that dies closes its socket and is noticed at once; one that fails
says so before it leaves; one that is stopped misses its heartbeats and is given up after `timeout_s`. Heartbeats come
from a thread of their own, so a rank that is busy, or whose main thread hangs, still sends them: they tell which call
its main thread has come to, and a rank that others have waited for as long as `stall_s` is given up as well. What
rank 0 learns it tells everybody; when rank 0 itself goes, every rank sees its own socket close. The watch is apart from
the transport, whose own errors name no rank or never come.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from cocodiff.comm.admission import Admission, Line
from cocodiff.comm.stalls import ALL, OwnProgress, ProgressOfPeers, find_stalled
from cocodiff.errors import PeerLost, UserError

BLAME_S = 3.0  # a transport error and the notice of the death behind it travel apart
BLOCKED_S = 0.5  # how long after a loss a library's wait may take to end with an error of its own
REFUSED_S = 10.0  # how long rank 0 may be out of reach, a full backlog or a slow network
ROUND_S = 0.2  # how often the watch looks at the clock
OnLoss = Callable[[BaseException], None]


@dataclass(frozen=True)
class Limits:
    """How long what may take, in seconds.

    timeout_s: without a heartbeat. start_s: until all ranks have met. stall_s: until a rank comes to a call that
    another rank waits in.
    """

    timeout_s: float = 300.0
    start_s: float = 600.0
    stall_s: float = 1800.0


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

    def close(self) -> None:
        """Leaves in good order, after the peers' last messages."""


class Watch(Health):
    """One rank's end of the watch; on rank 0 also its hub. Use `Watch.open`."""

    def __init__(self, rank: int, size: int, limits: Limits, on_loss: Sequence[OnLoss] = ()) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        self._lost: PeerLost | UserError | None = None
        self._raised = False  # this rank's own code knows that the run has failed
        self._lines: dict[int, Line] = {}
        self._left: set[int] = set()  # ranks that said goodbye
        self._changed = threading.Condition()
        self._closing = self._ended = False
        self._agreed = False
        self._beat_s = min(5.0, limits.timeout_s / 4)
        self._actions = list(on_loss)
        self._own = OwnProgress()
        self._peers = ProgressOfPeers()
        self._settings: dict[str, str] = {}
        self._refused: tuple[int, str] | None = None

    @classmethod
    def open(
        cls,
        rank: int,
        size: int,
        endpoint: socket.socket | tuple[str, int],
        key: str,
        settings: dict[str, str],
        limits: Limits,
        on_loss: Sequence[OnLoss] = (),
    ) -> Watch:
        """Connects all ranks and compares their settings.

        endpoint: rank 0's listening socket; elsewhere its (host, port).
        key: the run's own word, so that a stranger on the port is turned away.
        settings: name -> value; a rank whose settings differ from rank 0's is refused on every rank, with the name.
        on_loss: see `when_lost`; told from the first moment on.
        Raises UserError for different settings, PeerLost when a rank does not show up within `limits.start_s`.
        """
        watch = cls(rank, size, limits, on_loss)
        selector = selectors.DefaultSelector()
        admission = None
        if isinstance(endpoint, socket.socket):
            watch._settings = settings
            admission = Admission(endpoint, key, size, selector)
        else:
            watch._lines[0] = watch._join(endpoint, key, settings)
            selector.register(watch._lines[0].socket, selectors.EVENT_READ, 0)
        threading.Thread(target=watch._listen, args=(selector, admission), name="watch", daemon=True).start()
        threading.Thread(target=watch._beat, name="watch-beat", daemon=True).start()
        with watch._changed:
            # Rank 0 waits for whoever is missing, and knows who it is; the others wait a little longer.
            patience_s = limits.start_s + (BLAME_S if rank else 0.0)
            ready = watch._changed.wait_for(lambda: watch._lost or watch._agreed, timeout=patience_s)
        if not ready:
            watch._give_up_start(admission)
        watch.check()
        return watch

    def check(self) -> None:
        if self._lost is not None:
            self._raised = True
            raise self._lost

    def arrive(self, at: str, among: tuple[int, ...] = ()) -> None:
        self._own.arrive(at, among)

    def still_waiting(self) -> None:
        self._own.still_waiting()
        self.check()

    def awaits(self, ranks: tuple[int, ...]) -> None:
        self._own.awaits(ranks)

    def when_lost(self, action: OnLoss) -> None:
        self._actions.append(action)  # launchers kill a job soon, and the main thread may be deep in a computation

    @contextmanager
    def blocking(self) -> Iterator[None]:
        self.check()
        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread hears of the loss itself
            return
        before = self._own.blocked_since  # a wait may run another one's job, which waits in turn
        self._own.blocked_since = self._own.now() if before is None else before
        try:
            yield
        finally:
            self._own.blocked_since = before

    def blame(self, error: BaseException) -> BaseException:
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout=BLAME_S)
        if self._lost is None and self._left and not self._closing:
            gone, reason = min(self._left), f"left the run while rank {self.rank} was still in it"
            self._tell(lost=gone, reason=reason)
            self._note_loss(PeerLost(gone, reason))
        self._raised = True
        return self._lost or error

    def fail(self, reason: str, mistake: bool = False) -> None:
        self._raised = True
        if self._lost is None:
            self._lost = UserError(reason) if mistake else PeerLost(self.rank, f"failed: {reason}")
            self._tell(**({"mistake": reason} if mistake else {"lost": self.rank, "reason": f"failed: {reason}"}))

    def close(self) -> None:
        """Says goodbye. Rank 0 stays until the others have said theirs, so that a late failure still reaches them."""
        if self._closing:
            return
        self._closing = True
        self._tell(left=self.rank)
        if self.rank == 0:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._lost is not None or len(self._left) == self.size - 1, timeout=self.limits.timeout_s
                )
        self._ended = True
        for line in list(self._lines.values()):
            line.socket.close()

    # Start-up -------------------------------------------------------------------------------------------------------

    def _join(self, address: tuple[str, int], key: str, settings: dict[str, str]) -> Line:
        """This rank's line to rank 0, which may not be listening yet."""
        deadline, error = time.monotonic() + self.limits.start_s, ""
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
                    self._hear(0, message)
                return line
            # It listened before its address was known: who is refused for long comes too late, or it is gone.
            refused_until = min(refused_until, time.monotonic() + REFUSED_S)
            time.sleep(0.1)
        raise PeerLost(0, f"does not answer at {address[0]}:{address[1]}{error}")

    def _admit(self, rank: int, line: Line, selector: selectors.BaseSelector, admission: Admission) -> None:
        self._lines[rank] = line
        selector.register(line.socket, selectors.EVENT_READ, rank)
        try:
            line.send(welcome=True)
            if isinstance(self._lost, PeerLost):  # before this rank came
                line.send(lost=self._lost.rank, reason=self._lost.reason)
        except OSError:
            return  # the next look at it tells that it is gone
        self._hear_all(rank, line.waiting_messages(), selector)

    def _compare(self, rank: int, settings: dict[str, str]) -> None:
        """Rank 0: notes whether a rank was started differently; once all have joined, tells all of them."""
        self._peers.hear(rank, {"calls": [], "among": ALL, "at": "the start", "waits_s": 0.0})
        difference = describe_difference(self._settings, settings)
        if difference and self._refused is None:
            self._refused = rank, difference
        if len(self._peers.seen(set())) < self.size - 1:
            return
        if self._refused is not None:
            self._tell(refused=self._refused[0], reason=self._refused[1])
            self._note_loss(_refusal(*self._refused))
            return
        self._tell(agreed=True)
        self._hear(0, {"agreed": True})

    def _give_up_start(self, admission: Admission | None) -> None:
        if admission is None:
            self._note_loss(PeerLost(0, f"did not answer within {self.limits.start_s:g} s of the start"))
            return
        missing = sorted(set(range(1, self.size)) - set(self._peers.seen(set())))
        others = f"rank{'s' * (len(missing) > 2)} {', '.join(map(str, missing[1:]))}"
        more = f", nor did {others}" if len(missing) > 1 else ""
        self._spread(missing[0], f"did not start within {self.limits.start_s:g} s{more}")

    # Running --------------------------------------------------------------------------------------------------------

    def _tell(self, **message: Any) -> None:
        for line in list(self._lines.values()):
            with suppress(OSError):  # the listener notices who is gone
                line.send(**message)

    def _note_loss(self, lost: PeerLost | UserError) -> None:
        with self._changed:
            first, self._lost = self._lost is None, self._lost or lost
            self._changed.notify_all()
        if first:
            for action in self._actions:
                action(lost)
            threading.Thread(target=self._end_if_unreachable, args=(lost,), name="watch-end", daemon=True).start()

    def _end_if_unreachable(self, lost: PeerLost | UserError) -> None:
        """A dead peer's connections close, which ends every wait for it; a silent one's stay open. And a rank that the
        others have given up must not stay behind for ever because its main thread hangs."""
        time.sleep(BLOCKED_S)
        if self._own.blocked_since is not None:
            self._end(f"{lost}; this rank was waiting for it and ends")
        if isinstance(lost, PeerLost) and lost.rank == self.rank:
            time.sleep(BLAME_S)
            if not self._raised and not self._closing:
                self._end(f"the other ranks have given this one up: {lost}")

    def _end(self, last_words: str) -> None:
        os.write(2, f"cocodiff: [rank {self.rank}] {last_words}\n".encode())
        os._exit(1)

    def _listen(self, selector: selectors.BaseSelector, admission: Admission | None) -> None:
        last_round, until = time.monotonic(), time.monotonic() + self.limits.start_s
        with selector:
            while selector.get_map() and not self._ended:
                try:
                    events = selector.select(timeout=ROUND_S)
                except (OSError, ValueError):
                    return  # closed under us at the end of the run
                last_round = self._forgive_own_sleep(last_round)
                for key, _ in events:
                    if admission is not None and admission.handles(key):
                        for rank, line in admission.progress(key):
                            self._admit(rank, line, selector, admission)
                    elif key.data in self._lines:
                        self._hear_all(key.data, self._lines[key.data].receive(), selector)
                if admission is not None:
                    admission.expire()
                    if not admission.missing or (self._lost is not None and last_round > until):
                        admission.close()
                        admission = None
                self._check_silence(selector, last_round)
                self._check_progress()

    def _forgive_own_sleep(self, last_round: float) -> float:
        """Where this process itself was stopped (Ctrl-Z, a debugger), the others' silence in that time says nothing,
        nor does anybody's wait."""
        now = time.monotonic()
        asleep_s = now - last_round - ROUND_S
        if asleep_s > min(1.0, self.limits.timeout_s / 2):
            for line in self._lines.values():
                line.heard += asleep_s
            self._own.asleep_s += asleep_s
            self._peers.forgive(asleep_s)
        return now

    def _hear_all(self, rank: int, messages: list[dict[str, Any]] | None, selector: selectors.BaseSelector) -> None:
        if messages is None:
            selector.unregister(self._lines[rank].socket)
            self._gone(rank)
        for message in messages or []:
            self._hear(rank, message)

    def _check_silence(self, selector: selectors.BaseSelector, now: float) -> None:
        """now: of this round, whose own sleep is forgiven; a stop since then is seen in the next one."""
        limit_s = self.limits.timeout_s
        for key in list(selector.get_map().values()):
            if key.data in self._lines and now - self._lines[key.data].heard > limit_s and key.data not in self._left:
                selector.unregister(key.fileobj)
                self._spread(key.data, f"has been silent for {limit_s:g} s")

    def _check_progress(self) -> None:
        if self.rank or not self._agreed or self._lost is not None:
            return
        progress = self._peers.seen(self._left) | {0: self._own.seen(left=self._closing)}
        stalled = find_stalled(progress, self.limits.stall_s, min(self.limits.stall_s, self.limits.timeout_s))
        if stalled is not None:
            self._spread(*stalled)

    def _gone(self, rank: int) -> None:
        if rank not in self._left and not self._closing:
            self._spread(rank, "died: its connection closed")
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _spread(self, rank: int, reason: str) -> None:
        if self._lost is None and self.rank == 0:
            self._tell(lost=rank, reason=reason)
        self._note_loss(PeerLost(rank, reason))

    def _hear(self, sender: int, message: dict[str, Any]) -> None:
        if "lost" in message:
            self._spread(message["lost"], message["reason"])
        elif "mistake" in message:
            if self.rank == 0:
                self._tell(mistake=message["mistake"])
            self._note_loss(UserError(message["mistake"]))
        elif "refused" in message:
            self._note_loss(_refusal(message["refused"], message["reason"]))
        elif "settings" in message:
            self._compare(sender, message["settings"])
        elif "calls" in message and self.rank == 0:
            self._peers.hear(sender, message)
        elif "agreed" in message or "left" in message:
            if self.rank == 0 and "left" in message:
                self._tell(left=message["left"])
            with self._changed:
                self._agreed = self._agreed or "agreed" in message
                self._left |= {message["left"]} - {self.rank} if "left" in message else set()
                self._changed.notify_all()

    def _beat(self) -> None:
        while not self._closing and self._lost is None:
            own = self._own.seen()
            self._tell(calls=[*own.calls.items()], at=own.at, among=own.among, waits_s=own.waits_s, awaits=own.awaits)
            time.sleep(self._beat_s)


def _refusal(rank: int, difference: str) -> UserError:
    return UserError(f"rank {rank} was started differently from rank 0: {difference}; start every rank alike")


def describe_difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The first setting that differs, "" when none does."""
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} on rank 0"
    return ""

"""The knowledge of one rank about its peers: what follows from their messages, or from their silence.

This module has no sockets, threads or clock. `health.py` passes messages and times to it, and sends the results of its
methods to every rank that it has a line to. Rank 0 has one to every other rank; these have one to rank 0.

The second half finds the rank that keeps others waiting. All ranks make the same calls in the same order (attention
calls, gathers, broadcasts), so the numbers of their calls can be compared. A rank that waits in call 40, while another
one is at call 39, waits for that one. If some of the ranks make calls of their own, these are counted for those ranks
and compared among them. Calls with the same number have the same name. This finds ranks that make different calls, once
they stand still. It does not depend on time, so a slow rank is never blamed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from cocodiff.config.errors import PeerLost, UserError

# Times in seconds.
BLAME_S = 3.0  # longest time between a transport's error and the notice of the loss behind it
BLOCKED_S = 0.5  # longest time after a loss until a library's wait ends with an error of its own
BEAT_S = 5.0  # longest time between a rank's heartbeats
ROUND_S = 0.2  # time between two looks of the watch at the clock
Message = dict[str, Any]
Ranks = tuple[int, ...]
Call = tuple[Ranks, int, str]  # the ranks that make it, its number among their calls, its name
ALL: Ranks = ()  # stands for all ranks of the run
RECENT_S = 1.0  # a wait reported within this time still goes on; a waiting thread reports four times a second
STILL_S = 1.0  # time without a new call after which a rank stands still: it sends its calls, and its waits are examined
LAST_CALLS = 256  # most calls that a rank sends; more than a rank can be ahead of the others


@dataclass(frozen=True)
class Limits:
    """The longest times that the watch over lost ranks allows, in seconds."""

    timeout_s: float = 300.0  # without a heartbeat of a rank
    start_s: float = 600.0  # until all ranks have met
    stall_s: float = 1800.0  # until a rank makes a call that another rank waits in


@dataclass(frozen=True)
class Progress:
    """The progress of one rank: the calls that it has made, and its waits. Others judge by it if the rank is stuck."""

    # ALL stands for all ranks.
    calls: Mapping[Ranks, int] = field(default_factory=dict)  # number of calls begun, by the ranks that make them
    at: str = "the start"  # name of the last call
    among: Ranks = ALL  # ranks that make the last call
    waits_s: float = 0.0  # time for which its main thread has waited for other ranks; 0 if it does not wait
    unchanged_s: float = 0.0  # time since `calls` changed
    left: bool = False  # True if it has left the run
    awaits: Ranks = ()  # ranks whose messages it waits for, if messages are checked


@dataclass
class OwnProgress:
    """The progress of this rank, as it changes.

    The thread that makes its calls writes it; the thread of heartbeats reads it.
    """

    clock: Callable[[], float]  # returns seconds
    _changed: float  # time of the last call, by `now`
    last: Progress = Progress()  # at the time of the last call
    blocked_since: float | None = None  # time by `now` at which a library's call began that cannot be interrupted
    asleep_s: float = 0.0  # total time for which this process was stopped
    _waits_since: float = 0.0  # time by `now` at which the current wait began
    _noted: float = -inf  # time by `now` at which the current wait was last reported
    _awaited: dict[int, Ranks] = field(default_factory=dict)  # awaited ranks by thread
    _untold: deque[Call] = field(default_factory=lambda: deque(maxlen=LAST_CALLS))  # calls not sent yet
    _thread: int | None = threading.main_thread().ident  # thread that makes the calls

    def now(self) -> float:
        """Return the time in seconds, without times in which this process was stopped."""
        return self.clock() - self.asleep_s

    def arrive(self, at: str, among: Ranks = ALL) -> None:
        """Record that this rank begins a call.

        Args:
            at: name of the call.
            among: the ranks that make it; ALL for all.
        """
        # A new object, because the thread that sends heartbeats reads the old one meanwhile.
        number = self.last.calls.get(among, 0) + 1
        self.last = Progress({**self.last.calls, among: number}, at, among)
        self._untold.append((among, number, at))
        self._changed, self._noted, self._thread = self.now(), -inf, threading.get_ident()

    def take_calls(self) -> list[Call]:
        """Return the calls that this rank has begun and not yet reported to the others, and count them as reported.

        Another thread may begin a call meanwhile.
        """
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def still_waiting(self) -> None:
        """Record that the calling thread waits for other ranks, if it is the one that makes this rank's calls."""
        if threading.get_ident() != self._thread:
            return
        now = self.now()
        if now - self._noted > RECENT_S:
            self._waits_since = now
        self._noted = now

    def awaits(self, ranks: Ranks) -> None:
        """Record the ranks whose messages the current thread waits for; () if it waits for none."""
        self._awaited[threading.get_ident()] = ranks

    def seen(self, now: float, left: bool = False) -> Progress:
        """Return this rank's progress as of now.

        Args:
            now: the time, by `now()`.
            left: True if this rank has left the run.
        """
        waits_s, blocked_since = 0.0, self.blocked_since
        if blocked_since is not None:
            waits_s = now - blocked_since
        elif now - self._noted <= RECENT_S:
            waits_s = now - self._waits_since
        awaited = tuple(sorted({rank for ranks in list(self._awaited.values()) for rank in ranks}))
        return replace(self.last, waits_s=waits_s, unchanged_s=now - self._changed, left=left, awaits=awaited)


class CallTable:
    """The names of the calls that all ranks have made, on rank 0, to find ranks that make different calls.

    A call is identified by the ranks that make it together, and by its number among the calls of these ranks.
    """

    def __init__(self) -> None:
        self._known: dict[Ranks, dict[int, tuple[int, str]]] = {}  # each name with the rank that sent it

    def find_other_call(self, rank: int, calls: Iterable[Call]) -> tuple[int, str] | None:
        """Record calls of a rank, and find one in whose place another rank has made a call of another name.

        Return (`rank`, the reason as a phrase) for the first such call; None if there is none.

        Args:
            rank: number of the rank.
            calls: its calls: the ranks that make each together, its number among their calls, and its name.
        """
        for among, number, at in calls:
            known = self._known.setdefault(among, {})
            other, there = known.setdefault(number, (rank, at))
            if at != there:
                ranks = _of_ranks(among)
                return rank, f"calls {at}{ranks}, and rank {other} {there}{ranks}: ranks make different calls"
            known.pop(number - 2 * LAST_CALLS, None)
        return None


class Peers:
    """The state of the run as one rank knows it: which ranks are lost, have left, or keep others waiting.

    It has no sockets: methods return the messages, dicts for JSON, that the caller then sends to all ranks that this
    one is connected to. Times are those of `own.now()`, in seconds.
    """

    def __init__(
        self, rank: int, size: int, settings: dict[str, str], limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        self.lost: PeerLost | UserError | None = None  # why the run has failed; None if it has not
        self.left: set[int] = set()  # ranks that have left or died
        # agreed: all ranks have met with the same settings. raised: this rank's own code has got the error.
        self.agreed = self.raised = False
        self.closed_at = inf  # time at which this rank left; from then on the others may leave
        self._round = self._next_beat = self._lost_at = clock()
        self.own = OwnProgress(clock, self._round)
        self._settings, self._refusal = settings, ""
        self._heard: dict[int, float] = {}
        self._progress: dict[int, tuple[Progress, float]] = {}  # each with the time of its last call
        self._table = CallTable()

    @property
    def closing(self) -> bool:
        """True once this rank has left the run."""
        return self.closed_at < inf

    @property
    def all_left(self) -> bool:
        """True once all other ranks have left the run or died."""
        return len(self.left) == self.size - 1

    def hear(self, sender: int, message: Message, now: float) -> list[Message]:
        """Handle a message from another rank. Return the messages to pass on, which only rank 0 does; [] on other
        ranks.

        Args:
            sender: the rank that sent it.
            message: its content.
            now: the time, by `own.now()`.
        """
        self._heard[sender] = now
        told = []
        if "lost" in message:
            told = self.lose(PeerLost(message["lost"], message["reason"]), now)
        elif "mistake" in message:
            told = self.lose(UserError(message["mistake"]), now)
        elif "settings" in message:
            told = self._compare(sender, message["settings"], now)
        elif "progress" in message:
            told = self._note_progress(sender, message["progress"], now)
        elif "agreed" in message:
            self.agreed = True
        elif "left" in message:
            self.left |= {message["left"]} - {self.rank}
            told = [message]
        return [] if self.rank else told

    def gone(self, sender: int, now: float) -> list[Message]:
        """Handle a closed connection: its rank has died, unless it has left. Return the messages to send.

        If it was rank 0, no further message arrives from any rank.

        Args:
            sender: the rank at its other end.
            now: the time, by `own.now()`.
        """
        expected = sender in self.left or self.closing
        told = [] if expected else self.lose(PeerLost(sender, "died: its connection closed"), now)
        self.left |= set(range(self.size)) - {self.rank} if self.rank else {sender}
        self._heard.pop(sender, None)
        return [*told, {"left": sender}]

    def lose(self, error: PeerLost | UserError, now: float) -> list[Message]:
        """Record the error by which the run has failed. Return the messages that report it.

        If the run has failed before, change nothing and return [].
        """
        if self.lost is not None:
            return []
        self.lost, self._lost_at = error, now
        return self.known_loss()

    def known_loss(self) -> list[Message]:
        """Return the messages by which to tell other ranks the error that ended the run; [] if it has not failed."""
        if isinstance(self.lost, PeerLost):
            return [{"lost": self.lost.rank, "reason": self.lost.reason}]
        return [] if self.lost is None else [{"mistake": str(self.lost)}]

    def late_start(self) -> PeerLost:
        """Return the error for a start in which not all ranks have met in time. On rank 0 it names those that are
        missing."""
        if self.rank:
            return PeerLost(0, f"did not answer within {self.limits.start_s:g} s of the start")
        missing, *others = sorted(set(range(1, self.size)) - set(self._progress))
        more = f", nor did rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""
        return PeerLost(missing, f"did not start within {self.limits.start_s:g} s{more}")

    def wake(self, clock_s: float) -> float:
        """Begin a round of the watch's thread, and return its time by `own.now()`.

        If this process was stopped since the last round (Ctrl-Z, a debugger), that time is left out. The others'
        silence and waits in it mean nothing.

        Args:
            clock_s: the time by the clock.
        """
        asleep_s, self._round = clock_s - self._round - ROUND_S, clock_s
        if asleep_s > min(1.0, self.limits.timeout_s / 2):
            self.own.asleep_s += asleep_s
        return clock_s - self.own.asleep_s

    def look(self, now: float) -> list[Message]:
        """End a round of the watch's thread, after its messages: find silent ranks and ranks that others wait for.

        Return the messages to send: the error if there is one, else this rank's heartbeat if it is due.
        """
        if self.lost is not None:
            return []
        limit_s = self.limits.timeout_s
        for rank, heard in self._heard.items():
            if now - heard > limit_s and rank not in self.left:
                return self.lose(PeerLost(rank, f"has been silent for {limit_s:g} s"), now)
        own = self.own.seen(now, left=self.closing)
        if self.rank == 0 and self.agreed:
            stall_s = self.limits.stall_s
            others = self._seen(now)
            stalled = find_stalled(others | {0: own}, stall_s, min(stall_s, STILL_S / 2))
            stalled = stalled or _find_lingering(others, now - self.closed_at, stall_s)
            if stalled is not None:
                return self.lose(PeerLost(*stalled), now)
        calls = self.own.take_calls() if own.unchanged_s > STILL_S else []
        if self.closing or (now < self._next_beat and not calls):
            return []
        self._next_beat = now + min(BEAT_S, limit_s / 4)
        return self._compare_calls(self.rank, calls, now) or [_told(own, calls)]

    def goodbye(self) -> list[Message]:
        """Record that this rank leaves the run without an error. Return the messages to send.

        They include this rank's last call, so that ranks that wait in it know that it was made.
        """
        self.closed_at, calls = self.own.now(), self.own.take_calls()
        found = self._compare_calls(self.rank, calls, self.closed_at)
        return [*found, _told(self.own.seen(self.closed_at), calls), {"left": self.rank}]

    def last_words(self, now: float) -> str:
        """Return the reason why this process has to end itself; "" if it does not.

        If a peer dies, its connections close, which ends every wait for it. If it is silent they stay open. And a rank
        that the others have given up must not stay for ever because its main thread hangs.
        """
        since_s = now - self._lost_at
        if self.lost is None or since_s < BLOCKED_S:
            return ""
        if self.own.blocked_since is not None:
            return f"{self.lost}; this rank was waiting for it and ends"
        given_up = isinstance(self.lost, PeerLost) and self.lost.rank == self.rank
        if given_up and since_s > BLOCKED_S + BLAME_S and not self.raised and not self.closing:
            return f"the other ranks have given this one up: {self.lost}"
        return ""

    def _compare(self, rank: int, settings: dict[str, str], now: float) -> list[Message]:
        """Compare a rank's settings with rank 0's, on rank 0. Return the messages to send.

        Once all ranks have joined, these tell them that they may begin, or which setting differs.

        Args:
            settings: values as text, by name.
        """
        self._progress[rank] = Progress(), now
        difference = describe_difference(self._settings, settings)
        if difference and not self._refusal:
            started = f"rank {rank} was started differently from rank 0"
            self._refusal = f"{started}: {difference}; start every rank alike"
        if len(self._progress) < self.size - 1:
            return []
        if self._refusal:
            return self.lose(UserError(self._refusal), now)
        self.agreed = True
        return [{"agreed": True}]

    def _note_progress(self, rank: int, told: list[Any], now: float) -> list[Message]:
        """Record another rank's progress, on rank 0. Return the messages to send if its calls differ from other ranks'.

        Args:
            told: the content of its message, as `_told` makes it.
        """
        counts, at, among, waits_s, awaits, unchanged_s, calls = told
        begun = {tuple(ranks): count for ranks, count in counts}
        one = Progress(begun, at, tuple(among), waits_s, awaits=tuple(awaits))
        self._progress[rank] = one, now - unchanged_s
        return self._compare_calls(rank, ((tuple(ranks), number, name) for ranks, number, name in calls), now)

    def _compare_calls(self, rank: int, calls: Iterable[Call], now: float) -> list[Message]:
        """Record calls of a rank, on rank 0. The run fails if another rank has made a different call instead.

        Return the messages that report this; [] if calls agree, and on other ranks.
        """
        found = None if self.rank else self._table.find_other_call(rank, calls)
        return [] if found is None else self.lose(PeerLost(*found), now)

    def _seen(self, now: float) -> dict[int, Progress]:
        """Return the progress of the other ranks as of now, by rank."""
        found = {}
        for rank, (one, changed) in self._progress.items():
            left = rank in self.left
            found[rank] = replace(one, waits_s=0.0 if left else one.waits_s, unchanged_s=now - changed, left=left)
        return found


def _told(own: Progress, calls: list[Call]) -> Message:
    """Return the message with this rank's progress and its latest calls, for rank 0."""
    counts = [*own.calls.items()]
    return {"progress": [counts, own.at, own.among, own.waits_s, own.awaits, own.unchanged_s, calls]}


def describe_difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return a phrase with the first setting that differs and both its values; "" if none does.

    Args:
        ours: rank 0's settings by name.
        theirs: another rank's.
    """
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if not names:
        return ""
    return f"{names[0]} is {theirs.get(names[0], 'absent')} there and {ours.get(names[0], 'absent')} on rank 0"


# The rank that keeps others waiting -----------------------------------------------------------------------------------


def find_stalled(progress: Mapping[int, Progress], stall_s: float, left_s: float) -> tuple[int, str] | None:
    """Return the rank that keeps others waiting too long or in vain, and the reason; None if there is none.

    Args:
        progress: that of every rank.
        stall_s: longest time that a rank may wait for another.
        left_s: the same if the other rank has left the run.
    """
    # A part of one rank is set up by that rank only. If it waits after that, it waits in a call of the whole run.
    progress = {rank: replace(one, among=ALL) if len(one.among) == 1 else one for rank, one in progress.items()}
    # A rank that waits in its part keeps the whole run waiting, so the smallest parts are examined first.
    for among in sorted({one.among for one in progress.values()}, key=lambda ranks: (ranks == ALL, len(ranks), ranks)):
        inside = {
            rank: one if one.among == among else replace(one, waits_s=0.0)
            for rank, one in progress.items()
            if among == ALL or rank in among
        }
        found = _find_stalled_among(among, inside, stall_s, left_s)
        if found is not None and (progress[found[0]].among == among or not progress[found[0]].waits_s):
            rank, reason = found
            awaited = progress[rank].awaits
            which = f"; it waits for a message from rank {' or '.join(map(str, awaited))}" if awaited else ""
            return rank, reason + which
    still_s = min(stall_s, STILL_S)
    return _in_a_circle({rank: one for rank, one in progress.items() if one.waits_s and one.unchanged_s > still_s})


def _in_a_circle(progress: Mapping[int, Progress]) -> tuple[int, str] | None:
    """Return one of several ranks that wait for each other in a circle, and the reason; None if there are none.

    A rank waits for those that have not made its call yet, and these make it only after their current calls. If those
    calls wait, directly or by way of further ranks, for the first rank, the wait never ends. The ranks are in calls
    that different sets of ranks make.

    Args:
        progress: of the ranks that wait.
    """
    inside = dict(progress)
    while True:
        fewest = {
            among: min((inside[rank].calls.get(among, 0) for rank in among or inside if rank in inside), default=0)
            for among in {one.among for one in inside.values()}
        }
        kept = {rank: one for rank, one in inside.items() if fewest[one.among] < one.calls.get(one.among, 0)}
        if not kept:
            return None
        if len(kept) == len(inside):
            return _in_another_call(kept, min(kept))
        inside = kept


def _find_stalled_among(
    among: Ranks, progress: Mapping[int, Progress], stall_s: float, left_s: float
) -> tuple[int, str] | None:
    """Return what `find_stalled` does, for the calls that a set of ranks makes together.

    Args:
        among: these ranks; ALL for all.
        progress: that of each of them; `waits_s` is 0 for a rank that waits in another set's call.
        stall_s: longest time that a rank may wait for another.
        left_s: the same if the other rank has left the run.
    """
    # A rank that has left after a call is ahead of one that waits in it.
    calls = {rank: one.calls.get(among, 0) + one.left / 2 for rank, one in progress.items()}
    waiting = max(progress, key=lambda rank: progress[rank].waits_s, default=None)
    if waiting is None or progress[waiting].waits_s <= min(stall_s, left_s):
        return None
    waits = progress[waiting]
    # The rank that is behind; of ranks at the same call, one that does not wait.
    late = min(progress, key=lambda rank: (calls[rank], progress[rank].waits_s, rank))
    one = progress[late]
    for_it = f"rank {waiting} has waited {waits.waits_s:.0f} s in {waits.at}"
    if one.left and calls[late] < calls[waiting] and waits.waits_s > left_s:
        return late, f"left the run after {one.at}, and {for_it}"
    if waits.waits_s <= stall_s or one.unchanged_s <= stall_s:
        return None
    if 0.0 < one.waits_s <= stall_s:
        return None  # it waits as well; the length of its wait is known only from its last heartbeat
    if late != waiting and not one.waits_s:
        return late, f"has not gone on from {one.at} for {one.unchanged_s:.0f} s, and {for_it}"
    ahead = max(calls, key=lambda rank: (calls[rank], -rank))
    if calls[ahead] > calls[late]:
        gone_on = f"rank {ahead} has {'left after' if progress[ahead].left else 'gone on to'} {progress[ahead].at}"
        return late, f"has waited {one.waits_s:.0f} s in {one.at}, and {gone_on}: a message to it was lost"
    return _in_another_call(progress, waiting)


def _find_lingering(others: Mapping[int, Progress], waits_s: float, stall_s: float) -> tuple[int, str] | None:
    """Return a rank that does not leave at the end of the run, and the reason; None if there is none.

    A rank that itself waits is examined in the call that it waits in.

    Args:
        others: the progress of all ranks but 0.
        waits_s: time for which rank 0 has waited for them to leave.
        stall_s: longest such time.
    """
    for rank, one in sorted(others.items()):
        if not one.left and not one.waits_s and min(waits_s, one.unchanged_s) > stall_s:
            hangs = f"has not gone on from {one.at} for {one.unchanged_s:.0f} s"
            return rank, f"{hangs}, and rank 0 has waited {waits_s:.0f} s for it to leave"
    return None


def _in_another_call(progress: Mapping[int, Progress], waiting: int) -> tuple[int, str]:
    """Return, of ranks that all wait, the one whose call is not that of most ranks, and the reason.

    They wait in calls of the same number, or for each other. If all calls are the same, a message was lost; then a rank
    that waits for it is returned.

    Args:
        progress: that of each of them.
        waiting: the rank that waits longest.
    """
    calls = {rank: f"{one.at}{_of_ranks(one.among)}" for rank, one in progress.items()}
    names = [*calls.values()]
    odd = min(progress, key=lambda rank: (names.count(calls[rank]), rank))
    if names.count(calls[odd]) < len(names):
        other = next(rank for rank in sorted(progress) if calls[rank] != calls[odd])
        return odd, f"waits in {calls[odd]}, and rank {other} in {calls[other]}: ranks make different calls"
    passed: list[int] = []
    while waiting not in passed and (awaited := [rank for rank in progress[waiting].awaits if rank in progress]):
        passed.append(waiting)  # the next rank waits as well; the lost message is where this closes a circle
        waiting = awaited[0]
    return waiting, f"and all other ranks wait in {progress[waiting].at}: a message was lost"


def _of_ranks(among: Ranks) -> str:
    """Return the phrase " of ranks 0, 1, ..." for the ranks that make a call, for error messages; "" for the whole
    run."""
    if not among:
        return ""
    listed = [*map(str, among)]
    return f" of ranks {', '.join(listed if len(listed) <= 8 else [*listed[:7], '...', listed[-1]])}"

"""What one rank knows of its peers: what follows from their messages, or from their silence.

No sockets, no threads, no clock: `health.py` feeds it messages and times, and sends what its methods return to every
rank that it has a line to. Rank 0 has one to every other rank, which all have one to rank 0.

Below is who keeps the others waiting. All ranks go through the same calls in the same order (attention calls, gathers,
broadcasts), so the numbers of the calls that they are at can be compared: a rank that waits in call 40 while another
one is at call 39 waits for it. Where a part of the ranks makes calls of its own, these are counted for that part, and
compared among its ranks. Calls of one number have one name: ranks that go different ways are found by that, once they
stand still. No time decides it, so a slow rank is blamed for nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from cocodiff.config.errors import PeerLost, UserError

BLAME_S = 3.0  # a transport error and the notice of the death behind it travel apart
BLOCKED_S = 0.5  # how long after a loss a library's wait may take to end with an error of its own
BEAT_S = 5.0  # between a rank's heartbeats, at most
ROUND_S = 0.2  # how often the watch looks at the clock
Message = dict[str, Any]
Ranks = tuple[int, ...]
Call = tuple[Ranks, int, str]  # the ranks that make it, its number among theirs, its name
ALL: Ranks = ()  # stands for all ranks of the run
RECENT_S = 1.0  # a wait that was noted within this time still goes on; a waiting thread notes it four times a second
STILL_S = 1.0  # without a new call a rank stands still: it tells its calls, and its waits are looked at
LAST_CALLS = 256  # that a rank tells: more than a displaced one is ahead of the others


@dataclass(frozen=True)
class Limits:
    """How long what may take, in seconds. timeout_s: without a heartbeat. start_s: until all ranks have met. stall_s:
    until a rank comes to a call that another rank waits in."""

    timeout_s: float = 300.0
    start_s: float = 600.0
    stall_s: float = 1800.0


@dataclass(frozen=True)
class Progress:
    """Where one rank is. calls: how many calls that all of some ranks make it has begun, by these ranks (or ALL). at,
    among: the name of the last call, and the ranks that make it. waits_s: for how long its main thread has been waiting
    for others, 0 while it does something else. unchanged_s: how long ago `calls` changed. left: it has said goodbye.
    awaits: the ranks whose messages it waits for, where messages are checked."""

    calls: Mapping[Ranks, int] = field(default_factory=dict)
    at: str = "the start"
    among: Ranks = ALL
    waits_s: float = 0.0
    unchanged_s: float = 0.0
    left: bool = False
    awaits: Ranks = ()


@dataclass
class OwnProgress:
    """This rank's own progress, written by the thread that makes its calls, and read by the one of heartbeats."""

    clock: Callable[[], float]
    _changed: float
    last: Progress = Progress()  # as of its last call
    blocked_since: float | None = None  # by `now`; in a library that cannot be interrupted
    asleep_s: float = 0.0  # for how long this process has been stopped in all
    _waits_since: float = 0.0
    _noted: float = -inf
    _awaited: dict[int, Ranks] = field(default_factory=dict)  # by thread
    _untold: deque[Call] = field(default_factory=lambda: deque(maxlen=LAST_CALLS))
    _thread: int | None = threading.main_thread().ident  # that makes the calls

    def now(self) -> float:
        """A clock that stands while this process is stopped."""
        return self.clock() - self.asleep_s

    def arrive(self, at: str, among: Ranks = ALL) -> None:
        # A new one: the thread that sends heartbeats reads the old one meanwhile.
        number = self.last.calls.get(among, 0) + 1
        self.last = Progress({**self.last.calls, among: number}, at, among)
        self._untold.append((among, number, at))
        self._changed, self._noted, self._thread = self.now(), -inf, threading.get_ident()

    def take_calls(self) -> list[Call]:
        """Return the calls that were begun since this was asked last. The other thread may begin one meanwhile."""
        return [self._untold.popleft() for _ in range(len(self._untold))]

    def still_waiting(self) -> None:
        if threading.get_ident() != self._thread:
            return
        now = self.now()
        if now - self._noted > RECENT_S:
            self._waits_since = now
        self._noted = now

    def awaits(self, ranks: Ranks) -> None:
        self._awaited[threading.get_ident()] = ranks

    def seen(self, now: float, left: bool = False) -> Progress:
        """Where this rank is now."""
        waits_s, blocked_since = 0.0, self.blocked_since
        if blocked_since is not None:
            waits_s = now - blocked_since
        elif now - self._noted <= RECENT_S:
            waits_s = now - self._waits_since
        awaited = tuple(sorted({rank for ranks in list(self._awaited.values()) for rank in ranks}))
        return replace(self.last, waits_s=waits_s, unchanged_s=now - self._changed, left=left, awaits=awaited)


class CallTable:
    """The names of the calls that ranks have made, by the ranks that make them and their numbers."""

    def __init__(self) -> None:
        self._known: dict[Ranks, dict[int, tuple[int, str]]] = {}  # with the rank that has told it

    def find_other_call(self, rank: int, calls: Iterable[Call]) -> tuple[int, str] | None:
        """Note some calls of a rank. Return the rank and a reason if another one has called something else instead."""
        for among, number, at in calls:
            known = self._known.setdefault(among, {})
            other, there = known.setdefault(number, (rank, at))
            if at != there:
                ranks = _of_ranks(among)
                return rank, f"calls {at}{ranks}, and rank {other} {there}{ranks}: ranks make different calls"
            known.pop(number - 2 * LAST_CALLS, None)
        return None


class Peers:
    """lost: why the run has failed, None while it has not. left: ranks that said goodbye or are gone. agreed: all ranks
    have met and were started alike. closed_at: when this rank said goodbye, since when the others may go. raised: this
    rank's own code knows that the run has failed. Times are `own.now()`, in seconds."""

    def __init__(
        self, rank: int, size: int, settings: dict[str, str], limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        self.lost: PeerLost | UserError | None = None
        self.left: set[int] = set()
        self.agreed = self.raised = False
        self.closed_at = inf
        self._round = self._next_beat = self._lost_at = clock()
        self.own = OwnProgress(clock, self._round)
        self._settings, self._refusal = settings, ""
        self._heard: dict[int, float] = {}
        self._progress: dict[int, tuple[Progress, float]] = {}  # with the time at which its calls changed
        self._table = CallTable()

    @property
    def closing(self) -> bool:
        return self.closed_at < inf

    @property
    def all_left(self) -> bool:
        return len(self.left) == self.size - 1

    def hear(self, sender: int, message: Message, now: float) -> list[Message]:
        """A message has come. Rank 0 alone passes on what follows from it."""
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
        """Its connection has closed. No word comes from anybody without rank 0."""
        expected = sender in self.left or self.closing
        told = [] if expected else self.lose(PeerLost(sender, "died: its connection closed"), now)
        self.left |= set(range(self.size)) - {self.rank} if self.rank else {sender}
        self._heard.pop(sender, None)
        return [*told, {"left": sender}]

    def lose(self, error: PeerLost | UserError, now: float) -> list[Message]:
        """The run has failed, if it has not before."""
        if self.lost is not None:
            return []
        self.lost, self._lost_at = error, now
        return self.known_loss()

    def known_loss(self) -> list[Message]:
        if isinstance(self.lost, PeerLost):
            return [{"lost": self.lost.rank, "reason": self.lost.reason}]
        return [] if self.lost is None else [{"mistake": str(self.lost)}]

    def late_start(self) -> PeerLost:
        """The ranks have not met in time."""
        if self.rank:
            return PeerLost(0, f"did not answer within {self.limits.start_s:g} s of the start")
        missing, *others = sorted(set(range(1, self.size)) - set(self._progress))
        more = f", nor did rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}" if others else ""
        return PeerLost(missing, f"did not start within {self.limits.start_s:g} s{more}")

    def wake(self, clock_s: float) -> float:
        """Begins a round, and tells its time. Where this process itself was stopped since the last one (Ctrl-Z, a
        debugger), the others' silence in that time says nothing, nor does anybody's wait: it is left out."""
        asleep_s, self._round = clock_s - self._round - ROUND_S, clock_s
        if asleep_s > min(1.0, self.limits.timeout_s / 2):
            self.own.asleep_s += asleep_s
        return clock_s - self.own.asleep_s

    def look(self, now: float) -> list[Message]:
        """Ends a round, after all messages that were there: who is silent, who is waited for, and a heartbeat."""
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
        """This rank leaves, and tells where it has come to: who waits for it there knows that it has made that call."""
        self.closed_at, calls = self.own.now(), self.own.take_calls()
        found = self._compare_calls(self.rank, calls, self.closed_at)
        return [*found, _told(self.own.seen(self.closed_at), calls), {"left": self.rank}]

    def last_words(self, now: float) -> str:
        """Why this process has to end by itself, if it has. A dead peer's connections close, which ends every wait for
        it; a silent one's stay open. And a rank that the others have given up must not stay behind for ever because
        its main thread hangs."""
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
        """Rank 0: notes whether a rank was started differently; once all have joined, tells all of them."""
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
        counts, at, among, waits_s, awaits, unchanged_s, calls = told
        begun = {tuple(ranks): count for ranks, count in counts}
        one = Progress(begun, at, tuple(among), waits_s, awaits=tuple(awaits))
        self._progress[rank] = one, now - unchanged_s
        return self._compare_calls(rank, ((tuple(ranks), number, name) for ranks, number, name in calls), now)

    def _compare_calls(self, rank: int, calls: Iterable[Call], now: float) -> list[Message]:
        """Rank 0: the run has failed if a rank has called something else than another one."""
        found = None if self.rank else self._table.find_other_call(rank, calls)
        return [] if found is None else self.lose(PeerLost(*found), now)

    def _seen(self, now: float) -> dict[int, Progress]:
        """Where the others are."""
        found = {}
        for rank, (one, changed) in self._progress.items():
            left = rank in self.left
            found[rank] = replace(one, waits_s=0.0 if left else one.waits_s, unchanged_s=now - changed, left=left)
        return found


def _told(own: Progress, calls: list[Call]) -> Message:
    counts = [*own.calls.items()]
    return {"progress": [counts, own.at, own.among, own.waits_s, own.awaits, own.unchanged_s, calls]}


def describe_difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The first setting that differs, "" when none does."""
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if not names:
        return ""
    return f"{names[0]} is {theirs.get(names[0], 'absent')} there and {ours.get(names[0], 'absent')} on rank 0"


# Who keeps the others waiting -----------------------------------------------------------------------------------------


def find_stalled(progress: Mapping[int, Progress], stall_s: float, left_s: float) -> tuple[int, str] | None:
    """Return the rank that others have been waiting for too long, or for no use, and why it is the one; None while all
    goes on. stall_s: for how long a rank may wait for another. left_s: the same for a rank that has said goodbye."""
    # Nobody else comes to the set-up of a part of one rank: who waits after it waits in a call of the whole run.
    progress = {rank: replace(one, among=ALL) if len(one.among) == 1 else one for rank, one in progress.items()}
    # A rank that waits in its part keeps the whole run waiting: so the smallest parts come first.
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
    """Return, of ranks that all wait, in calls of different parts, one that waits for another which waits for it in
    turn, perhaps by way of more, and why. A rank waits for those that have not come to its call: these come to it
    after their own, for which the rank has to come to a call after its own. So it is no matter of time."""
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
    """`find_stalled` for the calls that all of `among` make."""
    # Who has left after the same call is ahead of who waits in it.
    calls = {rank: one.calls.get(among, 0) + one.left / 2 for rank, one in progress.items()}
    waiting = max(progress, key=lambda rank: progress[rank].waits_s, default=None)
    if waiting is None or progress[waiting].waits_s <= min(stall_s, left_s):
        return None
    waits = progress[waiting]
    # The rank that is behind; of ranks at the same call the one that does not wait.
    late = min(progress, key=lambda rank: (calls[rank], progress[rank].waits_s, rank))
    one = progress[late]
    for_it = f"rank {waiting} has waited {waits.waits_s:.0f} s in {waits.at}"
    if one.left and calls[late] < calls[waiting] and waits.waits_s > left_s:
        return late, f"left the run after {one.at}, and {for_it}"
    if waits.waits_s <= stall_s or one.unchanged_s <= stall_s:
        return None
    if 0.0 < one.waits_s <= stall_s:
        return None  # it waits as well, and for how long is known as of its last heartbeat only
    if late != waiting and not one.waits_s:
        return late, f"has not gone on from {one.at} for {one.unchanged_s:.0f} s, and {for_it}"
    ahead = max(calls, key=lambda rank: (calls[rank], -rank))
    if calls[ahead] > calls[late]:
        gone_on = f"rank {ahead} has {'left after' if progress[ahead].left else 'gone on to'} {progress[ahead].at}"
        return late, f"has waited {one.waits_s:.0f} s in {one.at}, and {gone_on}: a message to it was lost"
    return _in_another_call(progress, waiting)


def _find_lingering(others: Mapping[int, Progress], waits_s: float, stall_s: float) -> tuple[int, str] | None:
    """`find_stalled` for the end of the run, where rank 0 has been waiting for the others' goodbyes for `waits_s`. What
    keeps a rank that waits itself is found in the call that it waits in."""
    for rank, one in sorted(others.items()):
        if not one.left and not one.waits_s and min(waits_s, one.unchanged_s) > stall_s:
            hangs = f"has not gone on from {one.at} for {one.unchanged_s:.0f} s"
            return rank, f"{hangs}, and rank 0 has waited {waits_s:.0f} s for it to leave"
    return None


def _in_another_call(progress: Mapping[int, Progress], waiting: int) -> tuple[int, str]:
    """All wait, in calls of the same number or for each other: the rank whose call is another than most ranks'."""
    calls = {rank: f"{one.at}{_of_ranks(one.among)}" for rank, one in progress.items()}
    names = [*calls.values()]
    odd = min(progress, key=lambda rank: (names.count(calls[rank]), rank))
    if names.count(calls[odd]) < len(names):
        other = next(rank for rank in sorted(progress) if calls[rank] != calls[odd])
        return odd, f"waits in {calls[odd]}, and rank {other} in {calls[other]}: ranks make different calls"
    passed: list[int] = []
    while waiting not in passed and (awaited := [rank for rank in progress[waiting].awaits if rank in progress]):
        passed.append(waiting)  # whoever it waits for waits as well: the lost message is where this comes round
        waiting = awaited[0]
    return waiting, f"and all other ranks wait in {progress[waiting].at}: a message was lost"


def _of_ranks(among: Ranks) -> str:
    """Whose call it is, nothing for one of the whole run."""
    if not among:
        return ""
    listed = [*map(str, among)]
    return f" of ranks {', '.join(listed if len(listed) <= 8 else [*listed[:7], '...', listed[-1]])}"

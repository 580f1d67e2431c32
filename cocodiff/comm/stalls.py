"""Who keeps the others waiting: pure arithmetic on what every rank says of itself with its heartbeat.

All ranks go through the same calls in the same order (attention calls, gathers, broadcasts), so the numbers of the
calls that they are at can be compared: a rank that waits in call 40 while another one is at call 39 waits for it. Where
a part of the ranks makes calls of its own, these are counted for that part, and compared among its ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

Ranks = tuple[int, ...]
ALL: Ranks = ()  # stands for all ranks of the run
RECENT_S = 1.0  # a wait that was noted within this time still goes on; a waiting thread notes it four times a second


@dataclass(frozen=True)
class Progress:
    """Where one rank is.

    calls: how many calls that all of some ranks make it has begun, by these ranks (or ALL). at, among: the name of the
    last call, and the ranks that make it.
    waits_s: for how long its main thread has been waiting for others, 0 while it does something else.
    unchanged_s: how long ago `calls` changed. left: it has said goodbye.
    awaits: the ranks whose messages it waits for, where messages are checked.
    """

    calls: Mapping[Ranks, int] = field(default_factory=dict)
    at: str = "the start"
    among: Ranks = ALL
    waits_s: float = 0.0
    unchanged_s: float = 0.0
    left: bool = False
    awaits: Ranks = ()


@dataclass
class OwnProgress:
    """This rank's own progress, written by its main thread and read by the thread that sends heartbeats."""

    clock: Callable[[], float]
    _changed: float
    calls: dict[Ranks, int] = field(default_factory=dict)
    at: str = "the start"
    among: Ranks = ALL
    blocked_since: float | None = None  # by `now`; in a library that cannot be interrupted
    asleep_s: float = 0.0  # for how long this process has been stopped in all
    _waits_since: float = 0.0
    _noted: float = -inf
    _awaited: dict[int, Ranks] = field(default_factory=dict)  # by thread

    def now(self) -> float:
        """A clock that stands while this process is stopped."""
        return self.clock() - self.asleep_s

    def arrive(self, at: str, among: Ranks = ALL) -> None:
        # A new dict: the thread that sends heartbeats reads the old one meanwhile.
        self.calls = self.calls | {among: self.calls.get(among, 0) + 1}
        self.at, self.among, self._changed, self._noted = at, among, self.now(), -inf

    def still_waiting(self) -> None:
        if threading.current_thread() is not threading.main_thread():
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
        return Progress(self.calls, self.at, self.among, waits_s, now - self._changed, left, awaited)


def find_stalled(progress: Mapping[int, Progress], stall_s: float, left_s: float) -> tuple[int, str] | None:
    """The rank that others have been waiting for too long, and why it is the one; None while all goes on.

    stall_s: for how long a rank may wait for another. left_s: the same for a rank that has said goodbye.
    """
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
    return _in_a_circle({rank: one for rank, one in progress.items() if one.waits_s > stall_s < one.unchanged_s})


def _in_a_circle(progress: Mapping[int, Progress]) -> tuple[int, str] | None:
    """Of ranks that have all waited too long, in calls of different parts: one that waits for another which waits for
    it in turn, perhaps by way of more. A rank waits for those that have not come to its call."""
    inside = dict(progress)
    while True:
        kept = {
            rank: one
            for rank, one in inside.items()
            if any(other.calls.get(one.among, 0) < one.calls.get(one.among, 0) for other in _part(one, inside))
        }
        if not kept:
            return None
        if len(kept) == len(inside):
            return _in_another_call(kept, min(kept))
        inside = kept


def _part(of: Progress, progress: Mapping[int, Progress]) -> list[Progress]:
    """The ranks that make its call, among some."""
    return [one for rank, one in progress.items() if of.among == ALL or rank in of.among]


def _find_stalled_among(
    among: Ranks, progress: Mapping[int, Progress], stall_s: float, left_s: float
) -> tuple[int, str] | None:
    """`find_stalled` for the calls that all of `among` make."""
    calls = {rank: one.calls.get(among, 0) for rank, one in progress.items()}
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
        gone_on = f"rank {ahead} has gone on to {progress[ahead].at}"
        return late, f"has waited {one.waits_s:.0f} s in {one.at}, and {gone_on}: a message to it was lost"
    return _in_another_call(progress, waiting)


def _in_another_call(progress: Mapping[int, Progress], waiting: int) -> tuple[int, str]:
    """All wait, in calls of the same number or for each other: the rank whose call is another one, as most ranks are
    in."""
    calls = {rank: f"{one.at}{_of_ranks(one.among)}" for rank, one in progress.items()}
    names = [*calls.values()]
    odd = min(progress, key=lambda rank: (names.count(calls[rank]), rank))
    if names.count(calls[odd]) < len(names):
        other = next(rank for rank in sorted(progress) if calls[rank] != calls[odd])
        return odd, f"waits in {calls[odd]}, and rank {other} in {calls[other]}: ranks make different calls"
    return waiting, f"and all other ranks wait in {progress[waiting].at}: a message was lost"


def _of_ranks(among: Ranks) -> str:
    """Whose call it is, nothing for one of the whole run."""
    if not among:
        return ""
    listed = [*map(str, among)]
    return f" of ranks {', '.join(listed if len(listed) <= 8 else [*listed[:7], '...', listed[-1]])}"

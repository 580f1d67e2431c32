"""What one rank knows of its peers: what follows from their messages, or from their silence.

No sockets, no threads, no clock: `health.py` feeds it messages and times, and sends what its methods return to every
rank that it has a line to. Rank 0 has one to every other rank, which all have one to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cocodiff.comm.stalls import OwnProgress, Progress, find_stalled
from cocodiff.errors import PeerLost, UserError

BLAME_S = 3.0  # a transport error and the notice of the death behind it travel apart
BLOCKED_S = 0.5  # how long after a loss a library's wait may take to end with an error of its own
ROUND_S = 0.2  # how often the watch looks at the clock
Message = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How long what may take, in seconds.

    timeout_s: without a heartbeat. start_s: until all ranks have met. stall_s: until a rank comes to a call that
    another rank waits in.
    """

    timeout_s: float = 300.0
    start_s: float = 600.0
    stall_s: float = 1800.0


class Peers:
    """lost: why the run has failed, None while it has not. left: ranks that said goodbye or are gone.

    agreed: all ranks have met and were started alike. closing: this rank has said goodbye, so the others may go.
    raised: this rank's own code knows that the run has failed. Times are `own.now()`, in seconds.
    """

    def __init__(
        self, rank: int, size: int, settings: dict[str, str], limits: Limits, clock: Callable[[], float]
    ) -> None:
        self.rank, self.size, self.limits = rank, size, limits
        self.lost: PeerLost | UserError | None = None
        self.left: set[int] = set()
        self.agreed = self.closing = self.raised = False
        self._round = self._next_beat = self._lost_at = clock()
        self.own = OwnProgress(clock, self._round)
        self._settings, self._refusal = settings, ""
        self._heard: dict[int, float] = {}
        self._progress: dict[int, tuple[Progress, float]] = {}  # with the time at which its calls changed

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
            self._note_progress(sender, message["progress"], now)
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
            stalled = find_stalled(self._seen(now) | {0: own}, stall_s, min(stall_s, limit_s))
            if stalled is not None:
                return self.lose(PeerLost(*stalled), now)
        if self.closing or now < self._next_beat:
            return []
        self._next_beat = now + min(5.0, limit_s / 4)
        return [{"progress": [[*own.calls.items()], own.at, own.among, own.waits_s, own.awaits]}]

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

    def _note_progress(self, rank: int, told: list[Any], now: float) -> None:
        calls, at, among, waits_s, awaits = told
        one = Progress({tuple(ranks): count for ranks, count in calls}, at, tuple(among), waits_s, awaits=tuple(awaits))
        known, changed = self._progress.get(rank, (None, now))
        self._progress[rank] = one, changed if known is not None and known.calls == one.calls else now

    def _seen(self, now: float) -> dict[int, Progress]:
        """Where the others are."""
        found = {}
        for rank, (one, changed) in self._progress.items():
            left = rank in self.left
            found[rank] = replace(one, waits_s=0.0 if left else one.waits_s, unchanged_s=now - changed, left=left)
        return found


def describe_difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The first setting that differs, "" when none does."""
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if not names:
        return ""
    return f"{names[0]} is {theirs.get(names[0], 'absent')} there and {ours.get(names[0], 'absent')} on rank 0"

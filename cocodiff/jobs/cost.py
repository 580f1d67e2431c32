"""What restorations cost: seconds, and bytes by the kind of link."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cocodiff_eval.steps import mean_profile

if TYPE_CHECKING:
    from cocodiff.engine import Engine


@dataclass
class Cost:
    """The cost of a stretch of work, under the names of `cocodiff_eval.metrics.Result`: seconds on this rank, and of
    all ranks of the replica together; bytes per link class of all ranks (rank 0 knows them); in a lossy run what its
    coding noted at each step (`Engine.drift_profile`). replica_seconds: which replicas the seconds are of, where that
    is known."""

    seconds: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)
    drift: list[dict[str, Any]] = field(default_factory=list)
    bytes_whole: dict[str, int] = field(default_factory=dict)
    bytes_late: dict[str, int] = field(default_factory=dict)
    rank_seconds: float = 0.0
    replica_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def wall_seconds(self) -> float:
        """Replicas work at the same time: the seconds of the one that took longest."""
        return max(self.replica_seconds.values(), default=self.seconds)

    def reported(self) -> dict[str, Any]:
        """As `cocodiff_eval.metrics.Result` takes it."""
        return vars(self) | {"seconds": self.wall_seconds, "replica_seconds": self.replica_seconds or None}

    def shares(self, count: int) -> list[Cost]:
        """Equal shares of `count` images that were made together; of bytes that cannot be shared equally, the first
        have one more. The drift is that of all of them."""

        def share(of: dict[str, int], n: int) -> dict[str, int]:
            return {link: sent * (n + 1) // count - sent * n // count for link, sent in of.items()}

        bytes_of = (self.bytes, self.bytes_whole, self.bytes_late)
        parts = [[share(of, n) for of in bytes_of] for n in range(count)]
        seconds = {replica: one / count for replica, one in self.replica_seconds.items()}
        times = (self.rank_seconds / count, seconds)
        return [Cost(self.seconds / count, sent, self.drift, whole, late, *times) for sent, whole, late in parts]

    @classmethod
    def summed(cls, costs: Sequence[Cost]) -> Cost:
        """Several runs for one image, taken together; the drift is the mean of theirs at each step."""
        if len(costs) == 1:
            return costs[0]

        def total(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
            links = dict.fromkeys(link for part in parts for link in part)
            return {link: sum(part.get(link, 0) for part in parts) for link in links}

        names = ("bytes", "bytes_whole", "bytes_late", "replica_seconds")
        sent, whole, late, replicas = (total([getattr(cost, name) for cost in costs]) for name in names)
        seconds, rank_seconds = (sum(getattr(cost, name) for cost in costs) for name in ("seconds", "rank_seconds"))
        drift = mean_profile([cost.drift for cost in costs])
        return cls(seconds, sent, drift, whole, late, rank_seconds, replicas)


@contextmanager
def measured(engine: Engine) -> Iterator[Cost]:
    """Makes the engine's model parallel, and fills in the cost when the work inside is done. All ranks call it."""
    cost, before = Cost(), [engine.bytes(purpose) for purpose in ("attention", "whole", "late")]
    engine.forget_drift()
    started = time.perf_counter()
    with engine:
        yield cost
    cost.seconds = time.perf_counter() - started
    cost.rank_seconds = cost.seconds * engine.size
    cost.bytes, cost.bytes_whole, cost.bytes_late = (
        {link: count - earlier[link] for link, count in engine.bytes(purpose).items()}
        for purpose, earlier in zip(("attention", "whole", "late"), before, strict=True)
    )
    cost.drift = engine.drift_profile()

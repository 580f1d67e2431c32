"""What restorations cost: seconds, and bytes by the kind of link."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from cocodiff_eval.steps import mean_profile

if TYPE_CHECKING:
    from cocodiff.engine import Engine

PURPOSES = {"bytes": "attention", "bytes_whole": "whole", "bytes_late": "late"}  # as `Engine.bytes` names them


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
        cached = [step["cached_fraction"] for step in self.drift if "cached_fraction" in step]
        return vars(self) | {
            "seconds": self.wall_seconds,
            "replica_seconds": self.replica_seconds or None,
            "cached_fraction": sum(cached) / len(cached) if cached else None,
        }

    def shares(self, count: int) -> list[Cost]:
        """Equal shares of `count` images that were made together; of bytes that cannot be shared equally, the first
        have one more. The drift is that of all of them."""
        replicas = {replica: one / count for replica, one in self.replica_seconds.items()}
        share = replace(
            self, seconds=self.seconds / count, rank_seconds=self.rank_seconds / count, replica_seconds=replicas
        )

        def sent(n: int) -> dict[str, Any]:
            of_links = {name: getattr(self, name).items() for name in PURPOSES}
            return {
                name: {link: sent * (n + 1) // count - sent * n // count for link, sent in of}
                for name, of in of_links.items()
            }

        return [replace(share, **sent(n)) for n in range(count)]

    @classmethod
    def summed(cls, costs: Sequence[Cost]) -> Cost:
        """Several runs for one image, taken together; the drift is the mean of theirs at each step."""

        def total(parts: Sequence[Any]) -> Any:
            if not isinstance(parts[0], dict):
                return sum(parts)
            links = dict.fromkeys(link for part in parts for link in part)
            return {link: sum(part.get(link, 0) for part in parts) for link in links}

        if len(costs) == 1:
            return costs[0]
        names = [one.name for one in fields(cls) if one.name != "drift"]
        sums = {name: total([getattr(cost, name) for cost in costs]) for name in names}
        return cls(**sums, drift=mean_profile([cost.drift for cost in costs]))


@contextmanager
def measured(engine: Engine) -> Iterator[Cost]:
    """Makes the engine's model parallel, and fills in the cost when the work inside is done. All ranks call it."""
    cost, before = Cost(), {name: engine.bytes(purpose) for name, purpose in PURPOSES.items()}
    engine.forget_drift()
    started = time.perf_counter()
    with engine:
        yield cost
    cost.seconds = time.perf_counter() - started
    cost.rank_seconds = cost.seconds * engine.size
    for name, purpose in PURPOSES.items():
        sent = engine.bytes(purpose).items()
        setattr(cost, name, {link: count - before[name][link] for link, count in sent})
    cost.drift = engine.drift_profile()

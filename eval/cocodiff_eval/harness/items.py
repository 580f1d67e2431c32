"""The items of a job (slices, images), in batches that a replica makes at once, what they cost, and what is kept of
them while they are no results yet: samples of slices whose other samples are made elsewhere, and trials of
settings for a bound on quality.

The samples of a slice are made in one batch where there are slices enough for many replicas. Otherwise they are cut
into batches as well, whose samples are kept in the store until rank 0 puts them together, in their order.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cocodiff.jobs.store import ROWS, Store
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.quality.metrics import mean_profile, sum_by_name
from cocodiff_eval.report.pictures import shown_slices

if TYPE_CHECKING:
    from cocodiff.engine.engine import Engine


@dataclass(frozen=True)
class Batch:
    """Items that one replica makes together, such as slices of a stack."""

    task: int  # its number: that of a stack under a mask
    indices: tuple[int, ...]  # places of the items in the task
    compared: bool = True  # the exact run is made of them too, for comparison alone
    samples: tuple[int, ...] = (0,)  # numbers of the samples that are made of each item
    of: int = 1  # samples that each item gets in all
    together: int = 1  # items, or samples of them, that share the model's calls
    fused: bool = False  # put together of units that were counted, as slices of a volume are
    tests: int = 0  # the last samples of each item: drawn with known regions hidden too, used for intervals alone

    @property
    def drawn(self) -> int:
        """Samples of each item that its result is made of."""
        return self.of - self.tests

    @property
    def size(self) -> int:
        """What is to be made in each mode."""
        return 0 if self.fused else len(self.indices) * len(self.samples)

    @property
    def whole(self) -> bool:
        """Whether its items have no samples in other batches."""
        return len(self.samples) == self.of

    @property
    def calls(self) -> list[list[tuple[int, int]]]:
        """Places in `indices` and samples that share the model's calls, tests apart: as many as without them."""
        every = [(place, sample) for place in range(len(self.indices)) for sample in self.samples]
        kinds = [[pair for pair in every if (pair[1] >= self.drawn) is tests] for tests in (False, True)]
        return [[pairs[n] for n in group] for pairs in kinds for group in evenly(range(len(pairs)), self.together)]


def evenly(indices: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Cut into as few groups of at most `most` as go, of nearly equal sizes."""
    count = -(-len(indices) // most)
    cuts = [round(n * len(indices) / count) for n in range(count + 1)] if count else []
    return [tuple(indices[start:end]) for start, end in pairwise(cuts)]


@dataclass(frozen=True)
class ItemSamples:
    """Samples of an item in one mode. moments: of the normalised images; cost: of all of them; psnr_db: of each,
    as a run with this sample alone would have it, None where the truth is unknown. kept: each sample, where they are
    written as well. tested: of the samples in which more was hidden, if any."""

    moments: Moments
    cost: Cost
    psnr_db: tuple[float | None, ...] = ()
    kept: tuple[np.ndarray, ...] = ()
    tested: Moments | None = None

    @property
    def restored01_YX(self) -> np.ndarray:
        """The mean of the samples: float64 [Y, X] in [0, 1]."""
        return self.moments.mean_YX

    @classmethod
    def merged(cls, parts: Sequence[ItemSamples]) -> ItemSamples:
        """Parts of an item's samples, from the first to the last."""
        moments, tested = parts[0].moments, [part.tested for part in parts if part.tested is not None]
        for part in parts[1:]:
            moments = moments.merged(part.moments)
        psnr_db, kept = (tuple(one for of in parts for one in getattr(of, name)) for name in ("psnr_db", "kept"))
        cost = Cost.summed([part.cost for part in parts])
        return cls(moments, cost, psnr_db, kept, reduce(Moments.merged, tested) if tested else None)


def packed(batch: Batch, drawn: Mapping[str, Sequence[ItemSamples]]) -> Iterator[tuple[str, Any]]:
    """Yield what is saved of samples, for `unpacked` to make them again.

    drawn: in each mode, the samples of each item of the batch
    """
    for mode, of_items in drawn.items():
        for index, one in zip(batch.indices, of_items, strict=True):
            counts = [0 if moments is None else moments.count for moments in (one.moments, one.tested)]
            yield ROWS, [[index, mode, vars(one.cost), one.psnr_db, *counts]]
            for kind, moments in (("drawn", one.moments), ("tested", one.tested)):
                if moments is not None and moments.count == 1:  # has no spread, and is a float32
                    yield f"{index} {mode} {kind}", moments.mean_YX.astype(np.float32)
                elif moments is not None:
                    yield f"{index} {mode} {kind}", np.stack([moments.mean_YX, moments.squares_YX])
            yield f"{index} {mode} kept", np.array(one.kept)


def unpacked(store: Store, numbers: Sequence[int], index: int) -> dict[str, ItemSamples]:
    """Return the samples of an item in each mode, those of some units of the store one after the other."""
    found: dict[str, list[ItemSamples]] = {}
    for number in numbers:
        with store.open(number) as arrays:
            for of, mode, cost, psnr_db, drawn, tested in store.rows([number]):
                if of == index:
                    name = f"{index} {mode}"
                    moments = _moments(arrays[f"{name} drawn"], drawn)
                    of_test = _moments(arrays[f"{name} tested"], tested) if tested else None
                    kept = tuple(arrays[f"{name} kept"])
                    one = ItemSamples(moments, Cost(**cost), tuple(psnr_db), kept, of_test)
                    found.setdefault(mode, []).append(one)
    return {mode: ItemSamples.merged(parts) for mode, parts in found.items()}


def _moments(saved: np.ndarray, count: int) -> Moments:
    return Moments.of(saved) if count == 1 else Moments(count, *saved)


PURPOSES = {"bytes": "attention", "bytes_whole": "whole", "bytes_late": "late"}  # as `Engine.bytes` names them


@dataclass
class Cost:
    """The cost of a stretch of work, under the names of `metrics.Result`: seconds on this rank, and of all ranks of the
    replica together; bytes per link class of all ranks (rank 0 knows them); in a lossy run what its codec noted at each
    step (`Engine.drift_profile`). replica_seconds: which replicas the seconds are of, where that is known."""

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
        """As `cocodiff_eval.quality.metrics.Result` takes it."""
        cached = [step["cached_fraction"] for step in self.drift if "cached_fraction" in step]
        return vars(self) | {
            "seconds": self.wall_seconds,
            "replica_seconds": self.replica_seconds or None,
            "cached_fraction": sum(cached) / len(cached) if cached else None,
        }

    def shares(self, count: int) -> list[Cost]:
        """Equal shares of `count` images; of bytes, the first have one more. The drift is that of all."""
        shared: dict[str, Any] = {"seconds": self.seconds / count, "rank_seconds": self.rank_seconds / count}
        shared["replica_seconds"] = {replica: one / count for replica, one in self.replica_seconds.items()}

        def sent(of_links: Mapping[str, int], n: int) -> dict[str, int]:
            return {link: sent * (n + 1) // count - sent * n // count for link, sent in of_links.items()}

        parts: list[dict[str, Any]] = [{name: sent(getattr(self, name), n) for name in PURPOSES} for n in range(count)]
        return [replace(self, **shared, **part) for part in parts]

    @classmethod
    def summed(cls, costs: Sequence[Cost]) -> Cost:
        """Several runs for one image, taken together; the drift is the mean of theirs at each step."""
        if len(costs) == 1:
            return costs[0]
        parts = {one.name: [getattr(cost, one.name) for cost in costs] for one in fields(cls)}
        profile = mean_profile(parts.pop("drift"))
        sums: dict[str, Any] = {
            name: sum_by_name(of) if isinstance(of[0], dict) else sum(of) for name, of in parts.items()
        }
        return cls(**sums, drift=profile)


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


BATCHES = 16  # of a task; with fewer, samples go to replicas too
SHARING = 2  # samples that a small model restores in one call at least


def batches_of(
    task: int,
    masked: Sequence[bool],
    together: int,
    sample: int,
    samples: int = 1,
    apart: Sequence[Collection[int]] = (),
    tests: int = 0,
    video: bool = False,
) -> list[Batch]:
    """The masked slices of a task in batches, which depend on nothing but these arguments.

    masked: which slices have something to restore. together: so many of them, or samples of one, at most share calls.
    sample: so many slices, evenly spread, are compared with an exact run, and have batches of their own: it then runs
    the same calls. samples: of each slice, and beside them so many `tests`. apart: sets of slices that are compared as
    well, each with batches of its own. video: slices of a batch are frames, so that it has one sample of each.
    """
    hidden = [index for index, has_mask in enumerate(masked) if has_mask]
    slices, at_once = (together, 1) if video else shape_of_batch(len(hidden), together, samples)
    parts, of_tests = evenly(range(samples), at_once), evenly(range(samples, samples + tests), at_once)
    parts = [(*parts[0], *sum(of_tests, ()))] if len(parts) == 1 else parts + of_tests
    samples += tests
    groups, left = [], {*hidden}
    for compared in (*apart, shown_slices(masked, sample)):
        groups += [(group, True) for group in evenly(sorted(left & {*compared}), slices)]
        left -= {*compared}
    groups += [(group, False) for group in evenly(sorted(left), slices)]
    pairs = [(*group, part) for group in groups for part in parts]
    batches = [Batch(task, *pair, samples, together, tests=tests) for pair in pairs]
    return sorted(batches, key=lambda batch: (batch.indices, batch.samples))


def shape_of_batch(slices: int, together: int, samples: int) -> tuple[int, int]:
    """At most so many slices, and samples of each, in a batch of a task with so many slices to restore."""
    least = SHARING if together > 1 else 1
    at_once = min(samples, max(least, -(-slices * samples // BATCHES)))
    return max(1, together // at_once), at_once


def count_batches(slices: int, together: int, samples: int, video: bool = False) -> tuple[int, int]:
    """Of a task with so many slices to restore; and the model's calls of a batch, as far as tiles fit a call."""
    of_slices, at_once = (together, 1) if video else shape_of_batch(slices, together, samples)
    return -(-slices // of_slices) * -(-samples // at_once), -(-at_once // together)

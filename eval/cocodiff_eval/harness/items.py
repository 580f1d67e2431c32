"""The items of a job (slices or images): their batches, their samples with mean and spread, and what these cost.

A mode is a preset, a setting on trial, or the exact run that others are compared with.

A batch is what one replica makes at once. All samples of a slice are made in one batch if there are enough slices for
many replicas. Otherwise they are divided among several batches. The store then keeps the samples of each batch until
all are made, and they are merged in their order. It also keeps the samples that were made to try the settings of a
bound on quality.
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
    """Some items of a job, such as slices of a stack, that one replica makes together.

    An item is made as several samples, with different noise; its result is their mean. The last ones may be calibration
    samples: known regions are hidden in them too, and they calibrate intervals and are no part of the result.
    """

    task: int  # index of the task, a stack with its mask, that the items are of
    indices: tuple[int, ...]  # the items, by their indices in the task
    compared: bool = True  # True if the exact run makes them too, to compare the presets with
    samples: tuple[int, ...] = (0,)  # numbers of the samples, from 0 to `of` - 1, that this batch makes
    of: int = 1  # number of samples of each item in all batches, calibration samples included
    together: int = 1  # most samples, of one or several items, that share the model's calls
    fused: bool = False  # True if its items are fused from other units' samples, as a volume's slices
    tests: int = 0  # number of calibration samples of each item, its last ones

    @property
    def drawn(self) -> int:
        """The number of samples that the result of each item is the mean of; calibration samples are not among them."""
        return self.of - self.tests

    @property
    def size(self) -> int:
        """The number of samples that this batch makes in each mode, such as a preset, which progress bars count.

        It is 0 for a batch that only fuses slices which are restored before.
        """
        return 0 if self.fused else len(self.indices) * len(self.samples)

    @property
    def whole(self) -> bool:
        """True if this batch makes all samples of its items, and False if other batches make further ones."""
        return len(self.samples) == self.of

    @property
    def calls(self) -> list[list[tuple[int, int]]]:
        """The groups of samples that share the model's calls, as pairs (place in `indices`, number of the sample).

        Calibration samples have groups of their own, since known regions are hidden in them too.
        """
        every = [(place, sample) for place in range(len(self.indices)) for sample in self.samples]
        kinds = [[pair for pair in every if (pair[1] >= self.drawn) is tests] for tests in (False, True)]
        return [[pairs[n] for n in group] for pairs in kinds for group in evenly(range(len(pairs)), self.together)]


def evenly(indices: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Return the indices in consecutive groups: as few as possible, with at most `most` in each, and nearly equal."""
    count = -(-len(indices) // most)
    cuts = [round(n * len(indices) / count) for n in range(count + 1)] if count else []
    return [tuple(indices[start:end]) for start, end in pairwise(cuts)]


@dataclass(frozen=True)
class ItemSamples:
    """The samples of one item in one mode, such as a preset, as their mean, spread and cost."""

    moments: Moments  # mean, which is the result, and spread of the normalised images, without calibration samples
    cost: Cost  # cost of all samples together, calibration samples included
    psnr_db: tuple[float | None, ...] = ()  # PSNR of each sample in dB, None without a truth; empty if not computed
    kept: tuple[np.ndarray, ...] = ()  # each sample in the input's dtype; empty unless samples are written as files
    tested: Moments | None = None  # mean and spread of the calibration samples; None if there are none

    @classmethod
    def merged(cls, parts: Sequence[ItemSamples]) -> ItemSamples:
        """Return the samples of several batches together, which are all of one item.

        Their order changes the last bits, so callers give parts in the order of their samples.
        """
        moments = reduce(Moments.merged, [part.moments for part in parts])
        tested = [part.tested for part in parts if part.tested is not None]
        psnr_db, kept = (tuple(one for of in parts for one in getattr(of, name)) for name in ("psnr_db", "kept"))
        cost = Cost.summed([part.cost for part in parts])
        return cls(moments, cost, psnr_db, kept, reduce(Moments.merged, tested) if tested else None)


def packed(batch: Batch, drawn: Mapping[str, Sequence[ItemSamples]]) -> Iterator[tuple[str, Any]]:
    """Yield what the store keeps of a batch's samples, as (name, value). `unpacked` returns the samples from it.

    Args:
        batch: the batch.
        drawn: for each mode the samples of each item of the batch, in the order of its `indices`.
    """
    for mode, of_items in drawn.items():
        for index, one in zip(batch.indices, of_items, strict=True):
            counts = [0 if moments is None else moments.count for moments in (one.moments, one.tested)]
            yield ROWS, [[index, mode, vars(one.cost), one.psnr_db, *counts]]
            for kind, moments in (("drawn", one.moments), ("tested", one.tested)):
                if moments is not None and moments.count == 1:  # one image has no spread, and float32 holds it exactly
                    yield f"{index} {mode} {kind}", moments.mean_YX.astype(np.float32)
                elif moments is not None:
                    yield f"{index} {mode} {kind}", np.stack([moments.mean_YX, moments.squares_YX])
            yield f"{index} {mode} kept", np.array(one.kept)


def unpacked(store: Store, numbers: Sequence[int], index: int) -> dict[str, ItemSamples]:
    """Return the samples of one item by mode, such as a preset, read from the store and merged.

    Args:
        store: the job's store, where `packed` has put them.
        numbers: units of the store whose samples are merged, in this order.
        index: the item's index in its task.
    """
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
    """Return mean and spread of `count` images from an array that `packed` saved.

    Args:
        saved: the image itself if it is only one; else mean and sum of squared deviations, [2, Y, X].
        count: number of images.
    """
    return Moments.of(saved) if count == 1 else Moments(count, *saved)


# for each field of `Cost` with bytes, the `purpose` for which `Engine.bytes` returns it
PURPOSES = {"bytes": "attention", "bytes_whole": "whole", "bytes_late": "late"}


@dataclass
class Cost:
    """The time and bytes of some work of a replica. Its fields are named as those of `metrics.Result`."""

    seconds: float = 0.0  # wall time on this rank
    bytes: dict[str, int] = field(default_factory=dict)  # sent for attention by the replica's ranks, by link class
    drift: list[dict[str, Any]] = field(default_factory=list)  # row for each step of a lossy run, see `drift_profile`
    bytes_whole: dict[str, int] = field(default_factory=dict)  # the same if all tensors were sent uncoded
    bytes_late: dict[str, int] = field(default_factory=dict)  # part of `bytes` that no attention call waited for
    rank_seconds: float = 0.0  # seconds of all ranks of the replica, added up
    replica_seconds: dict[str, float] = field(default_factory=dict)  # part of `seconds` by replica; empty: unknown

    @property
    def wall_seconds(self) -> float:
        """The elapsed time in seconds: that of the slowest replica, as replicas work at the same time."""
        return max(self.replica_seconds.values(), default=self.seconds)

    def reported(self) -> dict[str, Any]:
        """Return the cost as keyword arguments of `cocodiff_eval.quality.metrics.Result`, a row of metrics.json."""
        cached = [step["cached_fraction"] for step in self.drift if "cached_fraction" in step]
        return vars(self) | {
            "seconds": self.wall_seconds,
            "replica_seconds": self.replica_seconds or None,
            "cached_fraction": sum(cached) / len(cached) if cached else None,
        }

    def shares(self, count: int) -> list[Cost]:
        """Divide the cost of `count` images that were made together. Return a cost for each.

        Seconds are divided evenly. Bytes are integers, so shares differ by at most one and their sum is unchanged. The
        measurements of each step in `drift` hold for all images: each share has all of them.
        """
        shared: dict[str, Any] = {"seconds": self.seconds / count, "rank_seconds": self.rank_seconds / count}
        shared["replica_seconds"] = {replica: one / count for replica, one in self.replica_seconds.items()}

        def sent(of_links: Mapping[str, int], n: int) -> dict[str, int]:
            """Return the n-th image's share of bytes by link class."""
            return {link: sent * (n + 1) // count - sent * n // count for link, sent in of_links.items()}

        parts: list[dict[str, Any]] = [{name: sent(getattr(self, name), n) for name in PURPOSES} for n in range(count)]
        return [replace(self, **shared, **part) for part in parts]

    @classmethod
    def summed(cls, costs: Sequence[Cost]) -> Cost:
        """Return the sum of the costs of several runs for one image. Their `drift` becomes its mean at each step."""
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
    """Make the engine's model parallel for the `with` block, and yield the block's cost, which is filled in at its end:
    seconds, bytes sent and drift profile.

    All ranks of the replica enter it together. The engine's drift profile of earlier blocks is deleted first.
    """
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


BATCHES = 16  # batches that a task should have; with fewer slices their samples are divided among batches too
SHARING = 2  # least number of samples of a slice in a batch, if samples can share the model's calls


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
    """Return batches of the masked slices of a task, sorted by slices and samples. They depend on the arguments alone.

    Slices that are compared with an exact run have batches of their own, so that the exact run makes the same calls.

    Args:
        task: index of the task.
        masked: for each slice, True if it has something to restore.
        together: most samples, of one or several slices, that share the model's calls.
        sample: number of slices, evenly spread, that are compared with an exact run.
        samples: number of samples that the result of each slice is the mean of.
        apart: sets of further slices that are compared, each with batches of its own.
        tests: number of calibration samples of each slice.
        video: True if the slices of a batch are frames of one video. A batch then has one sample of each.
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
    """Return the most slices of a batch, and the most samples of each that it makes, in this order.

    With about BATCHES slices or more, a batch has all samples of its slices. With fewer slices, samples are divided
    among batches too, so that there are up to about BATCHES batches.

    Args:
        slices: number of slices that the task has to restore.
        together: most samples, of one or several slices, that share a call of the model.
        samples: number of samples of each slice.
    """
    least = SHARING if together > 1 else 1
    at_once = min(samples, max(least, -(-slices * samples // BATCHES)))
    return max(1, together // at_once), at_once


def count_batches(slices: int, together: int, samples: int, video: bool = False) -> tuple[int, int]:
    """Return the number of batches of a task, and the number of calls of the pipeline that a batch makes one by one.

    The planner predicts a job's time by them. The samples of a call are assumed to fit, with all their tiles, into each
    call of the model. Calibration samples are not counted.

    Args:
        slices: number of slices that the task has to restore.
        together: most samples in a call, of one or several slices.
        samples: number of samples of each slice.
        video: True if the slices of a batch are frames of one video. A batch then has one sample of each.
    """
    of_slices, at_once = (together, 1) if video else shape_of_batch(slices, together, samples)
    return -(-slices // of_slices) * -(-samples // at_once), -(-at_once // together)

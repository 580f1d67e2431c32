"""Messages as fluids: what every one of them gets of the links that all share, by max-min fairness. Pure arithmetic.

A rate vector is max-min fair when no flow can have more without taking from one that has less. It is found by filling
all flows alike until a link is full, freezing the flows on it, and going on with the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
FULL = 1e-9  # links whose share is so near to the smallest are full together


def fair_rates(paths_FK: Indices, weights_F: Floats, capacity_L: Floats) -> Floats:
    """The max-min-fair rate of one message of every flow, in the unit of the capacities.

    paths_FK: the links of each flow, filled up with the index L for none. weights_F: how many equal messages a flow
    stands for. A flow over no link at all gets inf.
    """
    flows, longest = paths_FK.shape
    links = len(capacity_L)
    rate_F = np.full(flows, np.inf)
    left_L = np.append(capacity_L, np.inf)
    open_F = np.flatnonzero((paths_FK < links).any(1))
    while len(open_F):
        paths, weights = paths_FK[open_F], weights_F[open_F]
        load_L = np.bincount(paths.ravel(), np.repeat(weights, longest), links + 1)
        share_L = np.divide(left_L, load_L, out=np.full(links + 1, np.inf), where=load_L > 0)
        share_L[links] = np.inf
        share = share_L.min()
        frozen = (share_L <= share * (1 + FULL))[paths].any(1)
        rate_F[open_F[frozen]] = share
        used_L = np.bincount(paths[frozen].ravel(), np.repeat(weights[frozen], longest), links + 1)
        left_L = np.maximum(left_L - share * used_L, 0.0)
        open_F = open_F[~frozen]
    return rate_F


def padded(paths: Sequence[Sequence[int]], links: int) -> Indices:
    """Paths as rows of one length, filled up with the index `links`."""
    longest = max((len(path) for path in paths), default=0) or 1
    rows = np.full((len(paths), longest), links, dtype=np.int64)
    for row, path in zip(rows, paths, strict=True):
        row[: len(path)] = path
    return rows


class FluidNetwork:
    """Links of given rates, and the messages on them. Time is the caller's: `advance` moves it."""

    def __init__(self, capacity_L: Sequence[float]) -> None:
        self._capacity_L = np.asarray(capacity_L, dtype=np.float64)
        self.now = 0.0
        self._paths_FK = np.zeros((0, 1), dtype=np.int64)
        self._left_F, self._weight_F = np.zeros(0), np.zeros(0)
        self._rate_F, self._end_F = np.zeros(0), np.zeros(0)
        self._members: list[tuple[int, ...]] = []

    def start(self, messages: Sequence[tuple[int, Sequence[int], float]]) -> None:
        """Puts (name, links, bytes) on the links, now. Messages of one size on one way are one flow."""
        alike: dict[tuple[tuple[int, ...], float], list[int]] = {}
        for name, path, size in messages:
            alike.setdefault((tuple(path), size), []).append(name)
        fresh_FK = padded([path for path, _ in alike], len(self._capacity_L))
        width = max(fresh_FK.shape[1], self._paths_FK.shape[1])
        self._paths_FK = np.concatenate([_widened(x, width, len(self._capacity_L)) for x in (self._paths_FK, fresh_FK)])
        self._left_F = np.append(self._left_F, [size for _, size in alike])
        self._weight_F = np.append(self._weight_F, [float(len(names)) for names in alike.values()])
        self._members += [tuple(names) for names in alike.values()]
        self._refill()

    def next_end(self) -> float:
        """When the next message is through; inf where none is under way."""
        return float(self._end_F.min()) if len(self._end_F) else np.inf

    def advance(self, to: float, slack: float = 0.0) -> list[int]:
        """Moves time on, at most to the next end; the names of messages that are through by then, or `slack` later."""
        with np.errstate(invalid="ignore"):  # no limit for no time: such a message is through, whatever it moved
            moved = self._rate_F * (to - self.now)
        self.now = to
        done_F = self._end_F <= to + slack
        self._left_F = np.maximum(self._left_F - np.where(np.isfinite(moved), moved, 0.0), 0.0)
        if not done_F.any():
            return []
        names = [name for index in np.flatnonzero(done_F) for name in self._members[index]]
        keep = ~done_F
        self._paths_FK, self._left_F, self._weight_F = self._paths_FK[keep], self._left_F[keep], self._weight_F[keep]
        self._members = [self._members[index] for index in np.flatnonzero(keep)]
        self._refill()
        return names

    def _refill(self) -> None:
        self._rate_F = fair_rates(self._paths_FK, self._weight_F, self._capacity_L)
        self._end_F = self.now + self._left_F / self._rate_F


def _widened(rows_FK: Indices, width: int, filler: int) -> Indices:
    return np.pad(rows_FK, ((0, 0), (0, width - rows_FK.shape[1])), constant_values=filler)

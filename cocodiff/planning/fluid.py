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
    links = len(capacity_L)
    paths_KF = np.ascontiguousarray(paths_FK.T)
    rate_F = np.full(len(paths_FK), np.inf)
    left_L, none_L = np.append(capacity_L, np.inf), np.full(links + 1, np.inf)
    open_F = np.asarray((paths_KF < links).any(0))
    load_L = _load(paths_KF, weights_F * open_F, links)
    while open_F.any():
        share_L = np.divide(left_L, load_L, out=none_L.copy(), where=load_L > 0.5)  # loads count messages
        share = share_L.min()
        full_L = share_L <= share * (1 + FULL)
        frozen_F = np.flatnonzero(full_L[paths_KF].any(0) & open_F)
        rate_F[frozen_F] = share
        open_F[frozen_F] = False
        used_L = _load(paths_KF[:, frozen_F], weights_F[frozen_F], links)
        load_L -= used_L
        left_L = np.maximum(left_L - share * used_L, 0.0)
    return rate_F


def _load(paths_KF: Indices, weights_F: Floats, links: int) -> Floats:
    """Messages on every link, and 0 for the index that stands for none."""
    of_paths = np.concatenate([weights_F] * len(paths_KF))
    load_L: Floats = np.bincount(paths_KF.ravel(), of_paths, links + 1).astype(np.float64, copy=False)
    load_L[links] = 0.0
    return load_L


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
        self._changed = False  # whether rates are those of other messages than are under way

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
        self._changed = True

    def next_end(self) -> float:
        """When the next message is through; inf where none is under way."""
        self._refill()
        return float(self._end_F.min()) if len(self._end_F) else np.inf

    def advance(self, to: float, slack: float = 0.0) -> list[int]:
        """Moves time on, at most to the next end; the names of messages that are through by then, or `slack` later."""
        self._refill()
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
        self._changed = True
        return names

    def _refill(self) -> None:
        """Rates and ends of what is under way now; messages that start or end at one moment take one filling."""
        if not self._changed:
            return
        self._changed = False
        self._rate_F = fair_rates(self._paths_FK, self._weight_F, self._capacity_L)
        self._end_F = self.now + self._left_F / self._rate_F


def _widened(rows_FK: Indices, width: int, filler: int) -> Indices:
    return np.pad(rows_FK, ((0, 0), (0, width - rows_FK.shape[1])), constant_values=filler)

"""Transposes of a grid of rows and columns between ranks, in pieces: which is sent when. Pure data.

Every rank has some rows of a grid, all columns of each, and is to have some columns, all rows of each; or the other way
round. Both are dealt to ranks and every rank's share is cut into slices (ScaleFusion, sections 4.3 and 4.4): what a
rank computes slice by slice on one side can be sent before all is computed, and used on the other side before all is
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cocodiff.topology.segments import deal, slices


@dataclass(frozen=True)
class Side:
    """The rows or the columns of a grid. shares: how many every rank has, in the order in which they stand; cuts: into
    how many slices each share is cut, of sizes that differ by at most one."""

    shares: tuple[int, ...]
    cuts: int = 1

    @classmethod
    def cut(cls, shares: Sequence[int], wanted: int) -> Side:
        """So many slices of each share, or as many as the smallest one has rows."""
        return cls(tuple(shares), min(wanted, *shares))

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """Of every rank, where its slices begin in its share, and where the last one ends."""
        every = [slices(deal(share, range(self.cuts))) for share in self.shares]
        return tuple((*(one.start for one in of_rank), of_rank[-1].stop) for of_rank in every)

    def own(self, rank: int, chosen: range) -> slice:
        """Where some slices of a rank stand in its share."""
        return slice(self._starts[rank][chosen.start], self._starts[rank][chosen.stop])

    def whole(self, rank: int, chosen: range) -> slice:
        """Where they stand on the whole side."""
        before, own = sum(self.shares[:rank]), self.own(rank, chosen)
        return slice(before + own.start, before + own.stop)

    def sizes(self, chosen: range) -> tuple[int, ...]:
        """How many rows these slices of every rank have together."""
        return tuple(starts[chosen.stop] - starts[chosen.start] for starts in self._starts)


class Piece(NamedTuple):
    """What is sent at once: these slices of the side that is computed, for those of the side that is to come."""

    given: range
    taken: range


def pieces(given: int, taken: int, early: int) -> Iterator[tuple[Piece, ...]]:
    """The pieces of a transpose, for each slice that is computed those that are sent then. given, taken: the number of
    slices of both sides. early: for how many slices of what is to come every computed slice is sent at once; for the
    others all is sent when all is computed, in the order in which it will be needed.

    With `early` 0 only receiving is overlapped (the paper's intra-layer scheduling); with more, some of it is sent
    while the layer before computes (inter-layer)."""
    for number in range(given - 1):
        yield (Piece(range(number, number + 1), range(early)),) if early else ()
    last = [Piece(range(given - 1, given), range(n, n + 1)) for n in range(early)]
    yield (*last, *(Piece(range(given), range(n, n + 1)) for n in range(early, taken)))

"""The segments of a sequence, and how their tokens are dealt to ranks: pure data.

A sequence that attention sees is a list of segments in the model's order, e.g. the tokens of a text, then those of an
image. Every rank has a share of each. Only a model's adapter knows what a segment is; others see what it says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology


def deal(total: int, order: Sequence[int]) -> tuple[int, ...]:
    """Shares of `total` for len(order) ranks: sizes differ by at most one, the first ranks of `order` get extras."""
    base, extra = divmod(total, len(order))
    shares = [base] * len(order)
    for rank in order[:extra]:
        shares[rank] += 1
    return tuple(shares)


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Consecutive slices of the given sizes."""
    ends = list(accumulate(sizes))
    return tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))


@dataclass(frozen=True)
class Segment:
    """A named part of a sequence.

    tokens         of all ranks
    on_every_rank  whether a rank needs one of them at least
    may_stay       whether tokens may stay behind where only some are sent (V-Major)
    dealt_from     the end of the topology's deal order whose ranks get the extra tokens: segments that are dealt from
                   different ends give no rank two extras before every rank has one
    """

    name: str
    tokens: int
    on_every_rank: bool = False
    may_stay: bool = False
    dealt_from: str = "front"

    def shares(self, topology: Topology) -> tuple[int, ...]:
        """Tokens of every rank; sizes differ by at most one.

        Raises UserError where every rank needs a token and there are more ranks."""
        if self.on_every_rank and topology.size > self.tokens:
            raise UserError(
                f"{topology.size} ranks for {self.tokens} {self.name} tokens: a rank needs at least one; "
                f"use at most {self.tokens} ranks or a larger {self.name}"
            )
        return deal(self.tokens, topology.deal_order if self.dealt_from == "front" else topology.deal_order[::-1])


@dataclass(frozen=True)
class DealtSegment:
    """A segment in one attention call: the tokens of each of the call's ranks.

    starts: where every rank's tokens begin in the segment; empty where they lie one behind the other.
    """

    segment: Segment
    shares: tuple[int, ...]
    starts: tuple[int, ...] = ()

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where every rank's tokens stand in the segment."""
        if not self.starts:
            return slices(self.shares)
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.shares, strict=True))

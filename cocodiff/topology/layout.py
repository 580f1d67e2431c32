"""Who holds which tokens and heads in one attention call: pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology


def even_shares(total: int, order: Sequence[int]) -> tuple[int, ...]:
    """Shares of `total` for len(order) ranks: sizes differ by at most one, the first ranks of `order` get extras."""
    base, extra = divmod(total, len(order))
    shares = [base] * len(order)
    for rank in order[:extra]:
        shares[rank] += 1
    return tuple(shares)


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Consecutive slices of the given sizes."""
    return tuple(slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


@dataclass(frozen=True)
class Segment:
    """A named part of a sequence. tokens: of all ranks. on_every_rank: whether a rank needs one of them at least.
    may_stay: whether tokens may stay behind where only some are sent (V-Major). extras_from: the end of the topology's
    `shard_order` whose ranks get the extra tokens: segments with extras from different ends give no rank two extras
    before every rank has one."""

    name: str
    tokens: int
    on_every_rank: bool = False
    may_stay: bool = False
    extras_from: str = "front"

    def shares(self, topology: Topology) -> tuple[int, ...]:
        """Tokens of every rank; sizes differ by at most one. Raises UserError where they are too few for all ranks."""
        if self.on_every_rank and topology.size > self.tokens:
            raise UserError(
                f"{topology.size} ranks for {self.tokens} {self.name} tokens: a rank needs at least one; "
                f"use at most {self.tokens} ranks or a larger {self.name}"
            )
        order = topology.shard_order if self.extras_from == "front" else topology.shard_order[::-1]
        return even_shares(self.tokens, order)


@dataclass(frozen=True)
class ShardedSegment:
    """A segment in one attention call: the tokens of each of the call's ranks. starts: where every rank's tokens begin
    in the segment; empty where they lie one behind the other."""

    segment: Segment
    shares: tuple[int, ...]
    starts: tuple[int, ...] = ()

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where every rank's tokens stand in the segment."""
        if not self.starts:
            return slices(self.shares)
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.shares, strict=True))


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class Layout:
    """One attention call: the tokens of every segment, in the model's order, and the heads of every rank.

    A rank's rows are its tokens of each segment, in the order in which the model concatenates them. After the
    exchange the sequence is rank 0's rows, then rank 1's, and so on: the same for queries and keys, so attention
    does not notice.

    sequence: the ranks in another order for this rank's sequence, as Torus has them; empty for that one.
    """

    parts: tuple[ShardedSegment, ...]
    heads: tuple[int, ...]
    sequence: tuple[int, ...] = ()

    @classmethod
    def build(cls, topology: Topology, segments: Segments, heads: int) -> Layout:
        """Splits evenly: extras of heads and of segments with extras from the front go round-robin over nodes, cards
        and planes; those of segments with extras from the back the other way round. Raises UserError when there are
        more ranks than heads, or than tokens of a segment that every rank needs."""
        if topology.size > heads:
            raise UserError(
                f"{topology.size} ranks for {heads} attention heads: Ulysses needs one or more for each; use at most "
                f"{heads} ranks, or a mesh of Ulysses and Ring (setting ring)"
            )
        parts = tuple(ShardedSegment(segment, segment.shares(topology)) for segment in segments)
        return cls(parts, even_shares(heads, topology.shard_order))

    def of_rows(self, rows: Sequence[int]) -> Layout:
        """The layout in which every rank has so many rows of no segment in particular, where only some are sent."""
        return Layout((ShardedSegment(Segment("rows", sum(rows)), tuple(rows)),), self.heads, self.sequence)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """L_i: rows of every rank."""
        return tuple(map(sum, zip(*(part.shares for part in self.parts), strict=True)))

    @cached_property
    def may_stay(self) -> tuple[int, ...]:
        """Of every rank's rows the number that may stay behind where only some are sent."""
        chosen = [part.shares for part in self.parts if part.segment.may_stay]
        return tuple(map(sum, zip(*chosen, strict=True))) if chosen else (0,) * len(self.heads)

    @cached_property
    def may_stay_slices(self) -> tuple[slice, ...]:
        """Where they stand among the rank's own rows. Raises UserError where other rows stand between them."""
        kinds = [part.segment.may_stay for part in self.parts]
        first = kinds.index(True) if True in kinds else 0
        if not all(kinds[first : first + sum(kinds)]):
            names = ", ".join(part.segment.name for part in self.parts)
            raise UserError(f"segments {names}: those whose tokens may stay behind have to stand side by side")
        before = [sum(part.shares[rank] for part in self.parts[:first]) for rank in range(len(self.heads))]
        return tuple(slice(start, start + size) for start, size in zip(before, self.may_stay, strict=True))

    @cached_property
    def in_sequence(self) -> tuple[int, ...]:
        """The ranks in the order in which their rows stand in the whole sequence."""
        return self.sequence or tuple(range(len(self.heads)))

    @cached_property
    def row_slices(self) -> tuple[slice, ...]:
        """Where every rank's rows stand in the whole sequence."""
        of_rank = slices([self.rows[rank] for rank in self.in_sequence])
        return tuple(where for _, where in sorted(zip(self.in_sequence, of_rank, strict=True), key=lambda x: x[0]))

    def rows_of(self, ranks: Sequence[int]) -> slice:
        """Where the rows of ranks that follow one another stand in the whole sequence."""
        return slice(self.row_slices[ranks[0]].start, self.row_slices[ranks[-1]].stop)

    @cached_property
    def head_slices(self) -> tuple[slice, ...]:
        return slices(self.heads)

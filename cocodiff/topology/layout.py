"""The tokens and heads of every rank in one attention call, as pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cocodiff.config.errors import UserError
from cocodiff.topology import Topology


def even_shares(total: int, order: Sequence[int]) -> tuple[int, ...]:
    """Divide a number, such as of tokens or heads, among ranks. Return each rank's share, by rank; shares differ by at
    most one.

    Args:
        total: the number to divide.
        order: all ranks, from 0 on. The first of this order get the larger shares.
    """
    base, extra = divmod(total, len(order))
    larger = {*order[:extra]}
    return tuple(base + (rank in larger) for rank in range(len(order)))


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return one slice for each size, where each begins at the end of the one before, and the first at 0."""
    return tuple(slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


@dataclass(frozen=True)
class Segment:
    """A named part of a sequence, such as text or image, whose tokens are divided among the ranks."""

    name: str  # such as "image"
    tokens: int  # number of tokens on all ranks together
    on_every_rank: bool = False  # True if every rank needs at least one token
    may_stay: bool = False  # True if V-Major may leave its unchanged tokens unsent
    # Two segments with different ends give no rank a second extra before every rank has one.
    extras_from: str = "front"  # end of `shard_order` whose ranks get one token more: "front" or "back"

    def shares(self, topology: Topology) -> tuple[int, ...]:
        """Return the number of this segment's tokens on each rank, by rank; the numbers differ by at most one.

        Raise UserError if every rank needs a token and there are fewer tokens than ranks.
        """
        if self.on_every_rank and topology.size > self.tokens:
            wrong = f"{topology.size} ranks for {self.tokens} {self.name} tokens: a rank needs at least one"
            raise UserError(f"{wrong}; use at most {self.tokens} ranks or a larger {self.name}")
        order = topology.shard_order if self.extras_from == "front" else topology.shard_order[::-1]
        return even_shares(self.tokens, order)


@dataclass(frozen=True)
class ShardedSegment:
    """A segment of the sequence, such as text or image, as its tokens are divided among ranks in one attention call."""

    segment: Segment  # the segment as a whole
    shares: tuple[int, ...]  # number of tokens of each of the call's ranks
    starts: tuple[int, ...] = ()  # each rank's first token in the segment; empty if the ranks' tokens are consecutive

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The place of each rank's tokens among all tokens of the segment, by rank."""
        if not self.starts:
            return slices(self.shares)
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.shares, strict=True))


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class Layout:
    """The division of one attention call: the tokens of every segment and the heads of every rank.

    A rank's rows are its tokens of each segment, in the order in which the model concatenates them. After the exchange
    the sequence is rank 0's rows, then rank 1's, and so on. Queries and keys have the same order, so attention is not
    affected by it.
    """

    parts: tuple[ShardedSegment, ...]  # the segments, in the model's order
    heads: tuple[int, ...]  # number of heads of every rank
    sequence: tuple[int, ...] = ()  # order of the ranks in this rank's sequence (Torus); empty for 0, 1, 2, ...

    @classmethod
    def build(cls, topology: Topology, segments: Segments, heads: int) -> Layout:
        """Divide the segments' tokens and the heads of an attention call evenly among the ranks, for a call without
        rings.

        Extra heads, and extra tokens of segments with `extras_from` "front", go to different nodes first, then cards,
        then planes. Extra tokens of segments with "back" go the other way round. Raise UserError if there are more
        ranks than heads, or than tokens of a segment that every rank needs.

        Args:
            topology: the ranks.
            segments: the segments of the sequence, in the model's order.
            heads: number of all attention heads.
        """
        if topology.size > heads:
            wrong = f"{topology.size} ranks for {heads} attention heads: Ulysses needs one or more for each"
            raise UserError(f"{wrong}; use at most {heads} ranks, or a mesh of Ulysses and Ring (setting ring)")
        parts = tuple(ShardedSegment(segment, segment.shares(topology)) for segment in segments)
        return cls(parts, even_shares(heads, topology.shard_order))

    def of_rows(self, rows: Sequence[int]) -> Layout:
        """Return a layout with these heads in which each rank has a given number of rows of no particular segment.
        Calls that send only some of their rows use it.

        Args:
            rows: number of rows of each rank.
        """
        return Layout((ShardedSegment(Segment("rows", sum(rows)), tuple(rows)),), self.heads, self.sequence)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of rows (tokens of all segments) of each rank, by rank."""
        return tuple(map(sum, zip(*(part.shares for part in self.parts), strict=True)))

    @cached_property
    def may_stay(self) -> tuple[int, ...]:
        """The number of each rank's rows that V-Major may leave unsent if they hardly changed, by rank."""
        chosen = [part.shares for part in self.parts if part.segment.may_stay]
        return tuple(map(sum, zip(*chosen, strict=True))) if chosen else (0,) * len(self.heads)

    @cached_property
    def may_stay_slices(self) -> tuple[slice, ...]:
        """The place among each rank's own rows of those that V-Major may leave unsent if they hardly changed: one slice
        a rank.

        `may_stay` has their numbers. Raise UserError if the segments of these rows do not stand side by side.
        """
        kinds = [part.segment.may_stay for part in self.parts]
        first = kinds.index(True) if True in kinds else 0
        if not all(kinds[first : first + sum(kinds)]):
            names = ", ".join(part.segment.name for part in self.parts)
            raise UserError(f"segments {names}: those whose tokens may stay behind have to stand side by side")
        before = [sum(part.shares[rank] for part in self.parts[:first]) for rank in range(len(self.heads))]
        return tuple(slice(start, start + size) for start, size in zip(before, self.may_stay, strict=True))

    @cached_property
    def in_sequence(self) -> tuple[int, ...]:
        """The numbers of the ranks in the order in which their rows lie in the whole sequence after the exchange."""
        return self.sequence or tuple(range(len(self.heads)))

    @cached_property
    def row_slices(self) -> tuple[slice, ...]:
        """The place of each rank's rows in the whole sequence after the exchange, by rank."""
        of_rank = slices([self.rows[rank] for rank in self.in_sequence])
        return tuple(where for _, where in sorted(zip(self.in_sequence, of_rank, strict=True), key=lambda x: x[0]))

    def rows_of(self, ranks: Sequence[int]) -> slice:
        """Return the place of the rows of some ranks in the whole sequence after the exchange.

        Args:
            ranks: ranks whose rows lie one after the other in the sequence, in that order.
        """
        return slice(self.row_slices[ranks[0]].start, self.row_slices[ranks[-1]].stop)

"""The tokens and heads of every rank in one attention call, as pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cocodiff.config.errors import UserError
from cocodiff.topology import Topology


def even_shares(total: int, order: Sequence[int]) -> tuple[int, ...]:
    """Divide `total` among len(order) ranks. Shares differ by at most one; the first ranks of `order` get the larger
    ones."""
    base, extra = divmod(total, len(order))
    shares = [base] * len(order)
    for rank in order[:extra]:
        shares[rank] += 1
    return tuple(shares)


def slices(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return consecutive slices of the given sizes, from 0 on."""
    return tuple(slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


@dataclass(frozen=True)
class Segment:
    """A named part of a sequence, such as text or image."""

    name: str
    tokens: int  # number of tokens on all ranks together
    on_every_rank: bool = False  # True if every rank needs at least one token
    may_stay: bool = False  # True if V-Major may leave its unchanged tokens unsent
    # The end of the topology's `shard_order` whose ranks get the extra tokens, "front" or "back". Two segments with
    # different ends give no rank a second extra before every rank has one.
    extras_from: str = "front"

    def shares(self, topology: Topology) -> tuple[int, ...]:
        """Return the number of tokens of every rank; these differ by at most one.

        Raise UserError if every rank needs a token and there are fewer tokens than ranks.
        """
        if self.on_every_rank and topology.size > self.tokens:
            raise UserError(
                f"{topology.size} ranks for {self.tokens} {self.name} tokens: a rank needs at least one; "
                f"use at most {self.tokens} ranks or a larger {self.name}"
            )
        order = topology.shard_order if self.extras_from == "front" else topology.shard_order[::-1]
        return even_shares(self.tokens, order)


@dataclass(frozen=True)
class ShardedSegment:
    """A segment as it is divided in one attention call."""

    segment: Segment
    shares: tuple[int, ...]  # number of tokens of each of the call's ranks
    starts: tuple[int, ...] = ()  # each rank's first token in the segment; empty if the ranks' tokens are consecutive

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The place of every rank's tokens in the segment."""
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
    # order of the ranks in this rank's sequence, where it differs (Torus); empty for 0, 1, 2, ...
    sequence: tuple[int, ...] = ()

    @classmethod
    def build(cls, topology: Topology, segments: Segments, heads: int) -> Layout:
        """Divide segments and heads evenly.

        Extra heads, and extra tokens of segments with `extras_from` "front", go in turn to nodes, cards and planes.
        Extra tokens of segments with "back" go the other way round. Raise UserError if there are more ranks than heads,
        or than tokens of a segment that every rank needs.
        """
        if topology.size > heads:
            raise UserError(
                f"{topology.size} ranks for {heads} attention heads: Ulysses needs one or more for each; use at most "
                f"{heads} ranks, or a mesh of Ulysses and Ring (setting ring)"
            )
        parts = tuple(ShardedSegment(segment, segment.shares(topology)) for segment in segments)
        return cls(parts, even_shares(heads, topology.shard_order))

    def of_rows(self, rows: Sequence[int]) -> Layout:
        """Return a layout in which rank i has rows[i] rows of no particular segment, for calls that send only some
        rows."""
        return Layout((ShardedSegment(Segment("rows", sum(rows)), tuple(rows)),), self.heads, self.sequence)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of every rank (L_i)."""
        return tuple(map(sum, zip(*(part.shares for part in self.parts), strict=True)))

    @cached_property
    def may_stay(self) -> tuple[int, ...]:
        """The number of every rank's rows that V-Major may leave unsent."""
        chosen = [part.shares for part in self.parts if part.segment.may_stay]
        return tuple(map(sum, zip(*chosen, strict=True))) if chosen else (0,) * len(self.heads)

    @cached_property
    def may_stay_slices(self) -> tuple[slice, ...]:
        """The slice of each rank's own rows that V-Major may leave unsent, by rank; `may_stay` has their numbers.

        Raise UserError if the segments of these rows do not stand side by side.
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
        """The ranks in the order in which their rows lie in the whole sequence."""
        return self.sequence or tuple(range(len(self.heads)))

    @cached_property
    def row_slices(self) -> tuple[slice, ...]:
        """The place of every rank's rows in the whole sequence."""
        of_rank = slices([self.rows[rank] for rank in self.in_sequence])
        return tuple(where for _, where in sorted(zip(self.in_sequence, of_rank, strict=True), key=lambda x: x[0]))

    def rows_of(self, ranks: Sequence[int]) -> slice:
        """Return the place of the rows of some ranks in the whole sequence. The ranks have to be consecutive in it."""
        return slice(self.row_slices[ranks[0]].start, self.row_slices[ranks[-1]].stop)

    @cached_property
    def head_slices(self) -> tuple[slice, ...]:
        """The heads of every rank, as a slice of all heads."""
        return slices(self.heads)

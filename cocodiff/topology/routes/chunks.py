"""The plans of Torus attention (StreamFusion section 4.3): the ranks of each chunk, and any exchange cut into stages,
one for each chunk. Pure data.

A chunk is the token range of some nodes, or of some cards where more chunks are asked for than there are nodes. Chunks
are ordered by distance from the rank that attends to them, itself first. So at every stage each node sends to one other
node and receives from one other. All stages together carry exactly the blocks of the whole exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

from cocodiff.config.grouping import by_key
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout, even_shares, slices
from cocodiff.topology.routes.plans import Block, Phase, Plan, reverse

T = TypeVar("T")
# The ranks of each chunk, in the order in which one rank attends to the chunks.
Chunks = tuple[tuple[int, ...], ...]
# One stage of an exchange, in the parts that `Stages` describes.
StageParts = tuple[Plan, Plan, Plan]


def chunk_ranks(topology: Topology, rank: int, chunks: int) -> Chunks:
    """Return the ranks whose tokens make each chunk of `rank`, in the order in which it attends to them.

    With at most as many chunks as nodes, a chunk is the own node, or a group of consecutive other nodes. With more, a
    chunk is a group of a node's cards, and the own card is a chunk of its own. If the nodes do not divide the chunks,
    the farthest nodes have one more. No chunk is smaller than a card, so there may be fewer chunks than asked for.
    Their number is the same on all ranks.
    """
    own = topology.places[rank]
    cards_of = by_key(dict.fromkeys((place.node, place.card) for place in topology.places))
    nodes = _from(own.node, range(topology.nodes))
    if topology.nodes > 1 and chunks <= topology.nodes:
        groups = [[nodes[0]], *consecutive(nodes[1:], chunks - 1)] if chunks > 1 else [nodes]
        grouped = [[card for node in group for card in cards_of[node]] for group in groups]
    else:
        most = min(len(cards) for cards in cards_of.values()) * topology.nodes
        place, grouped = cards_of[own.node].index(own.card), []
        for node, share in zip(nodes, _shares_for_the_last(min(chunks, most), topology.nodes), strict=True):
            cards = _from(place % len(cards_of[node]), cards_of[node])
            near = [cards[:1]] if node == own.node and share > 1 else []
            grouped += near + consecutive(cards[len(near) :], share - len(near))
    return tuple(tuple(rank for card in group for rank in sorted(topology.cards[card])) for group in grouped)


def sequence_of(topology: Topology, rank: int, chunks: int) -> tuple[int, ...]:
    """Return all ranks in the order in which their rows lie in `rank`'s sequence, chunk by chunk.

    Return () if there is one chunk, for the plain order of ranks.
    """
    found = chunk_ranks(topology, rank, chunks)
    return sum(found, ()) if len(found) > 1 else ()


class Stages:
    """The stages of one rank's exchanges, one for each chunk.

    Each stage has three parts: messages that leave at once, blocks that are passed on, and blocks that come over a slow
    link from another node before they are passed on.
    """

    def __init__(self, topology: Topology, rank: int, chunks: int) -> None:
        self._topology, self._rank = topology, rank
        of_rank = [chunk_ranks(topology, other, chunks) for other in range(topology.size)]
        self.chunks = of_rank[rank]
        self._stage = [{rows: n for n, ranks in enumerate(of) for rows in ranks} for of in of_rank]

    @property
    def hearing(self) -> list[tuple[int, ...]]:
        """The ranks, for every stage, that attend to this rank's tokens at that stage."""
        numbers = [of[self._rank] for of in self._stage]
        return [tuple(r for r, n in enumerate(numbers) if n == number) for number in range(len(self.chunks))]

    def of(self, plan: Plan, way: str) -> list[StageParts]:
        """Cut an exchange of this rank into its stages.

        Args:
            plan: the whole exchange, always in its forward direction.
            way: the direction that the stages are for, "forward" or "back".
        """
        places, whole = self._topology.places, plan if way == "forward" else reverse(plan)

        def is_late(block: Block, sender: int) -> bool:
            """Return True if `sender` passes on a block that first came to it from another node."""
            return places[block.rows if way == "forward" else block.heads].node != places[sender].node

        def parts(stage: int) -> StageParts:
            """Return the three parts of one stage."""
            phases = [self._only(phase, lambda b, _: self._stage[b.heads][b.rows] == stage) for phase in whole]
            relays = [phase for phase in phases if phase.hop == 2]
            early = tuple(self._only(phase, lambda b, sender: not is_late(b, sender)) for phase in relays)
            late = tuple(self._only(phase, is_late) for phase in relays)
            return tuple(phase for phase in phases if phase.hop != 2), early, late

        return [parts(stage) for stage in range(len(self.chunks))]

    def _only(self, phase: Phase, wanted: Callable[[Block, int], bool]) -> Phase:
        """Return a phase with some of its blocks, over the same routes. `wanted` is given a block and the rank that
        sends it."""
        sends = {peer: tuple(b for b in message if wanted(b, self._rank)) for peer, message in phase.sends.items()}
        receives = {peer: tuple(b for b in message if wanted(b, peer)) for peer, message in phase.receives.items()}
        sends, receives = ({p: message for p, message in some.items() if message} for some in (sends, receives))
        return Phase(phase.lane, sends, receives, phase.hop)


def consecutive(items: Sequence[T], groups: int) -> list[list[T]]:
    """Divide items into `groups` lists of neighbours, or one list per item if there are fewer. Sizes differ by at most
    one, smaller lists first."""
    groups = min(groups, len(items))
    return [list(items[part]) for part in slices(_shares_for_the_last(len(items), groups))] if groups else []


def _shares_for_the_last(total: int, parts: int) -> tuple[int, ...]:
    """Divide `total` into shares that differ by at most one; the last ones get the extras."""
    return even_shares(total, range(parts)[::-1])


def _from(first: int, items: Sequence[T]) -> list[T]:
    """Rotate `items` so that the one at index `first` is the first."""
    return [*items[first:], *items[:first]]


@dataclass(frozen=True)
class ExchangeTable:
    """A table of the exchange to use by size of the tensors."""

    # (largest MB per rank, name of the exchange), ascending; the last limit is infinite
    rows: tuple[tuple[float, str], ...]

    def exchange_for(self, megabytes: float) -> str:
        """Return the name of the exchange for tensors of this size per rank."""
        return next(name for limit, name in self.rows if megabytes <= limit)


@dataclass(frozen=True)
class Chunking:
    """The number of chunks of Torus attention, and the size that it pays from."""

    chunks: int = 1  # 1: not in chunks
    from_mb: float = 0.0  # smallest MB of q, k and v per rank


def megabytes_per_rank(layout: Layout, cell: int) -> float:
    """Return the mean MB (1e6 bytes) of a rank's tensors in one call, which is the same number on every rank.

    Args:
        cell: bytes of one token and head.
    """
    return sum(layout.rows) * sum(layout.heads) * cell / len(layout.rows) / 1e6


@dataclass(frozen=True)
class Side:
    """The rows or the columns of a grid that ranks share, as Latte's frames or places."""

    shares: tuple[int, ...]  # number of rows of every rank, in order
    cuts: int = 1  # number of slices that each share is cut into, of sizes that differ by at most one

    @classmethod
    def cut(cls, shares: Sequence[int], wanted: int) -> Side:
        """Build a side with `wanted` slices per share, or as many as the smallest share has rows."""
        return cls(tuple(shares), min(wanted, *shares))

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """The beginning of every rank's slices in its share, with the end of the last one behind."""
        return tuple(tuple(accumulate(even_shares(share, range(self.cuts)), initial=0)) for share in self.shares)

    def own(self, rank: int, chosen: range) -> slice:
        """Return the place of a rank's `chosen` slices in its share."""
        return slice(self._starts[rank][chosen.start], self._starts[rank][chosen.stop])

    def whole(self, rank: int, chosen: range) -> slice:
        """Return the place of a rank's `chosen` slices on the whole side."""
        before, own = sum(self.shares[:rank]), self.own(rank, chosen)
        return slice(before + own.start, before + own.stop)

    def sizes(self, chosen: range) -> tuple[int, ...]:
        """Return the number of rows of every rank in some slices of its share.

        Args:
            chosen: consecutive numbers of slices, from 0 to `cuts` - 1.
        """
        return tuple(starts[chosen.stop] - starts[chosen.start] for starts in self._starts)


class Piece(NamedTuple):
    """The part of a transpose that is sent at once: some slices of one side by some slices of the other."""

    given: range  # slices of the side that is computed before the transpose
    taken: range  # slices of the side that is computed after it


def pieces(given: int, taken: int, early: int) -> Iterator[tuple[Piece, ...]]:
    """Yield, for each slice that is computed, the pieces of a transpose that are sent after it.

    With `early` 0 only receiving overlaps with computing (the paper's intra-layer scheduling). With more, some of it is
    sent while the layer before computes (inter-layer).

    Args:
        given: number of slices of the side that is computed.
        taken: number of slices of the other side.
        early: number of `taken` slices that every computed slice is sent for at once. All others are sent after the
            last computed slice, in the order in which they will be needed.
    """
    for number in range(given - 1):
        yield (Piece(range(number, number + 1), range(early)),) if early else ()
    last = [Piece(range(given - 1, given), range(n, n + 1)) for n in range(early)]
    yield (*last, *(Piece(range(given), range(n, n + 1)) for n in range(early, taken)))

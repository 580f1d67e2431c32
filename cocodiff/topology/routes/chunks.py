"""Torus attention's plans (StreamFusion section 4.3): which ranks' tokens make a chunk, and any exchange cut into one
exchange for each chunk. Pure data.

A chunk is the token range of some nodes, or of some cards where more chunks are asked for than there are nodes. They
go by distance from the rank that attends to them, itself first, so at every stage each node sends to one other and
hears from one other. The stages together carry exactly the blocks of the whole exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

from cocodiff.config.machine import Topology
from cocodiff.topology.layout import Layout, even_shares, slices
from cocodiff.topology.routes.plans import Block, Phase, Plan, reverse

T = TypeVar("T")
Chunks = tuple[tuple[int, ...], ...]
StageParts = tuple[Plan, Plan, Plan]


def chunk_ranks(topology: Topology, rank: int, chunks: int) -> Chunks:
    """The ranks whose tokens make each chunk of one rank, in the order in which it attends to them.

    Up to as many chunks as nodes: the own node, then the others in consecutive groups. More: every node's cards in
    groups, the farthest nodes' in one more where they do not divide; the own card is a chunk of its own. No chunk is
    less than a card, so there are fewer than asked for where there are fewer cards; the same number on all ranks.
    """
    own = topology.places[rank]
    cards_of = _cards_by_node(topology)
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
    """All ranks, chunk by chunk, as their rows stand in one rank's sequence; empty for the order of ranks."""
    found = chunk_ranks(topology, rank, chunks)
    return sum(found, ()) if len(found) > 1 else ()


class Stages:
    """All stages of one rank's exchanges, each in three parts: what leaves at once, what is passed on, and what comes
    over a slow link before it is passed on."""

    def __init__(self, topology: Topology, rank: int, chunks: int) -> None:
        self._topology, self._rank = topology, rank
        of_rank = [chunk_ranks(topology, other, chunks) for other in range(topology.size)]
        self.chunks = of_rank[rank]
        self._stage = [{rows: n for n, ranks in enumerate(of) for rows in ranks} for of in of_rank]

    @property
    def hearing(self) -> list[tuple[int, ...]]:
        """Of every stage the ranks that have this rank's tokens in their chunk of that number."""
        numbers = [of[self._rank] for of in self._stage]
        return [tuple(r for r, n in enumerate(numbers) if n == number) for number in range(len(self.chunks))]

    def of(self, plan: Plan, way: str) -> list[StageParts]:
        """plan: forward, whole. way: "forward" or "back"."""
        places, whole = self._topology.places, plan if way == "forward" else reverse(plan)

        def is_late(block: Block, sender: int) -> bool:
            return places[block.rows if way == "forward" else block.heads].node != places[sender].node

        def parts(stage: int) -> StageParts:
            phases = [self._only(phase, lambda b, _: self._stage[b.heads][b.rows] == stage) for phase in whole]
            relays = [phase for phase in phases if phase.hop == 2]
            early = tuple(self._only(phase, lambda b, sender: not is_late(b, sender)) for phase in relays)
            late = tuple(self._only(phase, is_late) for phase in relays)
            return tuple(phase for phase in phases if phase.hop != 2), early, late

        return [parts(stage) for stage in range(len(self.chunks))]

    def _only(self, phase: Phase, wanted: Callable[[Block, int], bool]) -> Phase:
        """Some of a phase's blocks, over the same routes. wanted: of a block and the rank that sends it."""
        sends = {peer: tuple(b for b in message if wanted(b, self._rank)) for peer, message in phase.sends.items()}
        receives = {peer: tuple(b for b in message if wanted(b, peer)) for peer, message in phase.receives.items()}
        sends, receives = ({p: message for p, message in some.items() if message} for some in (sends, receives))
        return Phase(phase.lane, sends, receives, phase.hop)


def consecutive(items: Sequence[T], groups: int) -> list[list[T]]:
    """So many groups of neighbours, or one for each item where there are fewer; sizes differ by one, smaller first."""
    groups = min(groups, len(items))
    return [list(items[part]) for part in slices(_shares_for_the_last(len(items), groups))] if groups else []


def _shares_for_the_last(total: int, parts: int) -> tuple[int, ...]:
    """Shares that differ by one at most; the last ones get what is left."""
    return even_shares(total, range(parts)[::-1])


def _from(first: int, items: Sequence[T]) -> list[T]:
    """The items from one on, and round to it."""
    return [*items[first:], *items[:first]]


def _cards_by_node(topology: Topology) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, card in dict.fromkeys((place.node, place.card) for place in topology.places):
        found.setdefault(node, []).append(card)
    return found


@dataclass(frozen=True)
class ExchangeTable:
    """Rows (up to so many MB per rank, exchange), ascending; the last one's limit is infinite."""

    rows: tuple[tuple[float, str], ...]

    def exchange_for(self, megabytes: float) -> str:
        return next(name for limit, name in self.rows if megabytes <= limit)


@dataclass(frozen=True)
class Chunking:
    """Torus: in how many chunks, and from how many MB of q, k and v per rank on. 1 chunk: not at all."""

    chunks: int = 1
    from_mb: float = 0.0


def megabytes_per_rank(layout: Layout, cell: int) -> float:
    """MB (1e6 bytes) of a mean rank's tensors: the same number on every rank. cell: bytes of a token and head."""
    return sum(layout.rows) * sum(layout.heads) * cell / len(layout.rows) / 1e6


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
        return tuple(tuple(accumulate(even_shares(share, range(self.cuts)), initial=0)) for share in self.shares)

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

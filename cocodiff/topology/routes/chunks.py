"""Torus attention's plans (StreamFusion section 4.3): which ranks' tokens make a chunk, and any exchange cut into one
exchange for each chunk. Pure data.

A chunk is the token range of some nodes, or of some cards where more chunks are asked for than there are nodes. They
go by distance from the rank that attends to them, itself first, so at every stage each node sends to one other and
hears from one other. The stages together carry exactly the blocks of the whole exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from cocodiff.config.machine import Topology
from cocodiff.topology.layout import Layout, even_shares, slices
from cocodiff.topology.routes.plans import Block, Phase, Plan, reverse

T = TypeVar("T")
Chunks = tuple[tuple[int, ...], ...]
StageParts = tuple[Plan, Plan, Plan]
Messages = dict[int, tuple[Block, ...]]


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
        base, extra = divmod(min(chunks, most), topology.nodes)
        place, grouped = cards_of[own.node].index(own.card), []
        for distance, node in enumerate(nodes):
            share = base + (distance >= topology.nodes - extra)
            cards = _from(place % len(cards_of[node]), cards_of[node])
            near = [cards[:1]] if distance == 0 and share > 1 else []
            grouped += near + consecutive(cards[len(near) :], share - len(near))
    return tuple(tuple(rank for card in group for rank in sorted(topology.cards[card])) for group in grouped)


def sequence_of(topology: Topology, rank: int, chunks: int) -> tuple[int, ...]:
    """All ranks, chunk by chunk, as their rows stand in one rank's sequence; empty for the order of ranks."""
    found = chunk_ranks(topology, rank, chunks)
    return tuple(other for ranks in found for other in ranks) if len(found) > 1 else ()


def cut_by_stage(plan: Plan, stage_of: Callable[[Block], int], stages: int) -> list[Plan]:
    """One plan for each stage, with the blocks of that stage alone: the same blocks over the same routes."""

    def only(messages: Messages, stage: int) -> Messages:
        of_stage = {peer: tuple(b for b in message if stage_of(b) == stage) for peer, message in messages.items()}
        return {peer: message for peer, message in of_stage.items() if message}

    return [
        tuple(Phase(phase.lane, only(phase.sends, s), only(phase.receives, s), phase.hop) for phase in plan)
        for s in range(stages)
    ]


def split_by_dependency(plan: Plan, late: Callable[[Block, int], bool], rank: int) -> StageParts:
    """The plan in three: what leaves at once, what is passed on, and what comes over a slow link before it is passed
    on. late: of a block and the rank that passes it on."""

    def only(messages: Messages, sender: Callable[[int], int], wanted: bool) -> Messages:
        of_kind = {
            peer: tuple(b for b in message if late(b, sender(peer)) == wanted) for peer, message in messages.items()
        }
        return {peer: message for peer, message in of_kind.items() if message}

    def passed_on(phase: Phase, wanted: bool) -> Phase:
        sends, receives = only(phase.sends, lambda _: rank, wanted), only(phase.receives, lambda peer: peer, wanted)
        return Phase(phase.lane, sends, receives, phase.hop)

    relays = [phase for phase in plan if phase.hop == 2]
    return (
        tuple(phase for phase in plan if phase.hop != 2),
        tuple(passed_on(phase, False) for phase in relays),
        tuple(passed_on(phase, True) for phase in relays),
    )


class Stages:
    """All stages of one rank's exchanges, each in the three parts of `split_by_dependency`."""

    def __init__(self, topology: Topology, rank: int, chunks: int) -> None:
        self._topology, self._rank = topology, rank
        of_rank = [chunk_ranks(topology, other, chunks) for other in range(topology.size)]
        self.chunks = of_rank[rank]
        self._stage = [{rows: n for n, ranks in enumerate(of) for rows in ranks} for of in of_rank]

    @property
    def sequence(self) -> tuple[int, ...]:
        """All ranks, chunk by chunk."""
        return tuple(rank for ranks in self.chunks for rank in ranks)

    @property
    def hearing(self) -> list[tuple[int, ...]]:
        """Of every stage the ranks that have this rank's tokens in their chunk of that number."""
        numbers = [of[self._rank] for of in self._stage]
        return [tuple(r for r, n in enumerate(numbers) if n == number) for number in range(len(self.chunks))]

    def of(self, plan: Plan, way: str) -> list[StageParts]:
        """plan: forward, whole. way: "forward" or "back"."""
        stages = cut_by_stage(plan if way == "forward" else reverse(plan), self._of_block, len(self.chunks))
        return [split_by_dependency(stage, partial(self._is_late, way), self._rank) for stage in stages]

    def _of_block(self, block: Block) -> int:
        return self._stage[block.heads][block.rows]

    def _is_late(self, way: str, block: Block, sender: int) -> bool:
        places = self._topology.places
        return places[block.rows if way == "forward" else block.heads].node != places[sender].node


def consecutive(items: Sequence[T], groups: int) -> list[list[T]]:
    """So many groups of neighbours, or one for each item where there are fewer; sizes differ by one, smaller first."""
    groups = min(groups, len(items))
    if not groups:
        return []
    base, extra = divmod(len(items), groups)
    ends = list(accumulate(base + (n >= groups - extra) for n in range(groups)))
    return [list(items[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _from(first: int, items: Sequence[T]) -> list[T]:
    """The items from one on, and round to it."""
    return [*items[first:], *items[:first]]


def _cards_by_node(topology: Topology) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in topology.places:
        cards = found.setdefault(place.node, [])
        if place.card not in cards:
            cards.append(place.card)
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
        every = [slices(even_shares(share, range(self.cuts))) for share in self.shares]
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

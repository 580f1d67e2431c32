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
ExchangeTable = Sequence[tuple[float, str]]  # (largest MB per rank, exchange), ascending; the last limit is infinite


def chunk_ranks(topology: Topology, rank: int, chunks: int) -> Chunks:
    """Return the ranks whose tokens make each chunk of a rank's attention calls, in the order in which it attends to
    the chunks.

    With at most as many chunks as nodes, a chunk is the own node, or a group of consecutive other nodes. With more, a
    chunk is a group of a node's cards, and the own card is a chunk of its own. If the nodes do not divide the chunks,
    the farthest nodes have one more. No chunk is smaller than a card, so there may be fewer chunks than asked for.
    Their number is the same on all ranks.

    Args:
        topology: the ranks that share the sequence.
        rank: the rank that attends.
        chunks: number of chunks that are asked for.
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
    """Return all ranks in the order in which their rows lie in one rank's sequence, if its calls are in chunks: chunk
    by chunk.

    Return () if there is only one chunk; rows then lie in the order of the ranks.

    Args:
        topology: the ranks that share the sequence.
        rank: the rank whose sequence it is.
        chunks: number of chunks that are asked for.
    """
    found = chunk_ranks(topology, rank, chunks)
    return sum(found, ()) if len(found) > 1 else ()


class Stages:
    """The exchanges of one rank cut into stages, one for each chunk of its attention calls (Torus attention).

    Each stage has three parts: messages that leave at once, blocks that are passed on, and blocks that come over a slow
    link from another node before they are passed on.
    """

    def __init__(self, topology: Topology, rank: int, chunks: int) -> None:
        """Compute the chunks of all ranks; this rank's are kept as `chunks`.

        Args:
            topology: the ranks that share the sequence.
            rank: the rank whose exchanges are cut.
            chunks: number of chunks that are asked for.
        """
        self._topology, self._rank = topology, rank
        of_rank = [chunk_ranks(topology, other, chunks) for other in range(topology.size)]
        self.chunks = of_rank[rank]
        self._stage = [{rows: n for n, ranks in enumerate(of) for rows in ranks} for of in of_rank]

    @property
    def attending_ranks(self) -> list[tuple[int, ...]]:
        """The ranks that attend to this rank's tokens at each stage: one tuple of ranks a stage."""
        numbers = [of[self._rank] for of in self._stage]
        return [tuple(r for r, n in enumerate(numbers) if n == number) for number in range(len(self.chunks))]

    def of(self, plan: Plan, way: str) -> list[StageParts]:
        """Cut an exchange of this rank into stages. Return the three parts of each stage, in the order of the stages.

        Args:
            plan: the whole exchange, always in its forward direction.
            way: the direction that the stages are for, "forward" (q, k and v) or "back" (the output).
        """
        places, whole = self._topology.places, plan if way == "forward" else reverse(plan)

        def is_late(block: Block, sender: int) -> bool:
            """Return True if `sender` passes on a block that it first received from another node."""
            return places[block.rows if way == "forward" else block.heads].node != places[sender].node

        def parts(stage: int) -> StageParts:
            """Return the three parts of one stage: messages that leave at once, blocks that are passed on, and those
            that first come from another node."""
            phases = [self._only(phase, lambda b, _: self._stage[b.heads][b.rows] == stage) for phase in whole]
            relays = [phase for phase in phases if phase.hop == 2]
            early = tuple(self._only(phase, lambda b, sender: not is_late(b, sender)) for phase in relays)
            late = tuple(self._only(phase, is_late) for phase in relays)
            return tuple(phase for phase in phases if phase.hop != 2), early, late

        return [parts(stage) for stage in range(len(self.chunks))]

    def _only(self, phase: Phase, wanted: Callable[[Block, int], bool]) -> Phase:
        """Return a phase with some of its blocks, over the same routes.

        Args:
            phase: the phase with all blocks.
            wanted: function of a block and the rank that sends it; True to keep the block.
        """
        sends = {peer: tuple(b for b in message if wanted(b, self._rank)) for peer, message in phase.sends.items()}
        receives = {peer: tuple(b for b in message if wanted(b, peer)) for peer, message in phase.receives.items()}
        sends, receives = ({p: message for p, message in some.items() if message} for some in (sends, receives))
        return Phase(phase.lane, sends, receives, phase.hop)


def consecutive(items: Sequence[T], groups: int) -> list[list[T]]:
    """Divide items into lists of neighbours whose sizes differ by at most one, smaller lists first. Return these lists.

    Args:
        groups: number of lists; there are fewer if there are fewer items.
    """
    groups = min(groups, len(items))
    return [list(items[part]) for part in slices(_shares_for_the_last(len(items), groups))] if groups else []


def _shares_for_the_last(total: int, parts: int) -> tuple[int, ...]:
    """Divide a number into shares that differ by at most one, the larger ones last. Return the shares."""
    return even_shares(total, range(parts)[::-1])


def _from(first: int, items: Sequence[T]) -> list[T]:
    """Return the items rotated, so that the one at index `first` comes first and those before it come last."""
    return [*items[first:], *items[:first]]


def exchange_for(table: ExchangeTable, megabytes: float) -> str:
    """Return the name of the exchange to use for tensors of a given size, for the setting `exchange: auto`.

    Args:
        table: the measurements that say so.
        megabytes: size of q, k and v together, in MB per rank.
    """
    return next(name for limit, name in table if megabytes <= limit)


@dataclass(frozen=True)
class Chunking:
    """The number of chunks of Torus attention, and the size of tensors from which chunks are used."""

    chunks: int = 1  # number of chunks; 1: not in chunks
    from_mb: float = 0.0  # smallest MB of q, k and v per rank that is cut into chunks


def megabytes_per_rank(layout: Layout, cell: int) -> float:
    """Return the mean MB (1e6 bytes) that a rank has of an attention call's tensors. The number is the same on every
    rank, so all choose the same exchange.

    Args:
        layout: the tokens and heads of every rank in the call.
        cell: bytes of one token and head, in all tensors that are counted.
    """
    return sum(layout.rows) * sum(layout.heads) * cell / len(layout.rows) / 1e6


@dataclass(frozen=True)
class Side:
    """The rows or the columns of a grid of tokens that ranks share, such as the frames or the places of the video model
    Latte."""

    shares: tuple[int, ...]  # number of rows of every rank, in order
    cuts: int = 1  # number of slices that each share is cut into, of sizes that differ by at most one

    @classmethod
    def cut(cls, shares: Sequence[int], wanted: int) -> Side:
        """Build a side whose shares are cut into a given number of slices, or into fewer if the smallest share has
        fewer rows.

        Args:
            shares: number of rows of every rank.
            wanted: number of slices of each share.
        """
        return cls(tuple(shares), min(wanted, *shares))

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """The row at which each slice of a rank's share begins, and behind them the share's size; one tuple a rank."""
        return tuple(tuple(accumulate(even_shares(share, range(self.cuts)), initial=0)) for share in self.shares)

    def own(self, rank: int, chosen: range) -> slice:
        """Return the place of some slices of a rank's share within that share.

        Args:
            chosen: consecutive numbers of slices, from 0 to `cuts` - 1.
        """
        return slice(self._starts[rank][chosen.start], self._starts[rank][chosen.stop])

    def whole(self, rank: int, chosen: range) -> slice:
        """Return the place of some slices of a rank's share among the rows of all ranks.

        Args:
            chosen: consecutive numbers of slices, from 0 to `cuts` - 1.
        """
        before, own = sum(self.shares[:rank]), self.own(rank, chosen)
        return slice(before + own.start, before + own.stop)

    def sizes(self, chosen: range) -> tuple[int, ...]:
        """Return, for every rank, the number of rows in some slices of its share.

        Every rank's share of this side is cut into `cuts` slices.

        Args:
            chosen: consecutive numbers of slices, from 0 to `cuts` - 1, the same for all ranks.
        """
        return tuple(starts[chosen.stop] - starts[chosen.start] for starts in self._starts)


class TransposePiece(NamedTuple):
    """A part of a transpose (an exchange of rows for columns between ranks) that is sent at once: some slices of one
    side by some slices of the other."""

    given: range  # slices of the side that is computed before the transpose
    taken: range  # slices of the side that is computed after it


def pieces(given: int, taken: int, early: int) -> Iterator[tuple[TransposePiece, ...]]:
    """Yield, for each slice that a rank computes before a transpose, the pieces of the transpose that it sends after
    this slice.

    With `early` 0 only receiving overlaps with computing (the paper's intra-layer scheduling). With more, some pieces
    are sent while the layer before computes (inter-layer).

    Args:
        given: number of slices of the side that is computed.
        taken: number of slices of the other side.
        early: number of `taken` slices that every computed slice is sent for at once. All others are sent after the
            last computed slice, in the order in which they will be needed.
    """
    for number in range(given - 1):
        yield (TransposePiece(range(number, number + 1), range(early)),) if early else ()
    last = [TransposePiece(range(given - 1, given), range(n, n + 1)) for n in range(early)]
    yield (*last, *(TransposePiece(range(given), range(n, n + 1)) for n in range(early, taken)))

"""The routes of an exchange: which rank sends which blocks to which other, in which phase. Pure data.

The unit of an exchange is a *block*: the rows (tokens) of one rank for the heads of another. Forward, every rank starts
with the blocks of its own rows and ends with those of its own heads; on the way back it is the reverse. An exchange is
only the route that blocks take: one phase for flat, two for TAPA. A plan is what one rank sends and receives, phase by
phase; it can be printed and checked without any communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cocodiff.config.grouping import by_key
from cocodiff.config.registry import EXCHANGES, load
from cocodiff.topology import Place, Topology


class Block(NamedTuple):
    """The unit of an exchange: the rows (tokens) of one rank for the heads of another."""

    rows: int  # rank whose rows they are
    heads: int  # rank whose heads they are


Messages = dict[int, tuple[Block, ...]]  # peer -> the blocks of the message to or from it


@dataclass(frozen=True)
class Phase:
    """The messages that one rank sends and receives in one part of an exchange, all posted together."""

    lane: str  # the background thread that posts it: "sibling" (on a card) or "plane" (within planes, between nodes)
    sends: Messages  # for each receiver, the blocks of its message in order
    receives: Messages  # for each sender, the blocks of its message in order
    hop: int = 0  # 0: blocks go straight to their owner; 1: to a rank that will pass them on; 2: onward from there

    def reversed(self) -> Phase:
        """Return this phase as it is on the way back, for attention's output: sends and receives are swapped."""
        return Phase(self.lane, sends=self.receives, receives=self.sends, hop=(0, 2, 1)[self.hop])


Plan = tuple[Phase, ...]  # the phases of one rank's exchange, in the order in which their messages are posted


def plan_of(topology: Topology, rank: int, name: str, nic_balance: bool) -> Plan:
    """Return what one rank sends and receives in an exchange, phase by phase.

    Args:
        topology: the ranks that exchange blocks.
        rank: the rank whose plan it is.
        name: name of the exchange in the table `EXCHANGES`.
        nic_balance: True to spread "split"'s blocks for other nodes over the NICs.
    """
    if name == "split" and nic_balance:
        return split_plan(topology, rank, nic_detours(topology))
    return load(EXCHANGES, name)(topology, rank)


def flat_plan(topology: Topology, rank: int) -> Plan:
    """Return one rank's messages in the exchange "flat", plain Ulysses: every block goes straight to the rank that owns
    its heads."""
    others = [other for other in range(topology.size) if other != rank]
    sends: Messages = {other: (Block(rank, other),) for other in others}
    receives: Messages = {other: (Block(other, rank),) for other in others}
    return (Phase("plane", sends, receives),)


def tapa_plan(topology: Topology, rank: int) -> Plan:
    """Return one rank's messages in the exchange "tapa" (CoCoDiff section III-B): tiles of a card swap first, then each
    plane exchanges among its own tiles.

    Phase 1 leaves a rank with all tokens of its card for the heads of the planes that it serves. Phase 2 takes them to
    the plane's tiles on the other cards and nodes. So no block crosses from one plane to another between cards.
    """
    place = topology.places[rank]
    swap, off_card = _swap(topology, rank, topology.places)
    other_cards = [(c, ranks) for c, ranks in topology.cards.items() if c != place.card]
    across = Phase(
        "plane",
        sends={other: tuple(Block(rows, other) for rows in topology.cards[place.card]) for other in off_card},
        receives={
            topology.server(c, place.plane): tuple(Block(rows, rank) for rows in ranks) for c, ranks in other_cards
        },
        hop=2,
    )
    return (swap, across)


def _swap(topology: Topology, rank: int, places: Sequence[Place]) -> tuple[Phase, list[int]]:
    """Return (the phase in which the tiles of a card swap blocks, the ranks on other cards that this rank serves).

    Each tile serves the ranks of its plane, and perhaps of planes in which its card has no tile: it passes the whole
    card's rows on to them later. So it gets from the card's other tiles their rows for these ranks' heads.

    Args:
        topology: the ranks that exchange blocks.
        rank: the rank whose phase it is.
        places: the ranks whose heads are considered: all, or those of this node if blocks for others go another way.
    """

    def served_by(server: int) -> list[int]:
        """Return the ranks of `places` that are in the planes which the rank `server` serves on its card."""
        return [other.rank for other in places if other.plane in topology.served_planes[server]]

    siblings, own_card = topology.siblings(rank), topology.cards[topology.places[rank].card]
    swap = Phase(
        "sibling",
        sends={s: tuple(Block(rank, heads) for heads in served_by(s)) for s in siblings},
        receives={s: tuple(Block(s, heads) for heads in served_by(rank)) for s in siblings},
        hop=1,
    )
    return swap, [other for other in served_by(rank) if other not in own_card]


def split_plan(topology: Topology, rank: int, detours: Mapping[tuple[int, int], int] | None = None) -> Plan:
    """Return one rank's messages in the exchange "split", which puts TAPA's bytes on all links at once.

    On a node, blocks for the planes that a rank serves go straight to their owners. Each sibling (other tile of the
    card) gets one message with all blocks for its planes and relays them. Blocks for other nodes go straight, except
    for `detours`.

    Every link carries the same bytes as in TAPA, but the slow ones start at once: siblings swap while these are busy.
    Phases are listed in the order in which their messages are posted. Only the relay depends on an earlier phase.

    Args:
        topology: the ranks that exchange blocks.
        rank: the rank whose plan it is.
        detours: the rank that passes a block on, by the ranks of the block's rows and heads.
    """
    here, siblings = topology.places[rank], topology.siblings(rank)
    on_node = [place for place in topology.places if place.node == here.node]
    swap, off_card = _swap(topology, rank, on_node)
    servers = {topology.server(c, here.plane): topology.cards[c] for c in {p.card for p in on_node} - {here.card}}
    off_node = [other.rank for other in topology.places if other.node != here.node]
    detours = detours or {}
    to_nodes = [other for other in off_node if (rank, other) not in detours]
    from_nodes = [other for other in off_node if (other, rank) not in detours]
    straight = Phase(
        "plane",
        sends={other: (Block(rank, other),) for other in off_card + to_nodes},
        receives={other: (Block(other, rank),) for other in [*sorted(servers), *from_nodes]},
    )
    relay = Phase(
        "plane",
        sends={other: tuple(Block(rows, other) for rows in siblings) for other in off_card if siblings},
        receives={
            server: tuple(Block(rows, rank) for rows in ranks if rows != server)
            for server, ranks in sorted(servers.items())
            if len(ranks) > 1
        },
        hop=2,
    )
    if not detours:
        return (straight, swap, relay)
    out, on = detour_phases(rank, detours)
    return (out, straight, swap, relay, on)


def detour_phases(rank: int, detours: Mapping[tuple[int, int], int]) -> tuple[Phase, Phase]:
    """Return two phases of one rank, with its messages in all detours: to the rank that passes a block on, and onward
    from that rank.

    Args:
        rank: the rank whose phases they are.
        detours: the rank that passes a block on, by the ranks of the block's rows and heads.
    """

    def by_peer(chosen: Iterable[tuple[int, Block]]) -> dict[int, tuple[Block, ...]]:
        """Return the blocks of each peer in one tuple, by peer."""
        return {peer: tuple(blocks) for peer, blocks in by_key(sorted(chosen)).items()}

    every = [(Block(*pair), via) for pair, via in detours.items()]
    out = Phase(
        "plane",
        sends=by_peer((via, block) for block, via in every if block.rows == rank),
        receives=by_peer((block.rows, block) for block, via in every if via == rank),
        hop=1,
    )
    on = Phase(
        "plane",
        sends=by_peer((block.heads, block) for block, via in every if via == rank),
        receives=by_peer((via, block) for block, via in every if block.heads == rank),
        hop=2,
    )
    return out, on


def reverse(plan: Plan) -> Plan:
    """Return an exchange's plan for the way back, for attention's output: the same routes, from the rank of the heads
    to the rank of the rows.

    Blocks that will be passed on are posted first, then those that go straight, and last those being passed on, which
    have to wait.
    """
    return tuple(sorted((phase.reversed() for phase in reversed(plan)), key=lambda phase: (1, 0, 2).index(phase.hop)))


Pair = tuple[int, int]  # the ranks of a block's rows and of its heads


@lru_cache(maxsize=4)  # the same for all ranks, of which one process may have many
def nic_detours(topology: Topology) -> dict[Pair, int]:
    """Return the blocks between nodes that take a detour so that all NICs of a node carry about the same: the rank that
    passes a block on, by the ranks of its rows and heads.

    All blocks are counted as equal in size. That is exact where tokens and heads divide evenly, and close otherwise.
    """
    detours: dict[Pair, int] = {}
    for leaving in (True, False):
        for node in range(topology.nodes):
            _balance(topology, node, leaving, detours)
    return detours


def _balance(topology: Topology, node: int, leaving: bool, detours: dict[Pair, int]) -> None:
    """Add detours to the dict `detours`, for blocks that leave or enter one node: from its fullest NIC to its emptiest,
    until their numbers of blocks differ by one.

    Args:
        topology: the ranks that exchange blocks.
        node: number of the node.
        leaving: True for blocks that leave the node, False for those that enter it.
        detours: the rank that passes a block on, by the ranks of the block's rows and heads.
    """
    here = topology.on_node[node]
    away = [place.rank for place in topology.places if place.node != node]
    load = {nic: tiles * len(away) for nic, tiles in Counter(topology.nics[rank] for rank in here).items()}
    tiles_of = Counter((topology.places[rank].node, topology.nics[rank]) for rank in range(topology.size))
    moved: Counter[int] = Counter()  # blocks of each rank that take a detour
    helped: Counter[Pair] = Counter()  # blocks between a rank and its helper
    met: Counter[int] = Counter()  # blocks of each rank on other nodes that take a detour
    while True:
        most, least = max(load.values()), min(load.values())
        if most - least < 2:
            return
        givers = [rank for rank in here if load[topology.nics[rank]] == most]
        takers = [rank for rank in here if load[topology.nics[rank]] == least]
        pairs = [(r, h) for r in givers for h in takers]
        rank, helper = min(pairs, key=lambda p: (topology.link_class(*p) == "cross_plane", moved[p[0]], helped[p], p))
        free = [other for other in away if ((rank, other) if leaving else (other, rank)) not in detours]
        if not free:
            return
        # First blocks whose other end has a NIC of its own: the others may need a detour at that end.
        shared = {r: tiles_of[topology.places[r].node, topology.nics[r]] for r in free}
        _, _, _, other = min((shared[r], met[r], (r - rank) % len(here), r) for r in free)
        detours[(rank, other) if leaving else (other, rank)] = helper
        moved[rank] += 1
        helped[rank, helper] += 1
        met[other] += 1
        load[topology.nics[rank]] -= 1
        load[topology.nics[helper]] += 1

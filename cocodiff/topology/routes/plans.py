"""The routes of an exchange: which rank sends which blocks to which other, in which phase. Pure data.

The unit of an exchange is a *block*: the rows (tokens) of one rank for the heads of another. Forward, every rank starts
with the blocks of its own rows and ends with those of its own heads; on the way back it is the reverse. An exchange is
nothing but the route that blocks take: one phase for flat, two for TAPA. A plan is what one rank sends and receives,
phase by phase; it can be printed and checked without any communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cocodiff.config.machine import Place, Topology
from cocodiff.config.registry import EXCHANGES, load


class Block(NamedTuple):
    """The rows of rank `rows` for the heads of rank `heads`."""

    rows: int
    heads: int


Messages = dict[int, tuple[Block, ...]]  # to or from every peer


@dataclass(frozen=True)
class Phase:
    """The messages of one rank before the next phase: peer -> blocks of the message, in their order in it.

    lane: the link group that carries it, "sibling" or "plane" (planes and nodes).
    hop: 0 for blocks that go straight to their owner, 1 for those that another rank will pass on, 2 when it does.
    """

    lane: str
    sends: Messages
    receives: Messages
    hop: int = 0

    def reversed(self) -> Phase:
        return Phase(self.lane, sends=self.receives, receives=self.sends, hop=(0, 2, 1)[self.hop])


Plan = tuple[Phase, ...]


def plan_of(topology: Topology, rank: int, name: str, nic_balance: bool) -> Plan:
    """Of a rank in an exchange of the table `EXCHANGES`. nic_balance: of split, between nodes."""
    if name == "split" and nic_balance:
        return split_plan(topology, rank, nic_detours(topology))
    plan: Plan = load(EXCHANGES, name)(topology, rank)
    return plan


def flat_plan(topology: Topology, rank: int) -> Plan:
    """Ulysses: every block goes straight to the rank that owns its heads."""
    others = [other for other in range(topology.size) if other != rank]
    sends: Messages = {other: (Block(rank, other),) for other in others}
    receives: Messages = {other: (Block(other, rank),) for other in others}
    return (Phase("plane", sends, receives),)


def tapa_plan(topology: Topology, rank: int) -> Plan:
    """TAPA (CoCoDiff section III-B): siblings swap first, then every plane exchanges among its own tiles. Phase 1
    leaves a rank with all tokens of its card for the heads of the planes that it serves; phase 2 takes them to the
    plane's tiles on the other cards and nodes. So nothing crosses from one plane to another between cards."""
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
    """What siblings swap of the heads at some places, and those of these ranks on other cards that this rank serves."""

    def served_by(server: int) -> list[int]:
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
    """Split: on a node, blocks for the planes that a rank serves go straight to their owners; each sibling gets one
    message with all blocks for its planes and relays them. Blocks for other nodes go straight, but for `detours`:
    (rows, heads) -> the rank that passes the block on.

    So every link carries what it carries in TAPA, but the slow ones start at once: what siblings swap travels while
    they are busy. Phases stand in the order in which their messages are posted; only the relay needs an earlier one.
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
    """The messages of a rank with blocks that are passed on: the first hop and the second."""

    def by_peer(chosen: Iterable[tuple[int, Block]]) -> dict[int, tuple[Block, ...]]:
        found: dict[int, tuple[Block, ...]] = {}
        for peer, block in sorted(chosen):
            found[peer] = (*found.get(peer, ()), block)
        return found

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
    """The way back, for the attention's output: the same routes, from the rank of the heads to the rank of the rows.
    What is to be passed on is posted first, what goes straight next, what is passed on last: it has to wait."""
    return tuple(sorted((phase.reversed() for phase in reversed(plan)), key=lambda phase: (1, 0, 2).index(phase.hop)))


Pair = tuple[int, int]  # the ranks of a block's rows and of its heads


@lru_cache(maxsize=4)  # the same for all ranks, of which one process may have many
def nic_detours(topology: Topology) -> dict[Pair, int]:
    """(rows, heads) -> the rank that passes the block on, for those blocks between nodes that do not go straight. All
    blocks count alike: exact where tokens and heads divide evenly, near enough where not."""
    detours: dict[Pair, int] = {}
    for leaving in (True, False):
        for node in range(topology.nodes):
            _balance(topology, node, leaving, detours)
    return detours


def _balance(topology: Topology, node: int, leaving: bool, detours: dict[Pair, int]) -> None:
    """Moves blocks that leave (or reach) a node from its fullest NIC to its emptiest, until they differ by one."""
    here = topology.on_node[node]
    away = [place.rank for place in topology.places if place.node != node]
    load = {nic: tiles * len(away) for nic, tiles in Counter(topology.nics[rank] for rank in here).items()}
    tiles_of = Counter((topology.places[rank].node, topology.nics[rank]) for rank in range(topology.size))
    moved: Counter[int] = Counter()  # blocks that a rank gave away
    helped: Counter[Pair] = Counter()  # blocks between a rank and its helper
    met: Counter[int] = Counter()  # blocks of a rank at the other end that take a detour
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
        # Blocks whose other end has a NIC for itself first: those with a shared one may need a detour at that end.
        shared = {r: tiles_of[topology.places[r].node, topology.nics[r]] for r in free}
        _, _, _, other = min((shared[r], met[r], (r - rank) % len(here), r) for r in free)
        detours[(rank, other) if leaving else (other, rank)] = helper
        moved[rank] += 1
        helped[rank, helper] += 1
        met[other] += 1
        load[topology.nics[rank]] -= 1
        load[topology.nics[helper]] += 1

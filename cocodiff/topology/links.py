"""The physical links of a topology: the tiles they join, their rates, and a bound on all-to-alls. Pure data.

Tiles of a card are joined to each other, and tiles of a plane on a node likewise. Each tile has one NIC to the other
nodes, which it may share. Rates are those of the machine file, one direction, in GB/s (1e9 bytes).
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import combinations
from typing import NamedTuple

from cocodiff.topology import Topology


class Wire(NamedTuple):
    """A physical link between the tiles of two ranks on a node."""

    a: int  # one rank
    b: int  # the other rank
    kind: str  # "sibling" or "plane"
    gb_s: float  # rate in one direction, GB/s


def wires(topology: Topology) -> list[Wire]:
    """Return all physical links between tiles of the same node, each link once."""
    rates = {"sibling": topology.machine.links.sibling_gb_s, "plane": topology.machine.links.plane_gb_s}
    every = [pair for ranks in topology.on_node.values() for pair in combinations(ranks, 2)]
    pairs = [(a, b, topology.link_class(a, b)) for a, b in every]
    return [Wire(a, b, kind, rates[kind]) for a, b, kind in pairs if kind in rates]


def next_hops(topology: Topology, rank: int) -> dict[int, int]:
    """Return the neighbour to which a rank sends a message for each other rank of its node: a dict from the receiver to
    the first rank on a shortest path to it. Receivers that links do not reach are left out.

    Links join the tiles of a card, and those of a plane. Of equally short paths it takes the one that goes to a tile of
    the same card first. The message then leaves the card in the plane of its receiver.
    """
    neighbours: dict[int, list[tuple[bool, int]]] = defaultdict(list)
    for a, b, kind, _ in wires(topology):
        neighbours[a].append((kind != "sibling", b))  # siblings first
        neighbours[b].append((kind != "sibling", a))
    hops: dict[int, int] = {}
    reached, waiting = {rank}, deque([(rank, rank)])
    while waiting:
        at, first = waiting.popleft()
        for _, other in sorted(neighbours[at]):
            if other not in reached:
                reached.add(other)
                hops[other] = other if at == rank else first
                waiting.append((other, hops[other]))
    return hops


def alltoall_bound(topology: Topology, block_bytes: float) -> float | None:
    """Return the least time, in seconds, of an all-to-all with equal blocks; None if no links join the ranks.

    It is the largest quotient of bytes and rate over these cuts: each tile, each card and each node against the other
    ranks.

    Args:
        block_bytes: bytes that each rank sends to each other rank.
    """
    links, bounds = topology.machine.links, []
    joined = wires(topology)
    for here in map(set, topology.on_node.values()):
        cards = [set(ranks) & here for ranks in topology.cards.values()]
        for inside in [*({rank} for rank in here), *(card for card in cards if card)]:
            leaving = len(inside) * (len(here) - len(inside)) * block_bytes
            rate = sum(wire.gb_s for wire in joined if (wire.a in inside) != (wire.b in inside))
            if leaving and rate:
                bounds.append(leaving / rate / 1e9)
        leaving = len(here) * (topology.size - len(here)) * block_bytes
        used = {topology.nics[rank] for rank in here}
        bounds.append(leaving / (len(used) * links.nic_gb_s) / 1e9)
    return max(bounds) or None

"""The physical links of a topology: which tiles they join, at what rate, and what they allow at best. Pure data.

Tiles of a card are joined to each other, and tiles of a plane on a node likewise; each tile has one NIC to the other
nodes, which it may share. Rates are those of the machine file, one direction, in GB/s (1e9 bytes).
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import combinations
from typing import NamedTuple

from cocodiff.config.machine import Topology


class Wire(NamedTuple):
    """A link between two ranks' tiles. kind: "sibling" or "plane"."""

    a: int
    b: int
    kind: str
    gb_s: float


def wires(topology: Topology) -> list[Wire]:
    """Every link between tiles of a node, once."""
    rates = {"sibling": topology.machine.links.sibling_gb_s, "plane": topology.machine.links.plane_gb_s}
    pairs = [(a, b, topology.link_class(a, b)) for ranks in topology.on_nodes for a, b in combinations(ranks, 2)]
    return [Wire(a, b, kind, rates[kind]) for a, b, kind in pairs if kind in rates]


def next_hops(topology: Topology, rank: int) -> dict[int, int]:
    """For every other rank of the node that can be reached, the neighbour that a shortest way goes through first. Of
    equal ways the one that crosses to the sibling first: the message leaves the card on the plane of its receiver."""
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
    """Seconds that an all-to-all with equal blocks takes at least: every cut's bytes over its links' rate, the largest.
    The cuts are each tile, each card and each node. None where the ranks are joined by no links."""
    links, bounds = topology.machine.links, []
    joined = wires(topology)
    for here in map(set, topology.on_nodes):
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

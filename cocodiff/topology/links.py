"""The physical links of a topology: which tiles they join, at what rate, and what they allow at best. Pure data.

Tiles of a card are joined to each other, and tiles of a plane on a node likewise; each tile has one NIC to the other
nodes, which it may share. Rates are those of the machine file, one direction, in GB/s (1e9 bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
    nodes: dict[int, list[int]] = {}
    for place in topology.places:
        nodes.setdefault(place.node, []).append(place.rank)
    found = []
    for ranks in nodes.values():
        for a, b in combinations(ranks, 2):
            kind = topology.link_class(a, b)
            if kind in rates:
                found.append(Wire(a, b, kind, rates[kind]))
    return found


def neighbours_of(joined: Iterable[Wire]) -> dict[int, list[tuple[int, int]]]:
    """Of every rank the ranks it has a wire to, each after a number that puts siblings first."""
    neighbours: dict[int, list[tuple[int, int]]] = {}
    for a, b, kind, _ in joined:
        for one, other in ((a, b), (b, a)):
            neighbours.setdefault(one, []).append((kind != "sibling", other))
    return neighbours


def next_hops(topology: Topology, rank: int) -> dict[int, int]:
    """For every other rank of the node that can be reached, the neighbour that a shortest way goes through first.

    Of equal ways the one that crosses to the sibling first: the message leaves the card on the plane of its receiver.
    """
    neighbours = neighbours_of(wires(topology))
    hops: dict[int, int] = {}
    reached, waiting = {rank}, deque([(rank, rank)])
    while waiting:
        at, first = waiting.popleft()
        for _, other in sorted(neighbours.get(at, [])):
            if other not in reached:
                reached.add(other)
                hops[other] = other if at == rank else first
                waiting.append((other, hops[other]))
    return hops


def alltoall_bound(topology: Topology, block_bytes: float) -> float | None:
    """Seconds that an all-to-all with equal blocks takes at least: every cut's bytes over its links' rate, the largest.

    The cuts are each tile, each card and each node. None where the ranks are joined by no links.
    """
    links, bounds = topology.machine.links, []
    joined = wires(topology)
    for node in range(topology.nodes):
        here = {place.rank for place in topology.places if place.node == node}
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

"""The physical links of a topology: which tiles they join, at what rate, and what they allow at best. Pure data.

Tiles of a card are joined to each other, and tiles of a plane on a node likewise; each tile has one NIC to the other
nodes, which it may share. Rates are those of the machine file, one direction, in GB/s (1e9 bytes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

from cocodiff.errors import UserError
from cocodiff.topology.machine import Topology


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


def next_hops(
    topology: Topology, rank: int, neighbours: Mapping[int, list[tuple[int, int]]] | None = None
) -> dict[int, int]:
    """For every other rank of the node that can be reached, the neighbour that a shortest way goes through first.

    Of equal ways the one that crosses to the sibling first: the message leaves the card on the plane of its receiver.
    neighbours: of `neighbours_of`, where they are known.
    """
    neighbours = neighbours_of(wires(topology)) if neighbours is None else neighbours
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


class DirectedLink(NamedTuple):
    """A physical link in one direction: its kind ("sibling", "plane", "nic out" or "nic in"), ends, and rate in GB/s.

    Of a NIC the ends are its node and its number.
    """

    kind: str
    a: int
    b: int
    gb_s: float


class Network:
    """The links of a topology, each direction on its own, and which of them a message between two ranks goes over.

    On a node it takes the shortest way, over the sibling where planes differ; between nodes the NICs of both ends.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        joined = wires(topology)
        self.links = [DirectedLink(w.kind, *ends, w.gb_s) for w in joined for ends in ((w.a, w.b), (w.b, w.a))]
        rate = topology.machine.links.nic_gb_s
        nics = sorted({(place.node, topology.nics[place.rank]) for place in topology.places})
        if topology.nodes > 1:
            self.links += [DirectedLink(kind, node, nic, rate) for node, nic in nics for kind in ("nic out", "nic in")]
        self._index = {way[:3]: index for index, way in enumerate(self.links)}
        self._neighbours = neighbours_of(joined)
        self._hops: dict[int, dict[int, int]] = {}
        self._paths: dict[tuple[int, int], tuple[int, ...]] = {}

    def path(self, sender: int, receiver: int) -> tuple[int, ...]:
        """Indices into `links`, in the order of the way. Raises UserError where there is none."""
        pair = (sender, receiver)
        if pair not in self._paths:
            self._paths[pair] = self._find(*pair)
        return self._paths[pair]

    def _find(self, sender: int, receiver: int) -> tuple[int, ...]:
        places, nics = self._topology.places, self._topology.nics
        if places[sender].node != places[receiver].node:
            out = self._index["nic out", places[sender].node, nics[sender]]
            return out, self._index["nic in", places[receiver].node, nics[receiver]]
        found, at = [], sender
        while at != receiver:
            if at not in self._hops:
                self._hops[at] = next_hops(self._topology, at, self._neighbours)
            if receiver not in self._hops[at]:
                raise UserError(
                    f"no link leads from rank {sender} to rank {receiver} on machine {self._topology.machine.name}: "
                    f"give every card a tile in each plane"
                )
            following = self._hops[at][receiver]
            kind = self._topology.link_class(at, following)
            found.append(self._index[str(kind), at, following])
            at = following
        return tuple(found)


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

"""The places of ranks on a machine, the division of ranks, tokens and heads, and the physical links. Pure data.

A *topology* places the ranks of one run on a machine: one rank is one tile. Other packages use this file, `axes`
(replicas, guidance, ring and Ulysses), `layout` (segments of tokens, and shares of them), `links` and `routes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cocodiff.config.errors import UserError
from cocodiff.config.grouping import by_key
from cocodiff.config.machine import Machine

MOST_RANKS = 2**17  # more tiles than the largest machine has; placing this number of ranks takes a second and 50 MB


@dataclass(frozen=True)
class Place:
    """The place of one rank on the machine: its node, card, plane and tile."""

    rank: int  # number of the rank in its topology
    node: int  # number of the node
    card: int  # number of the card, counted over all nodes
    plane: int  # number of the plane; a plane spans all nodes
    tile: int  # number of the tile, counted on its node


@dataclass(frozen=True)
class Topology:
    """The ranks of one run, each placed on a tile of the machine.

    A card may have fewer ranks than others: with 5 ranks on cards of two tiles the last card has one. If a card has no
    tile in plane k, its lowest rank serves plane k: it forwards that plane's data and owns none of its heads.
    """

    machine: Machine  # the kind of node that the ranks are on
    places: tuple[Place, ...]  # the place of each rank, by rank

    @classmethod
    def build(cls, machine: Machine, size: int, ranks_per_node: int | None = None) -> Topology:
        """Place the ranks of a run on a machine, node by node and card by card.

        Raise UserError if nodes of a fixed size are not filled exactly, and for more than MOST_RANKS ranks.

        Args:
            size: number of ranks.
            ranks_per_node: number of ranks that the launcher starts on a node, for machines without a fixed node size;
                None for all on one node.
        """
        if size < 1:
            raise UserError(f"{size} ranks: at least 1 is needed")
        if size > MOST_RANKS:
            raise UserError(f"{size} ranks: up to {MOST_RANKS} can be placed, more than any machine has tiles")
        fixed = machine.tiles_per_node
        if fixed is not None and (size % fixed or (machine.nodes and size > machine.nodes * fixed)):
            whole = f"{machine.nodes} node(s) of {fixed}" if machine.nodes else f"nodes of {fixed}"
            below = min(size // fixed, machine.nodes or size) * fixed
            nearest = [n for n in (below, below + fixed) if n and n <= (machine.nodes or size) * fixed]
            remedy = f"start {' or '.join(map(str, nearest))} ranks, or use --machine local"
            raise UserError(f"machine {machine.name} has {whole} ranks and {size} rank(s) were started: {remedy}")
        per_node = fixed or ranks_per_node or size
        cards_per_node = math.ceil(per_node / machine.tiles)
        places = []
        for rank in range(size):
            node, local = divmod(rank, per_node)
            card = node * cards_per_node + local // machine.tiles
            places.append(Place(rank, node, card, machine.planes[local % len(machine.planes)], local))
        return cls(machine, tuple(places))

    def part(self, ranks: Sequence[int]) -> Topology:
        """Return some of the ranks, at their places, as a topology of their own.

        Ranks are numbered from 0 in the given order. Their nodes are numbered from 0 as well; cards and planes keep
        their numbers.

        Args:
            ranks: the ranks to keep, those of a node side by side.
        """
        chosen = [self.places[rank] for rank in ranks]
        numbers = {node: number for number, node in enumerate(sorted({place.node for place in chosen}))}
        places = [replace(place, rank=new, node=numbers[place.node]) for new, place in enumerate(chosen)]
        return Topology(self.machine, tuple(places))

    @property
    def relative_places(self) -> tuple[tuple[int, int, int], ...]:
        """The (node, card, plane) of every rank, each numbered by first appearance.

        Two groups of ranks that are arranged in the same way on different hardware have equal values, and so equal
        predicted costs.
        """
        kinds = zip(*((p.node, p.card, p.plane) for p in self.places), strict=True)
        orders = [(numbers, list(dict.fromkeys(numbers))) for numbers in kinds]
        return tuple(zip(*([order.index(n) for n in numbers] for numbers, order in orders), strict=True))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.places)

    @property
    def nodes(self) -> int:
        """The number of nodes that the ranks are on."""
        return self.places[-1].node + 1

    @cached_property
    def on_node(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each node, ascending, by the node's number."""
        return self._grouped("node")

    @cached_property
    def cards(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each card, ascending, by the card's number."""
        return self._grouped("card")

    @cached_property
    def planes(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each plane on all nodes, ascending, by the plane's number. Planes without a rank are absent."""
        return self._grouped("plane")

    @cached_property
    def served_planes(self) -> tuple[frozenset[int], ...]:
        """The set of planes that each rank serves on its card, by rank: its own plane, and perhaps planes in which its
        card has no tile."""
        served: list[set[int]] = [set() for _ in self.places]
        for card in self.cards:
            for plane in self.planes:
                served[self.server(card, plane)].add(plane)
        return tuple(frozenset(planes) for planes in served)

    def siblings(self, rank: int) -> tuple[int, ...]:
        """Return the other ranks of the card that a rank is on, ascending."""
        return tuple(other for other in self.cards[self.places[rank].card] if other != rank)

    def server(self, card: int, plane: int) -> int:
        """Return the rank that carries a plane's traffic for a card: the card's tile in that plane, or its lowest rank
        if it has none."""
        ranks = self.cards[card]
        return next((rank for rank in ranks if self.places[rank].plane == plane), ranks[0])

    @cached_property
    def nics(self) -> tuple[int, ...]:
        """The NIC that every rank uses, by rank. NICs are numbered on each node from 0."""
        links = self.machine.links
        return tuple(links.nic_of[p.tile] if links.nic_of else p.tile % links.nics for p in self.places)

    def link_class(self, sender: int, receiver: int) -> str | None:
        """Return the class of the link between two ranks, or None if both are the same rank.

        "node": they are on different nodes; "sibling": on one card; "plane": on two cards of a node in one plane;
        "cross_plane": on two cards and in different planes.
        """
        a, b = self.places[sender], self.places[receiver]
        if sender == receiver:
            return None
        if a.node != b.node:
            return "node"
        if a.card == b.card:
            return "sibling"
        return "plane" if a.plane == b.plane else "cross_plane"

    @cached_property
    def shard_order(self) -> tuple[int, ...]:
        """The ranks in the order in which they get one token or head more if a number does not divide evenly.

        Consecutive ranks of this order are on different nodes, then on different cards, then in different planes.
        """
        first_card = {node: min(self.places[rank].card for rank in ranks) for node, ranks in self.on_node.items()}
        order = sorted(self.places, key=lambda p: (p.plane, p.card - first_card[p.node], p.node, p.rank))
        return tuple(place.rank for place in order)

    def _grouped(self, attribute: str) -> dict[int, tuple[int, ...]]:
        """Return the ranks in groups by one field of their places, such as "node". Groups and the ranks in each
        ascend."""
        groups = by_key((getattr(place, attribute), place.rank) for place in self.places)
        return {key: tuple(ranks) for key, ranks in sorted(groups.items())}

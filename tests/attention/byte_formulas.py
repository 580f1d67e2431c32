"""The bytes that each rank sends, from closed formulas over rows, heads, cards and planes: no plan, no route."""

from collections import Counter

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.machine import Topology
from cocodiff.topology.layout import Layout


class Formulas:
    """Symbols as in the design: L_i rows and h_i heads of rank i, S_c rows of card c, H_k heads of plane k on all
    nodes, K_i the planes that rank i serves on its card."""

    def __init__(self, topology: Topology, layout: Layout) -> None:
        self.places = topology.places
        self.ranks = range(topology.size)
        self.L, self.h = layout.rows, layout.heads
        self.planes = {place.plane for place in self.places}
        self.cards = {place.card for place in self.places}
        self.S = {c: sum(self.L[i] for i in self.ranks if self.places[i].card == c) for c in self.cards}
        self.H = {k: sum(self.h[i] for i in self.ranks if self.places[i].plane == k) for k in self.planes}
        self.K = [{k for k in self.planes if self.server(self.places[i].card, k) == i} for i in self.ranks]

    def server(self, card: int, plane: int) -> int:
        """The card's tile in the plane, else its lowest rank."""
        of_card = [i for i in self.ranks if self.places[i].card == card]
        return next((i for i in of_card if self.places[i].plane == plane), min(of_card))

    def link(self, i: int, j: int) -> str:
        a, b = self.places[i], self.places[j]
        if a.node != b.node:
            return "node"
        if a.card == b.card:
            return "sibling"
        return "plane" if a.plane == b.plane else "cross_plane"

    def sent(self, exchange: str, direction: str, i: int, u: int) -> dict[str, int]:
        """Bytes of rank i by link class; u = B x D x itemsize, times the tensors that travel together."""
        bytes_to = getattr(self, f"{exchange}_{direction}")(i)
        total: Counter[str] = Counter()
        for link, elements in bytes_to:
            total[link] += u * elements
        return {link: total[link] for link in LINK_CLASSES}

    def flat_forward(self, i: int) -> list[tuple[str, int]]:
        return [(self.link(i, j), self.L[i] * self.h[j]) for j in self.ranks if j != i]

    def flat_back(self, i: int) -> list[tuple[str, int]]:
        return [(self.link(i, j), self.h[i] * self.L[j]) for j in self.ranks if j != i]

    def tapa_forward(self, i: int) -> list[tuple[str, int]]:
        card = self.places[i].card
        swap = self.L[i] * sum(self.H[k] for k in self.planes - self.K[i])
        off_card = [j for j in self.ranks if self.places[j].plane in self.K[i] and self.places[j].card != card]
        return [("sibling", swap)] + [(self.link(i, j), self.S[card] * self.h[j]) for j in off_card]

    def split_forward(self, i: int) -> list[tuple[str, int]]:
        node, card = self.places[i].node, self.places[i].card
        here = {j for j in self.ranks if self.places[j].node == node}
        swap = self.L[i] * sum(self.h[j] for j in here if self.places[j].plane not in self.K[i])
        off_card = [j for j in here if self.places[j].plane in self.K[i] and self.places[j].card != card]
        on_node = [("sibling", swap)] + [(self.link(i, j), self.S[card] * self.h[j]) for j in off_card]
        return on_node + [("node", self.L[i] * self.h[j]) for j in self.ranks if j not in here]

    def split_back(self, i: int) -> list[tuple[str, int]]:
        node, card, plane = self.places[i].node, self.places[i].card, self.places[i].plane
        here = {j for j in self.ranks if self.places[j].node == node}
        cards = {self.places[j].card for j in here}
        across = [(self.link(i, self.server(c, plane)), self.h[i] * self.S[c]) for c in cards if c != card]
        served = sum(self.h[j] for j in here if self.places[j].plane in self.K[i])
        off_node = [("node", self.h[i] * self.L[j]) for j in self.ranks if j not in here]
        return [*across, ("sibling", (self.S[card] - self.L[i]) * served), *off_node]

    def tapa_back(self, i: int) -> list[tuple[str, int]]:
        card, plane = self.places[i].card, self.places[i].plane
        across = [(self.link(i, self.server(c, plane)), self.h[i] * self.S[c]) for c in self.cards if c != card]
        return [*across, ("sibling", (self.S[card] - self.L[i]) * sum(self.H[k] for k in self.K[i]))]

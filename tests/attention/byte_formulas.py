"""The bytes that each rank sends, from closed formulas over rows, heads, cards and planes: no plan, no route."""

from collections import Counter

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout

Sent = list[tuple[str, int]]  # elements over links


class Formulas:
    """Symbols as in the design: L_i rows and h_i heads of rank i, S_c rows of card c, K_i the planes that rank i serves
    on its card."""

    def __init__(self, topology: Topology, layout: Layout) -> None:
        self.places = topology.places
        self.ranks = range(topology.size)
        self.L, self.h = layout.rows, layout.heads
        self.planes = {place.plane for place in self.places}
        cards = {place.card for place in self.places}
        self.S = {c: sum(self.L[i] for i in self.ranks if self.places[i].card == c) for c in cards}
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
        """Bytes of rank i by link class; u = B x D x itemsize, times the tensors that travel together. TAPA relays to
        and from all ranks, split to and from those of its own node, flat none."""
        relayed = {j for j in self.ranks if exchange == "tapa" or self.places[j].node == self.places[i].node}
        if exchange == "flat":
            relayed = set()
        forward = direction == "forward"
        of_relays = (self.relayed_forward if forward else self.relayed_back)(i, relayed) if relayed else []
        straight = [j for j in self.ranks if j not in relayed | {i}]
        total: Counter[str] = Counter()
        for link, elements in of_relays + [(self.link(i, j), self.block(i, j, forward)) for j in straight]:
            total[link] += u * elements
        return {link: total[link] for link in LINK_CLASSES}

    def block(self, i: int, j: int, forward: bool) -> int:
        return self.L[i] * self.h[j] if forward else self.h[i] * self.L[j]

    def relayed_forward(self, i: int, among: set[int]) -> Sent:
        """To the sibling the own rows for what the other planes' tiles serve, then the card's rows to other cards."""
        card = self.places[i].card
        swap = self.L[i] * sum(self.h[j] for j in among if self.places[j].plane not in self.K[i])
        off_card = [j for j in among if self.places[j].plane in self.K[i] and self.places[j].card != card]
        return [("sibling", swap)] + [(self.link(i, j), self.S[card] * self.h[j]) for j in off_card]

    def relayed_back(self, i: int, among: set[int]) -> Sent:
        """The own heads to the own plane's tile on other cards, then to the sibling its rows of all that came."""
        card, plane = self.places[i].card, self.places[i].plane
        cards = {self.places[j].card for j in among}
        across = [(self.link(i, self.server(c, plane)), self.h[i] * self.S[c]) for c in cards if c != card]
        served = sum(self.h[j] for j in among if self.places[j].plane in self.K[i])
        return [*across, ("sibling", (self.S[card] - self.L[i]) * served)]

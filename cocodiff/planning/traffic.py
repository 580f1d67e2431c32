"""Bytes between ranks, and the time that the fullest link of the machine needs for them. Pure arithmetic on arrays: a
mesh of 1,536 ranks has millions of messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cocodiff.routes.rounds import Integers
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES

SIBLING, PLANE, NIC_OUT, NIC_IN = range(4)  # kinds of links, one direction each


class Wires:
    """Where every rank sits, as arrays over the ranks, and numbers for the links between them."""

    def __init__(self, topology: Topology) -> None:
        places, links = topology.places, topology.machine.links
        self.size = topology.size
        self.node_P, self.card_P, self.plane_P = (
            np.array([getattr(place, name) for place in places]) for name in ("node", "card", "plane")
        )
        self.nic_P = np.array(topology.nics)
        self.server_CP = np.zeros((max(topology.cards) + 1, max(topology.planes) + 1), dtype=np.int64)
        for card in topology.cards:
            for plane in topology.planes:
                self.server_CP[card, plane] = topology.server(card, plane)
        self.rates = 1e9 * np.array([links.sibling_gb_s, links.plane_gb_s, links.nic_gb_s, links.nic_gb_s])

    def link(self, kind: int, a_N: Integers, b_N: Integers) -> Integers:
        """A number for the link of this kind that two numbers name: its ends, or a node and its NIC."""
        return (kind * self.size + a_N) * self.size + b_N

    def seconds(self, link_N: Integers, bytes_N: Integers) -> float:
        """Of the fullest link."""
        if not len(link_N):
            return 0.0
        links, which_N = np.unique(link_N, return_inverse=True)
        loads = np.bincount(which_N, bytes_N)
        return float((loads / self.rates[links // self.size**2]).max())


class Traffic:
    """Messages that are under way together: by link class, out of every node, and on every link."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.bytes = dict.fromkeys(LINK_CLASSES, 0)
        self.out_of = np.zeros(wires.node_P.max() + 1, dtype=np.int64)  # by node
        self._links: list[tuple[Integers, Integers]] = []

    def send(self, sender_N: Integers, receiver_N: Integers, bytes_N: Integers) -> None:
        """Any number of messages; those of a rank to itself take no link."""
        leaves_N = sender_N != receiver_N
        a, b, count = sender_N[leaves_N], receiver_N[leaves_N], bytes_N[leaves_N]
        wires = self._wires
        node, card, plane = wires.node_P, wires.card_P, wires.plane_P
        far, at_card, in_plane = node[a] != node[b], card[a] == card[b], plane[a] == plane[b]
        classes = (~far & at_card, ~far & ~at_card & in_plane, ~far & ~at_card & ~in_plane, far)
        for kind, chosen in zip(LINK_CLASSES, classes, strict=True):
            self.bytes[kind] += int(count[chosen].sum())
        sibling, _, cross, _ = classes
        np.add.at(self.out_of, node[a[far]], count[far])
        self._load(NIC_OUT, node[a[far]], wires.nic_P[a[far]], count[far])
        self._load(NIC_IN, node[b[far]], wires.nic_P[b[far]], count[far])
        self._load(SIBLING, a[sibling], b[sibling], count[sibling])
        through = np.where(cross, wires.server_CP[card[a], plane[b]], a)
        first = ~far & (through != a)  # off its plane a message takes a sibling's link first
        self._load(SIBLING, a[first], through[first], count[first])
        planes = ~far & ~at_card
        self._load(PLANE, through[planes], b[planes], count[planes])

    def seconds(self) -> float:
        """Of the fullest link."""
        if not self._links:
            return 0.0
        links, counts = zip(*self._links, strict=True)
        return self._wires.seconds(np.concatenate(links), np.concatenate(counts))

    def _load(self, kind: int, a_N: Integers, b_N: Integers, bytes_N: Integers) -> None:
        if len(a_N):
            self._links.append((self._wires.link(kind, a_N, b_N), bytes_N))


def busiest_node(traffic: Sequence[Traffic]) -> int:
    return int(np.sum([one.out_of for one in traffic], axis=0).max())

"""Bytes between ranks, the stages in which an exchange's routes send them, and the time that the machine's fullest link
needs. Pure arithmetic on arrays: a mesh of 1,536 ranks has millions of messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.machine import Machine, Topology
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.plans import Plan, plan_of
from cocodiff.topology.routes.rounds import Integers

Floats = NDArray[np.float64]
SIBLING, PLANE, NIC_OUT, NIC_IN = range(4)  # kinds of links, one direction each


class Latencies(NamedTuple):
    """Seconds: of a message before its first byte; between two messages of one sender; of a kernel's launch; that each
    message blocks the host of either end; that the host waits for the device's queue to read a number."""

    latency_s: float = 0.0
    message_s: float = 0.0
    launch_s: float = 0.0
    blocked_s: float = 0.0
    wait_s: float = 0.0

    @classmethod
    def of(cls, machine: Machine) -> Latencies:
        """As the machine file has them."""
        links, device = machine.links, machine.device
        times = links.latency_us, links.message_us, device.launch_us, links.blocked_us, device.wait_us
        return cls(*(us / 1e6 for us in times))


class Wires:
    """Where every rank sits."""

    def __init__(self, topology: Topology) -> None:
        places = topology.places
        self.size = topology.size
        self.node_P, self.card_P, self.plane_P = (
            np.array([getattr(place, name) for place in places]) for name in ("node", "card", "plane")
        )
        self.nic_P = np.array(topology.nics)
        self.server_CP = np.zeros((max(topology.cards) + 1, max(topology.planes) + 1), dtype=np.int64)
        for card in topology.cards:
            for plane in topology.planes:
                self.server_CP[card, plane] = topology.server(card, plane)
        self.rates = rates_of(topology.machine)


def rates_of(machine: Machine) -> Floats:
    """Bytes a second of a link, by its kind."""
    links = machine.links
    return 1e9 * np.array([links.sibling_gb_s, links.plane_gb_s, links.nic_gb_s, links.nic_gb_s])


class Traffic:
    """Messages that are under way together: by link class, out of every node, and on every link."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.bytes: dict[str, float] = dict.fromkeys(LINK_CLASSES, 0)
        self.out_of = np.zeros(wires.node_P.max() + 1)  # by node
        self._loads: list[list[tuple[Integers, Integers | Floats]]] = [[] for _ in wires.rates]  # by kind of link

    def send(self, sender_N: Integers, receiver_N: Integers, bytes_N: Integers | Floats) -> None:
        """Any number of messages; those of a rank to itself take no link."""
        leaves_N = sender_N != receiver_N
        a, b, count = sender_N[leaves_N], receiver_N[leaves_N], bytes_N[leaves_N]
        wires = self._wires
        node, card, plane = wires.node_P, wires.card_P, wires.plane_P
        far, at_card, in_plane = node[a] != node[b], card[a] == card[b], plane[a] == plane[b]
        classes = (~far & at_card, ~far & ~at_card & in_plane, ~far & ~at_card & ~in_plane, far)
        for kind, chosen in zip(LINK_CLASSES, classes, strict=True):
            self.bytes[kind] += count[chosen].sum().item()
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

    def fullest(self) -> Floats:
        """Bytes on the fullest link of every kind."""
        found = np.zeros(len(self._loads))
        for kind, loads in enumerate(self._loads):
            if loads:
                link_N, bytes_N = (np.concatenate(part) for part in zip(*loads, strict=True))
                found[kind] = np.bincount(np.unique(link_N, return_inverse=True)[1], bytes_N).max()
        return found

    def seconds(self) -> float:
        """Of the fullest link."""
        return float((self.fullest() / self._wires.rates).max())

    def _load(self, kind: int, a_N: Integers, b_N: Integers, bytes_N: Integers | Floats) -> None:
        """Onto the links of a kind that two numbers name: their ends, or a node and its NIC."""
        if len(a_N):
            self._loads[kind].append((a_N * self._wires.size + b_N, bytes_N))


class Stage:
    """Messages of all ranks of a mesh that are under way together: block by block the sender, the receiver, and whose
    rows and heads the block has."""

    def __init__(self, wires: Wires, lane: str, blocks_N4: Integers, phases: int = 1) -> None:
        """blocks_N4: of every block the four as ranks. phases: how often messages are packed, one after another."""
        self.lane, self.phases = lane, phases
        self._wires, self._blocks_N4 = wires, blocks_N4
        size = wires.size
        pairs = np.unique(blocks_N4[:, 0] * size + blocks_N4[:, 1])
        started, received = np.bincount(pairs // size, minlength=size), np.bincount(pairs % size, minlength=size)
        self.messages, self.handled = int(started.max()), int((started + received).max())

    def only(self, near_PP: np.ndarray) -> Stage:
        """Those of the blocks whose (rows, heads) are chosen."""
        return Stage(self._wires, self.lane, self._blocks_N4[near_PP[self._blocks_N4[:, 2], self._blocks_N4[:, 3]]])

    def back(self) -> Stage:
        """The same way back."""
        return Stage(self._wires, self.lane, self._blocks_N4[:, [1, 0, 2, 3]], self.phases)

    def in_turns(self, mesh: Mesh) -> list[Stage]:
        """Each to the peer that is so many slots further on: of groups that serve one peer at a time."""
        slot_P = np.array([mesh.group_and_slot(rank)[1] for rank in range(self._wires.size)])
        steps_N = (slot_P[self._blocks_N4[:, 1]] - slot_P[self._blocks_N4[:, 0]]) % mesh.ulysses
        return [Stage(self._wires, self.lane, self._blocks_N4[steps_N == step]) for step in np.unique(steps_N)]

    def traffic(self, rows_P: Floats, heads_P: Floats) -> Traffic:
        """In numbers of a token and head. rows_P, heads_P: of every rank's blocks."""
        found, (sender_N, receiver_N, rows_N, heads_N) = Traffic(self._wires), self._blocks_N4.T
        found.send(sender_N, receiver_N, rows_P[rows_N] * heads_P[heads_N])
        return found

    def wait_s(self, latencies: Latencies) -> float:
        """Seconds that messages take, however large they are."""
        latency_s, message_s, _, blocked_s, _ = latencies
        return latency_s + self.messages * message_s + self.handled * blocked_s

    def hop(self, rows_P: Floats, heads_P: Floats, cell: int, latencies: Latencies) -> Hop:
        """Of tensors of which a token and head has `cell` bytes."""
        sender_N, _, rows_N, heads_N = self._blocks_N4.T
        packed_P = np.bincount(sender_N, rows_P[rows_N] * heads_P[heads_N], 1)
        traffic, wait_s = self.traffic(rows_P, heads_P), self.wait_s(latencies)
        return Hop(self.lane, cell * traffic.seconds(), wait_s, float(cell * packed_P.max()), traffic, self.phases)


class Hop(NamedTuple):
    """One tensor in a stage."""

    lane: str
    link_s: float  # of the fullest link
    wait_s: float  # before the first byte, however many tensors travel together
    packed: float  # bytes that a rank packs
    traffic: Traffic  # in numbers of a token and head
    phases: int


def total(sent: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of bytes by link class."""
    every = list(sent)
    return {link: sum(one[link] for one in every) for link in LINK_CLASSES}


def of_ranks(mesh: Mesh, of_groups: Iterable[Sequence[float]]) -> Floats:
    """Of every rank what its group has at its slot."""
    found_P = np.zeros(mesh.topology.size)
    for group, of_slots in zip(mesh.groups, of_groups, strict=True):
        found_P[list(group)] = of_slots
    return found_P


@lru_cache(maxsize=8)  # the same for all layers, and for all kinds of calls
def stages_of(mesh: Mesh, name: str, nic_balance: bool = True, one_peer: bool = False) -> list[Stage]:
    """The stages of an exchange in all Ulysses groups at once, forward. TAPA's phases follow one another, each on its
    own lane; phases of all others are under way together."""
    wires, found = Wires(mesh.topology), dict[int, list[tuple[int, int, int, int]]]()
    if name == "flat":  # as its plans have it, for as many ranks as there may be
        pairs = [np.stack(np.meshgrid(group, group, indexing="ij"), -1).reshape(-1, 2) for group in mesh.groups]
        every_N2 = np.concatenate(pairs)
        blocks_N4 = np.tile(every_N2[every_N2[:, 0] != every_N2[:, 1]], 2)
        stage = Stage(wires, "plane", blocks_N4)
        return stage.in_turns(mesh) if one_peer else [stage]
    lanes: dict[int, str] = {}
    plans: dict[Any, list[Plan]] = {}
    for group, part in zip(mesh.groups, mesh.parts, strict=True):
        alike = part.relative_places, part.nics
        if alike not in plans:
            plans[alike] = [plan_of(part, slot, name, nic_balance) for slot in range(part.size)]
        for slot, plan in enumerate(plans[alike]):
            for number, phase in enumerate(plan):
                lanes[number] = phase.lane
                found.setdefault(number, []).extend(
                    (group[slot], group[peer], group[block.rows], group[block.heads])
                    for peer, blocks in phase.sends.items()
                    for block in blocks
                )
    phases = {number: np.array(blocks).reshape(-1, 4) for number, blocks in sorted(found.items()) if blocks}
    if name == "tapa":
        stages = [Stage(wires, lanes[number], blocks) for number, blocks in phases.items()]
    else:
        stages = [Stage(wires, "plane", np.concatenate([*phases.values()]), len(phases))]
    return [step for stage in stages for step in (stage.in_turns(mesh) if one_peer else [stage])]

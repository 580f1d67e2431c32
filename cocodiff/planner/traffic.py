"""Bytes between ranks, the stages in which an exchange's routes send them, and the seconds of the machine's fullest
link. Pure arithmetic on arrays: a mesh of 1,536 ranks has millions of messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.machine import Machine
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.plans import Plan, plan_of
from cocodiff.topology.routes.rounds import Integers

Floats = NDArray[np.float64]
SIBLING, PLANE, NIC_OUT, NIC_IN = range(4)  # kinds of links, each in one direction


class Latencies(NamedTuple):
    """The machine's latencies, in seconds."""

    latency_s: float = 0.0  # from a message's start to its first byte
    message_s: float = 0.0  # between two messages of one sender
    launch_s: float = 0.0  # of a kernel's launch
    blocked_s: float = 0.0  # for which each message blocks the host of either end
    wait_s: float = 0.0  # for which the host waits for the device's queue to read a number

    @classmethod
    def of(cls, machine: Machine) -> Latencies:
        """Return the latencies in a machine file."""
        links, device = machine.links, machine.device
        times = links.latency_us, links.message_us, device.launch_us, links.blocked_us, device.wait_us
        return cls(*(us / 1e6 for us in times))


class Wires:
    """The places of all ranks and the rates of links, as arrays."""

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
        self.forwarding_share = topology.machine.links.forwarding_share


def rates_of(machine: Machine) -> Floats:
    """Return the bytes per second of a link, by its kind."""
    links = machine.links
    return 1e9 * links.link_share * np.array([links.sibling_gb_s, links.plane_gb_s, links.nic_gb_s, links.nic_gb_s])


class Traffic:
    """The messages that are under way together: their bytes by link class, out of every node, and on every link."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.bytes: dict[str, float] = dict.fromkeys(LINK_CLASSES, 0)
        self.out_of = np.zeros(wires.node_P.max() + 1)  # bytes out of each node
        self._loads: list[list[tuple[Integers, Integers | Floats]]] = [[] for _ in wires.rates]  # by kind of link

    def send(self, sender_N: Integers, receiver_N: Integers, bytes_N: Integers | Floats) -> None:
        """Add messages, one for each entry of the arrays. Those of a rank to itself take no link."""
        leaves_N = sender_N != receiver_N
        a, b, count = sender_N[leaves_N], receiver_N[leaves_N], bytes_N[leaves_N]
        wires, share = self._wires, self._wires.forwarding_share
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
        through, count = np.where(cross, wires.server_CP[card[a], plane[b]], a), count / np.where(cross, share, 1)
        first = ~far & (through != a)  # to another plane a message first takes the link to a sibling
        self._load(SIBLING, a[first], through[first], count[first])
        planes = ~far & ~at_card
        self._load(PLANE, through[planes], b[planes], count[planes])

    def fullest(self) -> Floats:
        """Return the bytes on the fullest link of every kind."""
        found = np.zeros(len(self._loads))
        for kind, loads in enumerate(self._loads):
            if loads:
                link_N, bytes_N = (np.concatenate(part) for part in zip(*loads, strict=True))
                found[kind] = np.bincount(np.unique(link_N, return_inverse=True)[1], bytes_N).max()
        return found

    def seconds(self) -> float:
        """Return the seconds of the fullest link."""
        return float((self.fullest() / self._wires.rates).max())

    def _load(self, kind: int, a_N: Integers, b_N: Integers, bytes_N: Integers | Floats) -> None:
        """Add bytes to links of a kind. A link is named by two numbers: the ranks at its ends, or a node and its
        NIC."""
        if len(a_N):
            self._loads[kind].append((a_N * self._wires.size + b_N, bytes_N))


class Stage:
    """The messages of all ranks of a mesh that are under way together, as an array of blocks."""

    def __init__(self, wires: Wires, lane: str, blocks_N4: Integers, phases: int = 1) -> None:
        """Count the messages of each rank.

        Args:
            lane: the lane that sends them
            blocks_N4: for every block four ranks: sender, receiver, owner of its rows, owner of its heads
            phases: number of times that messages are packed, one after another
        """
        self.lane, self.phases = lane, phases
        self._wires, self._blocks_N4 = wires, blocks_N4
        size = wires.size
        pairs = np.unique(blocks_N4[:, 0] * size + blocks_N4[:, 1])
        started, received = np.bincount(pairs // size, minlength=size), np.bincount(pairs % size, minlength=size)
        self.messages, self.handled = int(started.max()), int((started + received).max())

    def only(self, near_PP: np.ndarray) -> Stage:
        """Return a stage with the blocks whose (rows, heads) are chosen."""
        return Stage(self._wires, self.lane, self._blocks_N4[near_PP[self._blocks_N4[:, 2], self._blocks_N4[:, 3]]])

    def back(self) -> Stage:
        """Return the stage with senders and receivers exchanged."""
        return Stage(self._wires, self.lane, self._blocks_N4[:, [1, 0, 2, 3]], self.phases)

    def in_turns(self, mesh: Mesh) -> list[Stage]:
        """Return a stage for each distance in slots between sender and receiver, for groups that serve one peer at a
        time."""
        slot_P = np.array([mesh.group_and_slot(rank)[1] for rank in range(self._wires.size)])
        steps_N = (slot_P[self._blocks_N4[:, 1]] - slot_P[self._blocks_N4[:, 0]]) % mesh.ulysses
        return [Stage(self._wires, self.lane, self._blocks_N4[steps_N == step]) for step in np.unique(steps_N)]

    def traffic(self, rows_P: Floats, heads_P: Floats) -> Traffic:
        """Return the messages' traffic in units of one token for one head. rows_P, heads_P: of every rank's blocks."""
        found, (sender_N, receiver_N, rows_N, heads_N) = Traffic(self._wires), self._blocks_N4.T
        found.send(sender_N, receiver_N, rows_P[rows_N] * heads_P[heads_N])
        return found

    def wait_s(self, latencies: Latencies) -> float:
        """Return the seconds that messages take whatever their size."""
        latency_s, message_s, _, blocked_s, _ = latencies
        return latency_s + self.messages * message_s + self.handled * blocked_s

    def hop(self, rows_P: Floats, heads_P: Floats, cell: int, latencies: Latencies) -> Hop:
        """Return the cost of sending one tensor in this stage.

        Args:
            rows_P: number of rows (tokens) of each rank.
            heads_P: number of heads of each rank. A block has one rank's rows for the heads of another.
            cell: bytes of one token for one head, in the whole batch.
            latencies: those of the machine.
        """
        sender_N, _, rows_N, heads_N = self._blocks_N4.T
        packed_P = np.bincount(sender_N, rows_P[rows_N] * heads_P[heads_N], 1)
        traffic, wait_s = self.traffic(rows_P, heads_P), self.wait_s(latencies)
        return Hop(self.lane, cell * traffic.seconds(), wait_s, float(cell * packed_P.max()), traffic, self.phases)


class Hop(NamedTuple):
    """The cost of one tensor in a stage."""

    lane: str
    link_s: float  # seconds of the fullest link
    wait_s: float  # seconds before the first byte, however many tensors are sent together
    packed: float  # bytes that a rank packs
    traffic: Traffic  # in units of one token for one head
    phases: int  # number of times that messages are packed, one after another


def total(sent: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of bytes by link class."""
    every = list(sent)
    return {link: sum(one[link] for one in every) for link in LINK_CLASSES}


def of_ranks(mesh: Mesh, of_groups: Iterable[Sequence[float]]) -> Floats:
    """Return for every rank its value in its group's sequence, as an array. of_groups: values by slot, for each
    group."""
    found_P = np.zeros(mesh.topology.size)
    for group, of_slots in zip(mesh.groups, of_groups, strict=True):
        found_P[list(group)] = of_slots
    return found_P


@lru_cache(maxsize=8)  # stages are equal for all layers, and for all kinds of calls
def stages_of(mesh: Mesh, name: str, nic_balance: bool = True, one_peer: bool = False) -> list[Stage]:
    """Return the stages of an exchange in all Ulysses groups at once, forward.

    TAPA's phases follow one another, each on its own lane. The phases of other exchanges are under way together.
    """
    wires, found = Wires(mesh.topology), dict[int, list[tuple[int, int, int, int]]]()
    if name == "flat":  # the same as its plans, but fast for many ranks
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

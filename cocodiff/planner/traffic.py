"""Bytes between ranks, the stages in which an exchange's routes send them, and the seconds of the machine's fullest
link. Pure arithmetic on arrays: a mesh of 1,536 ranks has millions of messages.

The last part predicts an all-to-all as `bench alltoall` times it, and writes the machine file that measurements give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
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
    """The latencies of a machine's links and kernels, in seconds."""

    latency_s: float = 0.0  # from a message's start to its first byte
    message_s: float = 0.0  # between the starts of two messages of one sender
    launch_s: float = 0.0  # to launch a kernel
    blocked_s: float = 0.0  # time for which each message blocks the host of its sender and of its receiver
    wait_s: float = 0.0  # time that the host loses when it reads a number that the device computed

    @classmethod
    def of(cls, machine: Machine) -> Latencies:
        """Return the latencies of a machine, converted to seconds from its file's microseconds."""
        links, device = machine.links, machine.device
        times = links.latency_us, links.message_us, device.launch_us, links.blocked_us, device.wait_us
        return cls(*(us / 1e6 for us in times))


class Wires:
    """The places of all ranks and the rates of links, as arrays, for sums over millions of messages."""

    def __init__(self, topology: Topology) -> None:
        """Read the places and the rates of a topology.

        Arrays end in their dimensions: P ranks, C cards, planes (the second P of `server_CP`).
        """
        self.size = topology.size
        self.node_P, self.card_P, self.plane_P = np.array([(p.node, p.card, p.plane) for p in topology.places]).T
        self.nic_P = np.array(topology.nics)
        self.server_CP = np.zeros((max(topology.cards) + 1, max(topology.planes) + 1), dtype=np.int64)
        for card in topology.cards:
            for plane in topology.planes:
                self.server_CP[card, plane] = topology.server(card, plane)
        self.rates = rates_of(topology.machine)
        self.forwarding_share = topology.machine.links.forwarding_share


def rates_of(machine: Machine) -> Floats:
    """Return the bytes per second that messages reach on a link, as an array by kind of link (SIBLING, PLANE, NIC_OUT,
    NIC_IN)."""
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
        """Add messages between ranks, one for each entry of the arrays. A rank's message to itself takes no link.

        Args:
            sender_N: the rank that sends each of N messages.
            receiver_N: the rank that receives it.
            bytes_N: its size, in bytes or another unit.
        """
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
        """Return the bytes on the fullest link of every kind, as an array (SIBLING, PLANE, NIC_OUT, NIC_IN)."""
        found = np.zeros(len(self._loads))
        for kind, loads in enumerate(self._loads):
            if loads:
                link_N, bytes_N = (np.concatenate(part) for part in zip(*loads, strict=True))
                found[kind] = np.bincount(np.unique(link_N, return_inverse=True)[1], bytes_N).max()
        return found

    def seconds(self) -> float:
        """Return the seconds that all messages take, as the fullest link sets them."""
        return float((self.fullest() / self._wires.rates).max())

    def _load(self, kind: int, a_N: Integers, b_N: Integers, bytes_N: Integers | Floats) -> None:
        """Add bytes to links of one kind. Two numbers name a link: the ranks at its ends, or a node and its NIC.

        Args:
            kind: kind of link, an index such as SIBLING.
            a_N: first number of the link of each of N messages.
            b_N: second number.
            bytes_N: size of each message.
        """
        if len(a_N):
            self._loads[kind].append((a_N * self._wires.size + b_N, bytes_N))


class Stage:
    """The messages of all ranks of a mesh that are under way together in one part of an exchange."""

    def __init__(self, wires: Wires, lane: str, blocks_N4: Integers, phases: int = 1) -> None:
        """Count the messages of each rank.

        Args:
            wires: the places of the ranks and the rates of links.
            lane: name of the background thread that sends the messages, such as "plane".
            blocks_N4: for each of N blocks four ranks: sender, receiver, owner of its rows, owner of its heads.
            phases: number of times that messages are packed, one after another.
        """
        self.lane, self.phases = lane, phases
        self._wires, self._blocks_N4 = wires, blocks_N4
        size = wires.size
        pairs = np.unique(blocks_N4[:, 0] * size + blocks_N4[:, 1])
        started, received = np.bincount(pairs // size, minlength=size), np.bincount(pairs % size, minlength=size)
        self.messages, self.handled = int(started.max()), int((started + received).max())

    def only(self, near_PP: np.ndarray) -> Stage:
        """Return the stage with some of its blocks.

        Args:
            near_PP: True for the chosen blocks, by the ranks of their rows and of their heads, [ranks, ranks].
        """
        return Stage(self._wires, self.lane, self._blocks_N4[near_PP[self._blocks_N4[:, 2], self._blocks_N4[:, 3]]])

    def back(self) -> Stage:
        """Return the stage of the way back, in which senders and receivers are exchanged."""
        return Stage(self._wires, self.lane, self._blocks_N4[:, [1, 0, 2, 3]], self.phases)

    def in_turns(self, mesh: Mesh) -> list[Stage]:
        """Cut the stage into one for each distance in slots between sender and receiver: a rank then exchanges with one
        other rank at a time.

        Args:
            mesh: the Ulysses groups, which give ranks their slots.
        """
        slot_P = np.array([mesh.group_and_slot(rank)[1] for rank in range(self._wires.size)])
        steps_N = (slot_P[self._blocks_N4[:, 1]] - slot_P[self._blocks_N4[:, 0]]) % mesh.ulysses
        return [Stage(self._wires, self.lane, self._blocks_N4[steps_N == step]) for step in np.unique(steps_N)]

    def traffic(self, rows_P: Floats, heads_P: Floats) -> Traffic:
        """Return the bytes on all links in this stage, in units of one token for one head.

        Args:
            rows_P: number of rows (tokens) of each of P ranks.
            heads_P: number of heads of each rank. A block has one rank's rows for the heads of another.
        """
        found, (sender_N, receiver_N, rows_N, heads_N) = Traffic(self._wires), self._blocks_N4.T
        found.send(sender_N, receiver_N, rows_P[rows_N] * heads_P[heads_N])
        return found

    def wait_s(self, latencies: Latencies) -> float:
        """Return the seconds that the stage's messages take whatever their size: latency, starting them, and blocking
        of the host."""
        latency_s, message_s, _, blocked_s, _ = latencies
        return latency_s + self.messages * message_s + self.handled * blocked_s

    def hop(self, rows_P: Floats, heads_P: Floats, cell: int, latencies: Latencies) -> Hop:
        """Return the cost of sending one tensor in this stage.

        Args:
            rows_P: number of rows (tokens) of each of P ranks.
            heads_P: number of heads of each rank. A block has one rank's rows for the heads of another.
            cell: bytes of one token for one head, in the whole batch.
            latencies: those of the machine.
        """
        sender_N, _, rows_N, heads_N = self._blocks_N4.T
        packed_P = np.bincount(sender_N, rows_P[rows_N] * heads_P[heads_N], 1)
        traffic, wait_s = self.traffic(rows_P, heads_P), self.wait_s(latencies)
        return Hop(self.lane, cell * traffic.seconds(), wait_s, float(cell * packed_P.max()), traffic, self.phases)


class Hop(NamedTuple):
    """The cost of sending one whole tensor in one stage of an exchange, on all ranks at once."""

    lane: str  # name of the background thread that sends the messages
    link_s: float  # seconds that the fullest link takes for all bytes that pass over it
    wait_s: float  # seconds before the first byte, however many tensors are sent together
    packed: float  # bytes that the rank which packs most has to pack
    traffic: Traffic  # all messages on all links, their sizes in cells (one token for one head) instead of bytes
    phases: int  # number of times that messages are packed, one after another


def total(sent: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several counts of bytes, by link class."""
    return {link: sum(one[link] for one in sent) for link in LINK_CLASSES}


def of_ranks(mesh: Mesh, of_groups: Iterable[Sequence[float]]) -> Floats:
    """Return one array with a value for each rank, from values for each Ulysses group.

    Args:
        mesh: the Ulysses groups.
        of_groups: for each group, the values by slot.
    """
    found_P = np.zeros(mesh.topology.size)
    found_P[np.array(mesh.groups)] = [*of_groups]
    return found_P


@lru_cache(maxsize=8)  # stages are equal for all layers, and for all kinds of calls
def stages_of(mesh: Mesh, name: str, nic_balance: bool = True, one_peer: bool = False) -> list[Stage]:
    """Return the stages of an exchange in all Ulysses groups at once, in its forward direction.

    TAPA's phases follow one another, each on its own lane. The phases of other exchanges are under way together.

    Args:
        mesh: the Ulysses groups.
        name: name of the exchange in the table `EXCHANGES`.
        nic_balance: True to spread "split"'s blocks for other nodes over the NICs.
        one_peer: True if a rank exchanges with one other rank at a time.
    """
    wires, found = Wires(mesh.topology), dict[int, list[Integers]]()
    if name == "flat":  # the same as its plans, but fast for many ranks
        pairs = [np.stack(np.meshgrid(group, group, indexing="ij"), -1).reshape(-1, 2) for group in mesh.groups]
        every_N2 = np.concatenate(pairs)
        blocks_N4 = np.tile(every_N2[every_N2[:, 0] != every_N2[:, 1]], 2)
        stage = Stage(wires, "plane", blocks_N4)
        return stage.in_turns(mesh) if one_peer else [stage]
    lanes, plans = dict[int, str](), dict[Any, list[Plan]]()
    for group, part in zip(mesh.groups, mesh.parts, strict=True):
        alike, ranks_U = (part.relative_places, part.nics), np.array(group)
        if alike not in plans:
            plans[alike] = [plan_of(part, slot, name, nic_balance) for slot in range(part.size)]
        for slot, plan in enumerate(plans[alike]):
            for number, phase in enumerate(plan):
                if blocks := [(slot, peer, *block) for peer, message in phase.sends.items() for block in message]:
                    lanes[number] = phase.lane
                    found.setdefault(number, []).append(ranks_U[np.array(blocks)])
    phases = {number: np.concatenate(blocks) for number, blocks in sorted(found.items())}
    if name == "tapa":
        stages = [Stage(wires, lanes[number], blocks) for number, blocks in phases.items()]
    else:
        stages = [Stage(wires, "plane", np.concatenate([*phases.values()]), len(phases))]
    return [step for stage in stages for step in (stage.in_turns(mesh) if one_peer else [stage])]


# An all-to-all by itself, and machines with measured links ------------------------------------------------------------

ROW_BYTES = 512  # bytes of a row of a block, as in bench alltoall
PHASES = ("phase1", "phase2")
RATES = ("sibling", "plane", "nic")
MEASURED = ("latency_us", "message_us", "link_share")  # beliefs about a machine that `Constants` settle
LEAST = 1e-3  # the smallest share of its links' rates that a machine file may have


class Constants(NamedTuple):
    """Measured latencies of a machine's messages, and the parts of the nominal rates that its links reach."""

    latency_us: float = 0.0  # microseconds from a message's start to its first byte
    message_us: float = 0.0  # microseconds between two messages that a rank starts
    sibling: float = 1.0  # part of its nominal rate that a link between tiles of a card reaches
    plane: float = 1.0  # the same of a link in a plane
    nic: float = 1.0  # the same of a NIC

    def machine(self, nominal: Machine) -> Machine:
        """Return a copy of the machine with these latencies and rates, without the beliefs (unmeasured ranges) that
        they settle.

        Args:
            nominal: the machine with the nominal rates of its links.
        """
        rates = {f"{name}_gb_s": getattr(nominal.links, f"{name}_gb_s") * getattr(self, name) for name in RATES}
        links = replace(nominal.links, latency_us=self.latency_us, message_us=self.message_us, **rates)
        beliefs = tuple(one for one in nominal.beliefs if one.name not in MEASURED)
        return replace(nominal, links=links, beliefs=beliefs)


class PlannedAllToAll:
    """An exchange of equal blocks among all ranks, as `bench alltoall` times it, whose seconds are predicted for a
    machine."""

    def __init__(self, topology: Topology, variant: str, size_mb: float) -> None:
        """Compute the bytes on the fullest link of every kind, for each stage of the exchange.

        Args:
            topology: the ranks.
            variant: name of an exchange, or "flat_serial": flat, but to one peer at a time.
            size_mb: MB of all blocks that a rank has before the exchange, its block for itself included.
        """
        P, one_peer = topology.size, variant == "flat_serial"
        rows = max(1, round(size_mb * 1e6 / P / ROW_BYTES))
        self.block_bytes = rows * ROW_BYTES
        stages = stages_of(Mesh.build(topology), variant.removesuffix("_serial"), one_peer=one_peer)
        rows_P, heads_P = np.full(P, float(rows)), np.ones(P)
        self._stages = [(stage, ROW_BYTES * stage.traffic(rows_P, heads_P).fullest()) for stage in stages]

    def seconds(self, machine: Machine, part: str = "whole") -> float:
        """Return the predicted seconds of the exchange, or of one phase of it.

        Args:
            machine: the machine whose rates and latencies count.
            part: "whole", or "phase1" or "phase2" of tapa.
        """
        latencies, rates = Latencies.of(machine), rates_of(machine)
        of_stages = [stage.wait_s(latencies) + float((loads / rates).max()) for stage, loads in self._stages]
        if part == "whole":
            return sum(of_stages)
        return of_stages[PHASES.index(part) - len(PHASES)]  # cards of one tile have only the second phase

    def link_share(self, machine: Machine, seconds: float) -> float | None:
        """Return the share of its links' rates that a machine reached, at least LEAST and at most 1, from a measured
        time.

        Return None if the exchange took no longer than the latencies of its messages.

        Args:
            machine: the machine that it was measured on, with its nominal rates.
            seconds: measured seconds of the exchange.
        """
        waits_s = sum(stage.wait_s(Latencies.of(machine)) for stage, _ in self._stages)
        links_s = self.seconds(machine.with_value("link_share", 1.0)) - waits_s
        return min(1.0, max(LEAST, links_s / (seconds - waits_s))) if seconds > waits_s else None


def slowed(machine: Machine, scale: float) -> Machine:
    """Return a copy of a machine whose links are slower by the factor `scale`, with the same latencies."""
    links, part = machine.links, 1 / scale
    return Constants(links.latency_us, links.message_us, part, part, part).machine(machine)


def machine_file(machine: Machine) -> dict[str, Any]:
    """Return a machine as the mapping that its YAML file holds."""
    data = {key: value for key, value in asdict(machine).items() if value is not None}
    data["beliefs"] = {one.pop("name"): one for one in data["beliefs"]}
    return data

"""The emulated network of a topology: namespaces, links, rates and routes, all as on the machine but slower.

Every tile is a namespace with its address on an empty bridge. Every sibling and Xe link is a veth pair with a token
bucket at both ends. Every NIC is a namespace between its tiles and the switch, and the tiles of other nodes have even
shares of it. Traffic between planes of different cards is routed over the sibling, so two hops contend for the same
links as on the machine. Rates are measured with TCP streams of half a second, for one kind of link at a time.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from typing import NamedTuple

from cocodiff.topology import Topology
from cocodiff.topology.links import next_hops, wires
from cocodiff_studies.namespaces import Namespace

BRIDGE = "tile"  # network interface with a tile's address, for programs to name
FINE_BELOW_MBIT = 10.0  # Mbit/s below which links get small packets, so that a bucket's bursts stay small
# kernel settings of every namespace
SETTINGS = {
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/tcp_wmem": "4096 262144 1048576",
    "ipv4/tcp_rmem": "4096 524288 2097152",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_early_retrans": "0",
    "ipv4/tcp_no_metrics_save": "1",
}
START_S, STOP_S = 0.15, 0.5  # seconds of a stream between which its bytes are counted
ROUTE = "initcwnd 20 rto_min 5s congctl cubic"
Key = tuple[str, int, int]  # ("tile", rank, 0), ("nic", node, nic) or ("switch", 0, 0)


def mbit_s(gb_s: float, scale: float) -> float:
    """Return the rate of a link in the emulation, in Mbit/s.

    Args:
        gb_s: the link's rate on the machine, in GB/s.
        scale: how many times slower links are in the emulation.
    """
    return gb_s * 8e3 / scale


def address(rank: int) -> str:
    """Return the IP address of a rank's tile in the emulated network."""
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


class Network:
    """The network namespaces of an emulated machine: one for each tile, each NIC and the switch, with the links between
    them.

    It exists during a `with` block of `open`.
    """

    def __init__(self, topology: Topology, scale: float) -> None:
        self.topology, self.scale = topology, scale
        self.spaces: dict[Key, Namespace] = {}
        # Lines of `ip` and `tc` by namespace: links and addresses, then routes, then rate limits.
        self._ip: dict[Key, list[str]] = defaultdict(list)
        self._routes: dict[Key, list[str]] = defaultdict(list)
        self._tc: dict[Key, list[str]] = defaultdict(list)
        links = topology.machine.links
        used = [wire.gb_s for wire in wires(topology)] + ([links.nic_gb_s] if topology.nodes > 1 else [])
        fine = bool(used) and mbit_s(min(used), scale) < FINE_BELOW_MBIT
        self._mtu, self._burst = (1500, 1700) if fine else (32000, 32200)

    @classmethod
    @contextmanager
    def open(cls, topology: Topology, scale: float) -> Iterator[Network]:
        """Build the network at the beginning of a `with` block, and remove it at its end.

        Args:
            topology: the places of ranks, and the machine with its links.
            scale: how many times slower links are in the emulation.
        """
        network = cls(topology, scale)
        try:
            network.build()
            yield network
        finally:
            for space in network.spaces.values():
                space.close()

    def tile(self, rank: int) -> Namespace:
        """Return the network namespace that stands for a rank's tile, the part of a GPU that it computes on."""
        return self.spaces["tile", rank, 0]

    def build(self) -> None:
        """Make the namespaces, with their links, routes and rate limits.

        Raise PermissionError without the right to, and UserError with the message of `ip` or `tc` if one fails.
        """
        for rank in range(self.topology.size):
            self._add_tile(("tile", rank, 0), address(rank))
        for wire in wires(self.topology):
            ends = (("tile", wire.a, 0), f"x{wire.b}"), (("tile", wire.b, 0), f"x{wire.a}")
            self._join(*ends, wire.gb_s)
        if self.topology.nodes > 1:
            self._add_nics()
        for rank in range(self.topology.size):
            for other, hop in next_hops(self.topology, rank).items():
                via, onlink = ("", "") if hop == other else (f"via {address(hop)} ", " onlink")
                route = f"route add {address(other)}/32 {via}dev x{hop}{onlink} src {address(rank)} {ROUTE}"
                self._routes["tile", rank, 0].append(route)
        for key, space in self.spaces.items():
            space.set(SETTINGS)
            space.run("ip", ["link set lo up", *self._ip[key]])
        for key, space in self.spaces.items():
            if self._routes[key]:
                space.run("ip", self._routes[key])
            if self._tc[key]:
                space.run("tc", self._tc[key])

    def _add_tile(self, key: Key, own: str) -> None:
        """Make a namespace for a tile, a NIC or the switch, and note the commands that give it its address on an empty
        bridge.

        Args:
            key: by which `spaces` holds the namespace.
            own: the IP address.
        """
        self.spaces[key] = Namespace()
        self._ip[key] += [f"link add {BRIDGE} type bridge", f"addr add {own}/32 dev {BRIDGE}", f"link set {BRIDGE} up"]

    def _join(self, one: tuple[Key, str], other: tuple[Key, str], gb_s: float | None) -> None:
        """Note the commands that connect two namespaces by a veth pair. `build` runs them.

        Args:
            one: a namespace, and the name of the network interface at its end.
            other: the same for the other end.
            gb_s: GB/s of the link on the machine. Each direction is limited to `1 / scale` of it; None: not limited.
        """
        (here, name), (there, peer) = one, other
        self._ip[here].append(
            f"link add {name} mtu {self._mtu} type veth peer name {peer} mtu {self._mtu} "
            f"netns {self.spaces[there].path}"
        )
        for key, device in one, other:
            self._routes[key].append(f"link set {device} up")
            if gb_s is not None:
                limit = f"rate {mbit_s(gb_s, self.scale) * 1e6:.0f}bit burst {self._burst} limit 64m"
                self._tc[key].append(f"qdisc add dev {device} root tbf {limit}")

    def _share_nic(self, key: Key, device: str, side: str, node: int) -> None:
        """Note the commands that limit one direction of a NIC, and share it evenly among the tiles at its far end.

        Without shares the streams with the shortest queues take most of it, and others end late: an all-to-all of two
        nodes takes a tenth longer. A machine's fabric controls congestion.

        Args:
            key: the namespace whose network interface sends.
            device: the network interface.
            side: where packets have the far tile's address: "src" or "dst".
            node: the node of the NIC.
        """
        rate, bursts = round(mbit_s(self.topology.machine.links.nic_gb_s, self.scale) * 1e6), self._burst
        far = [place.rank for place in self.topology.places if place.node != node]
        options = f"ceil {rate}bit burst {bursts} cburst {bursts} quantum {bursts}"
        add = f"class add dev {device} parent 1:"
        self._tc[key] += [
            f"qdisc add dev {device} root handle 1: htb",
            f"{add} classid 1:1 htb rate {rate}bit {options}",
        ]
        for number, rank in enumerate(far, 2):
            match = f"u32 match ip {side} {address(rank)}/32 flowid 1:{number:x}"
            self._tc[key].append(f"{add}1 classid 1:{number:x} htb rate {rate // len(far)}bit {options}")
            self._tc[key].append(f"filter add dev {device} parent 1: protocol ip {match}")

    def _add_nics(self) -> None:
        """Make the namespaces of NICs and of the switch that joins them, and note the commands that connect them and
        the tiles.

        Links between tiles and their NIC have no limit; those between NICs and the switch are limited to the NICs'
        rate.
        """
        topology, switch = self.topology, ("switch", 0, 0)
        self._add_tile(switch, "10.79.0.1")
        for place in topology.places:
            nic, tile = ("nic", place.node, topology.nics[place.rank]), ("tile", place.rank, 0)
            own, port, of_tile = f"10.78.{place.node}.{nic[2] + 1}", f"n{place.node}-{nic[2]}", address(place.rank)
            if nic not in self.spaces:
                self._add_tile(nic, own)
                self._join((nic, "wire"), (switch, port), None)
                self._share_nic(nic, "wire", "dst", place.node)
                self._share_nic(switch, port, "src", place.node)
                self._routes[nic].append(f"route add default via 10.79.0.1 dev wire onlink {ROUTE}")
            self._join((nic, f"t{place.rank}"), (tile, "nic"), None)
            self._routes[nic].append(f"route add {of_tile}/32 dev t{place.rank} {ROUTE}")
            self._routes[switch].append(f"route add {of_tile}/32 via {own} dev {port} onlink {ROUTE}")
            self._routes[tile].append(f"route add default via {own} dev nic onlink src {of_tile} {ROUTE}")


class Rate(NamedTuple):
    """The measured rate of one TCP stream between two ranks of an emulated network, beside what it should be."""

    kind: str  # class of the link: "sibling", "plane", "cross_plane" or "node"
    source: int  # rank that sends
    target: int  # rank that receives
    nominal: float  # Mbit/s by the machine file and the emulation's scale
    measured: float  # Mbit/s that was measured


def measure_rates(network: Network) -> list[Rate]:
    """Measure one TCP stream for each class of link that the machine has, one after the other. Return their rates."""
    links = network.topology.machine.links
    gb_s = {"sibling": links.sibling_gb_s, "plane": links.plane_gb_s, "node": links.nic_gb_s}
    gb_s["cross_plane"] = min(links.sibling_gb_s, links.plane_gb_s)
    return [
        Rate(kind, a, b, mbit_s(gb_s[kind], network.scale), stream_rate(network, a, b))
        for kind, (a, b) in representative_pairs(network.topology).items()
    ]


def representative_pairs(topology: Topology) -> dict[str, tuple[int, int]]:
    """Return, for each class of link, two ranks that it joins: for siblings the last such pair, for others the first
    one."""
    pairs: dict[str, tuple[int, int]] = {}
    for a, b in combinations(range(topology.size), 2):
        kind = topology.link_class(a, b) or ""
        if kind == "sibling" or kind not in pairs:
            pairs[kind] = (a, b)
    return pairs


def stream_rate(network: Network, source: int, target: int) -> float:
    """Measure a TCP stream of half a second between two tiles of the network. Return its Mbit/s; 0 if nothing arrives.

    Args:
        network: the emulated network.
        source: rank whose tile sends.
        target: rank whose tile receives.
    """
    with network.tile(target).inside():
        listener = socket.create_server((address(target), 0))
    with listener:
        with network.tile(source).inside():
            sender = socket.create_connection(listener.getsockname(), timeout=5.0)
        receiver, _ = listener.accept()
    receiver.settimeout(5.0)

    def send() -> None:
        with suppress(OSError):  # the receiver has closed, or nothing arrives
            while True:
                sender.send(bytes(1 << 16))

    thread = threading.Thread(target=send)
    thread.start()
    buffer, begun, first, last, counted = bytearray(1 << 16), time.perf_counter(), 0.0, 0.0, 0
    with sender:
        with receiver, suppress(OSError):
            while time.perf_counter() - begun < STOP_S:
                got = receiver.recv_into(buffer)
                now = time.perf_counter()
                if now - begun > START_S:
                    if first:
                        counted, last = counted + got, now
                    first = first or now
        thread.join()
    return counted * 8 / (last - first) / 1e6 if last > first else 0.0

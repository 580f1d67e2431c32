"""Measures the emulated links with TCP streams of half a second, one of each kind at a time."""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from cocodiff.topology.machine import Topology
from cocodiff_studies.emulate.network import Network, address, mbit_s

START_S, STOP_S = 0.15, 0.5  # what is counted of a stream: not its start


class Rate(NamedTuple):
    """Of one stream between two ranks, in Mbit/s."""

    kind: str
    source: int
    target: int
    nominal: float
    measured: float


def measure_rates(network: Network) -> list[Rate]:
    """One stream for each class of link that the topology has; streams that may meet on a link take turns."""
    pairs = representative_pairs(network.topology)
    links = network.topology.machine.links
    gb_s = {"sibling": links.sibling_gb_s, "plane": links.plane_gb_s, "node": links.nic_gb_s}
    gb_s["cross_plane"] = min(links.sibling_gb_s, links.plane_gb_s)
    together: list[str] = [kind for kind in ("sibling", "plane") if kind in pairs]
    turns: list[list[str]] = [together, *([kind] for kind in pairs if kind not in together)]
    measured: dict[str, float] = {}
    for turn in filter(None, turns):
        streams = {kind: _Stream(network, *pairs[kind]) for kind in turn}
        for stream in streams.values():
            stream.start()
        measured |= {kind: stream.finish() for kind, stream in streams.items()}
    return [Rate(kind, *pairs[kind], mbit_s(gb_s[kind], network.scale), measured[kind]) for kind in pairs]


def representative_pairs(topology: Topology) -> dict[str, tuple[int, int]]:
    """Class of link -> two ranks that it joins: the last such pair for siblings, the first one for all others."""
    pairs: dict[str, tuple[int, int]] = {}
    for a in range(topology.size):
        for b in range(topology.size):
            kind = topology.link_class(a, b)
            if kind is not None and (kind not in pairs or (kind == "sibling" and a < b)):
                pairs[kind] = (a, b)
    return pairs


class _Stream:
    """A TCP stream whose sockets belong to the two namespaces, and threads at both ends."""

    def __init__(self, network: Network, source: int, target: int) -> None:
        with network.tile(target).inside():
            listener = socket.create_server((address(target), 0))
        with listener:
            with network.tile(source).inside():
                self._sender = socket.create_connection(listener.getsockname(), timeout=5.0)
            self._receiver, _ = listener.accept()
        self._receiver.settimeout(5.0)
        self._stop = threading.Event()
        self._bits = self._seconds = 0.0
        self._threads = [threading.Thread(target=work) for work in (self._send, self._receive)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> float:
        for thread in self._threads:
            thread.join()
        self._sender.close()
        self._receiver.close()
        return self._bits / self._seconds / 1e6 if self._seconds else 0.0

    def _send(self) -> None:
        chunk = bytes(1 << 16)
        try:
            while not self._stop.is_set():
                self._sender.send(chunk)
            self._sender.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the receiver has what it wanted, or nothing arrived: then the rate is 0

    def _receive(self) -> None:
        buffer, begun, first, last, counted = bytearray(1 << 16), time.perf_counter(), 0.0, 0.0, 0
        try:
            while (now := time.perf_counter()) - begun < STOP_S:
                got = self._receiver.recv_into(buffer)
                now = time.perf_counter()
                if now - begun > START_S:
                    if first:
                        counted += got
                        last = now
                    first = first or now
        except OSError:
            counted = 0
        finally:
            self._stop.set()
            self._bits, self._seconds = counted * 8.0, last - first
            self._receiver.close()

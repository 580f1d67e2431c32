"""Topologies to test on: full, ragged and multi-node ones; and tensors through an exchange."""

from types import SimpleNamespace

from hypothesis import strategies as st

from cocodiff.config.config import load_machine
from cocodiff.config.machine import Machine
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology import Topology

TRIPLE = Machine("triple", tiles=3, planes=(0, 1, 2))
SWAPPED = Machine("swapped", tiles=2, planes=(0, 1, 1, 0), cards=2)


def topology_of(machine: str, size: int, ranks_per_node: int | None = None) -> Topology:
    return Topology.build(load_machine(machine), size, ranks_per_node)


@st.composite
def topologies(draw: st.DrawFn, largest: int = 24) -> Topology:
    """Any world of up to `largest` ranks on machines of fixed and of free size, on one node or more."""
    kind = draw(st.sampled_from(("free", "triple", "swapped", "fixed")))
    if kind == "swapped":
        return Topology.build(SWAPPED, 4 * draw(st.integers(1, largest // 4)))
    if kind == "fixed" and largest >= 12:
        return topology_of(draw(st.sampled_from(("aurora", "local-6x2"))), 12 * draw(st.integers(1, largest // 12)))
    machine = TRIPLE if kind == "triple" else load_machine("local")
    size = draw(st.integers(1, largest))
    return Topology.build(machine, size, draw(st.one_of(st.none(), st.integers(1, size))))


def is_full(topology: Topology) -> bool:
    """Every card has a tile in every plane."""
    return all(len(planes) == 1 for planes in topology.served_planes)


def forward(exchange, tensors_BLHD, layout):
    """Sends this rank's rows of some tensors, which travel together, on their way to its heads: `wait` returns them."""
    sent = Transfer(exchange, layout).send(**{f"x{number}": x for number, x in enumerate(tensors_BLHD)})
    return SimpleNamespace(wait=lambda: [arriving.wait() for arriving in sent.values()])


def back(exchange, out_BSGD, layout):
    """This rank's rows of all heads."""
    return Transfer(exchange, layout).back(out_BSGD)

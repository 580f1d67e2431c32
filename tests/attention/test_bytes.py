"""The bytes that an exchange really sends, by link class, are exactly what the closed formulas say."""

import pytest
import torch
from byte_formulas import Formulas
from worlds import TRIPLE, back, forward, topology_of

from cocodiff.comm.loopback import LoopbackTransport, run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.machine import Topology
from cocodiff.exchange.exchange import Exchange
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout

B, D = 2, 3
WORLDS = {  # topology, image tokens, text tokens, heads
    "even, aurora": (topology_of("aurora", 12), 48, 24, 24),
    "uneven, aurora": (topology_of("aurora", 12), 37, 5, 38),
    "uneven, two nodes": (topology_of("local-6x2", 24), 41, 7, 38),
    "two nodes of aurora": (topology_of("aurora", 24), 55, 30, 25),
    "one card": (topology_of("local", 2), 7, 0, 3),
    "ragged 5": (topology_of("local", 5), 23, 4, 11),
    "ragged 7": (topology_of("local", 7), 19, 9, 10),
    "ragged nodes": (topology_of("local", 7, ranks_per_node=3), 16, 3, 9),
    "three tiles, ragged": (Topology.build(TRIPLE, 8), 21, 2, 13),
}
Counted = tuple[dict[str, int], dict[str, int]]


def counted_bytes(exchange: str, topology: Topology, layout: Layout, dtype: torch.dtype) -> list[Counted]:
    """What each rank's trace counts for q, k and v forward, and for the output back."""

    def work(transport: LoopbackTransport) -> Counted:
        trace = Trace(transport.rank)
        ours = Exchange(exchange, topology, transport, trace, nic_balance=False)
        rows, heads = layout.rows[transport.rank], sum(layout.heads)
        q_BSGD, _, _ = forward(ours, [torch.zeros(B, rows, heads, D, dtype=dtype)] * 3, layout).wait()
        there = trace.bytes()
        trace.clear()
        back(ours, q_BSGD, layout)
        return there, trace.bytes()

    return run_ranks(topology.size, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("exchange", ["flat", "tapa", "split"])
@pytest.mark.parametrize("world", WORLDS)
def test_counted_bytes_equal_the_formulas(world, exchange, dtype):
    topology, image, text, heads = WORLDS[world]
    layout = Layout.build(topology, image_and_text(image, text), heads)
    formulas, u = Formulas(topology, layout), B * D * dtype.itemsize
    counted = counted_bytes(exchange, topology, layout, dtype)
    for rank, (there, returned) in enumerate(counted):
        assert there == formulas.sent(exchange, "forward", rank, 3 * u)
        assert returned == formulas.sent(exchange, "back", rank, u)


@pytest.mark.parametrize("nodes", [1, 2])
def test_even_case_on_aurora(nodes):
    """A block of c bytes per pair of ranks: where flat crosses planes, TAPA loads siblings and planes instead."""
    topology = topology_of("aurora", 12 * nodes)
    layout = Layout.build(topology, image_and_text(24 * nodes, 12 * nodes), 24 * nodes)
    c = B * D * 4 * 3 * 2
    node = 12 * (nodes - 1) * c
    expected = {
        "flat": {"sibling": c, "plane": 5 * c, "cross_plane": 5 * c, "node": node},
        "tapa": {"sibling": 6 * nodes * c, "plane": 10 * c, "cross_plane": 0, "node": node},
        "split": {"sibling": 6 * c, "plane": 10 * c, "cross_plane": 0, "node": node},
    }
    for exchange, of_each_rank in expected.items():
        for there, returned in counted_bytes(exchange, topology, layout, torch.float32):
            assert there == {link: 3 * count for link, count in of_each_rank.items()}
            assert returned == of_each_rank

"""The bytes of an exchange by link class: what ranks really hand over, what traces count, and closed formulas."""

from __future__ import annotations

import pytest
import torch
from byte_formulas import Formulas
from really_sent import ReallySent
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
    "even, two nodes of aurora": (topology_of("aurora", 24), 48, 24, 48),
    "one card": (topology_of("local", 2), 7, 0, 3),
    "ragged 5": (topology_of("local", 5), 23, 4, 11),
    "ragged 7": (topology_of("local", 7), 19, 9, 10),
    "ragged nodes": (topology_of("local", 7, ranks_per_node=3), 16, 3, 9),
    "three tiles, ragged": (Topology.build(TRIPLE, 8), 21, 2, 13),
}
Counted = list[tuple[dict[str, int], dict[str, int]]]


def counted_bytes(exchange: str, topology: Topology, layout: Layout, dtype: torch.dtype, sent: ReallySent) -> Counted:
    """Count what each rank sends of q, k and v forward, and of the output back. The trace and the transport agree."""

    def work(transport: LoopbackTransport) -> tuple[dict[str, int], dict[str, int]]:
        rank, trace = transport.rank, Trace(transport.rank)
        ours = Exchange(exchange, topology, transport, trace, nic_balance=False)
        x_BLHD = torch.zeros(B, layout.rows[rank], sum(layout.heads), D, dtype=dtype)
        q_BSGD, _, _ = forward(ours, [x_BLHD] * 3, layout).wait()
        there = trace.bytes()
        assert there == sent.by_link(topology, rank)
        back(ours, q_BSGD, layout)
        both = trace.bytes()
        assert both == sent.by_link(topology, rank) == trace.bytes("whole")
        return there, {link: count - there[link] for link, count in both.items()}

    return run_ranks(topology.size, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("exchange", ["flat", "tapa", "split"])
@pytest.mark.parametrize("world", WORLDS)
def test_counted_bytes_equal_the_formulas(world, exchange, dtype, monkeypatch):
    topology, image, text, heads = WORLDS[world]
    layout = Layout.build(topology, image_and_text(image, text), heads)
    formulas, u = Formulas(topology, layout), B * D * dtype.itemsize
    for rank, found in enumerate(counted_bytes(exchange, topology, layout, dtype, ReallySent(monkeypatch))):
        assert found == tuple(formulas.sent(exchange, way, rank, n * u) for way, n in (("forward", 3), ("back", 1)))

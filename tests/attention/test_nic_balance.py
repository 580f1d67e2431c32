"""Detours between nodes: every NIC carries the same, nothing is passed on twice, and every block arrives."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from test_exchange import check_exchange
from test_layout import by_heads, by_rows, check_pairs, simulate
from worlds import forward, topology_of

from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.machine import Topology
from cocodiff.exchange.exchange import Exchange
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import nic_detours, reverse, split_plan


def nic_loads(topology: Topology, detours: dict[tuple[int, int], int]) -> tuple[Counter, Counter]:
    """Blocks that leave and reach every (node, NIC)."""
    out, into = Counter(), Counter()
    for i in range(topology.size):
        for j in range(topology.size):
            path = [i, *([detours[i, j]] if (i, j) in detours else []), j]
            hops = [(a, b) for a, b in pairwise(path) if topology.link_class(a, b) == "node"]
            assert len(hops) == (topology.places[i].node != topology.places[j].node)
            for a, b in hops:
                out[topology.places[a].node, topology.nics[a]] += 1
                into[topology.places[b].node, topology.nics[b]] += 1
    return out, into


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_nics_of_aurora_carry_the_same(nodes):
    topology = topology_of("aurora", 12 * nodes)
    assert max(nic_loads(topology, {})[0].values()) == 2 * 12 * 12 * (nodes - 1) // 12
    detours = nic_detours(topology)
    for loads in nic_loads(topology, detours):
        assert set(loads.values()) == {18 * (nodes - 1)}
    for (i, j), via in detours.items():
        on_node = (i, via) if topology.places[i].node == topology.places[via].node else (via, j)
        assert topology.link_class(*on_node) in ("plane", "sibling")


def test_one_node_and_tiles_with_nics_alike_need_no_detours():
    assert nic_detours(topology_of("aurora", 12)) == {}
    assert nic_detours(topology_of("local-6x2", 24)) == {}


@pytest.mark.parametrize("nodes", [2, 3])
def test_blocks_arrive_both_ways(nodes):
    topology = topology_of("aurora", 12 * nodes)
    plans = [split_plan(topology, rank, nic_detours(topology)) for rank in range(topology.size)]
    check_pairs(plans)
    assert simulate(plans, by_rows(topology)) == by_heads(topology)
    back = [reverse(plan) for plan in plans]
    check_pairs(back)
    assert simulate(back, by_heads(topology)) == by_rows(topology)


def test_detours_carry_the_same_bits():
    check_exchange("split", topology_of("aurora", 24), 41, 7, 26, 2, torch.float32)


def test_counted_bytes_are_those_of_the_plan():
    topology = topology_of("aurora", 24)
    layout = Layout.build(topology, image_and_text(55, 30), 25)

    def work(transport):
        trace = Trace(transport.rank)
        ours = Exchange("split", topology, transport, trace)
        forward(ours, [torch.zeros(1, layout.rows[transport.rank], 25, 3)], layout).wait()
        return trace.bytes()

    for rank, counted in enumerate(run_ranks(topology.size, work)):
        expected = Counter()
        for phase in split_plan(topology, rank, nic_detours(topology)):
            for peer, blocks in phase.sends.items():
                size = sum(layout.rows[b.rows] * layout.heads[b.heads] for b in blocks)
                expected[topology.link_class(rank, peer)] += size * 3 * 4
        assert counted == {link: expected[link] for link in counted}

"""Detours between nodes: every NIC carries the same, nothing is passed on twice, and every block arrives."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from test_exchange import check_exchange
from test_layout import check_both_ways
from worlds import topology_of

from cocodiff.config.machine import Topology
from cocodiff.topology.routes.plans import nic_detours, split_plan


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
    check_both_ways([split_plan(topology, rank, nic_detours(topology)) for rank in range(topology.size)])


def test_detours_carry_the_same_bits():
    check_exchange("split", topology_of("aurora", 24), 41, 7, 26, 2, torch.float32)

"""Physical links: which there are, the ways over them, and what an all-to-all takes at least."""

from collections import Counter

import pytest
from worlds import TRIPLE, topology_of

from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Links, Machine, Topology
from cocodiff.topology.links import alltoall_bound, next_hops, wires


def test_a_node_of_aurora_has_its_links():
    """Both of two nodes; at half of what ALCF publishes for both ways together: 269 GB/s between siblings and 23
    between cards; 2487 TFLOP/s with twelve tiles, and 1 TB/s a tile."""
    joined = Counter((wire.kind, wire.gb_s) for wire in wires(topology_of("aurora", 24)))
    assert joined == {("sibling", 134): 2 * 6, ("plane", 23 / 2): 2 * 30} and abs(134 - 269 / 2) <= 0.5
    device = load_machine("aurora").device
    assert (device.bf16_tflop_s, device.memory_gb_s) == (pytest.approx(2487 / 12, abs=0.5), 1000)


def test_ways_between_planes_lead_over_the_own_sibling_and_around_a_missing_tile():
    topology = topology_of("aurora", 12)
    hops = next_hops(topology, 0)
    assert hops[1] == 1 and hops[3] == 3  # sibling, and a tile of the same plane
    assert {hops[other] for other in range(2, 12) if topology.link_class(0, other) == "cross_plane"} == {1}
    assert next_hops(topology_of("local", 3), 1) == {0: 0, 2: 0}
    assert set(next_hops(Topology.build(TRIPLE, 8), 7)) == set(range(7))


def test_bound_of_one_node_and_of_two():
    """A card's 20 blocks leave over its 10 Xe links; of two nodes, 144 blocks over 8 NICs."""
    assert alltoall_bound(topology_of("aurora", 12), 1e6) == pytest.approx(2e6 / 11.5e9)
    assert alltoall_bound(topology_of("aurora", 24), 1e6) == pytest.approx(144e6 / (8 * 25e9))
    assert alltoall_bound(topology_of("local", 2), 1e6) == pytest.approx(1e6 / 10e9)
    assert alltoall_bound(topology_of("local", 1), 1e6) is None


def test_nics_are_data_or_taken_in_turns():
    assert topology_of("aurora", 24).nics[12:] == (0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 4, 5)
    machine = Machine("turns", tiles=2, planes=(0, 1), cards=2, links=Links(nics=3))
    assert Topology.build(machine, 8).nics == (0, 1, 2, 0, 0, 1, 2, 0)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ({"nics": 2, "nic_of": (0, 2)}, "number the NICs of a node from 0"),
        ({"plane_gb_s": 0}, "a rate above 0"),
        ({"nics": 2, "nic_of": (0, 1, 0)}, "NICs of 3 tiles: give one for each of the 4"),
    ],
)
def test_impossible_links_are_named(links, said):
    with pytest.raises(UserError, match=said):
        Machine("short", tiles=2, planes=(0, 1), cards=2, links=Links(**links))

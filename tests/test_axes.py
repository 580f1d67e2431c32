"""Ranks dealt to replicas, guidance branches, rings and Ulysses groups."""

from __future__ import annotations

from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import topologies, topology_of

from cocodiff.errors import UserError
from cocodiff.topology.axes import Axes, Coordinates, Mesh, cut
from cocodiff.topology.machine import Topology

PLANES = ((0, 3, 4, 6, 8, 11), (1, 2, 5, 7, 9, 10))  # of an Aurora node


def links_in(topology: Topology, ranks: tuple[int, ...]) -> set[str | None]:
    return {topology.link_class(a, b) for a, b in combinations(ranks, 2)}


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def test_without_degrees_it_is_one_mesh():
    topology = topology_of("aurora", 12)
    axes = Axes.build(topology)
    assert axes.meshes == ((Mesh.build(topology),),) and axes.degrees == (1, 1, 1, 12)
    assert axes.replica(5) == axes.branch(5) == axes.along("ulysses", 5) == tuple(range(12))


def test_on_one_aurora_node_each_branch_is_a_plane():
    topology = topology_of("aurora", 12)
    axes = Axes.build(topology, guidance=2)
    assert axes.branches == (PLANES,)
    for branch in PLANES:
        assert links_in(topology, branch) == {"plane"}
        assert links_in(axes.mesh(branch[0]).topology, tuple(range(6))) == {"plane"}
    assert axes.coordinates(4) == Coordinates(replica=0, guidance=0, ring=0, ulysses=2)
    assert axes.along("guidance", 4) == (4, 5)  # its sibling, who has the same slot of the other branch


def test_on_two_aurora_nodes_each_branch_is_a_node():
    topology = topology_of("aurora", 24)
    axes = Axes.build(topology, guidance=2, ring=2)
    assert axes.branches == ((tuple(range(12)), tuple(range(12, 24))),)
    assert axes.degrees == (1, 2, 2, 6)
    assert axes.mesh(13).topology.nodes == 1
    assert axes.along("ring", 13) == (12, 13)
    assert links_in(topology, axes.along("ulysses", 13)) == {"plane"}
    assert axes.along("guidance", 13) == (1, 13)


def test_replicas_take_whole_nodes_and_their_branches_planes():
    axes = Axes.build(topology_of("aurora", 24), replica=2, guidance=2)
    second = tuple(tuple(rank + 12 for rank in plane) for plane in PLANES)
    assert axes.branches == (PLANES, second)
    assert axes.replica(3) == tuple(range(12)) and axes.replica(20) == tuple(range(12, 24))
    assert axes.along("replica", 3) == (3, 15)


def test_four_parts_of_two_nodes_are_their_planes():
    second = tuple(tuple(rank + 12 for rank in plane) for plane in PLANES)
    assert cut(topology_of("aurora", 24), tuple(range(24)), 4) == (*PLANES, *second)


@pytest.mark.parametrize(
    ("parts", "links"), [(6, {"sibling"}), (4, {"plane"}), (3, {"sibling", "plane", "cross_plane"})]
)
def test_small_parts_of_a_node(parts, links):
    """A card's siblings, half a plane; and two cards where a third of a node fits no plane."""
    topology = topology_of("aurora", 12)
    assert set().union(*(links_in(topology, ranks) for ranks in cut(topology, tuple(range(12)), parts))) == links


def test_a_ragged_machine():
    topology = topology_of("local", 5)
    assert Axes.build(topology, replica=5).branches == (((0,),), ((1,),), ((2,),), ((3,),), ((4,),))
    assert Axes.build(topology, ring=5).along("ring", 3) == (0, 1, 2, 3, 4)
    ten = Axes.build(topology_of("local", 10, 5), guidance=2)
    assert ten.branches == (((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)),)
    assert ten.mesh(7).topology.served_planes == topology.served_planes


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"guidance": 2}, "guidance 2 does not divide 5 ranks: choose one of 1, 5"),
        ({"replica": 5, "guidance": 2}, "guidance 2 does not divide 1 ranks: choose one of 1"),
        ({"replica": 0}, "replicas 0 does not divide 5 ranks"),
        ({"ring": 3}, "ring 3 does not divide 5 ranks"),
    ],
)
def test_degrees_that_do_not_divide(degrees, message):
    with pytest.raises(UserError, match=message):
        Axes.build(topology_of("local", 5), **degrees)


@given(topologies(), st.data())
@settings(max_examples=40, deadline=None)
def test_every_rank_has_coordinates_of_its_own(topology, data):
    replica = data.draw(st.sampled_from(divisors(topology.size)))
    guidance = data.draw(st.sampled_from(divisors(topology.size // replica)))
    ring = data.draw(st.sampled_from(divisors(topology.size // replica // guidance)))
    axes = Axes.build(topology, replica, guidance, ring)
    assert axes.degrees[:3] == (replica, guidance, ring) and prod(axes.degrees) == topology.size
    assert len({axes.coordinates(rank) for rank in range(topology.size)}) == topology.size
    for rank in range(topology.size):
        at, branch, mesh = axes.coordinates(rank), axes.branch(rank), axes.mesh(rank)
        assert branch[mesh.groups[at.ring][at.ulysses]] == rank and set(branch) <= set(axes.replica(rank))
        for axis, number in at._asdict().items():
            assert axes.along(axis, rank)[number] == rank
        for other in branch:
            a, b = branch.index(rank), branch.index(other)
            assert mesh.topology.link_class(a, b) == topology.link_class(rank, other)

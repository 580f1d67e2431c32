"""Ranks divided among replicas, guidance branches, rings and Ulysses groups."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import topologies, topology_of

from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.topology.axes import Axes, Coordinates, Mesh, cut, mesh_without_ring, meshes

PLANES = ((0, 3, 4, 6, 8, 11), (1, 2, 5, 7, 9, 10))  # of an Aurora node


def links_in(topology: Topology, ranks: tuple[int, ...]) -> set[str | None]:
    return {topology.link_class(a, b) for a, b in combinations(ranks, 2)}


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def test_without_degrees_all_ranks_share_a_sequence():
    axes = Axes.build(topology_of("aurora", 12))
    assert axes.replica(5) == axes.branch(5) == tuple(range(12)) and axes.partners(5) == (5,)


def test_on_one_aurora_node_each_branch_is_a_plane():
    topology = topology_of("aurora", 12)
    axes = Axes.build(topology, guidance=2)
    assert axes.branches == (PLANES,)
    for branch in PLANES:
        assert links_in(topology, branch) == {"plane"}
        assert links_in(topology.part(branch), tuple(range(6))) == {"plane"}
    assert axes.coordinates(4) == Coordinates(replica=0, guidance=0)
    assert axes.partners(4) == (4, 5)  # its sibling, who has the same slot of the other branch


def test_on_two_aurora_nodes_each_branch_is_a_node():
    topology = topology_of("aurora", 24)
    axes = Axes.build(topology, guidance=2)
    assert axes.branches == ((tuple(range(12)), tuple(range(12, 24))),)
    assert axes.partners(13) == (1, 13)
    mesh = Mesh.build(topology.part(axes.branch(13)), 2)
    group, slot = mesh.group_and_slot(1)
    assert mesh.topology.nodes == 1 and tuple(ranks[slot] for ranks in mesh.groups) == (0, 1)
    assert links_in(mesh.topology, mesh.groups[group]) == {"plane"}


def test_replicas_take_whole_nodes_and_their_branches_planes():
    axes = Axes.build(topology_of("aurora", 24), replica=2, guidance=2)
    second = tuple(tuple(rank + 12 for rank in plane) for plane in PLANES)
    assert axes.branches == (PLANES, second)
    assert axes.replica(3) == tuple(range(12)) and axes.replica(20) == tuple(range(12, 24))


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
    assert Mesh.build(topology, 5).groups == ((0,), (1,), (2,), (3,), (4,))
    ten = Axes.build(topology_of("local", 10, 5), guidance=2)
    assert ten.branches == (((0, 1, 2, 3, 4), (5, 6, 7, 8, 9)),)
    assert ten.topology.part(ten.branch(7)).served_planes == topology.served_planes


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"guidance": 2}, "guidance 2 does not divide 5 ranks: choose one of 1, 5"),
        ({"replica": 5, "guidance": 2}, "guidance 2 does not divide 1 ranks: choose one of 1"),
        ({"replica": 0}, "replicas 0 does not divide 5 ranks"),
    ],
)
def test_degrees_that_do_not_divide(degrees, message):
    with pytest.raises(UserError, match=message):
        Axes.build(topology_of("local", 5), **degrees)


def test_a_ring_that_does_not_divide():
    with pytest.raises(UserError, match="ring 3 does not divide 5 ranks"):
        Mesh.build(topology_of("local", 5), 3)


@given(topologies(), st.data())
@settings(max_examples=40, deadline=None)
def test_every_rank_is_in_one_branch_and_in_one_slot_of_its_mesh(topology, data):
    replica = data.draw(st.sampled_from(divisors(topology.size)))
    guidance = data.draw(st.sampled_from(divisors(topology.size // replica)))
    ring = data.draw(st.sampled_from(divisors(topology.size // replica // guidance)))
    axes = Axes.build(topology, replica, guidance)
    assert sorted(rank for of_replica in axes.branches for ranks in of_replica for rank in ranks) == [
        *range(topology.size)
    ]
    for rank in range(topology.size):
        at, branch = axes.coordinates(rank), axes.branch(rank)
        mesh = Mesh.build(topology.part(branch), ring)
        group, slot = mesh.group_and_slot(branch.index(rank))
        assert branch[mesh.groups[group][slot]] == rank and set(branch) <= set(axes.replica(rank))
        assert axes.partners(rank)[at.guidance] == rank
        for other in branch:
            a, b = branch.index(rank), branch.index(other)
            assert mesh.topology.link_class(a, b) == topology.link_class(rank, other)


@pytest.mark.parametrize(("heads", "alone"), [(23, False), (24, True), (25, True)])
def test_a_rank_for_each_head_needs_no_ring(heads, alone):
    """Two nodes of Aurora: without rates always, with them for what speeds up Ulysses' exchange."""
    aurora, local = topology_of("aurora", 24), topology_of("local", 24)
    for topology, prefer in ((aurora, True), (local, False)):
        found = mesh_without_ring(topology, heads, "auto", prefer)
        assert (found is not None and found.ring == 1) is alone
    assert mesh_without_ring(aurora, heads, "auto") is None
    assert min(mesh.ring for mesh in meshes(aurora, heads)) == (1 if alone else 2)

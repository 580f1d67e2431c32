"""Ranks divided among replicas, guidance branches, rings and Ulysses groups."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings, strategies
from worlds import topologies, topology_of

from cocodiff.config.errors import UserError
from cocodiff.topology import Topology
from cocodiff.topology.axes import PLACEMENTS, Axes, Mesh, mesh_without_ring, meshes


def links_in(topology: Topology, ranks: tuple[int, ...]) -> set[str | None]:
    return {topology.link_class(a, b) for a, b in combinations(ranks, 2)}


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def test_a_part_of_a_ragged_machine_is_ragged():
    ten = Axes.build(topology_of("local", 10, 5), guidance=2)
    assert ten.topology.part(ten.branch(7)).served_planes == topology_of("local", 5).served_planes
    assert Mesh.build(topology_of("local", 5), 5).groups == ((0,), (1,), (2,), (3,), (4,))


def test_a_ring_on_a_branch_keeps_its_groups_in_planes():
    mesh = Mesh.build(topology_of("aurora", 24).part(range(12, 24)), 2)
    group, slot = mesh.group_and_slot(1)
    assert mesh.topology.nodes == 1 and tuple(ranks[slot] for ranks in mesh.groups) == (0, 1)
    assert links_in(mesh.topology, mesh.groups[group]) == {"plane"}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"guidance": 2}, r"guidance 2 does not divide 5 ranks: \D*1, 5$"),
        ({"replica": 5, "guidance": 2}, r"guidance 2 does not divide 1 ranks: \D*1$"),
        ({"replica": 0}, "replicas 0 does not divide 5 ranks"),
        ({"ring": 3}, "ring 3 does not divide 5 ranks"),
    ],
)
def test_degrees_that_do_not_divide(degrees, message):
    with pytest.raises(UserError, match=message):
        Mesh.build(topology_of("local", 5), 3) if "ring" in degrees else Axes.build(topology_of("local", 5), **degrees)


@given(topologies(), strategies.data())
@settings(max_examples=40, deadline=None)
def test_every_rank_is_in_one_branch_and_in_one_slot_of_its_mesh(topology, data):
    replica = data.draw(strategies.sampled_from(divisors(topology.size)))
    guidance = data.draw(strategies.sampled_from(divisors(topology.size // replica)))
    ring = data.draw(strategies.sampled_from(divisors(topology.size // replica // guidance)))
    placement = data.draw(strategies.sampled_from(PLACEMENTS))
    axes = Axes.build(topology, replica, guidance)
    every = [rank for of_replica in axes.branches for ranks in of_replica for rank in ranks]
    assert sorted(every) == [*range(topology.size)]
    for rank in range(topology.size):
        at, branch = axes.coordinates(rank), axes.branch(rank)
        mesh = Mesh.build(topology.part(branch), ring, placement)
        group, slot = mesh.group_and_slot(branch.index(rank))
        assert (mesh.ring, mesh.ulysses) == (ring, len(branch) // ring)
        part = mesh.parts[group]
        assert part.nics[slot] == topology.nics[rank]
        assert sorted({place.node for place in part.places}) == list(range(part.nodes))
        assert branch[mesh.groups[group][slot]] == rank and set(branch) <= set(axes.replica(rank))
        of_replica = axes.branches[at.replica]
        assert of_replica[at.guidance] == branch and set(axes.replica(rank)) == {*chain(*of_replica)}
        assert axes.partners(rank) == tuple(ranks[branch.index(rank)] for ranks in of_replica)
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

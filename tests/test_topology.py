"""Machines, places and links: which rank sits where, who stands in for whom, which ways there are, what is refused."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from cocodiff_studies import network
from hypothesis import given, settings
from hypothesis import strategies as st
from value_tables import beside
from worlds import TRIPLE, is_full, topologies, topology_of

from cocodiff.comm.groups import group_ranks
from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Device, Links, Machine
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes, cut
from cocodiff.topology.links import alltoall_bound, next_hops, wires
from cocodiff.topology.routes.chunks import chunk_ranks
from cocodiff.topology.routes.plans import plan_of

CASES = beside(__file__)
LINKS = {None: ".", "sibling": "s", "plane": "p", "cross_plane": "x", "node": "n"}


@pytest.mark.parametrize(("machine", "ranks", "on_node"), CASES["worlds"])
def test_where_ranks_sit_and_how_they_are_divided(machine, ranks, on_node, snapshot):
    """Each rank's place, NIC and links to all ranks; replicas, which take nodes, and branches of guidance, which take
    nodes or planes; small parts of nodes; chunks by their distance from a rank."""
    topology, every = topology_of(machine, ranks, on_node), tuple(range(ranks))
    lines = [f"cards {topology.cards}", f"planes {topology.planes}", f"extras go to {topology.shard_order}"]
    for place in topology.places:
        links = "".join(LINKS[topology.link_class(place.rank, other)] for other in every)
        lines.append(f"{tuple(vars(place).values())} NIC {topology.nics[place.rank]} {links}")
    for replicas, branches in ((1, 2), (2, 1), (2, 2)):
        if ranks % (replicas * branches) == 0:
            lines.append(f"{replicas} replicas of {branches}: {Axes.build(topology, replicas, branches).branches}")
    lines += [f"{parts} parts: {cut(topology, every, parts)}" for parts in (3, 4, 6) if ranks % parts == 0]
    lines += [f"{n} chunks: {chunk_ranks(topology, rank, n)}" for n in (2, 3, 4) for rank in {ranks // 4, ranks // 2}]
    snapshot("\n".join(lines))


@pytest.mark.parametrize("chunks", range(2, 13))
def test_ranks_on_unequal_nodes_count_the_same_number_of_chunks(chunks):
    topology = topology_of("aurora", 24).part((*range(12), *range(12, 16)))  # six cards of one node, two of the other
    of_ranks = [chunk_ranks(topology, rank, chunks) for rank in range(topology.size)]
    assert len({len(own) for own in of_ranks}) == 1
    assert all(sorted(one for ranks in own for one in ranks) == [*range(topology.size)] for own in of_ranks)


@given(topologies(), st.sampled_from([["flat"], ["tapa"], ["split"], ["flat", "tapa", "split"]]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_group_has_those_whom_messages_join(topology, names, nic_balance):
    """All its ranks find the same one. With TAPA on whole cards, and split on one node, they are a plane's and a
    card's."""
    for lane, near in (("sibling", topology.cards), ("plane", topology.planes)):
        of_rank = [group_ranks(topology, rank, lane, names, nic_balance) for rank in range(topology.size)]
        for rank, group in enumerate(of_rank):
            assert rank in group and all(of_rank[member] == group for member in group)
            plans = [plan_of(topology, rank, name, nic_balance) for name in names]
            phases = [phase for plan in plans for phase in plan if phase.lane == lane]
            assert set(group) >= {peer for phase in phases for peer in (*phase.sends, *phase.receives)}
        if is_full(topology) and (names == ["tapa"] or (names == ["split"] and topology.nodes == 1)):
            assert {*of_rank} == {*near.values()}


@pytest.mark.parametrize(("size", "remedy"), [(5, "12"), (13, "12 or 24"), (0, "")])
def test_ranks_that_do_not_fill_the_machine_are_refused(size, remedy):
    said = rf"machine aurora has nodes of 12 ranks and {size} .*: (?=.*--machine local)\D*{remedy}\D*$"
    with pytest.raises(UserError, match=said if size else "0 rank"):
        Topology.build(load_machine("aurora"), size)


PAIR = Machine("pair", tiles=2, planes=(0, 1), cards=2, nodes=2)


def test_more_ranks_than_the_machines_nodes_hold_are_refused():
    with pytest.raises(
        UserError, match=r"pair has 2 node\(s\) of 4 ranks and 12 rank\(s\)(?=.* 8 ranks).*--machine local"
    ):
        Topology.build(PAIR, 12)
    assert Topology.build(PAIR, 8).nodes == 2


@pytest.mark.parametrize(("settings", "links", "message"), CASES["malformed"])
def test_malformed_machines_are_refused(settings: dict[str, Any], links: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Machine("odd", **{"tiles": 2, "planes": (0, 1), "cards": 2} | settings, links=Links(**links))


@pytest.mark.parametrize(("device", "links", "lacking"), CASES["lacking"])
def test_rates_that_a_machine_file_does_not_give(device, links, lacking):
    assert (
        Machine(name="m", tiles=1, planes=(0,), device=Device(**device), links=Links(**links)).missing_rates == lacking
    )


# Links ----------------------------------------------------------------------------------------------------------------


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


def test_nics_that_are_no_data_are_taken_in_turns():
    machine = Machine("turns", tiles=2, planes=(0, 1), cards=2, links=Links(nics=3))
    assert Topology.build(machine, 8).nics == (0, 1, 2, 0, 0, 1, 2, 0)


def test_what_is_expected_of_one_stream_is_its_slowest_links_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "stream_rate", lambda *_: 1.0)
    emulated: Any = SimpleNamespace(topology=topology_of("aurora", 24), scale=1.0)
    links = emulated.topology.machine.links
    found = {rate.kind: rate.nominal for rate in network.measure_rates(emulated)}
    sides = {"sibling": links.sibling_gb_s, "plane": links.plane_gb_s, "node": links.nic_gb_s}
    assert sides["sibling"] != sides["plane"]
    sides["cross_plane"] = min(sides["sibling"], sides["plane"])
    assert found == {kind: pytest.approx(8000 * gb_s) for kind, gb_s in sides.items()}

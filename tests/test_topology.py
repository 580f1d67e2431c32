"""Machines and places: which rank sits on which card and plane, who stands in for whom, and what is refused."""

import pytest

from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Device, Links, Machine, Place, Topology


def test_aurora_planes_are_the_public_colouring():
    topology = Topology.build(load_machine("aurora"), 12)
    assert {frozenset(ranks) for ranks in topology.planes.values()} == {
        frozenset({0, 3, 4, 6, 8, 11}),
        frozenset({1, 2, 5, 7, 9, 10}),
    }
    assert topology.cards == {card: (2 * card, 2 * card + 1) for card in range(6)}
    assert topology.nodes == 1


def test_aurora_links_follow_the_planes_not_the_rank():
    topology = Topology.build(load_machine("aurora"), 24)
    assert topology.link_class(2, 3) == "sibling"
    assert topology.link_class(0, 3) == "plane"  # card 1 is wired the other way round
    assert topology.link_class(0, 2) == "cross_plane"
    assert topology.link_class(0, 12) == "node"
    assert topology.link_class(11, 12) == "node"
    assert topology.link_class(7, 7) is None


def test_ragged_card_has_a_stand_in():
    topology = Topology.build(load_machine("local"), 5)
    assert topology.cards == {0: (0, 1), 1: (2, 3), 2: (4,)}
    assert topology.planes == {0: (0, 2, 4), 1: (1, 3)}
    assert topology.server(2, 1) == 4
    assert topology.server(1, 1) == 3
    assert [set(planes) for planes in topology.served_planes] == [{0}, {1}, {0}, {1}, {0, 1}]
    assert topology.siblings(1) == (0,)
    assert topology.siblings(4) == ()


def test_two_nodes_of_six_two_tile_cards():
    topology = Topology.build(load_machine("local-6x2"), 24)
    assert topology.nodes == 2
    assert topology.places[0] == Place(0, node=0, card=0, plane=0, tile=0)
    assert topology.places[13] == Place(13, node=1, card=6, plane=1, tile=1)
    assert topology.planes == {0: tuple(range(0, 24, 2)), 1: tuple(range(1, 24, 2))}
    assert topology.link_class(0, 2) == "plane"
    assert topology.link_class(0, 3) == "cross_plane"
    assert topology.link_class(10, 12) == "node"


def test_extras_are_dealt_over_nodes_then_cards_then_planes():
    assert Topology.build(load_machine("local"), 5).shard_order == (0, 2, 4, 1, 3)
    order = Topology.build(load_machine("local-6x2"), 24).shard_order
    assert order[:6] == (0, 12, 2, 14, 4, 16)
    assert order[12:16] == (1, 13, 3, 15)
    assert sorted(order) == list(range(24))
    aurora = Topology.build(load_machine("aurora"), 12)
    assert aurora.shard_order == (0, 3, 4, 6, 8, 11, 1, 2, 5, 7, 9, 10)


def test_a_machine_of_no_fixed_size_takes_the_launchers_word_on_nodes():
    topology = Topology.build(load_machine("local"), 6, ranks_per_node=3)
    assert [place.node for place in topology.places] == [0, 0, 0, 1, 1, 1]
    assert topology.cards == {0: (0, 1), 1: (2,), 2: (3, 4), 3: (5,)}
    assert topology.served_planes[2] == {0, 1}
    assert topology.link_class(2, 3) == "node"


def test_fixed_machines_ignore_the_launchers_node_size():
    assert Topology.build(load_machine("aurora"), 24, ranks_per_node=8).nodes == 2


def test_one_rank_serves_its_own_plane_only():
    topology = Topology.build(load_machine("local"), 1)
    assert topology.planes == {0: (0,)}
    assert topology.served_planes == (frozenset({0}),)


@pytest.mark.parametrize(
    ("size", "remedy"), [(5, "start 12 ranks"), (13, "start 12 or 24 ranks"), (1, "start 12 ranks")]
)
def test_ranks_that_do_not_fill_the_machine_are_refused(size, remedy):
    with pytest.raises(UserError) as caught:
        Topology.build(load_machine("aurora"), size)
    message = str(caught.value)
    assert "aurora" in message and "nodes of 12" in message and f"{size} rank(s)" in message
    assert remedy in message and "--machine local" in message


def test_more_ranks_than_the_machines_nodes_hold_are_refused():
    machine = Machine("pair", tiles=2, planes=(0, 1), cards=2, nodes=2)
    with pytest.raises(UserError, match=r"2 node\(s\) of 4 ranks and 12 rank\(s\) were started"):
        Topology.build(machine, 12)
    assert Topology.build(machine, 8).nodes == 2


def test_no_ranks_are_refused():
    with pytest.raises(UserError, match="0 ranks"):
        Topology.build(load_machine("local"), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiles": 2, "planes": (0, 1, 0), "cards": 2}, "3 plane entries.*2 tiles of a card.*4 tiles of a node"),
        ({"tiles": 2, "planes": (0,)}, "1 plane entries"),
        ({"tiles": 2, "planes": (0, 1, 0, 0), "cards": 2}, r"tiles 2\.\.3 form a card and have planes \[0, 0\]"),
        ({"tiles": 2, "planes": (1, 2)}, r"one tile in each of the planes 0\.\.1"),
        ({"tiles": 0, "planes": ()}, "0 tiles"),
        ({"tiles": 2, "planes": (0, 1), "cards": 0}, "0 cards"),
    ],
)
def test_malformed_machines_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Machine("odd", **settings)


@pytest.mark.parametrize(
    ("device", "links", "lacking"),
    [
        ({}, {}, ["its device", "its links"]),
        ({"bf16_tflop_s": 1.0}, {"nics": 2}, ["its device"]),
        ({"memory_gb_s": 1.0}, {"nics": 2}, ["its device"]),
        ({"memory_gb_s": 1.0, "bf16_tflop_s": 1.0}, {}, ["its links"]),
        ({"memory_gb_s": 1.0, "bf16_tflop_s": 1.0}, {"nics": 2}, []),
    ],
)
def test_rates_that_a_machine_file_does_not_give(device, links, lacking):
    assert Machine("m", 1, (0,), device=Device(**device), links=Links(**links)).missing_rates == lacking

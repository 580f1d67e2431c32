"""Meshes of Ulysses and Ring: who sits where, what that sends between nodes, and which one is taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from value_tables import beside
from worlds import topologies, topology_of

from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine
from cocodiff.engine.assemble import AttentionWork, mesh_of
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models.adapter import image_and_text
from cocodiff.planner.automatic import price, price_meshes
from cocodiff.planner.case import Case
from cocodiff.planner.layers import plan_step
from cocodiff.planner.rings import LAG, staged_seconds, stream_seconds, token_seconds
from cocodiff.planner.traffic import Traffic, Wires
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh, meshes
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.rounds import visits_of


def machines(nodes: int, tiles: int) -> Topology:
    """N machines of M one-tile cards, as in appendix D."""
    return Topology.build(Machine("m", tiles=1, planes=(0,), cards=tiles), nodes * tiles)


FLAT = Config(exchange="flat")


@given(topologies(), st.integers(1, 40), st.integers(0, 30), st.integers(1, 30), st.data())
@settings(max_examples=40, deadline=None)
def test_layouts_deal_tokens_as_without_a_mesh_and_heads_evenly(topology, more, text, heads, data):
    mesh = data.draw(st.sampled_from(meshes(topology, heads)))
    image = topology.size + more
    layouts = mesh.layouts(image_and_text(image, text), heads)
    whole = Layout.build(topology, image_and_text(image, text), max(heads, topology.size))
    for group, layout in zip(mesh.groups, layouts, strict=True):
        assert layout.rows == tuple(whole.rows[rank] for rank in group)
        for part, of_all in zip(layout.parts, whole.parts, strict=True):
            assert part.slices == tuple(of_all.slices[rank] for rank in group)
        assert layout.heads == layouts[0].heads and sum(layout.heads) == heads
        assert max(layout.heads) - min(layout.heads) <= 1
    assert sum(mesh.layouts(image_and_text(image, text), heads + 1)[0].heads) == heads + 1  # another model's layers


def links_onward(mesh: Mesh, rank: int) -> Counter[str | None]:
    """The links that a rank's blocks go on over."""
    to = [group[mesh.group_and_slot(rank)[1]] for group in mesh.groups]
    onward = [visit.onward for visit in visits_of(mesh, rank) if visit.onward is not None]
    return Counter(mesh.topology.link_class(rank, to[one.to]) for one in onward)


def test_over_cards_of_unequal_numbers_of_ranks_a_ring_goes_to_and_fro():
    mesh = Mesh.build(topology_of("local", 5), 5)
    links = [{"sibling": 4}, {"plane": 4}, {"plane": 4}, {"sibling": 4}, {"plane": 4}]
    assert [links_onward(mesh, rank) for rank in range(5)] == links


@pytest.mark.parametrize(("machine", "size", "ring", "links"), beside(__file__))
def test_a_ring_stays_on_cards_and_planes_and_a_node_hears_a_block_once(machine, size, ring, links):
    """How many blocks a rank passes on over which links. In a ring on two nodes 12 blocks cross each way, not 23, each
    over the sender's own NIC."""
    mesh = Mesh.build(topology_of(machine, size), ring)
    assert all(links_onward(mesh, rank) == links for rank in range(size))
    for group in mesh.groups if ring == 2 else ():  # Ulysses goes over a plane's cards
        places = [mesh.topology.places[rank] for rank in group]
        assert len({place.plane for place in places}) == 1 and len({place.card for place in places}) == len(group)


@given(
    st.one_of(topologies(), st.builds(machines, st.integers(1, 6), st.integers(1, 8))), st.integers(1, 40), st.data()
)
@settings(max_examples=60, deadline=None)
def test_the_default_placement_sends_least_out_of_the_busiest_node(topology, heads, data):
    """Of all placements of a ring degree. That prices are what ranks send is in `test_exact_attention.py`."""
    every = meshes(topology, heads)
    work = AttentionWork(heads, head_dim=1, segments=image_and_text(4 * topology.size, 0), itemsize=1)
    ring = data.draw(st.sampled_from(sorted({mesh.ring for mesh in every})))
    sent = [price(FLAT, mesh, work).sent.busiest_node for mesh in every if mesh.ring == ring]
    if topology.machine.missing_rates:
        assert price(FLAT, mesh_of(FLAT.with_(ring=ring), topology, work), work).sent.busiest_node == min(sent)


def test_a_message_on_the_links_it_takes():
    """Of one gigabyte: alone on its link, over a sibling's link first, beside another on one NIC."""
    topology = topology_of("aurora", 24)
    links = topology.machine.links

    def seconds(*pairs: tuple[int, int]) -> float:
        traffic = Traffic(Wires(topology))
        traffic.send(*np.array([(a, b, 10**9) for a, b in pairs]).T)
        return traffic.seconds()

    plane = next(n for n in (2, 3) if topology.link_class(0, n) == "plane")
    cross = 5 - plane  # its sibling
    assert topology.link_class(0, cross) == "cross_plane"
    assert seconds((0, 1)) == pytest.approx(1 / links.sibling_gb_s)
    assert seconds((0, plane)) == seconds((0, cross)) == pytest.approx(1 / links.plane_gb_s)
    assert seconds((0, cross), (1, cross)) == pytest.approx(2 / links.plane_gb_s)  # both on tile 1's link to it
    assert seconds((0, 12)) == pytest.approx(1 / links.nic_gb_s) and seconds((3, 3)) == 0
    assert seconds((0, 12), (0, 13)) == pytest.approx(2 / links.nic_gb_s)


def chosen(topology: Topology, heads: int, image: int = 4096, **settings: Any) -> Mesh:
    return mesh_of(Config(**settings), topology, AttentionWork(heads, segments=image_and_text(image, 512)))


def telling(topology: Topology, **device: Any) -> Topology:
    """The same ranks on devices with a kernel that tells the sums of a part."""
    device = replace(topology.machine.device, sums_kernel=True, **device)
    return replace(topology, machine=replace(topology.machine, device=device))


def test_what_auto_takes():
    aurora = topology_of("aurora", 96)
    mesh = chosen(aurora, 24)
    assert (mesh.ulysses, mesh.ring, mesh.placement) == (24, 4, "topology")
    of_32_nodes = chosen(topology_of("aurora", 384), 24)  # a hundred thousand messages: sums over arrays
    assert (of_32_nodes.ulysses, of_32_nodes.ring) == (24, 16)
    assert chosen(topology_of("aurora", 12), 24).ring == 1
    assert chosen(topology_of("local", 24), 24).ring == 1
    assert chosen(topology_of("local", 5), 4).ring == 5  # a prime number of ranks
    assert chosen(topology_of("local", 48), 24).ulysses == 24
    assert chosen(topology_of("local", 30), 24).ulysses == 6  # even heads; 15 and 10 ranks would have some idle
    uneven = chosen(aurora, 38, 65536).heads(38)
    assert max(uneven) * len(uneven) / 38 < 1.3  # larger than the greatest common divisor of ranks and heads, 2
    assert len(uneven) > 2
    assert chosen(aurora, 24, selection="v_major").ring == 4
    two = topology_of("aurora", 24)
    assert chosen(telling(two), 38, 65536).ring > 1  # the idle heads cost most there
    assert chosen(telling(two), 38, 65536, selection="v_major").ring == 1
    assert chosen(two, 38, 65536).ring == 1  # parts whose sums no kernel tells cost more
    assert chosen(two.part((0, 1)), 38, 65536).ring == 1


def test_meshes_that_the_settings_do_not_allow_are_left_out():
    """Chunks are measured for one and two nodes, so that a Ulysses group is on as many at most."""
    assert max(part.nodes for part in chosen(topology_of("aurora", 96), 24, chunks="auto").parts) <= 2
    with pytest.raises(UserError, match="chunks auto"):
        chosen(topology_of("aurora", 96), 24, chunks="auto", ring=4, placement="topology")


@pytest.mark.sample(6)
@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize(
    ("model", "size"), [("flux.1", 3072), ("flux.1", 4096), ("cogvideox-paper", 6544), ("cogvideox-paper", 9200)]
)
def test_what_auto_takes_is_what_a_plan_prices_least(model, size, nodes):
    """StreamFusion's loads. Two of these meshes are not those that send least between nodes."""
    shape, topology = load_shape(model), topology_of("p4de", 8 * nodes)
    config = Config.preset("flat", machine="p4de", image_tokens=shape.image_tokens(size))
    case = Case(shape, topology, config, shape.segments(size), shape.rows_per_image, 2, shape.branches)
    steps_s = [plan_step(replace(case, known_mesh=mesh)).step_s for mesh in meshes(topology, shape.heads)]
    assert len(steps_s) > 5 and plan_step(case).step_s == min(steps_s)


def test_what_stages_hide_counts_for_the_time_and_not_for_the_bytes():
    """12 MB of q, k and v per rank on two nodes, attention about as long as they travel, and none."""
    aurora, work = topology_of("aurora", 24), AttentionWork(12, 128, image_and_text(15624, 0), itemsize=4)
    topology, timeless = (telling(aurora, bf16_tflop_s=tflop_s) for tflop_s in (125.0, 1e9))
    staged = FLAT.with_(chunks=2)
    for placement in ("topology", "usp"):
        mesh, soon = (Mesh.build(one, 2, placement) for one in (topology, timeless))
        alone, ours = price(FLAT, mesh, work), price(staged, mesh, work)
        assert ours.sent.bytes == alone.sent.bytes and ours.seconds < alone.seconds
        assert price(staged, soon, work).seconds == pytest.approx(price(FLAT, soon, work).seconds, 0.1)
    hidden = [price(staged, Mesh.build(topology, 2, name), work).seconds for name in ("topology", "usp")]
    assert hidden[0] < hidden[1]  # Ulysses across nodes has more to hide, and hides most of it


def test_stages_by_hand():
    """A quarter of each chunk's messages are q's: 1 s of the own chunk's, 2 s of each other one's."""
    two = [0.5, 0.5], [4.0, 8.0], ()
    assert staged_seconds(*two, 0.0) == 3 + 3 + 2 + 1  # own q, k and v; others' k and v; their outputs, then the own
    assert staged_seconds(*two, 100.0) == 3 + 100 + 1
    three = [0.5, 0.25, 0.25], [4.0, 4.0, 4.0]
    assert staged_seconds(*three, (), 0.0) == 6 + 2 + 1, "other chunks follow each other on their links"
    assert staged_seconds(*three, (), 100.0) == 3 + 100 + 1
    assert staged_seconds(*three, (7.0,), 0.0) == 6 + 7 + 2 + 1, "all keys of the group go round"
    assert staged_seconds(*three, (7.0,), 100.0) == 3 + 200 + 1


def test_a_layer_with_too_few_heads():
    with pytest.raises(UserError, match=r"groups of 6 of 12 ranks for 5 attention heads.*\b5\b"):
        Mesh.build(topology_of("local", 12), 2).layouts(image_and_text(24, 0), 5)


# Kinds of rings -------------------------------------------------------------------------------------------------------


def test_token_moves_by_hand():
    """Queries of 1 s hide attention of 0.5 s; parts of 2 s may be LAG steps late, and the last are waited for, of which
    the first of four pieces leaves after a fourth of the attention."""
    moves = (1.0, 1.0, 1.0, 0.0), (0.0, 2.0, 2.0, 2.0), ()
    assert LAG == 2 and token_seconds(*moves, 1, 0.5) == 3.5 + 2.0
    assert token_seconds(*moves, 4, 0.5) == 3.125 + 2.0
    assert token_seconds((0.0,), (0.0,), (5.0,), 1, 0.5) == 5.5  # a rank on each of two nodes: a ring of keys
    assert token_seconds(*moves, 1, 10.0) == 42.0 and token_seconds(*moves, 4, 10.0) == 40.5


def test_streaming_moves_by_hand():
    """Three pieces of 1 s: the first gather and the last reduction and crossing are waited for."""
    assert stream_seconds(2, 3, 0.25, 0.5, 0.125, 0.5) == 0.25 + 3 * 1.0 + 0.5 + 0.125
    assert stream_seconds(2, 3, 0.25, 0.5, 1.0, 0.5) == 0.25 + 3 * 2.0 + 0.5 + 1.0
    assert stream_seconds(1, 2, 3.0, 2.0, 0.0, 0.5) == 3.0 + 3.0 + 2.0 + 2.0


def on_aurora(ranks: int, **settings: Any) -> Mesh:
    return chosen(topology_of("aurora", ranks), 24, **settings)


def test_prices_on_a_node_of_aurora():
    """In a plane a token ring halves what the fullest link carries, and streaming's queries take the links to all other
    ranks at once; over a card's two tiles a token ring gains nothing."""
    topology = topology_of("aurora", 12)

    def seconds(kind: str, ring: int, placement: str) -> float:
        return price(Config(), Mesh.build(topology, ring, placement, kind=kind), AttentionWork(24)).seconds

    assert seconds("streaming", 6, "usp") < seconds("token", 6, "usp") < seconds("keys", 6, "usp")
    assert seconds("token", 2, "topology") >= seconds("keys", 2, "topology")


def test_auto_takes_streaming_where_it_is_predicted_to_be_faster():
    """In rings of a plane or a node. On a card's two tiles, where no rates are known, and in chunks keys go round."""
    assert on_aurora(24, ring=24, ring_kind="auto").kind == "streaming"
    assert on_aurora(48, ring_kind="auto").kind == "keys"
    assert on_aurora(12, ring=12, ring_kind="auto").kind == "streaming"
    assert on_aurora(12, ring=2, placement="topology", ring_kind="auto").kind == "keys"
    assert chosen(topology_of("local", 12), 24, ring=12, ring_kind="auto").kind == "keys"
    assert Config(ring=12, ring_kind="auto", chunks=2).ring_kind == "keys"


@pytest.mark.parametrize("kind", ["token", "streaming"])
def test_a_kind_is_taken_where_it_is_asked_for(kind):
    asked = on_aurora(12, ring_kind=kind)
    assert asked.ring > 1 and asked.kind == kind
    found = price_meshes(Config(ring_kind=kind), topology_of("aurora", 12), AttentionWork(24))
    assert all(one.mesh.ring > 1 for one in found)
    assert on_aurora(12).ring == on_aurora(12, ring=1, ring_kind=kind).ring == 1
    assert chosen(topology_of("local", 1), 24, ring_kind=kind).ring == 1


@pytest.mark.parametrize("kind", ["token", "streaming"])
def test_spellings_of_a_kind(kind):
    assert Config(ring=kind) == Config(ring_kind=kind) and Config().ring_kind == "keys"
    assert Config(ring=4, ring_kind=kind).ring == 4
    for chunks in (2, "auto"):
        with pytest.raises(UserError, match=f"ring_kind {kind} .* chunks {chunks}"):
            Config(ring=2, ring_kind=kind, chunks=chunks)
    with pytest.raises(UserError, match="ring_kind"):
        Config(ring_kind="values")

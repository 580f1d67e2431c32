"""Plans as pure data: what ranks send their peers receive, every block arrives, and NICs carry the same."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import topologies, topology_of

from cocodiff.attention.local import AttentionCall
from cocodiff.attention.strategy import LazyQKV
from cocodiff.config.errors import UserError
from cocodiff.config.registry import EXCHANGES
from cocodiff.models.adapter import image_and_text, image_segment, text_segment
from cocodiff.topology.layout import Layout, Segment
from cocodiff.topology.routes.plans import Block, Plan, nic_detours, plan_of, reverse

MODEST = settings(max_examples=60, deadline=None)


def check(plans: list[Plan], held: list[set[Block]], ends: list[set[Block]]) -> None:
    """Moves blocks along the plans to where they end. In each phase both ends of a message list the same blocks in one
    order, and no message is empty. A rank may only send what it holds when the phase begins, and loses it."""
    for phases in zip(*plans, strict=True):
        assert len({phase.lane for phase in phases}) == 1
        sent = {(a, b): blocks for a, phase in enumerate(phases) for b, blocks in phase.sends.items()}
        received = {(a, b): blocks for b, phase in enumerate(phases) for a, blocks in phase.receives.items()}
        assert sent == received and all(sent.values()) and all(a != b for a, b in sent)
        for (rank, peer), blocks in sent.items():
            assert {*blocks} <= held[rank], f"rank {rank} sends blocks that it does not hold to rank {peer}"
            held[rank] -= {*blocks}
        for (_, peer), blocks in sent.items():
            held[peer] |= {*blocks}
    assert held == ends


@pytest.mark.parametrize("name", EXCHANGES)
@given(topology=topologies(), nic_balance=st.booleans())
@MODEST
def test_every_block_arrives_both_ways(name, topology, nic_balance):
    """From who has the rows to who has the heads, and by the reversed plans back. nic_balance: whether blocks make
    detours between nodes."""
    every = range(topology.size)
    plans = [plan_of(topology, rank, name, nic_balance) for rank in every]
    of_rows, of_heads = (
        [{Block(own, x) for x in every} for own in every],
        [{Block(x, own) for x in every} for own in every],
    )
    check(plans, [{*blocks} for blocks in of_rows], of_heads)
    check([*map(reverse, plans)], [{*blocks} for blocks in of_heads], of_rows)


@given(topology=topologies(), image=st.integers(24, 300), text=st.integers(0, 300), heads=st.integers(24, 64))
@MODEST
def test_shares_differ_by_one_in_the_order_of_shards_and_for_text_in_the_opposite_one(topology, image, text, heads):
    layout, order = Layout.build(topology, image_and_text(image, text), heads), topology.shard_order
    (of_image, of_text), size = (part.shares for part in layout.parts), topology.size
    for shares, total, first in ((of_image, image, order), (of_text, text, order[::-1]), (layout.heads, heads, order)):
        assert shares == tuple(total // size + (rank in first[: total % size]) for rank in range(size))
    assert layout.rows == tuple(map(sum, zip(of_image, of_text, strict=True)))


def test_too_many_ranks_are_refused_with_values():
    topology = topology_of("local", 6)
    with pytest.raises(UserError, match=r"6 ranks for 5 image tokens.*\b5 ranks"):
        image_segment(5).shares(topology)
    with pytest.raises(UserError, match=r"6 ranks for 4 attention heads.*\b4 ranks"):
        Layout.build(topology, image_and_text(100, 10), 4)


def test_what_may_stay_stands_side_by_side():
    frames = [Segment(f"frame {n}", 7, may_stay=True) for n in (1, 2)]
    layout = Layout.build(topology_of("local", 3), (text_segment(4), *frames, Segment("end", 2)), 3)
    assert layout.rows == (8, 6, 6) and layout.may_stay == (6, 4, 4)
    assert layout.may_stay_slices == (slice(1, 7), slice(2, 6), slice(1, 5))
    assert layout.of_rows((3, 2, 0)).rows == (3, 2, 0)
    apart = Layout.build(topology_of("local", 3), (frames[0], text_segment(4), frames[1]), 3)
    with pytest.raises(UserError, match="segments frame 1, text, frame 2: "):
        _ = apart.may_stay_slices
    exact = Layout.build(topology_of("local", 3), (text_segment(4),), 3)
    assert exact.may_stay == (0, 0, 0) and exact.may_stay_slices == (slice(0, 0),) * 3


def test_masks_of_any_segment_follow_the_ranks_rows():
    segments = (Segment("a", 4), Segment("b", 5, extras_from="back"), Segment("c", 3))
    masks = {"b": torch.tensor([[True, False, True, False, True]]), "c": torch.tensor([[False, True, False]])}
    layout = Layout.build(topology_of("local", 2), segments, 2)
    found = AttentionCall(LazyQKV(torch.empty, torch.empty, torch.empty, segments, 2, masks), [layout]).mask(0)
    assert found is not None and found[0, 0, 0].int().tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0]


# Detours between nodes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nic_balance", "most"), [(True, 18), (False, 24)])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_nics_of_aurora_carry_the_same(nodes, nic_balance, most):
    """The blocks that leave and reach a node, by detours over links of a plane and to siblings. Without detours four of
    its eight NICs carry the blocks of two tiles."""
    topology, loads = topology_of("aurora", 12 * nodes), Counter[tuple[str, int, int]]()
    for place in topology.places:
        for phase in plan_of(topology, place.rank, "split", nic_balance):
            for way, messages in (("out", phase.sends), ("in", phase.receives)):
                links = {peer: topology.link_class(place.rank, peer) for peer in messages}
                assert {*links.values()} <= {"plane", "sibling", "node"}
                far = sum(len(blocks) for peer, blocks in messages.items() if links[peer] == "node")
                loads[way, place.node, topology.nics[place.rank]] += far
    assert max(loads.values()) == most * (nodes - 1) and len({*loads.values()}) == (1 if nic_balance else 2)


def test_one_node_and_tiles_with_nics_alike_need_no_detours():
    assert nic_detours(topology_of("aurora", 12)) == {}
    assert nic_detours(topology_of("local-6x2", 24)) == {}

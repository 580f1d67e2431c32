"""Plans as pure data: what ranks send their peers receive, every block arrives, and NICs carry the same."""

from collections import Counter
from itertools import pairwise

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
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout, Segment, even_shares, slices
from cocodiff.topology.routes.plans import Block, Plan, nic_detours, plan_of, reverse

MODEST = settings(max_examples=60, deadline=None)


def check_pairs(plans: list[Plan]) -> None:
    """Per phase, both ends of a message list the same blocks in the same order, and no message is empty."""
    for phases in zip(*plans, strict=True):
        assert len({phase.lane for phase in phases}) == 1
        sent = {(a, b): blocks for a, phase in enumerate(phases) for b, blocks in phase.sends.items()}
        received = {(a, b): blocks for b, phase in enumerate(phases) for a, blocks in phase.receives.items()}
        assert sent == received and all(sent.values()) and all(a != b for a, b in sent)


def simulate(plans: list[Plan], held: list[set[Block]]) -> list[set[Block]]:
    """Moves blocks along the plans. A rank may only send what it holds when the phase begins, and loses it."""
    for phases in zip(*plans, strict=True):
        arriving: list[set[Block]] = [set() for _ in plans]
        for rank, phase in enumerate(phases):
            for peer, blocks in phase.sends.items():
                assert set(blocks) <= held[rank], f"rank {rank} sends blocks that it does not hold to rank {peer}"
                held[rank] -= set(blocks)
                arriving[peer] |= set(blocks)
        held = [mine | new for mine, new in zip(held, arriving, strict=True)]
    return held


def check_both_ways(plans: list[Plan]) -> None:
    """Forward every rank gets the blocks of its heads, and by the reversed plans those of its rows again."""
    every = range(len(plans))
    by_rows, by_heads = (
        [{Block(*pair[::way]) for pair in ((me, x) for x in every)} for me in every] for way in (1, -1)
    )
    for one, begins, ends in ((plans, by_rows, by_heads), ([*map(reverse, plans)], by_heads, by_rows)):
        check_pairs(one)
        assert simulate(one, [{*blocks} for blocks in begins]) == ends


@pytest.mark.parametrize("name", EXCHANGES)
@given(topology=topologies(), nic_balance=st.booleans())
@MODEST
def test_every_block_arrives_both_ways(name, topology, nic_balance):
    """nic_balance: whether blocks make detours between nodes."""
    check_both_ways([plan_of(topology, rank, name, nic_balance) for rank in range(topology.size)])


@given(topology=topologies(), image=st.integers(24, 300), text=st.integers(0, 300), heads=st.integers(24, 64))
@MODEST
def test_shares_differ_by_one_in_the_order_of_shards_and_for_text_in_the_opposite_one(topology, image, text, heads):
    layout, order = Layout.build(topology, image_and_text(image, text), heads), topology.shard_order
    (of_image, of_text), size = (part.shares for part in layout.parts), topology.size
    for shares, total, first in ((of_image, image, order), (of_text, text, order[::-1]), (layout.heads, heads, order)):
        assert shares == tuple(total // size + (rank in first[: total % size]) for rank in range(size))
    assert layout.rows == tuple(map(sum, zip(of_image, of_text, strict=True)))


def test_what_is_left_is_dealt_in_the_order_of_shards():
    """The 38 heads of SD3.5 over 12 ranks of Aurora: two ranks of a plane have one more."""
    assert even_shares(7, (2, 0, 1)) == (2, 2, 3) and even_shares(2, (2, 0, 1)) == (1, 0, 1)
    layout = Layout.build(topology_of("aurora", 12), image_and_text(1025, 333), 38)
    assert layout.heads == (4, 3, 3, 4, 3, 3, 3, 3, 3, 3, 3, 3)
    assert layout.row_slices[-1].stop == 1358 and slices(layout.heads)[0] == slice(0, 4)


def test_too_many_ranks_are_refused_with_values():
    topology = topology_of("local", 6)
    with pytest.raises(UserError, match=r"6 ranks for 5 image tokens.*at most 5 ranks or a larger image"):
        image_segment(5).shares(topology)
    with pytest.raises(UserError, match=r"6 ranks for 4 attention heads.*at most 4 ranks"):
        Layout.build(topology, image_and_text(100, 10), 4)
    assert text_segment(2).shares(topology) == (0, 0, 0, 1, 0, 1)


def test_what_may_stay_stands_side_by_side():
    frames = [Segment(f"frame {n}", 7, may_stay=True) for n in (1, 2)]
    layout = Layout.build(topology_of("local", 3), (text_segment(4), *frames, Segment("end", 2)), 3)
    assert layout.rows == (8, 6, 6) and layout.may_stay == (6, 4, 4)
    assert layout.may_stay_slices == (slice(1, 7), slice(2, 6), slice(1, 5))
    assert layout.of_rows((3, 2, 0)).rows == (3, 2, 0)
    apart = Layout.build(topology_of("local", 3), (frames[0], text_segment(4), frames[1]), 3)
    with pytest.raises(UserError, match="segments frame 1, text, frame 2: those whose tokens may stay behind have to"):
        _ = apart.may_stay_slices
    exact = Layout.build(topology_of("local", 3), (text_segment(4),), 3)
    assert exact.may_stay == (0, 0, 0) and exact.may_stay_slices == (slice(0, 0),) * 3


def test_masks_of_any_segment_follow_the_ranks_rows():
    segments = (Segment("a", 4), Segment("b", 5, extras_from="back"), Segment("c", 3))
    masks = {"b": torch.tensor([[True, False, True, False, True]]), "c": torch.tensor([[False, True, False]])}
    layout = Layout.build(topology_of("local", 2), segments, 2)
    qkv = LazyQKV(torch.empty, torch.empty, torch.empty, segments, 2, masks)
    found = AttentionCall(qkv, [layout]).mask(0)
    assert found is not None and found[0, 0, 0].int().tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0]


# Detours between nodes ------------------------------------------------------------------------------------------------


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

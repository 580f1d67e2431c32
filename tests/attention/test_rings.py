"""Rings: what is here and under way at a time, which kind is taken and at what price; with codecs. What they compute is
in `test_exact_attention.py`."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_worlds import RUN, Ranks, World
from worlds import topology_of

from cocodiff.attention.local import LocalAttention
from cocodiff.comm.loopback import LoopbackGroup
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.assemble import AttentionWork, mesh_of
from cocodiff.planner.automatic import price, price_meshes
from cocodiff.planner.rings import LAG, stream_seconds, token_seconds
from cocodiff.topology.axes import Mesh

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.mark.parametrize(("machine", "size"), [("local", 2), ("local", 3), ("local", 5), ("local", 6), ("aurora", 24)])
def test_at_most_two_foreign_blocks_are_here(machine, size):
    ranks = Ranks(World(size, heads=3, image=31, machine=machine), ring=size)
    ranks.call([RUN[0]])
    a_block = 2 * 2 * max(ranks.world.layout(RUN[0]).rows) * 3 * 40 * 4
    for rank in range(size):
        assert 0 < ranks.messages.most_bytes[rank] <= a_block * (1 if size == 2 else 2)


@pytest.mark.parametrize(("kind", "heads", "attended"), [("keys", 5, 0), ("token", 16, 16)])
def test_messages_travel_while_what_came_before_is_attended_to(kind, heads, attended, monkeypatch):
    """Nothing attends before everybody's first message has come, which is a block of keys; and a token ring does not
    begin the last piece of its last queries before the results of other heads have returned to everybody. That must
    not hold anybody up."""
    came, post = [threading.Event() for _ in range(3)], LoopbackGroup.send_recv
    heads_of = [0, 0, 0]  # by rank, heads that were attended to, of queries in pieces

    def send_recv(group: LoopbackGroup, sends: Any, recvs: Any) -> Any:
        pending = post(group, sends, recvs)
        if recvs and recvs[0][0].dim() == 4 and recvs[0][0].shape[2] < 16:
            pending.wait()
            came[group.ranks[group.index]].set()
        return pending

    class Waiting(LocalAttention):
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def part(self, q_BLHD: Any, *more: Any) -> Any:
            heads_of[self._rank] += q_BLHD.shape[2] % 16
            if heads_of[self._rank] >= attended:
                assert all(event.wait(20.0) for event in came)
            return super().part(q_BLHD, *more)

    monkeypatch.setattr(LoopbackGroup, "send_recv", send_recv)
    Ranks(World(3, heads=heads), ring=3, ring_kind=kind, local=Waiting).call([RUN[0]])
    assert heads_of == [16 if kind == "token" else 3 * heads] * 3


@pytest.mark.parametrize("kind", ["token", "streaming"])
@pytest.mark.parametrize(
    "lossy",
    [
        {"selection": "v_major", "schedule": "fixed", "warmup": 1},
        {"codec": "int8", "exchange": "split"},
        {"arrival": "displaced", "exchange": "flat"},
    ],
)
def test_with_what_the_ulysses_part_sends_in_tensors_places(lossy, kind):
    """As a ring of keys, up to rounding: both pass on whole what the Ulysses part has brought."""
    calls, of_kinds = [replace(call, steps=4) for call in RUN[:3]], []
    for one in ("keys", kind):
        of_kinds.append(Ranks(World(6, heads=4, channels=8), ring=3, ring_kind=one, **lossy).call(calls))
    for keys, others in zip(*of_kinds, strict=True):
        allowed = 1e-2 if "codec" in lossy else 1e-5
        torch.testing.assert_close(others.outputs, keys.outputs, rtol=0, atol=allowed)


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


def chosen(ranks: int, machine: str = "aurora", **settings: Any) -> Mesh:
    return mesh_of(Config(**settings), topology_of(machine, ranks), AttentionWork(24))


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
    assert chosen(24, ring=24, ring_kind="auto").kind == "streaming"
    assert chosen(48, ring_kind="auto").kind == "keys"
    assert chosen(12, ring=12, ring_kind="auto").kind == "streaming"
    assert chosen(12, ring=2, placement="topology", ring_kind="auto").kind == "keys"
    assert chosen(12, "local", ring=12, ring_kind="auto").kind == "keys"
    assert Config(ring=12, ring_kind="auto", chunks=2).ring_kind == "keys"


@pytest.mark.parametrize("kind", ["token", "streaming"])
def test_a_kind_is_taken_where_it_is_asked_for(kind):
    asked = chosen(12, ring_kind=kind)
    assert asked.ring > 1 and asked.kind == kind
    found = price_meshes(Config(ring_kind=kind), topology_of("aurora", 12), AttentionWork(24))
    assert all(one.mesh.ring > 1 for one in found)
    assert chosen(12).ring == chosen(12, ring=1, ring_kind=kind).ring == 1
    assert chosen(1, "local", ring_kind=kind).ring == 1


@pytest.mark.parametrize("kind", ["token", "streaming"])
def test_spellings_of_a_kind(kind):
    assert Config(ring=kind) == Config(ring_kind=kind) and Config().ring_kind == "keys"
    assert Config(ring=4, ring_kind=kind).ring == 4
    for chunks in (2, "auto"):
        with pytest.raises(UserError, match=f"ring_kind {kind} .* chunks {chunks}"):
            Config(ring=2, ring_kind=kind, chunks=chunks)
    with pytest.raises(UserError, match="ring_kind"):
        Config(ring_kind="values")

"""Rings: what is here and under way at a time, which kind is taken and at what price; with codecs. What they compute is
in `test_exact_attention.py`."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_worlds import RUN, Ranks, World

from cocodiff.attention.local import LocalAttention
from cocodiff.comm.loopback import LoopbackGroup

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

"""Messages of rings and chunks: what of them is in memory and under way at a time, which chunks there are, and that all
are waited for in the end, those too that no attention call waits for. What attention computes is in
`test_exact_attention.py`; that each call waits for its own is seen there, by `attention_worlds.Ranks`."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_worlds import LAYER, RUN, Messages, Ranks, World
from hypothesis import given, settings
from hypothesis import strategies as st
from seams import receives_of
from tiny_models import sd3_inputs, sd3_transformer
from value_tables import beside
from worlds import topologies, topology_of

from cocodiff.attention.local import LocalAttention
from cocodiff.comm.loopback import LoopbackGroup, run_ranks
from cocodiff.config.registry import EXCHANGES, load
from cocodiff.engine import assemble
from cocodiff.engine.engine import parallelize
from cocodiff.exchange.messages import InFlight, Target
from cocodiff.topology.routes.chunks import Stages, chunk_ranks
from cocodiff.topology.routes.plans import nic_detours, reverse, split_plan

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
        torch.testing.assert_close(others.outputs, keys.outputs, rtol=0, atol=1e-2 if "codec" in lossy else 1e-5)


# Chunks ---------------------------------------------------------------------------------------------------------------


class Counting(LocalAttention):
    """Notes how often it attends to a part of the keys. look: called before that."""

    def __init__(self, look: Any = lambda *_: None) -> None:
        self.parts, self._look = 0, look

    def part(self, *qkv_mask: Any) -> Any:
        self.parts += 1
        self._look(*qkv_mask)
        return super().part(*qkv_mask)


def parts_of(world: World, **settings: Any) -> tuple[list[int], list[torch.Tensor]]:
    """How many parts of attention each rank merges in a call, and its outputs."""
    local = [Counting() for _ in range(world.size)]
    found = Ranks(world, local=local.__getitem__, **settings).call([RUN[0]])
    return [one.parts for one in local], [one.outputs[0] for one in found]


def test_two_ranks_are_a_card_and_have_one_chunk_however_many_are_wanted():
    (once, outputs), (often, others) = (parts_of(World(2), exchange="split", chunks=chunks) for chunks in (1, 4))
    assert once == often == [0, 0] and all(map(torch.equal, outputs, others))


@pytest.mark.parametrize(("times", "parts"), [(1.0, 4), (1.01, 0)])
def test_from_so_many_megabytes_on_calls_go_in_chunks(times, parts, monkeypatch):
    """Two chunks of q by two of keys. Below, a call goes whole."""
    world = World(4, heads=4, image=25)
    mb = 3 * (world.image + RUN[0].text) * world.batch * 4 * world.channels * 4 / 4 / 1e6
    monkeypatch.setattr(assemble, "load_chunk_table", lambda *_: (2, times * mb))
    found, outputs = parts_of(world, exchange="split", chunks="auto")
    assert found == [parts] * 4
    torch.testing.assert_close(outputs, parts_of(world, exchange="split")[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("machine", "size", "chunks"), [("local", 8, 3), ("aurora", 24, 4)])
def test_keys_and_values_are_in_memory_once(machine, size, chunks):
    """Every part of them is a slice of one tensor, and what they arrived in is gone when the last is there."""
    world = World(size, 2 * size, 3 * size, 8, machine=machine)
    storages: list[set[tuple[int, int]]] = [set(), set()]
    buffers, alive, post = list[weakref.ref[Any]](), list[int](), InFlight.post_receives

    def receive(flight: InFlight, plan: Any, groups: Any) -> None:
        post(flight, plan, groups)
        rank, receives = receives_of(flight)
        if rank == 0 and threading.current_thread().name == "lane-plane":
            buffers.extend(weakref.ref(one.buffer) for one in receives if one.message[0].heads == 0)

    def look(_q: Any, k: torch.Tensor, v: torch.Tensor, *_: Any) -> None:
        for found, x in zip(storages, (k, v), strict=True):
            found.add((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
        alive.append(sum(buffer() is not None for buffer in buffers))

    with mock.patch.object(InFlight, "post_receives", receive):
        local = [Counting(look if rank == 0 else lambda *_: None) for rank in range(size)]
        Ranks(world, local=local.__getitem__, exchange="split", chunks=chunks).call([RUN[0]])
    tokens = world.image + RUN[0].text
    assert [{nbytes for _, nbytes in found} for found in storages] == [{tokens * 2 * 2 * 8 * 4}] * 2
    assert [len(found) for found in storages] == [1, 1] and buffers and alive[-1] == 0


def test_chunks_are_put_in_place_in_the_order_in_which_attention_needs_them(monkeypatch):
    """The first ones of q, k and v before anybody asks, then q's and those of keys that are attended to together."""
    landed, land = list[Any](), InFlight.land

    def note(flight: InFlight, target: Any) -> None:
        if receives_of(flight)[0] == 0:
            landed.append(target)
        land(flight, target)

    monkeypatch.setattr(InFlight, "land", note)
    Ranks(World(4), exchange="split", chunks=2).call([RUN[0]])
    targets = list(dict.fromkeys(landed))
    assert ["qkvo"[targets.index(one)] for one in landed] == [*"qkvqvk", *"oo"]


@given(topology=topologies(largest=24), chunks=st.integers(1, 9), name=st.sampled_from(sorted(EXCHANGES)))
@settings(max_examples=25, deadline=None)
def test_stages_are_the_plan_cut_in_pieces(topology, chunks, name):
    """The same blocks between the same ranks, each once, whatever is late; and both ends agree on the stage."""
    for rank in {0, topology.size // 2, topology.size - 1}:
        stages = Stages(topology, rank, chunks)
        assert sorted(sum(stages.chunks, ())) == list(range(topology.size)) and rank in stages.chunks[0]
        assert len(stages.chunks) == len(chunk_ranks(topology, 0, chunks)) <= chunks
        plan = load(EXCHANGES, name)(topology, rank)
        for way, whole in (("forward", plan), ("back", reverse(plan))):
            cut = [part for pair in stages.of(plan, way) for part in pair]
            for side in ("sends", "receives"):
                assert blocks_of(whole, side) == sum((blocks_of(part, side) for part in cut), Counter())
            for number, pair in enumerate(stages.of(plan, way)):
                for part in pair:
                    for _, block in blocks_of(part, "receives"):
                        assert block.rows in chunk_ranks(topology, block.heads, chunks)[number]


def blocks_of(plan, side: str) -> Counter:
    return Counter((peer, b) for phase in plan for peer, message in getattr(phase, side).items() for b in message)


def test_chunks_go_by_distance():
    assert [ranks[0] // 12 for ranks in chunk_ranks(topology_of("aurora", 48), 13, 4)] == [1, 2, 3, 0]


def test_what_waits_for_another_node_is_late():
    """Only detours that end here wait for a slow link before they are passed on; on the way back relays do as well."""
    topology = topology_of("aurora", 24)
    plans = [split_plan(topology, rank, nic_detours(topology)) for rank in range(24)]
    late = [
        [any(p.sends for p in parts[2]) for parts in Stages(topology, r, 2).of(plans[r], "forward")] for r in range(24)
    ]
    assert any(far for _, far in late) and not any(near for near, _ in late)
    one = topology_of("aurora", 12)
    assert not any(p.sends for parts in Stages(one, 0, 3).of(split_plan(one, 0), "back") for p in parts[2])


# Waits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", beside(__file__), ids=lambda how: " ".join(map(str, how.values())))
def test_no_message_is_left_when_an_engine_is_left(how: dict[str, Any]) -> None:
    """Neither what no call waits for, nor what ranks decide by, nor weights."""
    model, messages = sd3_transformer(4).to(torch.bfloat16), Messages()
    inputs = sd3_inputs(1, 2, 2, 3, torch.bfloat16)

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, **how):
            for step in range(3):
                own(**inputs | {"timestep": torch.full_like(inputs["timestep"], 0.9 - 0.1 * step)})
        assert not messages.unwaited(transport.rank)

    with messages.watched():
        run_ranks(2, work)
    assert messages.posted == set() and messages.most_bytes[0] > 0


def test_a_layer_that_is_forgotten_has_received_what_was_late() -> None:
    """As where another part of the ranks computes its next call."""
    ranks = Ranks(World(2), arrival="displaced", exchange="flat")

    def forget(rank: int, codec: Any) -> None:
        codec.forget(LAYER)
        assert not ranks.messages.unwaited(rank) and not codec.bytes_held()

    ranks.call(RUN[:3], forget)


def test_a_chunk_of_the_output_that_cannot_be_put_in_place_fails_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: here the first of three on each rank."""
    world, land, seen = World(4, heads=6, image=24), InFlight.land, set[int]()
    whole = sum(world.layout(RUN[0]).rows)

    def fail_at_first(flight: InFlight, target: Target) -> None:
        (x_BLHW,) = target.tensors
        if x_BLHW.shape[1] < whole and id(x_BLHW) not in seen:
            seen.add(id(x_BLHW))
            raise RuntimeError("out of memory")
        land(flight, target)

    monkeypatch.setattr(InFlight, "land", fail_at_first)
    with pytest.raises(RuntimeError, match="out of memory"):
        Ranks(world, exchange="split", chunks=3).call([RUN[0]])

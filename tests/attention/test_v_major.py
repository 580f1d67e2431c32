"""V-Major gives, bit for bit, what one process with whole tensors gives; and what it sends is what was selected."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_worlds import Call, Ranks, World
from covering import examples
from hypothesis import given, strategies
from seams import sums_on_the_device
from torch.nn.functional import scaled_dot_product_attention
from v_major_reference import Reference
from value_tables import beside

from cocodiff.attention.strategy import LayerKey
from cocodiff.attention.v_major.selection import Cards, Drift, DriftNotes, Schedule, Selection
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.config.machine import Machine
from cocodiff.engine.assemble import build_strategy
from cocodiff.exchange.codec import merge_notes
from cocodiff.kernels import Kernels
from cocodiff.kernels.residual import Candidates
from cocodiff.models.adapter import image_and_text
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout, Segment, Segments

CASES = beside(__file__)
SCHEDULES: dict[str, dict[str, Any]] = CASES["schedules"]


@dataclass(frozen=True)
class Drifting(World):
    """Tensors that drift from a start, each token at a pace of its own. frames: of 7 tokens of text and 23 of an image,
    two frames of unlike size, divided each for itself, between other ones."""

    heads: int = 9
    text: int = 7
    channels: int = 4
    text_first: bool = True
    frames: bool = False

    def segments(self, call: Call) -> Segments:
        if self.frames:
            image, text = image_and_text(15, 5)
            return text, image, replace(image, name="frame", tokens=8), Segment("end", 2)
        return image_and_text(self.image, self.text, self.text_first)

    @cached_property
    def motion(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of q, k and v [3, B, S, H, D]: where they start, where to and how fast they drift."""
        generator = torch.Generator().manual_seed(7)
        shape = (3, self.batch, self.image + self.text, self.heads, self.channels)
        start, drift = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        return start, drift, torch.rand((1, *shape[1:3], 1, 1), generator=generator) ** 3

    def tensors(self, call: Call) -> list[torch.Tensor]:
        start, drift, pace = self.motion
        return list(start + 0.3 * math.sin(0.4 * call.step) * pace * drift)


def run_of(steps: int, run: int = 0) -> list[Call]:
    return [Call(step, run, steps=steps) for step in range(steps)]


def selecting(world: World, schedule: str | dict[str, Any], **settings: Any) -> Ranks:
    named = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    return Ranks(world, selection="v_major", **named, **{"order": "v_first", **settings})


def check(world: Drifting, steps: int, schedule: str, **settings: Any) -> None:
    calls, ranks = run_of(steps), selecting(world, schedule, **settings)
    of_ranks, config = ranks.call(calls), ranks.config
    layout = world.layout(calls[0])
    expected = Reference(world.topology, layout, Schedule(config), config.scoring, config.reference)
    for call in calls:
        whole_BSHD = torch.cat(list(expected.attend(*world.tensors(call), call.step, steps)), 2)
        for rank, one in enumerate(of_ranks):
            own = whole_BSHD[:, layout.row_slices[rank]]
            assert torch.equal(one.outputs[call.step], own), f"step {call.step}, rank {rank}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    size=strategies.sampled_from((2, 3, 4, 6, 12)),
    image=strategies.integers(12, 40),
    text=strategies.integers(0, 9),
    heads=strategies.integers(12, 15),
    batch=strategies.integers(1, 2),
    text_first=strategies.booleans(),
    frames=strategies.booleans(),
    scoring=strategies.sampled_from(("source", "card")),
    reference=strategies.sampled_from(("prev", "sent")),
    order=strategies.sampled_from(("joint", "v_first")),
    exchange=strategies.sampled_from(("flat", "tapa", "split")),
    steps=strategies.sampled_from((6, 20)),
)
@examples(3, exhaustive=20)
def test_equals_one_process(
    schedule, size, image, text, heads, batch, text_first, frames, steps, scoring, exchange, **settings
):
    machine = "aurora" if size == 12 else "local"
    frames = frames and size < 8  # the smaller one has 8 tokens
    image, text = (23, 7) if frames else (image, text)
    world = Drifting(size, heads, image, 4, batch, machine, text=text, text_first=text_first, frames=frames)
    check(world, steps, schedule, scoring=scoring, exchange="tapa" if scoring == "card" else exchange, **settings)


@pytest.mark.parametrize(("size", "machine", "chunks", "exchange", "order", "scoring"), CASES["chunks"])
def test_in_chunks_it_is_the_same_up_to_rounding(size, machine, chunks, exchange, order, scoring):
    """Chunks decide when, not what: the same tokens travel, the same bytes; attention sums in another order."""
    world, calls = Drifting(size, max(size, 9), 29, machine=machine, text=5), run_of(7)
    schedule = "threshold" if scoring == "source" else "cosine"
    settings = {"scoring": scoring, "exchange": exchange, "order": order}
    for ours, whole in zip(
        selecting(world, schedule, chunks=chunks, **settings).call(calls),
        selecting(world, schedule, **settings).call(calls),
        strict=True,
    ):
        assert ours.sent == whole.sent and ours.codec.bytes_held() == whole.codec.bytes_held()
        torch.testing.assert_close(ours.outputs, whole.outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scoring", "reference", "exchange"),
    [("source", "sent", "split"), ("source", "prev", "flat"), ("card", "prev", "tapa")],
)
@pytest.mark.parametrize(("size", "ring", "placement"), [(6, 2, "topology"), (6, 3, "usp"), (12, 3, "topology")])
def test_with_a_ring_it_equals_one_process(size, ring, placement, scoring, reference, exchange):
    """Every group selects among its own tokens; their rings carry whole keys and values, stale ones too."""
    world, calls = Drifting(size, image=31), run_of(6)
    settings = {"scoring": scoring, "reference": reference, "exchange": exchange}
    ranks = selecting(world, "fixed", ring=ring, placement=placement, **settings)
    mesh, of_ranks = ranks.mesh, ranks.call(calls)
    layouts = mesh.layouts(world.segments(calls[0]), world.heads)
    where = [range(31 + world.text)[world.rows(calls[0], rank)] for rank in range(size)]
    rows = [[row for rank in group for row in where[rank]] for group in mesh.groups]
    expected = [
        Reference(part, layout, Schedule(ranks.config), scoring, reference)
        for part, layout in zip(mesh.parts, layouts, strict=True)
    ]
    for call in calls:
        for group, one in enumerate(expected):
            one.attend(*(x[:, rows[group]] for x in world.tensors(call)), call.step, 6)
        q, k, v = (torch.cat([one.caches[n] for one in expected], 1).transpose(1, 2) for n in range(3))
        out, at = scaled_dot_product_attention(q, k, v).transpose(1, 2), 0
        for rank in (rank for group in mesh.groups for rank in group):
            own = out[:, at : at + len(where[rank])]
            torch.testing.assert_close(of_ranks[rank].outputs[call.step], own, rtol=1e-5, atol=1e-6)
            at += len(where[rank])
    assert any(one.active_counts[-1] < world.batch * (31 + world.text) for one in expected)


def test_a_second_image_sees_nothing_of_the_first():
    for outputs, _, codec in selecting(Drifting(4, 13, 29), "fixed").call([*run_of(8), *run_of(8, run=1)]):
        assert all(torch.equal(a, b) for a, b in zip(outputs[:8], outputs[8:], strict=True))
        assert codec.bytes_held() > 0
        codec.end()
        assert codec.bytes_held() == 0


def test_a_call_after_a_step_that_left_the_layer_out_is_whole():
    calls, schedule = run_of(8), {"schedule": "fixed", "ratio": 0.6, "warmup": 1, "sync_interval": 0}
    for one in selecting(Drifting(3, 6, 29), schedule).call([*calls[:3], *calls[4:6]]):
        of_calls = one.bytes_of_calls()
        assert [count == of_calls[0] for count in of_calls] == [True, False, False, True, False]


def test_ties_go_to_the_first_positions():
    among = Candidates.of_sets([torch.arange(5).view(1, 1, 5)], torch.device("cpu"))
    for share, active in ((0.4, [1, 0, 0, 1, 1]), (0.8, [0, 0, 0, 1, 0]), (0.39, [1, 0, 1, 1, 1])):
        assert Kernels().choose(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), among, share, 0.0).tolist() == [*active, 1]


def test_schedules_over_twenty_steps():
    linear, reverse, cosine = (Schedule(Config(schedule=rule)) for rule in ("linear", "reverse", "cosine"))
    assert [linear.warm_steps(n) for n in (20, 5, 50)] == [2, 1, 5] and Schedule(Config(warmup=0)).warm_steps(20) == 0
    assert [linear.is_full(t, 20) for t in (0, 1, 2, 11, 12, 13, 19)] == [True, True, False, False, True, False, False]
    assert [one.stable_fraction(19, 20) for one in (linear, reverse, cosine)] == [1, 0, 1]
    listed = Schedule(Config(schedule="list", ratios=(0.1, 0.2, 0.3, 0.5)))
    assert [listed.stable_fraction(t, 20) for t in (2, 7)] == [0.3, 0.5] and linear.stable_fraction(2, 20) == 0
    assert all(Schedule(Config(schedule="fixed", sync_interval=1)).is_full(t, 20) for t in range(20))


SINGLE = Machine("single", tiles=1, planes=(0,), cards=3)


@pytest.mark.parametrize("fraction", [0.0, 0.35, 1.0])
def test_on_cards_of_one_tile_a_fraction_tells_what_travels_without_the_device(fraction, monkeypatch):
    """Nothing of a tensor is read by the host, and the choice is the one for which it reads the numbers of rows."""
    topology = Topology.build(SINGLE, 3)
    layout = Layout.build(topology, image_and_text(41, 7), 6)
    cards, kernels = Cards.build(topology, layout, 2, 1, torch.device("cpu"), False, 0), Kernels("torch")
    scores = torch.rand(2 * 41, generator=torch.Generator().manual_seed(0))
    active_T = kernels.choose(scores, cards.among, fraction, 0.0)
    expected = Selection.build(active_T, layout, 2, replace(cards, single=False), fraction, kernels)
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, None)
    chosen = Selection.build(active_T, layout, 2, cards, fraction, kernels)
    monkeypatch.undo()
    assert chosen.layout == expected.layout and torch.equal(chosen.arriving, expected.arriving)
    assert all(map(torch.equal, chosen.of_rank, expected.of_rank))


@pytest.mark.full
def test_a_thousand_steps_take_the_memory_of_the_first_ones():
    """Also what is noted of each: memory of this process, of two ranks after a quarter of the steps and at the end."""
    world, pages, layers = Drifting(2, 4, 24, text=8), [], [LayerKey(f"layer {n}") for n in range(8)]
    config, tensors = selecting(world, "cosine", scoring="card", reference="prev").config, world.tensors(Call(0))

    def work(transport: Any) -> None:
        trace = Trace(transport.rank)
        strategy = build_strategy(
            config, Mesh.build(world.topology), RankContext(transport, world.topology, trace, Kernels("torch"))
        )
        for call in run_of(1000):
            strategy.codec.begin_step(call.step_info)
            for layer in layers:
                strategy.attend(world.qkv(call, tensors, transport.rank), layer)
            trace.clear()
            if transport.rank == 0 and call.step % 250 == 249:
                pages.append(int(Path("/proc/self/statm").read_text().split()[1]))

    run_ranks(2, work)
    assert (pages[3] - pages[0]) * os.sysconf("SC_PAGE_SIZE") < 4e6


# What is noted of a run -----------------------------------------------------------------------------------------------


def test_notes_are_sums_over_calls_and_runs_that_take_no_more_memory_than_one_run():
    notes = DriftNotes()
    for run in range(3):
        notes.ensure_step(0)
        for layer_key in range(4):
            change_BN, norm_BN = torch.full((2, 5), 0.5), torch.full((2, 5), float(1 + layer_key))
            notes.scored(1, torch.stack([change_BN, norm_BN]))
            notes.chosen(1, 10, 4)
        if run < 2:
            notes.sync_to_host()
            assert not sums_on_the_device(notes)
    moved = Drift(change=12 * 5.0, norm=3 * 10 * (1 + 2 + 3 + 4), tokens=120, stable=48)
    assert notes.by_step() == {0: Drift(), 1: moved}
    assert notes.by_step() == notes.by_step()
    notes.clear()
    assert notes.by_step() == {}


def test_the_profile_of_ranks_weighs_them_by_what_they_compared():
    one, other = Drift(change=1.0, norm=4.0, tokens=10, stable=5), Drift(change=2.0, norm=8.0, tokens=30, stable=5)
    first, second = merge_notes([{0: Drift(), 1: one}, {1: other}])
    assert first == {"step": 0, "change": None, "stable_fraction": 0.0}
    assert second == {"step": 1, "change": pytest.approx(3 / 12), "stable_fraction": 10 / 40}

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
from covering import covering, examples
from hypothesis import given
from hypothesis import strategies as st
from v_major_reference import Reference
from worlds import topology_of

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.attention.ulysses import Ulysses, joint, v_first
from cocodiff.attention.v_major.codec import VMajor
from cocodiff.attention.v_major.selection import Cards, Schedule, Selection, stable_tokens
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.config import Config
from cocodiff.config.machine import Machine, Topology
from cocodiff.exchange.codec import StepInfo
from cocodiff.exchange.exchange import Exchange
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout, Segment, Segments
from cocodiff.topology.routes.chunks import Chunking

D = 4
ALL = slice(None)
SCHEDULES = {
    "linear": Schedule("linear"),
    "fixed": Schedule("fixed", ratio=0.6, sync_interval=4),
    "reverse": Schedule("reverse", warmup=3, sync_interval=0),
    "cosine": Schedule("cosine", sync_interval=7),
    "list": Schedule("list", ratios=(0.0, 0.2, 0.9, 0.4)),
    "threshold": Schedule("threshold", threshold=0.12, sync_interval=0),
}


@dataclass(frozen=True)
class Case:
    """Attention calls of one layer over all steps."""

    size: int
    image: int
    text: int
    heads: int
    batch: int = 1
    steps: int = 20
    machine: str = "local"
    text_first: bool = True
    channels: int = D

    @property
    def segments(self) -> Segments:
        return image_and_text(self.image, self.text, self.text_first)

    def layout(self) -> Layout:
        return Layout.build(topology_of(self.machine, self.size), self.segments, self.heads)

    @cached_property
    def motion(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of q, k and v [3, B, S, H, D]: a start that drifts, each token at a pace of its own."""
        generator = torch.Generator().manual_seed(7)
        shape = (3, self.batch, self.image + self.text, self.heads, self.channels)
        start, drift = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        return start, drift, torch.rand((1, *shape[1:3], 1, 1), generator=generator) ** 3

    def tensors(self, step: int, rows: slice = ALL) -> list[torch.Tensor]:
        """q, k and v [B, L, H, D] of some rows in rank order."""
        start, drift, pace = (x[:, :, rows] for x in self.motion)
        return list(start + 0.3 * math.sin(0.4 * step) * pace * drift)


class FramesCase(Case):
    """Of 7 tokens of text and 23 of an image: two frames of unlike size, divided each for itself, between other
    ones."""

    @property
    def segments(self) -> Segments:
        image, text = image_and_text(15, 5)
        return text, image, replace(image, name="frame", tokens=8), Segment("end", 2)


def distributed(case: Case, make: Any, repeats: int = 1, chunks: int = 1) -> list[Any]:
    """Every rank's outputs [B, L, H, D] of all steps, its strategy and its trace. make: (parts of a strategy) -> it."""
    layout, topology = case.layout(), topology_of(case.machine, case.size)
    assert len(case.motion) == 3  # drawn once, before ranks ask for it together

    def work(transport: Any) -> Any:
        trace = Trace(transport.rank)
        exchange_name, build = make
        exchange = Exchange(exchange_name, topology, transport, trace, chunking=Chunking(chunks))
        strategy = build(topology, exchange, trace, transport)
        outputs = []
        for run in range(repeats):
            for step in range(case.steps):
                strategy.codec.begin_step(StepInfo(run, step, case.steps))
                q, k, v = (lambda x=x: x for x in case.tensors(step, layout.row_slices[transport.rank]))
                qkv = LazyQKV(q, k, v, case.segments, case.heads)
                outputs.append(strategy.attend(qkv, LayerKey("layer")).clone())
        return outputs, strategy, trace

    return run_ranks(case.size, work)


def v_major(schedule: Schedule, scoring: str, reference: str, order: Any = v_first, exchange: str = "tapa") -> Any:
    def build(topology: Any, ex: Any, trace: Any, transport: Any) -> Ulysses:
        codec = VMajor(Config(scoring=scoring, reference=reference), ex, transport)
        codec.schedule = schedule
        return Ulysses(topology, ex, trace, order, codec)

    return exchange, build


def full(order: Any = v_first, exchange: str = "tapa") -> Any:
    return exchange, lambda topology, ex, trace, transport: Ulysses(topology, ex, trace, order)


def check(case: Case, schedule: Schedule, scoring: str, reference: str, order: Any, exchange: str) -> None:
    layout, topology = case.layout(), topology_of(case.machine, case.size)
    expected = Reference(topology, layout, schedule, scoring, reference)
    of_ranks = distributed(case, v_major(schedule, scoring, reference, order, exchange))
    for step in range(case.steps):
        of_heads = expected.attend(*case.tensors(step), step, case.steps)
        whole_BSHD = torch.cat(list(of_heads), 2)
        for rank, (outputs, _, _) in enumerate(of_ranks):
            assert torch.equal(outputs[step], whole_BSHD[:, layout.row_slices[rank]]), f"step {step}, rank {rank}"


@pytest.mark.parametrize(
    ("schedule", "scoring", "reference", "order"),
    covering(SCHEDULES, ("source", "card"), ("prev", "sent"), (joint, v_first)),
)
def test_equals_one_process(schedule, scoring, reference, order):
    check(Case(5, 23, 7, 9, batch=2), SCHEDULES[schedule], scoring, reference, order, "tapa")


@pytest.mark.parametrize(("scoring", "exchange"), [("source", "split"), ("card", "tapa")])
def test_equals_one_process_with_other_segments(scoring, exchange):
    check(FramesCase(5, 23, 7, 9, batch=2), SCHEDULES["fixed"], scoring, "sent", v_first, exchange)


@given(
    size=st.sampled_from((2, 3, 4, 6, 12)),
    image=st.integers(12, 40),
    text=st.integers(0, 9),
    heads=st.integers(12, 15),
    batch=st.integers(1, 2),
    text_first=st.booleans(),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    scoring=st.sampled_from(("source", "card")),
    reference=st.sampled_from(("prev", "sent")),
    order=st.sampled_from((joint, v_first)),
    exchange=st.sampled_from(("flat", "tapa", "split")),
    steps=st.sampled_from((6, 20)),
)
@examples(12, exhaustive=60)
def test_equals_one_process_anywhere(
    size, image, text, heads, batch, schedule, text_first, scoring, reference, order, exchange, steps
):
    machine = "aurora" if size == 12 else "local"
    case = Case(size, image, text, heads, batch, steps, machine, text_first)
    exchange = "tapa" if scoring == "card" else exchange
    check(case, SCHEDULES[schedule], scoring, reference, order, exchange)


@pytest.mark.parametrize("size", [2, 3, 6, 12])
@pytest.mark.parametrize("schedule", [Schedule("linear", sync_interval=1), Schedule("fixed", ratio=0.0)])
@pytest.mark.parametrize(("scoring", "reference"), [("source", "sent"), ("card", "prev")])
def test_with_nothing_stable_it_is_the_full_exchange(size, schedule, scoring, reference):
    case = Case(size, 29, 5, 13, steps=6)
    for (ours, _, _), (plain, _, _) in zip(
        distributed(case, v_major(schedule, scoring, reference)), distributed(case, full()), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("size", "machine", "chunks", "exchange", "order", "scoring"),
    [
        (5, "local", 3, "split", joint, "source"),
        (5, "local", 2, "flat", v_first, "source"),
        (6, "local", 3, "tapa", v_first, "card"),
        (6, "local", 2, "tapa", joint, "card"),
        (12, "aurora", 3, "split", v_first, "source"),
    ],
)
def test_in_chunks_it_is_the_same_up_to_rounding(size, machine, chunks, exchange, order, scoring):
    """Chunks decide when, not what: the same tokens travel, the same bytes; attention sums in another order."""
    case = Case(size, 29, 5, max(size, 9), batch=2, steps=7, machine=machine)
    make = v_major(SCHEDULES["threshold" if scoring == "source" else "cosine"], scoring, "sent", order, exchange)
    for (ours, strategy, trace), (whole, plain, once) in zip(
        distributed(case, make, chunks=chunks), distributed(case, make), strict=True
    ):
        assert trace.bytes() == once.bytes() and strategy.codec.bytes_held() == plain.codec.bytes_held()
        for a, b in zip(ours, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scoring", "exchange"), [("source", "split"), ("card", "tapa")])
def test_in_chunks_with_nothing_stable_it_is_the_full_exchange(scoring, exchange):
    case, always = Case(6, 29, 5, 13, steps=4), Schedule("linear", sync_interval=1)
    lossless = distributed(case, v_major(always, scoring, "sent", v_first, exchange), chunks=3)
    for (ours, _, _), (plain, _, _) in zip(lossless, distributed(case, full(v_first, exchange), chunks=3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_second_image_sees_nothing_of_the_first():
    case = Case(4, 29, 5, 13, steps=8)
    for outputs, strategy, _ in distributed(case, v_major(SCHEDULES["fixed"], "source", "sent"), repeats=2):
        assert all(torch.equal(a, b) for a, b in zip(outputs[:8], outputs[8:], strict=True))
        assert strategy.codec.bytes_held() > 0
        strategy.codec.end()
        assert strategy.codec.bytes_held() == 0


@pytest.mark.parametrize(("scoring", "reference"), [("source", "sent"), ("card", "prev")])
def test_what_travels_is_what_was_selected(scoring, reference):
    """Plane bytes of q, k and v, summed over ranks, follow r(t) exactly; the output's and the selection's come on top.

    The text is divided evenly and image tokens divide by the ranks, so that every card has as many tokens."""
    schedule, batch = Schedule("fixed", ratio=0.75, sync_interval=10), 2
    case = Case(12, 48, 12, 12, batch=batch, machine="aurora")
    of_ranks = distributed(case, v_major(schedule, scoring, reference))
    sent = sum(trace.bytes()["plane"] for _, _, trace in of_ranks)
    cards, tokens_of_card, text_of_card, heads_of_plane = 6, 8, 2, 6
    row = 4 * D * heads_of_plane * (cards - 1) / cards  # bytes of a token that leave its card in a plane
    planes_of_a_card = 2
    active = [tokens_of_card - math.floor(tokens_of_card * r) for r in realised(schedule, case.steps)]
    qkv = sum(3 * cards * planes_of_a_card * batch * (text_of_card + n) * row for n in active)
    out = case.steps * cards * planes_of_a_card * batch * (text_of_card + tokens_of_card) * row
    chosen = selection_bytes(scoring, schedule, case)
    assert sent == qkv + out + chosen


def realised(schedule: Schedule, steps: int) -> list[float]:
    return [0.0 if schedule.is_full(t, steps) else schedule.stable_fraction(t, steps) for t in range(steps)]


def selection_bytes(scoring: str, schedule: Schedule, case: Case) -> int:
    """Scores (4 bytes a token, from every rank) or masks (1 byte a token, from every card) to the plane's others."""
    steps = sum(not schedule.is_full(t, case.steps) for t in range(case.steps))
    a_token = 4 if scoring == "source" else 1
    return steps * case.batch * case.image * a_token * 5


@pytest.mark.parametrize(("image", "text"), [(1536, 29), pytest.param(4096, 77, marks=pytest.mark.exhaustive)])
def test_a_fixed_three_quarters_sends_a_third(image, text):
    """Of q, k and v over 20 steps, two of them warm, a sync every ten, with all overheads."""
    schedule = Schedule("fixed", ratio=0.75, warmup=2, sync_interval=10)
    case = Case(12, image, text, 12, machine="aurora", channels=32)
    lossy = distributed(case, v_major(schedule, "source", "sent"))
    exact = distributed(replace(case, steps=1), full())
    spent, one_step = (sum(t.bytes()["plane"] for _, _, t in ranks) for ranks in (lossy, exact))
    whole = one_step * case.steps
    out = whole / 4
    assert (spent - out) / (whole - out) <= 0.38


def test_ties_go_to_the_first_positions():
    score = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]])
    assert stable_tokens(score, 0.4, Kernels()).tolist() == [[False, True, True, False, False]]
    assert stable_tokens(score, 0.8, Kernels()).tolist() == [[True, True, True, False, True]]
    assert stable_tokens(score, 0.39, Kernels()).tolist() == [[False, True, False, False, False]]


def test_schedules_over_twenty_steps():
    linear = Schedule("linear")
    assert linear.warm_steps(20) == 2 and linear.warm_steps(5) == 1 and linear.warm_steps(50) == 5
    assert [linear.is_full(t, 20) for t in (0, 1, 2, 11, 12, 13, 19)] == [True, True, False, False, True, False, False]
    assert linear.stable_fraction(2, 20) == 0 and linear.stable_fraction(19, 20) == 1
    assert Schedule("reverse").stable_fraction(19, 20) == 0
    assert Schedule("cosine").stable_fraction(19, 20) == 1
    assert Schedule("list", ratios=(0.1, 0.5)).stable_fraction(7, 20) == 0.5
    assert all(Schedule("fixed", sync_interval=1).is_full(t, 20) for t in range(20))


SINGLE = Machine("single", tiles=1, planes=(0,), cards=3)


@pytest.mark.parametrize("fraction", [0.0, 0.35, 1.0])
def test_on_cards_of_one_tile_a_fraction_tells_what_travels_without_the_device(fraction, monkeypatch):
    """Nothing of a tensor is read by the host, and the choice is the one for which it reads the numbers of rows."""
    topology = Topology.build(SINGLE, 3)
    layout = Layout.build(topology, image_and_text(41, 7), 6)
    cards = Cards.build(topology, layout, torch.device("cpu"))
    score_BS = torch.rand(2, 41, generator=torch.Generator().manual_seed(0))
    active_BS = cards.active(score_BS, score_BS, fraction, 0.0, Kernels("torch"))
    expected = Selection.build(active_BS, layout, replace(cards, single=False), fraction)
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, None)
    chosen = Selection.build(active_BS, layout, cards, fraction)
    monkeypatch.undo()
    assert chosen.layout == expected.layout and torch.equal(chosen.arriving, expected.arriving)
    assert all(map(torch.equal, chosen.of_rank, expected.of_rank))


@pytest.mark.full
def test_a_thousand_steps_take_the_memory_of_the_first_ones():
    """Also what is noted of each: memory of this process, of two ranks after a quarter of the steps and at the end."""
    case, steps, pages = Case(2, 24, 8, 4), 1000, []
    layout, topology = case.layout(), topology_of(case.machine, case.size)
    exchange_name, build = v_major(SCHEDULES["cosine"], "card", "prev")
    tensors = case.tensors(0)

    def work(transport: Any) -> None:
        trace = Trace(transport.rank)
        strategy = build(topology, Exchange(exchange_name, topology, transport, trace), trace, transport)
        own = [x[:, layout.row_slices[transport.rank]] for x in tensors]
        for step in range(steps):
            strategy.codec.begin_step(StepInfo(0, step, steps))
            q, k, v = (lambda x=x: x for x in own)
            for layer in range(8):
                strategy.attend(LazyQKV(q, k, v, case.segments, case.heads), LayerKey(f"layer {layer}"))
            trace.clear()
            if transport.rank == 0 and step % 250 == 249:
                pages.append(int(Path("/proc/self/statm").read_text().split()[1]))

    run_ranks(case.size, work)
    assert (pages[3] - pages[0]) * os.sysconf("SC_PAGE_SIZE") < 4e6

"""Sums over spans: what is hidden, what is exposed."""

from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import pytest
from cocodiff_bench.hidden import Late, length, overlap, summarise, union
from cocodiff_bench.model_step import Measured, key_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodiff.comm.trace import Span
from cocodiff.planner.costs import WHOLE, CallKind

LAYER = "blocks.attn"
intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


def span(name: str, lane: str, start: int, end: int, layer: str = LAYER) -> Span:
    return Span(name, lane, start, end, layer)


def v_first_call(delay: int = 0) -> list[Span]:
    """v's first phase is 20..50 and its wait starts at 40: 20 of 30 are hidden. Times in nanoseconds."""
    spans = [
        span("project v", "main", 10, 20),
        span("v sibling", "sibling", 20, 50),
        span("project qk", "main", 20, 40),
        span("wait for v", "main", 40, 60),
        span("v plane", "plane", 50, 60),
        span("wait for qk", "main", 60, 80),
        span("qk sibling", "sibling", 50, 70),
        span("qk plane", "plane", 70, 80),
        span("attention", "main", 80, 90),
        span("wait for o", "main", 90, 100),
        span("o plane", "plane", 90, 95),
        span("o sibling", "sibling", 95, 100),
    ]
    return [s._replace(start_ns=s.start_ns + delay, end_ns=s.end_ns + delay) for s in spans]


def joint_call() -> list[Span]:
    return [
        span("project qk", "main", 0, 30),
        span("project v", "main", 30, 40),
        span("qkv plane", "plane", 40, 70),
        span("wait for qkv", "main", 45, 70),
        span("attention", "main", 70, 75),
        span("o plane", "plane", 75, 85),
        span("wait for o", "main", 75, 85),
    ]


def test_v_first_hides_what_main_does_not_wait_for():
    (times,) = summarise({"tapa": {0: v_first_call()}})
    assert (times.mode, times.layer, times.calls) == ("tapa", LAYER, 1)
    assert times[3:] == pytest.approx([10e-9, 20e-9, 30e-9, 20e-9, 70e-9, 50e-9, 20e-9])


def test_joint_order_has_no_phase_of_v():
    (times,) = summarise({"flat": {0: joint_call()}})
    assert (times.v_phase1_s, times.v_phase1_hidden_s) == (None, None)
    assert times[7:] == pytest.approx([40e-9, 35e-9, 5e-9])


def test_the_only_phase_of_flat_is_its_first():
    spans = [s for s in v_first_call() if "sibling" not in s.name]
    (times,) = summarise({"flat": {0: spans}})
    assert (times.v_phase1_s, times.v_phase1_hidden_s) == pytest.approx((10e-9, 0))


def test_means_are_over_calls_and_ranks():
    slow = [s._replace(start_ns=3 * s.start_ns, end_ns=3 * s.end_ns) for s in v_first_call()]
    (times,) = summarise({"tapa": {0: v_first_call() + v_first_call(1000), 1: slow + v_first_call(1000)}})
    assert times.calls == 4
    assert times.v_phase1_s == pytest.approx(30e-9 * (1 + 1 + 3 + 1) / 4)


def test_a_rank_hides_behind_its_own_work_only():
    """Rank 1 waits all the time; that exposes nothing of rank 0's."""
    idle = [span("wait for qkv", "main", 0, 1000), span("attention", "main", 1000, 1001)]
    alone, together = (summarise({"tapa": ranks})[0] for ranks in ({0: v_first_call()}, {0: v_first_call(), 1: idle}))
    assert together.hidden_s == pytest.approx(alone.hidden_s / 2) and together.calls == 2


def test_modes_and_layers_are_apart_and_the_rest_is_left_out():
    other = [s._replace(layer="blocks.attn2") for s in v_first_call(500)]
    gather = span("gather", "gather", 0, 400, layer="")
    spans = {"b": {0: [gather, *other, *v_first_call()]}, "a": {0: joint_call()}, "none": {0: [gather]}}
    assert [(t.mode, t.layer) for t in summarise(spans)] == [("b", LAYER), ("b", "blocks.attn2"), ("a", LAYER)]


def displaced_call() -> list[Span]:
    """q, k and v go late and are on their way in 40..60, a rank waits for something else in 55..70; o was waited for at
    the next call, for half of its time."""
    return [
        span("encode q", "main", 30, 35),
        Span("late qkv plane", "plane", 40, 60, LAYER, 600),
        span("attention", "main", 40, 55),
        Span("wait for outputs", "main", 55, 70, ""),
        Span("late o plane", "plane", 70, 90, LAYER, 200),
        span("wait for late o", "main", 80, 90),
    ]


def test_late_bytes_are_hidden_while_main_waits_for_nothing():
    others = [Span("late qkv plane", "plane", 0, 10, "blocks.attn2", 50)]
    assert Late.of([joint_call()]) == (0, 0)
    assert Late.of([others]) == (50, 50)
    of_two_ranks = Late.of([[*displaced_call(), *others], displaced_call()])
    assert of_two_ranks == (1650, pytest.approx(2 * (600 * 15 / 20 + 200 * 10 / 20) + 50))


def test_a_step_tells_how_much_of_what_it_sends_late_is_hidden():
    """Of calls of several kinds, each by its part of the steps."""
    qkv, qkvo = CallKind(displaced="qkv"), CallKind(displaced="qkvo")
    late = {
        key_of("ahead", qkvo): Late.of([displaced_call(), displaced_call()]),
        key_of("ahead", qkv): Late(1200, 1200.0),
    }
    assert late[key_of("ahead", qkvo)] == (1600, pytest.approx(1100))
    steps = [{WHOLE: 1.0}, {qkvo: 0.5, qkv: 0.25, CallKind(): 0.25}, {qkvo: 1.0}]
    share = partial(Measured.hidden_share, Mock(late=late))
    assert share("ahead", steps) == pytest.approx((1.5 * 1100 + 0.25 * 1200) / (1.5 * 1600 + 0.25 * 1200))
    assert share("ahead", steps[:1]) is None and share("another", steps) is None


@st.composite
def random_spans(draw: st.DrawFn) -> list[Span]:
    named = st.sampled_from(
        [
            ("wait for v", "main"),
            ("attention", "main"),
            ("project qk", "main"),
            ("v sibling", "sibling"),
            ("v plane", "plane"),
            ("qk plane", "plane"),
            ("o sibling", "sibling"),
        ]
    )
    times = draw(intervals)
    return [span(*draw(named), start, end, draw(st.sampled_from(["a", "b"]))) for start, end in times]


@settings(deadline=None)
@given(st.lists(random_spans(), min_size=1, max_size=3), st.randoms())
def test_exposed_and_hidden_make_communication(of_ranks, random):
    summary = summarise({"mode": dict(enumerate(of_ranks))})
    for times in summary:
        assert times.exposed_s + times.hidden_s == pytest.approx(times.communication_s)
        assert 0 <= times.hidden_s <= times.communication_s
        if times.v_phase1_s is not None:
            assert 0 <= times.v_phase1_hidden_s <= times.v_phase1_s
    shuffled = {rank: random.sample(spans, len(spans)) for rank, spans in enumerate(of_ranks)}
    assert sorted(summarise({"mode": shuffled}), key=str) == sorted(summary, key=str)


@given(intervals, intervals)
def test_interval_arithmetic_is_that_of_sets(first, second):
    def moments(some):
        return {moment for start, end in some for moment in range(start, end)}

    assert length(union(first)) == len(moments(first))
    assert overlap(union(first), union(second)) == len(moments(first) & moments(second))
    joined = union(first)
    assert all(a[1] < b[0] for a, b in pairwise(joined))

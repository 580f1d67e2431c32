"""Sums over spans: what of displaced messages is hidden."""

from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import pytest
from cocodiff_bench.model_step import StepMeasurement, key_of
from cocodiff_bench.stand_in import Late, overlap, union
from hypothesis import given
from hypothesis import strategies as st

from cocodiff.comm.trace import Span
from cocodiff.exchange.codec import WHOLE, CallKind

LAYER = "blocks.attn"
intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


def span(name: str, lane: str, start: int, end: int, layer: str = LAYER) -> Span:
    return Span(name, lane, start, end, layer)


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
    assert Late.of([[one for one in displaced_call() if not one.late_bytes]]) == (0, 0)
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
    share = partial(StepMeasurement.hidden_share, Mock(late=late))
    assert share("ahead", steps) == pytest.approx((1.5 * 1100 + 0.25 * 1200) / (1.5 * 1600 + 0.25 * 1200))
    assert share("ahead", steps[:1]) is None and share("another", steps) is None


@given(intervals, intervals)
def test_interval_arithmetic_is_that_of_sets(first, second):
    def moments(some):
        return {moment for start, end in some for moment in range(start, end)}

    joined = union(first)
    assert sum(end - start for start, end in joined) == len(moments(first))
    assert sum(overlap(one, union(second)) for one in joined) == len(moments(first) & moments(second))
    assert all(a[1] < b[0] for a, b in pairwise(joined))

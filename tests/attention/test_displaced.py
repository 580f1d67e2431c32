"""Displaced exchange gives, bit for bit, what one process with whole tensors gives, whatever arrives when."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import covering
from residual_worlds import RUN, TROUBLED, Ranks, World, check

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.mark.parametrize(
    ("codec", "predictor", "arrival", "exchange", "order", "dtype"),
    covering(
        ("none", "int2", "int4"),
        ("last", "taylor"),
        ("displaced", "adaptive"),
        ("flat", "tapa", "split"),
        ("joint", "v_first"),
        (torch.float32, torch.bfloat16),
    ),
)
def test_equals_one_process(codec, predictor, arrival, exchange, order, dtype):
    settings = {"codec": codec, "predictor": predictor, "exchange": exchange, "order": order, "arrival": arrival}
    reference = check(World(3, dtype=dtype), TROUBLED, tau=0.2, **settings)
    assert any(reference.displaced)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (World(2, channels=8), {"codec": "int2", "exchange": "flat"}),
        (World(5, heads=6, image=24, dtype=torch.bfloat16), {"codec": "none"}),
        (World(12, heads=13, image=63, machine="aurora"), {"codec": "none", "exchange": "split", "order": "v_first"}),
        (World(24, heads=25, image=31, machine="aurora", channels=8), {"codec": "int4", "order": "v_first"}),
    ],
)
def test_equals_one_process_on_any_number_of_ranks(world, settings):
    assert "qkv" in check(world, RUN, arrival="adaptive", tau=0.045, predictor="last", **settings).displaced


def test_no_timing_changes_a_bit():
    """With random delays of every message, lane and rank, also where only some tensors of a call are waited for."""
    settings = {"codec": "int2", "arrival": "adaptive", "tau": 0.08, "exchange": "tapa", "order": "v_first"}
    reference = check(World(4), TROUBLED, delayed=True, **settings)
    assert {"", "qkv", "qkvo"} <= set(reference.displaced)


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (World(12, heads=12, machine="aurora", channels=8), {"exchange": "split", "chunks": 2}),
        (World(12, heads=7, machine="aurora", channels=8), {"exchange": "tapa", "chunks": 2, "ring": 2}),
        (World(4), {"exchange": "flat", "ring": 2}),
    ],
)
def test_in_chunks_and_with_a_ring_it_is_attention_to_what_the_last_call_left(world, how):
    """A call that does not wait for all goes unchunked: there is nothing to hide it behind."""
    rings = {key: value for key, value in how.items() if key == "ring"}
    unchunked = Ranks(world, chunks="auto" if "chunks" in how else 1, **rings)
    settings = {"codec": "int4", "predictor": "last", "arrival": "adaptive", "tau": 0.045, **how}
    assert {"", "qkv"} <= set(check(world, RUN[:5], Ranks(world, **how), unchunked, **settings).displaced)


def test_the_last_steps_wait():
    run = [replace(call, steps=len(RUN)) for call in RUN]
    reference = check(World(2), run, codec="none", arrival="displaced", fine_steps=3)
    assert reference.displaced == ["", *["qkvo"] * 3, *[""] * 3]

"""Torus through the engine: whole models of every family, and what a user can get wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from exactness import Case, Expected
from tiny_models import FAMILIES, HEADS

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.mark.parametrize(
    ("family", "size", "batch", "dtype", "settings"),
    [
        ("sd3", 5, 2, torch.float32, {"exchange": "split", "order": "joint", "chunks": 3}),
        ("flux", 7, 1, torch.bfloat16, {"exchange": "tapa", "order": "v_first", "chunks": 2}),
        ("flux2", 6, 1, torch.float32, {"exchange": "flat", "order": "v_first", "chunks": 9}),
        ("qwen", 12, 2, torch.bfloat16, {"exchange": "auto", "order": "v_first", "chunks": 2, "machine": "aurora"}),
    ],
)
def test_equals_one_process(family, size, batch, dtype, settings):
    """More chunks than cards are as many as there are cards."""
    case = Case(HEADS[family], 7, 9, 11, batch, dtype=dtype, family=family)
    expected = Expected.of(case)

    def work(transport: Any) -> Any:
        own = copy.deepcopy(expected.model)
        with torch.no_grad(), parallelize(own, transport=transport, **settings) as engine:
            output = own(**case.inputs()).sample
            assert engine.sequence.strategy.exchange.staged is not None
            return output

    outputs = run_ranks(size, work)
    expected.check(outputs[0])
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_auto_is_off_where_it_does_not_pay():
    """At the size of a test, by the table of two nodes: not one call goes in stages."""
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(24, layers=1), inputs_of(1, 6, 7, 5)

    def work(transport: Any) -> Any:
        outputs = []
        for chunks in ("auto", 1):
            own = copy.deepcopy(model)
            settings = {"exchange": "split", "chunks": chunks, "machine": "aurora"}
            with torch.no_grad(), parallelize(own, transport=transport, **settings) as engine:
                own(**inputs)
                outputs.append({span.lane for span in engine.trace.spans} | {span.name for span in engine.trace.spans})
        assert outputs[0] == outputs[1]

    run_ranks(24, work)


@pytest.mark.parametrize("chunks", [0, -1, 2.0, True, "two", None])
def test_mistaken_chunks(chunks):
    with pytest.raises(UserError, match=r"chunks is .*: give a whole number of at least 1 \(1: off\) or auto"):
        Config(chunks=chunks)


def test_auto_needs_a_machine_that_was_measured():
    model = FAMILIES["sd3"][0](6)
    with pytest.raises(UserError, match=r"chunks auto: machine local on 1 node\(s\) was not measured, but aurora on"):
        run_ranks(2, lambda transport: parallelize(copy.deepcopy(model), transport=transport, chunks="auto"))

"""A parallel transformer computes what one process computes, on every rank to the same bits, and leaves no trace."""

import copy

import pytest
import torch
from covering import all_but, examples
from exactness import Case, Expected, check_ranks, parallel_outputs
from hypothesis import given
from hypothesis import strategies as st

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize

WORLDS = (1, 2, 3, 4, 6, 12)
CASES = {
    "38 heads, dual": Case(38, 3, 5, 5, batch=2, dual=(0,)),
    "38 heads, bf16": Case(38, 5, 5, 7, dtype=torch.bfloat16),
    "24 heads": Case(24, 3, 7, 13, batch=1),
    "12 heads, dual, bf16": Case(12, 3, 5, 1, batch=2, dual=(0, 1), dtype=torch.bfloat16),
    "FLUX.1": Case(24, 5, 7, 11, batch=2, family="flux"),
    "FLUX.2": Case(48, 5, 7, 11, batch=2, family="flux2"),
    "Qwen-Image": Case(24, 5, 7, 11, batch=2, family="qwen"),
}

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    return {name: Expected.of(case) for name, case in CASES.items()}


def check_world(case: Case, expected: Expected, size: int, machine: str = "local") -> None:
    of_ranks = run_ranks(size, lambda transport: parallel_outputs(transport, expected.model, case, machine), 120.0)
    check_ranks(of_ranks, expected, case.family)


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("name", "size"),
    all_but(
        [(name, size) for name in CASES for size in WORLDS if size < 12 or name in ("12 heads, dual, bf16", "FLUX.1")],
        CASES,
        WORLDS,
    ),
)
def test_equals_one_process(name, size, expected):
    check_world(CASES[name], expected[name], size)


def test_one_rank_has_one_process_bits(expected):
    for name, case in CASES.items():
        (outputs,) = run_ranks(1, lambda t, n=name, c=case: parallel_outputs(t, expected[n].model, c, "local"))
        assert all(torch.equal(output, expected[name].plain) for output in outputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("machine", "size"), [("aurora", 12), ("local-6x2", 24), ("local", 5), ("local", 7)])
def test_other_machines(machine, size, expected):
    case = Case(38, 5, 5, 7, dtype=torch.bfloat16) if size == 24 else CASES["38 heads, dual"]
    check_world(case, expected["38 heads, bf16" if size == 24 else "38 heads, dual"], size, machine)


@given(
    height=st.integers(1, 9),
    width=st.integers(4, 9),
    text=st.integers(1, 20),
    batch=st.integers(1, 2),
    size=st.sampled_from((2, 3, 4)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
@examples(6, exhaustive=30)
def test_any_token_counts(height, width, text, batch, size, dtype):
    case = Case(5, height, width, text, batch, dual=(0,), dtype=dtype)
    check_world(case, Expected.of(case), size)


def test_sizes_may_change_from_call_to_call(expected):
    """One engine serves images of several sizes; the last call repeats the first."""
    model = expected["24 heads"].model
    calls = [Case(24, 3, 7, 13), Case(24, 4, 4, 2, batch=2), Case(24, 3, 7, 13)]

    def work(transport):
        own = copy.deepcopy(model)
        with parallelize(own, transport=transport):
            return [own(**case.inputs()).sample for case in calls]

    for rank_outputs in run_ranks(3, work):
        for case, output in zip(calls, rank_outputs, strict=True):
            Expected.of(case).check(output)
        assert torch.equal(rank_outputs[0], rank_outputs[2])


def state_of(model) -> tuple:
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in model.named_modules()
    ]
    return {name: id(processor) for name, processor in model.attn_processors.items()}, hooks


@pytest.mark.parametrize("size", [1, 2])
def test_leaving_restores_the_model(size, expected):
    case, plain = CASES["24 heads"], expected["24 heads"].plain

    def work(transport):
        own = copy.deepcopy(expected["24 heads"].model)
        processors, before = dict(own.attn_processors), state_of(own)
        with parallelize(own, transport=transport):
            assert state_of(own) != before
            own(**case.inputs())
        assert state_of(own) == before
        assert all(own.attn_processors[name] is processor for name, processor in processors.items())
        assert torch.equal(own(**case.inputs()).sample, plain)

    assert run_ranks(size, work) == [None] * size


def test_an_error_inside_restores_the_model_too(expected):
    case = CASES["24 heads"]
    own = copy.deepcopy(expected["24 heads"].model)
    before = state_of(own)

    def work(transport):
        with parallelize(own, transport=transport):
            assert state_of(own) != before
            raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError, match="the user's own"):
        run_ranks(1, work)
    assert state_of(own) == before
    with torch.no_grad():
        assert torch.equal(own(**case.inputs()).sample, expected["24 heads"].plain)


def test_weights_stay_untouched(expected):
    model = expected["24 heads"].model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_ranks(2, lambda transport: parallel_outputs(transport, model, CASES["24 heads"], "local"))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

"""Whole models on meshes of Ulysses and Ring: what one process computes, on any number of ranks."""

import copy
from typing import Any

import pytest
import torch
from covering import examples, thorough
from exactness import Case, Expected, check_ranks, parallel_outputs
from hypothesis import given
from hypothesis import strategies as st
from test_engine_v_major import STEPS, denoise
from tiny_models import FAMILIES, HEADS

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.registry import RINGS
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
LARGE = pytest.mark.exhaustive


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int]:
    """Ranks, and a Ring degree among 1, 2, 3 and all of them."""
    size = draw(st.sampled_from((2, 3, 4, 5, 6, 9, *((12, 24) if thorough() else ()))))
    return size, draw(st.sampled_from(sorted({n for n in (1, 2, 3, size) if size % n == 0})))


@pytest.mark.parametrize("family", FAMILIES)
@given(
    world=rings(),
    height=st.integers(6, 11),
    width=st.integers(6, 13),
    text=st.integers(1, 60),
    batch=st.integers(1, 2),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    placement=st.sampled_from(("topology", "usp", "auto")),
    aurora=st.booleans(),
    kind=st.sampled_from(sorted(RINGS)),
)
@examples(2, exhaustive=8)
def test_equals_one_process(family, world, height, width, text, batch, dtype, placement, aurora, kind):
    size, ring = world
    case = Case(HEADS[family], height, width, text, batch, dtype=dtype, family=family)
    expected = Expected.of(case)
    machine = "aurora" if size in (12, 24) and aurora else "local"
    mesh = {"ring": ring, "placement": placement, "ring_kind": kind}
    check_ranks(run_ranks(size, lambda t: parallel_outputs(t, expected.model, case, machine, **mesh)), expected, family)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "ring", "placement", "kind"),
    [
        (12, 3, "usp", "keys"),
        (12, 6, "usp", "token"),
        (24, 12, "usp", "streaming"),
        pytest.param(24, 2, "auto", "keys", marks=LARGE),
    ],
)
def test_on_nodes_of_aurora(size, ring, placement, kind):
    case = Case(24, 7, 8, 11, dtype=torch.bfloat16, family="qwen")
    expected, mesh = Expected.of(case), {"ring": ring, "placement": placement, "ring_kind": kind}
    of_ranks = run_ranks(size, lambda t: parallel_outputs(t, expected.model, case, "aurora", **mesh))
    check_ranks(of_ranks, expected, case.family)


@pytest.mark.parametrize(
    ("family", "size", "heads", "meshed"),
    [
        ("flux", 12, 6, (6, 2)),
        ("qwen", 7, 3, (1, 7)),
        ("sd3", 12, 6, (6, 2)),
        pytest.param("flux", 48, 24, (24, 2), marks=LARGE),
    ],
)
def test_more_ranks_than_heads(family, size, heads, meshed):
    case = Case(heads, 7, 8, 11, 1 if size == 48 else 2, family=family)
    expected = Expected.of(case)

    def work(transport: Any) -> Any:
        own = copy.deepcopy(expected.model)
        with torch.no_grad(), parallelize(own, transport=transport) as engine:
            return (engine.sequence.mesh.ulysses, engine.sequence.mesh.ring), own(**case.inputs()).sample

    of_ranks = run_ranks(size, work)
    expected.check(of_ranks[0][1])
    for mesh, output in of_ranks:
        assert mesh == meshed and torch.equal(output, of_ranks[0][1])


@pytest.mark.parametrize(("size", "ring", "scoring"), [(4, 2, "card"), (6, 3, "source"), (3, 3, "source")])
def test_v_major_with_nothing_stable_is_nothing_changed(size, ring, scoring):
    make, inputs_of = FAMILIES["qwen"]
    model, inputs = make(13), inputs_of(2, 6, 7, 5)

    def work(transport: Any) -> None:
        own, mesh = copy.deepcopy(model), {"ring": ring, "transport": transport, "order": "v_first"}
        lossy = {"selection": "v_major", "steps": STEPS, "scoring": scoring}
        with torch.no_grad():
            with parallelize(own, **mesh):
                exact = denoise(own, inputs)
            with parallelize(own, sync_interval=1, **mesh, **lossy):
                assert torch.equal(denoise(own, inputs), exact)
            with parallelize(own, schedule="fixed", ratio=0.8, sync_interval=0, **mesh, **lossy):
                stale = denoise(own, inputs)
            assert torch.equal(stale[:1], exact[:1])
            assert torch.equal(stale[1:], exact[1:]) == (size == ring)  # Ring alone sends whole keys and values

    run_ranks(size, work)

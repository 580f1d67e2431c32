"""A parallel transformer computes what one process computes, on every rank to the same bits, and leaves no trace."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from covering import covering, examples, thorough
from exactness import Case, denoise
from hypothesis import assume, given
from hypothesis import strategies as st
from on_ranks import VARIANTS, check_exact, on_ranks, outputs_of, state_of
from tiny_models import FAMILIES, HEADS
from value_tables import beside
from worlds import topology_of

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.config.registry import RINGS
from cocodiff.engine.engine import parallelize
from cocodiff.topology.axes import Axes

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
CASES = beside(__file__)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_has_one_process_bits(family):
    """Of images of several sizes; the last call repeats the first."""
    calls = [
        Case(HEADS[family], 5, 7, 11, 2, family=family).inputs(),
        Case(HEADS[family], 4, 4, 2, family=family).inputs(),
    ]
    check_exact(1, FAMILIES[family][0](HEADS[family]), [*calls, calls[0]], VARIANTS)
    check_exact(3, FAMILIES[family][0](6), [*calls, calls[0]], {"tapa": {}})


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("machine", "size", "fields", "settings", "degrees", "staged"),
    [*CASES["worlds"], *(pytest.param(*world, marks=pytest.mark.exhaustive) for world in CASES["large"])],
    ids=str,
)
def test_equals_one_process_on_machines_in_meshes_and_in_stages(machine, size, fields, settings, degrees, staged):
    """degrees: of Ulysses and of Ring, chosen where the settings name none; staged: whether Torus is at work."""

    def look(engine: Any) -> None:
        mesh, exchange = engine.sequence.mesh, engine.sequence.strategy.exchange
        assert [mesh.ulysses, mesh.ring] == degrees
        assert (exchange is not None and exchange.staged is not None) == staged  # Ring alone has no exchange

    case = Case(**fields | {"dtype": getattr(torch, fields.get("dtype", "float32"))})
    orders = ("joint", "v_first") if size < 24 or thorough() else ("v_first",)
    modes = {name: given for name, given in VARIANTS.items() if given["order"] in orders}
    check_exact(size, case.model(), [case.inputs()], modes, seen=look, machine=machine, **settings)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@examples(2, exhaustive=24)
def test_any_sizes_and_any_mesh(family, data):
    size = data.draw(st.sampled_from((2, 3, 4, 5, 6, 7, 9, *((12, 24) if thorough() else ()))), "ranks")
    heads, batch = data.draw(st.sampled_from((5, HEADS[family])), "heads"), data.draw(st.integers(1, 2), "batch")
    rings = [n for n in (1, 2, 3, size) if size % n == 0 and size // n <= heads]
    height, width, text = (data.draw(st.integers(*ends)) for ends in ((1, 11), (4, 13), (1, 60)))
    assume(height * width >= size)
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)), "dtype")
    mesh = {
        "ring": data.draw(st.sampled_from(("auto", *rings)), "ring"),
        "placement": data.draw(st.sampled_from(("topology", "usp", "auto")), "placement"),
        "ring_kind": data.draw(st.sampled_from(sorted(RINGS)), "kind"),
    }
    machine = "aurora" if size in (12, 24) and data.draw(st.booleans()) else "local"
    dual = data.draw(st.sampled_from(((), (0,), (0, 1))), "dual") if family == "sd3" else ()
    case = Case(heads, height, width, text, batch, dual, dtype, family)
    check_exact(size, case.model(), [case.inputs()], VARIANTS, machine=machine, **mesh)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("preset", "chunks", "ring"), covering(("tapa", "cocodiff+"), (1, 2), ("auto", 2)))
def test_inference_mode_gives_the_same_bits(preset, chunks, ring):
    """Also where one engine is used in inference mode first, then without, and where a run changes over."""
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(12), inputs_of(2, 6, 7, 5)
    plain, inference = (torch.no_grad,) * 4, (torch.inference_mode,) * 4

    def run(own: Any, _: Any) -> None:
        expected = denoise(own, inputs, *plain)
        for modes in (inference, plain, inference[:2] + plain[:2]):
            outputs = denoise(own, inputs, *modes)
            same = 2 if modes == inference[:2] + plain[:2] and preset == "cocodiff+" else 4
            assert torch.equal(outputs[:same], expected[:same]), modes

    on_ranks(4, model, run=run, preset=preset, steps=4, threshold=0.3, chunks=chunks, ring=ring)


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_inside_leaves_the_model_as_it_was(size):
    """Processors, hooks and weights, and so the bits of one process; what leaves without one is asked by `on_ranks`."""
    model, inputs = (case := Case(24, 3, 7, 13)).model(), case.inputs()
    plain = outputs_of(model, inputs)

    def work(transport):
        own = copy.deepcopy(model)
        before = state_of(own)
        with pytest.raises(ZeroDivisionError, match="the user's own"), parallelize(own, transport=transport):
            assert state_of(own) != before
            outputs_of(own, inputs)
            raise ZeroDivisionError("the user's own")
        assert state_of(own) == before and all(map(torch.equal, outputs_of(own, inputs), plain))
        assert all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))

    run_ranks(size, work)


# Stages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_auto_is_off_where_it_does_not_pay():
    """At the size of a test, by the table of a node: not one call goes in stages."""
    make, inputs_of = FAMILIES["sd3"]
    model, inputs, found = make(12, layers=1), inputs_of(1, 6, 7, 5), []
    for chunks in ("auto", 1, 2):
        of_ranks = on_ranks(12, model, inputs, exchange="split", chunks=chunks, machine="aurora")
        found.append([{(span.lane, span.name) for span in ran.engine.trace.spans} for ran in of_ranks])
    assert found[0] == found[1] and not any(map(set.__eq__, found[0], found[2]))


# Parts of a run -------------------------------------------------------------------------------------------------------

IN_PARTS = (Case(12, 3, 5, 5), Case(12, 5, 7, 3, batch=2, family="qwen"))


@pytest.mark.parametrize(
    ("machine", "size", "settings"),
    [
        ("aurora", 12, {"preset": "tapa"}),
        ("local", 4, {"preset": "coded-", "predictor": "taylor"}),
        ("local", 4, {"step_cache": "first_block", "step_cache_threshold": 0.25}),
    ],
    ids=["exact", "coded", "cached"],
)
def test_two_replicas_have_the_bits_of_one_replica(machine, size, settings):
    """Each predicts and decides by its own ranks' notes and keeps states of its own, over images of its own: the first
    makes one while the second makes two, of other tokens, batch and family. A part is closed by itself. On an Aurora
    node each has a plane: an exchange there sends nothing to siblings."""
    axes = Axes.build(topology_of(machine, size), replica=2)
    models, exact = [case.model() for case in IN_PARTS], settings == {"preset": "tapa"}
    share = "cached_fraction" if "step_cache" in settings else "coded_fraction"

    def images(transport: Any, number: int, machine: str = "local") -> tuple[list[torch.Tensor], Any]:
        model, modes = copy.deepcopy(models[number]), [nullcontext] * exact
        with torch.no_grad(), parallelize(model, transport=transport, machine=machine, **settings) as engine:
            outputs = [denoise(model, IN_PARTS[number].inputs(), *modes) for _ in range(1 + number)]
            of_steps = [row[share] for row in engine.drift_profile()]
        assert exact or of_steps[1] == (1 if "preset" in settings else 1 - number)  # replicas decide otherwise
        return outputs, engine

    def work(transport: Any) -> list[torch.Tensor]:
        part, number = transport.part(axes.replica(transport.rank)), axes.coordinates(transport.rank).replica
        outputs, engine = images(part, number, machine)
        assert engine.topology == axes.topology.part(axes.replica(transport.rank))
        assert sum(engine.bytes().values()) > 0 and (machine == "local" or engine.bytes()["sibling"] == 0)
        part.close()
        with pytest.raises(UserError, match="the transport of this engine is closed"):
            parallelize(copy.deepcopy(models[number]), transport=part, machine=machine).__enter__()
        assert not transport.closed and transport.broadcast_value(transport.rank) == 0
        return outputs

    of_ranks = run_ranks(size, work, 120.0)
    for number, (ranks,) in enumerate(axes.branches):
        alone = run_ranks(len(ranks), lambda whole, number=number: images(whole, number)[0])
        # Ranks of a plane compute as ranks of a row do, up to rounding.
        same = torch.equal if machine == "local" else partial(torch.allclose, atol=1e-5)
        for rank, one in zip(ranks, alone, strict=True):
            assert all(map(same, of_ranks[rank], one)) and all(map(torch.equal, of_ranks[rank], of_ranks[ranks[0]]))


def test_a_rank_lost_in_one_replica_ends_the_other_and_has_its_number_in_the_run():
    def work(transport: Any) -> None:
        part = transport.part((0, 1) if transport.rank < 2 else (2, 3))
        if transport.rank == 3:
            part.health.fail("out of memory")
        if transport.rank >= 2:
            return
        with pytest.raises(PeerLost, match="rank 3 failed: out of memory"):
            while True:
                part.gather_values(None)
                part.broadcast_value(None)
                part.health.check()

    run_ranks(4, work, 60.0)

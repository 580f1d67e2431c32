"""The residual codec and displaced exchange give, bit for bit, what one process with whole tensors gives, whatever
arrives when; and what is sent is as short as its codes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_worlds import RUN, TROUBLED, Call, Ranks, World
from byte_formulas import Formulas
from covering import covering
from residual_reference import check
from value_tables import beside
from worlds import topology_of

from cocodiff.attention.stateful import CodedStep, LayerState, SharedNotes, continuation
from cocodiff.attention.strategy import LayerKey
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.engine.assemble import build_strategy
from cocodiff.exchange.codec import StepInfo
from cocodiff.kernels import Kernels
from cocodiff.kernels.residual import coded_width
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture
def table(tmp_path: Any) -> str:
    """For exchange auto: by it a coded tensor takes another route than a whole one."""
    (tmp_path / "table.yaml").write_text("local:\n  1: [[0.006, flat], [null, split]]\n")
    return str(tmp_path / "table.yaml")


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("codec", "arrival", "predictor", "exchange", "order", "dtype"),
    covering(
        ("none", "int2", "int4", "int8"),
        ("now", "displaced", "adaptive"),
        ("last", "taylor"),
        ("flat", "tapa", "split", "auto"),
        ("joint", "v_first"),
        (torch.float32, torch.bfloat16),
        fits=lambda codec, arrival, *_: (codec, arrival) != ("none", "now"),
    ),
)
def test_equals_one_process(codec, arrival, predictor, exchange, order, dtype, table):
    settings = {"codec": codec, "arrival": arrival, "predictor": predictor, "exchange": exchange, "order": order}
    world = World(3, dtype=dtype)
    reference = check(world, TROUBLED, tau=0.2, exchange_table=table if exchange == "auto" else None, **settings)
    assert any(reference.displaced) == (arrival != "now")
    assert codec == "none" or reference.whole_calls == [0, 5, 9, 11, 13, 15]


@pytest.mark.parametrize("codec", ["int2", "int4"])
def test_a_first_call_that_no_scale_fits_is_followed_by_a_whole_one(codec):
    run = [Call(0, spoilt=math.inf), *map(Call, range(1, 5)), Call(0, 1, spoilt=1e7), Call(1, 1), Call(2, 1)]
    whole_calls = {"int2": [0, 1, 5, 6], "int4": [0, 2, 5, 7]}  # int4's first calls travel as they are
    assert check(World(2), run, codec=codec).whole_calls == whole_calls[codec]


@pytest.mark.parametrize(
    ("codec", "arrival", "fine_steps"),
    [("int2", "now", 2), ("int4", "now", 3), ("int8", "now", 2), ("none", "displaced", 3)],
)
def test_the_last_steps_have_twice_the_bits_and_wait(codec, arrival, fine_steps):
    run = [replace(call, steps=len(RUN)) for call in RUN]
    for predictor in ("last", "taylor"):
        reference = check(World(2), run, codec=codec, arrival=arrival, predictor=predictor, fine_steps=fine_steps)
        assert reference.displaced == ["", *["qkvo" * (arrival == "displaced")] * 3, *[""] * 3]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("world", "settings", "arrival"),
    [
        (World(24, heads=25, image=31, machine="aurora", channels=8), {"codec": "int4"}, "adaptive"),
        (World(2, channels=8), {"codec": "int2", "exchange": "flat"}, "now"),
        (
            World(12, heads=13, image=63, machine="aurora", channels=8),
            {"codec": "none", "exchange": "split"},
            "adaptive",
        ),
        (World(5, heads=6, image=24, dtype=torch.bfloat16), {"codec": "none", "order": "joint"}, "adaptive"),
        (World(5, heads=6, image=24, dtype=torch.bfloat16), {"codec": "int4"}, "now"),
        (World(2, channels=8), {"codec": "int2", "exchange": "flat"}, "adaptive"),
        (World(12, heads=13, image=31, machine="aurora", channels=8), {"codec": "int4", "exchange": "split"}, "now"),
    ],
)
def test_equals_one_process_on_any_number_of_ranks(world, settings, arrival):
    settings = {"order": "v_first", "predictor": "last", "tau": 0.045, **settings}
    reference = check(world, RUN[:6], arrival=arrival, **settings)
    assert reference.whole_calls == [0] and ("qkv" in reference.displaced) == (arrival == "adaptive")


def test_no_timing_changes_a_bit():
    """With random delays of every message, lane and rank, also where only some tensors of a call are waited for."""
    settings = {"codec": "int2", "arrival": "adaptive", "tau": 0.08, "exchange": "tapa", "order": "v_first"}
    assert {"", "qkv", "qkvo"} <= set(check(World(4), TROUBLED, delayed=True, **settings).displaced)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("world", "how", "arrival"),
    [
        (World(5), {"exchange": "split", "chunks": 3}, "now"),
        (World(6, heads=7), {"exchange": "tapa", "chunks": 2, "ring": 2}, "now"),
        (World(6), {"exchange": "flat", "ring": 2}, "now"),
        (World(6, heads=3), {"exchange": "split", "ring": 2, "placement": "usp"}, "now"),
        (World(12, heads=12, machine="aurora", channels=8), {"exchange": "split", "chunks": 2}, "adaptive"),
        (World(12, heads=7, machine="aurora", channels=8), {"exchange": "tapa", "chunks": 2, "ring": 2}, "adaptive"),
        (World(4), {"exchange": "flat", "ring": 2}, "adaptive"),
    ],
)
def test_in_chunks_and_with_a_ring_it_is_attention_to_the_reconstructions(world, how, arrival):
    """Of all ranks, also where several groups of them code: what they decide by is everybody's. A call that does not
    wait for all goes unchunked, for there is nothing to hide it behind: its bits are those of a table by which no call
    goes in chunks."""
    ring = {"ring": how.get("ring", 1)}
    unchunked = Ranks(world, chunks="auto" if "chunks" in how else 1, **ring)
    settings = {
        "codec": "int4",
        "predictor": "taylor" if arrival == "now" else "last",
        "order": "v_first",
        "tau": 0.045,
    }
    calls = TROUBLED[:7] if arrival == "now" else RUN[:5]
    reference = check(world, calls, Ranks(world, order="v_first", **how), unchunked, arrival=arrival, **settings, **how)
    assert (set(reference.displaced) >= {"", "qkv"}) == (arrival == "adaptive")


@pytest.mark.parametrize(
    ("world", "exchange"),
    [
        (World(7, heads=10, image=19), "flat"),
        (World(5, heads=11), "tapa"),
        (World(24, heads=25, image=55, machine="aurora", batch=1), "split"),
    ],
)
def test_bytes_are_those_of_the_codes(world, exchange):
    """Of all four tensors in every link class, and those that a decision takes."""
    topology = topology_of(world.machine, world.size)
    settings = {"codec": "int2", "predictor": "last", "exchange": exchange, "nic_balance": False}

    of_ranks = Ranks(world, **settings).call(RUN[:3])
    formulas = Formulas(topology, world.layout(RUN[0]))
    first, coded = (world.batch * coded_width(world.channels, bits) for bits in (8, 2))
    for rank, (_, (one, two, three), _) in enumerate(of_ranks):
        for link, count in one["attention"].items():
            both = [
                formulas.sent(exchange, "forward", rank, 3 * u)[link] + formulas.sent(exchange, "back", rank, u)[link]
                for u in (first, coded)
            ]
            assert [count, two["attention"][link] - count, three["attention"][link] - count] == [*both, 2 * both[1]]
        for calls, sent in enumerate((one, two, three)):  # before each, the notes of those before it
            assert sum(sent["notes"].values()) == 128 * (world.size - 1) * calls


@pytest.mark.parametrize(("sigmas", "factor"), beside(__file__))
def test_the_continuation_goes_by_the_noise_levels(sigmas, factor):
    assert continuation(sigmas[-3:]) == pytest.approx(factor)


X = torch.empty(1, 4, 2, 8)
LAYOUTS = [Layout.build(topology_of("local", 2), image_and_text(image, 3), 2) for image in (5, 6)]


@pytest.mark.parametrize(
    ("like", "layout", "step", "anew", "inference", "follows"),
    [
        (X, 0, 2, False, False, 2),
        (X, 0, 4, False, False, 2),  # steps between left the layer out
        (X, 0, 1, False, False, 0),
        (X, 0, 2, True, False, 0),
        (X.bfloat16(), 0, 2, False, False, 0),
        (X, 1, 2, False, False, 0),
        (X, 0, 2, False, True, 0),
    ],
)
def test_a_call_follows_the_last_one_where_all_is_alike(like, layout, step, anew, inference, follows):
    for unfit in (0, 1):
        state = LayerState()
        for before in (0, 1):
            state.begin(X, LAYOUTS[0], StepInfo(0, before, 9), False)
        state.take_notes([(0, 160, 0, 0), (unfit, 160, 0, 0)] * 2)
        with torch.inference_mode(inference):
            state.begin(like, LAYOUTS[layout], StepInfo(0, step, 9), anew)
        assert (state.follows, len(state.levels)) == ((0, 1) if unfit or not follows else (2, 3))
        assert {*state.needed.values()} == ({160} if state.follows else set())


def test_what_is_told_of_a_step_is_of_its_calls():
    """A coded call of which the output alone is waited for, and a whole one; and without displacement."""
    late, now = CodedStep(), CodedStep()
    for step in (late, now):
        step.add(coded=True, share=0.25, linear=4)
        step.add()
    late.displace(frozenset("qkv"), 0.25)
    late.displace()
    told = CodedStep.merged([late, late])
    assert told == CodedStep.merged([late])
    assert (told["coded_fraction"], told["linear_fraction"], told["sent_fraction"]) == (0.5, 1.0, 5 / 8)
    assert (told["displaced_fraction"], told["displaced_sets"]) == (3 / 8, {"": 0.5, "qkv": 0.5})
    assert (told["exposed_fraction"], CodedStep.merged([now])["exposed_fraction"]) == (4.25 / 8, 5 / 8)


def test_layers_decide_each_for_itself():
    """Two layers in turn, of which one has a residual without a scale; the other is coded on."""
    calls = list[Call]()
    for call in RUN[:5]:
        spoilt = math.inf if call.step == 2 else 0.0
        calls += replace(call, layer=LayerKey("a")), replace(call, layer=LayerKey("b"), spoilt=spoilt)
    for one in Ranks(World(2), codec="int8").call(calls):
        of_calls = one.bytes_of_calls()
        assert [count == max(of_calls) for count in of_calls] == [True, True, *[False] * 4, False, True, False, False]


@pytest.mark.parametrize("settings", [{"codec": "int4"}, {"codec": "lossless"}, {"arrival": "displaced"}])
def test_each_run_codes_the_layers_that_it_calls_first(settings):
    """A run may call other layers first than the one before it did."""
    config = Config(state_layers=1, **settings)

    def work(transport):
        context = RankContext(transport, topology_of("local", 2), Trace(), Kernels())
        codec = build_strategy(config, Mesh.build(context.topology, 1), context).codec
        for run, (first, second) in enumerate((("a", "b"), ("b", "a"), ("c", "b"))):
            codec.begin_step(StepInfo(run, 0, None))
            assert [codec.codes(layer) for layer in (first, second, first)] == [True, False, True]

    run_ranks(2, work)


def test_notes_of_many_calls_reach_their_takers_and_none_are_left_of_a_run_that_failed():
    def work(transport: Any) -> list[int]:
        notes, taken = SharedNotes(RankContext(transport, topology_of("local", 2), Trace(), Kernels())), list[Any]()
        taker: Any = SimpleNamespace(take_notes=taken.append)
        for run in range(2):
            for number in range(70):
                notes.of_call(torch.device("cpu"), taker).own[:] = number
            notes.begin_step()
            if run == 0:
                notes.clear()
            notes.hand_out()
        return [of_tensors[0][0] for of_tensors in taken]

    assert run_ranks(2, work) == [[2 * number for number in range(70)]] * 2

"""torch.compile of blocks. Most cases leave out the compiler itself, by torch's backend "eager": how a model is taken
apart into graphs is the same, and every bit has to be what it is without."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import MagCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from on_ranks import Call, check_alike, on_ranks, outputs_of, state_of
from planned_models import PLANNED
from test_step_cache import moving
from tiny_models import FAMILIES, sd3_inpaint_pipeline, with_lora
from torch._dynamo.utils import counters
from value_tables import beside
from warm import forked

from cocodiff.comm.lane import Lane
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine import compiling
from cocodiff.engine.engine import parallelize
from cocodiff.engine.sequence import SequenceRanks

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
SETTINGS = beside(__file__)
LAYERS = {"sd3": {"layers": 3, "dual": (0,)}, "flux": {"num_layers": 2}}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "eager")


@pytest.mark.full
@pytest.mark.parametrize(("family", "size"), [("flux", 2), ("sd3", 1)])
def test_compiled_a_model_gives_the_same_up_to_rounding(family, size):
    model, inputs = FAMILIES[family][0](6), FAMILIES[family][1](1, 4, 5, 6)
    calls = [inputs | {"timestep": inputs["timestep"] * (1 - step / 4)} for step in range(3)]
    of_ranks = on_ranks(size, model, *calls, preset="lossless", compile=True, steps=3, timeout_s=600)
    assert check_alike(of_ranks, outputs_of(model, *calls), 1e-5).engine.compiled.startswith("compiled ")


def is_traced() -> bool:
    """Whether this thread's call is made by torch.compile, to see what it does."""
    frame: Any = inspect.currentframe()
    while frame is not None and "_dynamo/symbolic_convert" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def four_steps(family: str, branches: int) -> list[Call]:
    """A sample that moves little and much, in each step with the text of every branch."""
    steps = moving(FAMILIES[family][1](1, 4, 5, 6), (0.0, 0.01, 1.0, 1.01))
    signs = (1, -1)[:branches]
    return [step | {"encoder_hidden_states": sign * step["encoder_hidden_states"]} for step in steps for sign in signs]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_taken_apart_a_model_has_the_same_bits_and_sends_nothing_from_inside_a_graph(name, monkeypatch):
    """Nor are tokens cut there, by hooks on blocks. Of each block there is a graph before its attention and one behind
    it, and no other break, none made after the first step."""
    family, size, settings = SETTINGS[name]
    inside, sent = threading.local(), []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            inside.graphs = True
            try:
                return graph.forward(*args)
            finally:
                inside.graphs = False

        return run

    def watched(kind: type, name: str) -> None:
        before = getattr(kind, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append((getattr(inside, "graphs", None), is_traced()))
            return before(*args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    monkeypatch.setattr(compiling, "BACKEND", backend)
    watched(Lane, "submit")  # where every message comes by
    watched(SequenceRanks, "cut")
    model = FAMILIES[family][0](6, **LAYERS.get(family, {}))
    calls = four_steps(family, 1 + ("guidance_parallel" in settings))

    given = {"steps": 4, **settings}
    plain, *_ = on_ranks(size, model, *calls, **given)
    assert not plain.engine.compiled and not any(graphs for graphs, _ in sent)
    compiled = on_ranks(size, model, *calls, compile=True, timeout_s=600, **given)
    check_alike(compiled, plain.found, 0)
    drift = plain.engine.drift_profile()
    for ran in compiled:
        assert ran.engine.drift_profile() == drift
        assert " 0 of them after the first step; 0 graph breaks beside" in ran.engine.compiled
    if "cached" in name:
        cached = [row["cached_fraction"] for row in drift[1:]]
        assert any(cached) and not all(cached)
    assert not any(graphs or traced for graphs, traced in sent)
    assert any(graphs is False for graphs, _ in sent)  # after some graph of this thread


@pytest.mark.full
def test_another_size_and_another_engine_are_compiled_anew(no_compiler):
    """Ranks of unequal shares, of which each compiles its own. What is compiled once is kept for the next block."""
    model = FAMILIES["flux"][0](6)
    sizes = [FAMILIES["flux"][1](1, *size) for size in ((4, 5, 7), (3, 5, 4))]
    sizes[1]["timestep"] /= 2  # its second step
    with torch.no_grad():
        plain = [model(**inputs).sample for inputs in sizes]

    def work(transport: Any) -> list[str]:
        own, said = copy.deepcopy(model), []
        engine = parallelize(own, transport=transport, compile=True)
        for number in (0, 1, 1):
            with engine:
                torch.testing.assert_close(own(**sizes[0]).sample, plain[0], rtol=0, atol=1e-5)
                if number:
                    torch.testing.assert_close(own(**sizes[1]).sample, plain[1], rtol=0, atol=1e-5)
            said.append(engine.compiled)
        return said

    for first, second, third in run_ranks(3, work):
        graphs, later = ([int(one.split()[number]) for one in (first, second, third)] for number in (1, 6))
        assert graphs[1] == graphs[2] == 2 * graphs[0] and later == [0, graphs[0], graphs[0]]


def test_a_pipeline_with_a_lora(no_compiler):
    pipe = sd3_inpaint_pipeline(6)
    pipe.set_progress_bar_config(disable=True)
    with_lora(pipe.transformer)
    call = {name: torch.ones(1, 5, 16) / 4 for name in ("prompt_embeds", "negative_prompt_embeds")}
    call |= {f"{name}pooled_prompt_embeds": torch.zeros(1, 16) for name in ("", "negative_")}
    call |= {"image": torch.rand(1, 3, 64, 64), "mask_image": torch.ones(1, 1, 64, 64), "strength": 1.0}

    def run(own: Any, _: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        noise = torch.Generator().manual_seed(0)
        return [own(**call, generator=noise, num_inference_steps=2, output_type="latent").images]

    plain, compiled = (on_ranks(1, pipe, run=run, compile=on) for on in (False, True))
    check_alike(compiled, plain[0].found, 0)


SOME = ("wan", "helios", "z-image")  # the last two cut tokens inside of blocks, and give a list


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in PLANNED]
)
def test_models_by_a_plan(name, no_compiler):
    """Whose first call, which is followed, is not compiled. Breaks of what was compiled before are not theirs."""
    counters["graph_break"]["somebody else's"] += 1
    model, calls = PLANNED[name].model(), [PLANNED[name].call()] * 2
    plain, compiled = (on_ranks(2, model, *calls, compile=on, timeout_s=600) for on in (False, True))
    check_alike(compiled, plain[0].found, 0)
    assert all(ran.engine.compiled.endswith("; 0 graph breaks beside those at attention") for ran in compiled)


# What is refused ------------------------------------------------------------------------------------------------------


HOOKED, COMPILED = r"has the cache hook .*Hook, .*compile", r" is compiled by torch\.compile.*compile=True$"
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: model.enable_cache(MagCacheConfig(mag_ratios=torch.ones(4), num_inference_steps=4)), HOOKED),
    (lambda model: model.enable_cache(PyramidAttentionBroadcastConfig(current_timestep_callback=lambda: 500)), HOOKED),
    (lambda model: model.enable_cache(TaylorSeerCacheConfig()), HOOKED),
    (
        lambda model: setattr(first(model), "forward", first(model).forward),
        r"^transformer_blocks.0 cannot be compiled: its forward was",
    ),
    (lambda model: first(model).compile(), rf"^transformer_blocks\.0{COMPILED}"),
    (lambda model: first(model).attn.compile(), rf"^transformer_blocks\.0\.attn{COMPILED}"),
]


def first(model: Any) -> Any:
    return model.transformer_blocks[0]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_cannot_be_compiled_is_refused_on_entering_before_anything_is_put_on_the_model(change, words, alone):
    model = FAMILIES["flux"][0](6)
    change(model)
    before = state_of(model)
    with pytest.raises(UserError, match=words), parallelize(model, transport=alone, compile=True):
        raise AssertionError("entered")
    assert state_of(model) == before


# A rank that compiles for long ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("stall_s", [60, 2])
def test_a_rank_that_compiles_for_long_is_waited_for(stall_s, tmp_path):
    """Longer than ranks may be silent; as long as they may keep others waiting."""
    done = forked(stall_s, folder=tmp_path, module="compiling_rank")
    if stall_s == 60:
        assert done.returncode == 0 and done.stdout.startswith("compiled "), done
    else:
        assert done.returncode != 0 and "rank 1" in done.stderr and "attention" in done.stderr, done

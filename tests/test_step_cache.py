"""First Block Cache on several ranks: one process's image, with decisions that all ranks of a sequence take alike."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig, _helpers
from on_ranks import Call, Ran, check_alike, on_ranks, outputs_of, refused
from planned_models import PLANNED, cast
from tiny_models import FAMILIES
from tiny_pipelines import PIPELINES

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.step_cache import place_of_image

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

MORE_BLOCKS = {
    "sd3": {"layers": 3},
    "flux": {"num_layers": 2, "num_single_layers": 2},
    "flux2": {"num_layers": 2},
    "qwen": {"num_layers": 3},
}
MOVES = (0.0, 0.01, 0.02, 1.0, 1.01, 1.02, 1.5, 2.5)
CACHED = {"step_cache": "first_block", "step_cache_threshold": 0.2}
Calls = Sequence[Call]


def moving(inputs: Call, moves: Sequence[float], tokens: slice = slice(None)) -> Calls:
    """A call for each step, whose sample has moved so far from the first. tokens: of a sequence, those that move."""
    name, time = ("x", "t") if "x" in inputs else ("hidden_states", "timestep")
    calls = []
    for step, far in enumerate(moves):
        call = cast(inputs, torch.float32)
        for number, x in enumerate(call[name] if name == "x" else [call[name]]):
            to = torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
            x[:, tokens] += far * to[:, tokens]
        call[time] = call[time] * (1 - step / 1000) if call[time].is_floating_point() else call[time] - step
        calls.append(call)
    return calls


def family(name: str, heads: int = 6, batch: int = 1) -> tuple[Any, Call]:
    make, inputs_of = FAMILIES[name]
    return make(heads, **MORE_BLOCKS[name]), inputs_of(batch, 6, 7, 5)


def planned(name: str) -> tuple[Any, Call]:
    case = PLANNED[name].variant({}, **{"n_layers" if name == "z-image" else "num_layers": 3})
    return case.model(), case.call()


def cached_on(size: int, model: Any, calls: Calls, **settings: Any) -> list[Ran]:
    return on_ranks(size, model, *calls, **CACHED | settings)


def check_decisions(of_ranks: Sequence[Ran], found: Sequence[torch.Tensor], cached: Sequence[float]) -> None:
    """The same bits on all ranks, and these decisions and outputs."""
    check_alike(of_ranks, found, 2e-5, 1e-4)
    assert all(ran.cached() == cached for ran in of_ranks)


def check_one_process(size: int, model: Any, calls: Calls, **settings: Any) -> Ran:
    """Several ranks decide and compute as one, which is returned."""
    threshold = {name: settings[name] for name in ("step_cache_threshold",) if name in settings}
    (one,) = cached_on(1, model, calls, **threshold)
    check_decisions(cached_on(size, model, calls, timeout_s=30.0, **settings), one.found, one.cached())
    return one


# One process ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["flux2", "flux", "sd3", "qwen", "wan", "z-image"])
def test_four_ranks_equal_one_process_and_diffusers_own_hook(name):
    """diffusers' hook fails with SD3, FLUX.2 and Z-Image; elsewhere one rank gives its very bits."""
    model, inputs = family(name) if name in FAMILIES else planned(name)
    calls = moving(inputs, MOVES)
    one = check_one_process(4, model, calls)
    exact = [
        all(map(torch.equal, *of)) for of in zip(by_call(outputs_of(model, *calls)), by_call(one.found), strict=True)
    ]
    assert {0.0, 1.0} == {*one.cached()} and one.cached()[0] == 0
    assert one.cached() == [not same for same in exact]
    if name in ("flux", "qwen", "wan"):
        theirs = copy.deepcopy(model)
        theirs.enable_cache(FirstBlockCacheConfig(threshold=CACHED["step_cache_threshold"]))
        with theirs.cache_context("cond"):
            assert all(map(torch.equal, outputs_of(theirs, *calls), one.found))


def by_call(found: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    each = len(found) // len(MOVES)
    return [found[at : at + each] for at in range(0, len(found), each)]


@pytest.mark.parametrize("settings", [{"ring": 2}, {"chunks": 2, "exchange": "split"}], ids=["ring", "chunks"])
def test_with_a_ring_and_in_chunks(settings):
    model, inputs = family("qwen")
    check_one_process(4, model, moving(inputs, MOVES), **settings)


def test_calls_of_another_form_begin_anew():
    """A text of another length, and blocks that the model leaves out itself, as SD3 does for one of its branches."""
    model, inputs = family("sd3")
    calls = moving(inputs, [0.01 * step for step in range(6)])
    calls[2]["encoder_hidden_states"] = calls[2]["encoder_hidden_states"][:, :3]
    calls[4]["skip_layers"] = [0]
    one = check_one_process(3, model, calls)
    assert [*map(torch.equal, outputs_of(model, *calls), one.found)] == [True, False, True, True, True, True]


# Ranks that see different things --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_ranks_that_would_decide_differently_end_alike(share):
    """The tokens of the first rank alone move: by its own ones it would compute and others would not. What all tokens
    say lies between: a smaller threshold has all compute, a larger one none."""
    model, inputs = family("flux")
    calls = moving(inputs, [0.0, 1.0, 2.0], slice(0, 11))
    added: list[torch.Tensor] = []

    def keep(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        added.append(output[1] - kwargs["hidden_states"])

    handle = model.transformer_blocks[0].register_forward_hook(keep, with_kwargs=True)
    outputs_of(model, *calls)
    handle.remove()

    def change(rows: slice) -> float:
        before, now = (x[:, rows] for x in added[:2])
        return float((now - before).abs().mean() / before.abs().mean())

    own = [change(slice(0, 11)), change(slice(11, 22)), change(slice(22, 32)), change(slice(32, 42))]
    threshold = share * own[0]
    assert max(own[1:]) < threshold < own[0] and (change(slice(0, 42)) < threshold) == (share == 0.5)

    assert check_one_process(4, model, calls, step_cache_threshold=threshold).cached()[1] == (share == 0.5)


def test_a_threshold_of_0_leaves_out_what_does_not_change():
    model, inputs = family("qwen")
    torch.nn.init.zeros_(model.time_text_embed.timestep_embedder.linear_2.weight)  # blocks see nothing of the time
    calls = moving(inputs, [0.0, 0.0, 0.0, 0.01])
    assert check_one_process(2, model, calls, step_cache_threshold=0.0).cached() == [0, 1, 1, 0]


def test_a_change_is_measured_by_the_kept_one():
    """It is .69 of the kept change, and .84 of its own."""
    model, inputs = family("qwen")
    assert check_one_process(2, model, moving(inputs, [0.0, 3.0]), step_cache_threshold=0.77).cached() == [0, 1]


def test_values_that_are_no_numbers_are_computed():
    model, inputs = family("qwen")
    calls = moving(inputs, [0.0, 0.0, 0.0, 0.0])
    calls[1]["hidden_states"][0, 40] = float("nan")
    found = cached_on(4, model, calls, step_cache_threshold=1e30)
    assert all(ran.cached() == [0, 0, 0, 1] for ran in found)


@pytest.mark.parametrize("size", [2, 4])
def test_each_branch_of_guidance_decides_for_itself(size):
    """One branch's text changes much from step to step and the other one's does not; each part of the ranks computes
    one of them, and asks nobody of the other."""
    model, inputs = family("qwen")
    calls = []
    for step, call in enumerate(moving(inputs, [0.0] * 5)):
        calls += [call, call | {"encoder_hidden_states": 9 * (-1) ** step * inputs["encoder_hidden_states"]}]
    one = check_one_process(size, model, calls, guidance_parallel=2, step_cache_threshold=0.08)
    assert one.cached()[0] == 0 and 0.5 in one.cached()


def test_each_part_decides_for_its_half_of_a_batch():
    """SD3's branches come in one call. Two parts decide as two runs of one branch each."""
    model, inputs = family("sd3", batch=2)
    calls = moving(inputs, [0.0, 0.5, 0.51, 1.0])
    for call in calls:
        call["hidden_states"][0] = inputs["hidden_states"][0]  # one of them does not move
    rows = [[{name: x[row : row + 1] for name, x in call.items()} for call in calls] for row in range(2)]
    (still,), (moved,) = (cached_on(1, model, of_row, step_cache_threshold=0.1) for of_row in rows)
    assert still.cached() == [0, 1, 1, 1] and moved.cached() == [0, 0, 1, 0]
    found = [torch.cat(of) for of in zip(still.found, moved.found, strict=True)]
    check_decisions(cached_on(4, model, calls, guidance_parallel=2, step_cache_threshold=0.1), found, [0, 0.5, 1, 0.5])


# Interruptions --------------------------------------------------------------------------------------------------------


def test_a_run_after_an_interrupted_one_begins_anew():
    model, inputs = family("sd3")
    calls = moving(inputs, MOVES)
    (one,) = cached_on(1, model, calls)

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        outputs_of(own, calls[0], calls[3], calls[4])  # other decisions
        handle = own.transformer_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            outputs_of(own, *calls[5:])
        handle.remove()
        engine.new_run()
        engine.forget_drift()
        return outputs_of(own, *calls)

    check_decisions(on_ranks(4, model, run=run, timeout_s=30.0, **CACHED), one.found, one.cached())


# Beside codecs, displacement and V-Major ------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["lossless", "coded", "ahead", "cocodiff+"])
def test_beside_what_is_sent_in_tensors_place(preset):
    """Layers that a step left out go on from their last call. The lossless codec changes no bit; what is lossy is not
    far from what is sent whole, though a change near the threshold may be decided otherwise; all ranks are alike."""
    model, inputs = family("flux")
    calls = [
        {name: x if "ids" in name else x.to(torch.bfloat16) for name, x in call.items()}
        for call in moving(inputs, MOVES)
    ]
    model.to(torch.bfloat16)
    whole, *_ = cached_on(4, model, calls, preset="split")
    found = cached_on(4, model, calls, preset=preset, steps=len(calls))
    check_decisions(found, found[0].found, found[0].cached())
    assert all(any(cached) and not all(cached[1:]) for cached in (whole.cached(), found[0].cached()))
    distance = (torch.stack(found[0].found) - torch.stack(whole.found)).float().norm()
    if preset == "lossless":
        assert distance == 0 and found[0].cached() == whole.cached()
    else:
        assert 0 < distance < 0.2 * torch.stack(whole.found).float().norm()


def test_a_layer_that_was_left_out_is_coded_when_it_is_called_again():
    model, inputs = family("qwen")
    calls = moving(inputs, [0.0, 0.5, 0.51, 1.2, 1.21, 3.0])
    first, _ = cached_on(2, model, calls, preset="coded", step_cache_threshold=0.12)
    assert first.cached() == [0, 0, 1, 0, 1, 0]
    assert [row["coded_fraction"] for row in first.engine.drift_profile()] == [0, 1, 1, 1, 1, 1]


# Settings -------------------------------------------------------------------------------------------------------------


def test_what_it_sends_is_counted_and_small():
    model, inputs = family("flux")
    calls, ranks = moving(inputs, MOVES), 4
    decisions = len(calls) - 1  # the first call has nothing to compare with
    assert cached_on(ranks, model, calls)[0].sent("notes") == decisions * ranks * (ranks - 1) * 2 * 8


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_refused_beside_a_cache_of_diffusers(size):
    pipe = PIPELINES["flux"](heads=12)
    pipe.transformer.enable_cache(MagCacheConfig(mag_ratios=[1.0] * 6, num_inference_steps=6))
    words = r"step_cache first_block and the cache hook MagCacheHeadHook .*disable_cache"
    refused(words, pipe, size=size, run=lambda *_: pytest.fail("entered"), **CACHED)


def test_models_of_one_block_are_refused():
    words = r"^step_cache first_block: SD3Transformer2DModel has 1 block\(s\).*: .*step_cache"
    refused(words, FAMILIES["sd3"][0](6, layers=1), size=1, **CACHED)


def test_ranks_in_threads_ask_diffusers_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its registry is filled at the first question, and says of itself at once that it is."""
    registry, fill = _helpers.TransformerBlockRegistry, vars(_helpers)["_register_transformer_blocks_metadata"]

    def slowly() -> None:
        time.sleep(0.3)
        fill()

    monkeypatch.setattr(_helpers, "_register_transformer_blocks_metadata", slowly)
    monkeypatch.setattr(registry, "_is_registered", False)
    monkeypatch.setattr(registry, "_registry", {})
    block = FAMILIES["sd3"][0](6).transformer_blocks[0]
    assert run_ranks(2, lambda transport: place_of_image(block)) == [1, 1]

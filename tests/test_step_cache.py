"""First Block Cache on several ranks: one process's image, with decisions that all ranks of a sequence take alike."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cocodiff_eval.harness.session import same_bits
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig
from planned_models import PLANNED
from test_engine_checks import painted
from tiny_models import FAMILIES
from tiny_pipelines import PIPELINES

from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.transport import Part
from cocodiff.config.config import Config
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

MORE_BLOCKS = {
    "sd3": {"layers": 3},
    "flux": {"num_layers": 2, "num_single_layers": 2},
    "flux2": {"num_layers": 2},
    "qwen": {"num_layers": 3},
}
MOVES = (0.0, 0.01, 0.02, 1.0, 1.01, 1.02, 1.5, 2.5)
CACHED = {"step_cache": "first_block", "step_cache_threshold": 0.2}
Calls = Sequence[dict[str, Any]]


def moving(inputs: dict[str, Any], moves: Sequence[float], tokens: slice = slice(None)) -> Calls:
    """A call for each step, whose sample has moved so far from the first. tokens: of a sequence, those that move."""
    name, time = ("x", "t") if "x" in inputs else ("hidden_states", "timestep")
    calls = []
    for step, far in enumerate(moves):
        several = inputs[name] if isinstance(inputs[name], list) else [inputs[name]]
        moved = [x.clone() for x in several]
        for number, x in enumerate(moved):
            to = torch.randn(x.shape, generator=torch.Generator().manual_seed(number))
            x[:, tokens] += far * to[:, tokens]
        now = inputs[time] * (1 - step / 1000) if inputs[time].is_floating_point() else inputs[time] - step
        calls.append(inputs | {name: moved if isinstance(inputs[name], list) else moved[0], time: now})
    return calls


def of_calls(model: Any, calls: Calls) -> torch.Tensor:
    found = [model(**copy.deepcopy(call), return_dict=False)[0] for call in calls]
    return torch.stack([torch.stack(x) if isinstance(x, list) else x for x in found]) + 0


def family(name: str, heads: int = 6, batch: int = 1) -> tuple[Any, dict[str, Any]]:
    make, inputs_of = FAMILIES[name]
    return make(heads, **MORE_BLOCKS[name]), inputs_of(batch, 6, 7, 5)


def planned(name: str) -> tuple[Any, dict[str, Any]]:
    blocks = {"n_layers": 3} if name == "z-image" else {"num_layers": 3}
    case = PLANNED[name]._replace(config=PLANNED[name].config | blocks)
    return case.model(), case.call()


def run(transport: Any, model: Any, calls: Calls, **settings: Any) -> tuple[torch.Tensor, list[float]]:
    """A rank's outputs of all calls, and of each step the fraction of calls that were cached."""
    own = copy.deepcopy(model)
    with torch.no_grad(), parallelize(own, transport=transport, **CACHED | settings) as engine:
        found = of_calls(own, calls)
    assert all("forward" not in vars(module) for module in own.modules())
    return found, [row["cached_fraction"] for row in engine.drift_profile()]


def check_alike(of_ranks: Sequence[tuple[torch.Tensor, list[float]]], one: tuple[torch.Tensor, list[float]]) -> None:
    """The same bits on all ranks, and one process's decisions and outputs."""
    for found, cached in of_ranks:
        assert torch.equal(found, of_ranks[0][0]) and cached == one[1]
    torch.testing.assert_close(of_ranks[0][0], one[0], rtol=1e-4, atol=2e-5)


# One process ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*FAMILIES, "wan", "z-image"])
def test_four_ranks_equal_one_process_and_diffusers_own_hook(name):
    """diffusers' hook fails with SD3, FLUX.2 and Z-Image; elsewhere one rank gives its very bits."""
    model, inputs = family(name) if name in FAMILIES else planned(name)
    calls = moving(inputs, MOVES)
    with torch.no_grad():
        exact = of_calls(model, calls)
    (one,) = run_ranks(1, lambda transport: run(transport, model, calls))
    assert {0.0, 1.0} == {*one[1]} and one[1][0] == 0
    assert [bool(x) for x in one[1]] == [not torch.equal(x, y) for x, y in zip(exact, one[0], strict=True)]
    if name in ("flux", "qwen", "wan"):
        theirs = copy.deepcopy(model)
        theirs.enable_cache(FirstBlockCacheConfig(threshold=CACHED["step_cache_threshold"]))
        with torch.no_grad(), theirs.cache_context("cond"):
            assert torch.equal(of_calls(theirs, calls), one[0])
    check_alike(run_ranks(4, lambda transport: run(transport, model, calls)), one)


@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_pipelines_paint_what_one_process_paints_with_diffusers_own_hook(name):
    """Two images, of which the second begins anew."""
    pipe = PIPELINES[name](heads=12)
    theirs = copy.deepcopy(pipe)
    theirs.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    plain = painted(name, theirs)

    def work(transport: Any) -> tuple[torch.Tensor, list[float]]:
        own = copy.deepcopy(pipe)
        with parallelize(own, transport=transport, **CACHED | {"step_cache_threshold": 0.5}) as engine:
            found = [painted(name, own) for _ in range(2)]
        assert torch.equal(*found)
        return found[0] + 0, [row["cached_fraction"] for row in engine.drift_profile()]

    (one,) = run_ranks(1, work)
    assert torch.equal(one[0], plain) and any(one[1])
    check_alike(run_ranks(4, work), one)


@pytest.mark.parametrize("settings", [{"ring": 2}, {"chunks": 2, "exchange": "split"}], ids=["ring", "chunks"])
def test_with_a_ring_and_in_chunks(settings):
    model, inputs = family("qwen")
    calls = moving(inputs, MOVES)
    (one,) = run_ranks(1, lambda transport: run(transport, model, calls))
    check_alike(run_ranks(4, lambda transport: run(transport, model, calls, **settings)), one)


def test_calls_of_another_form_begin_anew():
    """A text of another length, and blocks that the model leaves out itself, as SD3 does for one of its branches."""
    model, inputs = family("sd3")
    calls = moving(inputs, [0.01 * step for step in range(6)])
    calls[2]["encoder_hidden_states"] = calls[2]["encoder_hidden_states"][:, :3]
    calls[4]["skip_layers"] = [0]
    (one,) = run_ranks(1, lambda transport: run(transport, model, calls))
    with torch.no_grad():
        exact = of_calls(model, calls)
    assert [torch.equal(x, y) for x, y in zip(exact, one[0], strict=True)] == [True, False, True, True, True, True]
    check_alike(run_ranks(3, lambda transport: run(transport, model, calls)), one)


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
    with torch.no_grad():
        of_calls(model, calls)
    handle.remove()

    def change(rows: slice) -> float:
        before, now = (x[:, rows] for x in added[:2])
        return float((now - before).abs().mean() / before.abs().mean())

    own = [change(slice(0, 11)), change(slice(11, 22)), change(slice(22, 32)), change(slice(32, 42))]
    threshold = share * own[0]
    assert max(own[1:]) < threshold < own[0] and (change(slice(0, 42)) < threshold) == (share == 0.5)

    def work(transport: Any) -> tuple[torch.Tensor, list[float]]:
        return run(transport, model, calls, step_cache_threshold=threshold)

    (one,), of_ranks = run_ranks(1, work), run_ranks(4, work, timeout_s=30.0)
    assert one[1][1] == (share == 0.5)
    check_alike(of_ranks, one)


def test_a_threshold_of_0_leaves_out_what_does_not_change():
    model, inputs = family("qwen")
    torch.nn.init.zeros_(model.time_text_embed.timestep_embedder.linear_2.weight)  # blocks see nothing of the time
    calls = moving(inputs, [0.0, 0.0, 0.0, 0.01])
    found = run_ranks(2, lambda transport: run(transport, model, calls, step_cache_threshold=0.0))
    assert all(cached == [0, 1, 1, 0] for _, cached in found)


def test_values_that_are_no_numbers_are_computed():
    model, inputs = family("qwen")
    calls = moving(inputs, [0.0, 0.0, 0.0, 0.0])
    calls[1]["hidden_states"][0, 40] = float("nan")
    found = run_ranks(4, lambda transport: run(transport, model, calls, step_cache_threshold=1e30), timeout_s=30.0)
    assert all(cached == [0, 0, 0, 1] for _, cached in found)


@pytest.mark.parametrize("size", [2, 4])
def test_each_branch_of_guidance_decides_for_itself(size):
    """One branch's text changes much from step to step and the other one's does not; each part of the ranks computes
    one of them, and asks nobody of the other."""
    model, inputs = family("qwen")
    calls = []
    for step, call in enumerate(moving(inputs, [0.0] * 5)):
        calls += [call, call | {"encoder_hidden_states": 9 * (-1) ** step * inputs["encoder_hidden_states"]}]

    def work(transport: Any, parts: int) -> tuple[torch.Tensor, list[float]]:
        settings = {"guidance_parallel": parts, "step_cache_threshold": 0.08}
        return run(transport, model, calls, **settings)

    (one,) = run_ranks(1, lambda transport: work(transport, 1))
    assert one[1][0] == 0 and 0.5 in one[1]
    check_alike(run_ranks(size, lambda transport: work(transport, 2), timeout_s=30.0), one)


def test_each_part_decides_for_its_half_of_a_batch():
    """SD3's branches come in one call. Two parts decide as two runs of one branch each."""
    model, inputs = family("sd3", batch=2)
    calls = moving(inputs, [0.0, 0.5, 0.51, 1.0])
    for call in calls:
        call["hidden_states"][0] = inputs["hidden_states"][0]  # one of them does not move
    halves = [
        [{name: x[row : row + 1] for name, x in call.items()} for call in calls]
        for row in range(len(calls[0]["timestep"]))
    ]

    def work(transport: Any, calls: Calls) -> tuple[torch.Tensor, list[float]]:
        return run(
            transport, model, calls, guidance_parallel="auto" if transport.size == 1 else 2, step_cache_threshold=0.1
        )

    of_halves = [run_ranks(1, lambda transport, half=half: work(transport, half))[0] for half in halves]
    assert of_halves[0][1] == [0, 1, 1, 1] and of_halves[1][1] == [0, 0, 1, 0]
    cached = [sum(of) / 2 for of in zip(*(cached for _, cached in of_halves), strict=True)]
    one = torch.cat([found for found, _ in of_halves], dim=1), cached
    check_alike(run_ranks(4, lambda transport: work(transport, calls)), one)


def test_replicas_decide_for_themselves():
    """One makes an image while the other makes three, with other decisions: neither waits for the other."""
    model, inputs = family("flux")
    of_replica = [moving(inputs, MOVES), moving(inputs, [0.0, 0.01, 0.02, 0.03, 2.0])]

    def work(transport: Any) -> tuple[torch.Tensor, list[float]]:
        number = transport.rank // 2
        part = Part(transport, (2 * number, 2 * number + 1))
        return [run(part, model, of_replica[number]) for _ in range(1 + 2 * number)][-1]

    found = run_ranks(4, work, timeout_s=30.0)
    assert found[0][1] != found[2][1]
    for number, calls in enumerate(of_replica):
        check_alike(
            found[2 * number : 2 * number + 2], run_ranks(1, lambda transport, c=calls: run(transport, model, c))[0]
        )


# Interruptions --------------------------------------------------------------------------------------------------------


def test_a_run_after_an_interrupted_one_begins_anew():
    model, inputs = family("sd3")
    calls = moving(inputs, MOVES)
    (one,) = run_ranks(1, lambda transport: run(transport, model, calls))

    def work(transport: Any) -> tuple[torch.Tensor, list[float]]:
        own = copy.deepcopy(model)

        def fail(*_: Any) -> None:
            raise RuntimeError("enough")

        with torch.no_grad(), parallelize(own, transport=transport, **CACHED) as engine:
            of_calls(own, calls[:3])
            handle = own.transformer_blocks[1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="enough"):
                of_calls(own, calls[3:])
            handle.remove()
            engine.new_run()
            engine.forget_drift()
            found = of_calls(own, calls)
        return found, [row["cached_fraction"] for row in engine.drift_profile()]

    check_alike(run_ranks(4, work, timeout_s=30.0), one)


def test_a_rank_that_fails_before_the_decision_ends_the_others():
    model, inputs = family("sd3")
    calls = moving(inputs, MOVES)

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)

        def fail(*_: Any) -> None:
            raise ValueError("lost its way")

        with torch.no_grad(), parallelize(own, transport=transport, **CACHED):
            of_calls(own, calls[:2])
            if transport.rank == 1:
                own.transformer_blocks[0].register_forward_hook(fail)
            of_calls(own, calls[2:])

    with pytest.raises((ValueError, PeerLost), match="lost its way"):
        run_ranks(4, work, timeout_s=30.0)


# Beside codecs, displacement and V-Major ------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["lossless", "coded", "ahead", "cocodiff+"])
def test_beside_what_is_sent_in_tensors_place(preset):
    """Layers that a step left out go on from their last call. The lossless codec changes no bit; what is lossy is not
    far from what is sent whole, though a change near the threshold may be decided otherwise; all ranks are alike."""
    model, inputs = family("flux")
    model, inputs = (
        model.to(torch.bfloat16),
        {name: x if "ids" in name else x.to(torch.bfloat16) for name, x in inputs.items()},
    )
    calls = moving(inputs, MOVES)
    whole = run_ranks(4, lambda transport: run(transport, model, calls, preset="split"))
    found = run_ranks(4, lambda transport: run(transport, model, calls, preset=preset, steps=len(calls)))
    assert all(torch.equal(of_rank[0], found[0][0]) and of_rank[1] == found[0][1] for of_rank in found)
    assert all(any(cached) and not all(cached[1:]) for cached in (whole[0][1], found[0][1]))
    if preset == "lossless":
        assert torch.equal(found[0][0], whole[0][0]) and found[0][1] == whole[0][1]
    else:
        distance = (found[0][0].float() - whole[0][0].float()).norm() / whole[0][0].float().norm()
        assert 0 < distance < 0.2


def test_a_layer_that_was_left_out_is_coded_when_it_is_called_again():
    model, inputs = family("qwen")
    calls = moving(inputs, [0.0, 0.5, 0.51, 1.2, 1.21, 3.0])

    def work(transport: Any) -> list[dict[str, Any]]:
        own = copy.deepcopy(model)
        with (
            torch.no_grad(),
            parallelize(own, "coded", transport=transport, **CACHED | {"step_cache_threshold": 0.12}) as engine,
        ):
            of_calls(own, calls)
        return engine.drift_profile()

    rows = run_ranks(2, work)[0]
    assert [row["cached_fraction"] for row in rows] == [0, 0, 1, 0, 1, 0]
    assert [row["coded_fraction"] for row in rows] == [0, 1, 1, 1, 1, 1]


# Settings -------------------------------------------------------------------------------------------------------------


def test_what_it_sends_is_counted_and_small():
    model, inputs = family("flux")
    calls = moving(inputs, MOVES)

    def work(transport: Any) -> dict[str, int]:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, **CACHED) as engine:
            of_calls(own, calls)
        return engine.bytes("notes")

    decisions, ranks = len(calls) - 1, 4  # the first call has nothing to compare with
    assert sum(run_ranks(ranks, work)[0].values()) == decisions * ranks * (ranks - 1) * 2 * 8


def test_it_is_lossy_and_does_not_change_other_settings():
    cached, exact = Config(**CACHED), Config()
    assert exact.exact and not cached.exact and cached.exact_attention
    assert not same_bits(cached, exact) and same_bits(Config(step_cache_threshold=0.9), exact)


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_refused_beside_a_cache_of_diffusers(size):
    pipe = PIPELINES["flux"](heads=12)

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        own.transformer.enable_cache(MagCacheConfig(mag_ratios=[1.0] * 6, num_inference_steps=6))
        with parallelize(own, transport=transport, **CACHED):
            raise AssertionError("entered")

    with pytest.raises(UserError, match=r"step_cache first_block and the cache hook MagCacheHeadHook .*disable_cache"):
        run_ranks(size, work)


def test_models_of_which_too_little_is_known_are_refused():
    case = PLANNED["hunyuan 1.5"]
    model, calls = case.model(), moving(case.call(), MOVES)
    with pytest.raises(UserError, match="HunyuanVideo15Transformer3DModel has blocks that return several tensors"):
        run_ranks(2, lambda transport: run(transport, model, calls))
    single = FAMILIES["sd3"][0](6, layers=1)
    with pytest.raises(UserError, match=r"SD3Transformer2DModel has 1 block\(s\).*choose step_cache none"):
        run_ranks(1, lambda transport: run(transport, single, calls))

"""What the engine refuses on entering and at each call, since a user may change a model in between."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    apply_first_block_cache,
    apply_mag_cache,
    apply_pyramid_attention_broadcast,
    apply_taylorseer_cache,
)
from planned_models import PLANNED
from tiny_models import FAMILIES, sd3_inputs, sd3_transformer
from tiny_pipelines import PIPELINES, TEXT_WIDTH

from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld, run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
STEPS = 6


@pytest.fixture
def alone():
    """The transport of a world of one rank."""
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    yield transport
    transport.close()


# Caches ---------------------------------------------------------------------------------------------------------------


def painted(family: str, pipe: Any) -> torch.Tensor:
    """Latents after a few steps, with prompts as embeddings and, for Qwen-Image, guidance."""
    prompt = torch.linspace(-1, 1, 5 * TEXT_WIDTH).view(1, 5, TEXT_WIDTH)
    more: dict[str, Any] = {"pooled_prompt_embeds": torch.zeros(1, 16)}
    if family == "qwen":
        mask = torch.ones(1, 5).long()
        more = {
            "prompt_embeds_mask": mask,
            "negative_prompt_embeds": -prompt,
            "negative_prompt_embeds_mask": mask,
            "true_cfg_scale": 3.0,
        }
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return pipe(
            prompt_embeds=prompt,
            height=32,
            width=32,
            num_inference_steps=STEPS,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
            **more,
        ).images


@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_a_cache_by_which_ranks_would_disagree_is_refused(family):
    """On entering, and at a call if it was put on later, however that was done; without it the image is as ever."""
    pipe = PIPELINES[family](heads=12)
    plain = painted(family, pipe)
    message = (
        r"transformer_blocks\.0 has the cache hook FBCHeadBlockHook, .* disagree: .*transformer\.disable_cache.*"
        r"step_cache first_block with step_cache_threshold 0\.3"
    )

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        own.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
        engine = parallelize(own, transport=transport)
        with pytest.raises(UserError, match=message), engine:
            raise AssertionError("entered")
        own.transformer.disable_cache()
        with engine:
            torch.testing.assert_close(painted(family, own), plain, rtol=0, atol=1e-4)
            apply_first_block_cache(own.transformer, FirstBlockCacheConfig(threshold=0.3))
            with pytest.raises(UserError, match=message):
                painted(family, own)

    run_ranks(3, work, timeout_s=20.0)


@pytest.mark.parametrize("guidance", [1, 2])
@pytest.mark.parametrize("kind", ["sea", "faster"])
def test_caches_that_clash_are_refused_by_name(kind, guidance):
    """SeaCache decides by a rank's own latents; FasterCache halves the batch, beside tokens' values of its own."""
    model = PLANNED["wan"].model() if kind == "sea" else FAMILIES["flux"][0](4)
    model.enable_cache(
        SeaCacheConfig()
        if kind == "sea"
        else FasterCacheConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500)
    )
    name = "SeaCacheRootHook" if kind == "sea" else "FasterCacheDenoiserHook"

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        message = (
            rf"has the cache hook {name}, .*transformer\.disable_cache\(\) first, and choose step_cache first_block"
        )
        engine = parallelize(own, transport=transport, guidance_parallel=guidance)
        with pytest.raises(UserError, match=message), engine:
            raise AssertionError("entered")

    run_ranks(2, work)


def test_one_rank_may_decide_for_itself(alone):
    pipe, same = PIPELINES["qwen"](), PIPELINES["qwen"]()
    for one in (pipe, same):
        one.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    with parallelize(same, transport=alone):
        assert torch.equal(painted("qwen", same), painted("qwen", pipe))


BROADCAST = PyramidAttentionBroadcastConfig(
    spatial_attention_block_skip_range=2,
    spatial_attention_timestep_skip_range=(-1, 1001),
    current_timestep_callback=lambda: 500,
    spatial_attention_block_identifiers=("transformer_blocks",),
)
RATIOS = MagCacheConfig(threshold=0.5, max_skip_steps=2, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS)
TAYLOR = TaylorSeerCacheConfig(2, disable_cache_before_step=2)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("flux", BROADCAST),
        ("flux", RATIOS),
        ("qwen", TAYLOR),
        pytest.param("qwen", RATIOS, marks=pytest.mark.exhaustive),
        pytest.param("flux", TAYLOR, marks=pytest.mark.exhaustive),
    ],
    ids=["broadcast", "ratios", "taylor", "ratios of branches", "taylor, one branch"],
)
def test_caches_that_count_calls_give_one_processs_image(family, config):
    pipe = PIPELINES[family](heads=12)
    exact, cached = painted(family, pipe), copy.deepcopy(pipe)
    cached.transformer.enable_cache(config)
    plain = painted(family, cached)
    assert (plain - exact).abs().max() > 1e-4

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(pipe)
        own.transformer.enable_cache(config)
        with parallelize(own, transport=transport):
            return painted(family, own)

    outputs = run_ranks(4, work)
    torch.testing.assert_close(outputs[0], plain, rtol=0, atol=1e-5)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(
    ("name", "kind", "preset"),
    [
        ("wan", "broadcast", "tapa"),
        ("wan", "ratios", "tapa"),
        ("wan", "taylor", "lossless"),
        ("sd3", "broadcast", "lossless"),
        ("sd3", "ratios", "tapa"),
    ],
)
def test_caches_that_count_calls_of_bare_transformers(name, kind, preset):
    """A class by a plan; and SD3's, whose last block returns no text, which has no cache contexts and so no TaylorSeer.
    Whatever layers a cache leaves out, all ranks do, and what travels in tensors' place is none the worse for it."""
    apply, config = {
        "broadcast": (
            apply_pyramid_attention_broadcast,
            replace(BROADCAST, spatial_attention_block_identifiers=("blocks",)),
        ),
        "ratios": (apply_mag_cache, RATIOS),
        "taylor": (apply_taylorseer_cache, replace(TAYLOR, cache_identifiers=[r"blocks\.\d\.attn1"])),
    }[kind]
    case = PLANNED["wan"]
    model, call = (
        (case.model(), case.call()) if name == "wan" else (sd3_transformer(4, layers=3), sd3_inputs(1, 6, 7, 5))
    )
    calls = [call | {"timestep": call["timestep"] - 20 * step} for step in range(STEPS)]

    def outputs_of(own: Any) -> torch.Tensor:
        apply(own, config)
        with torch.no_grad(), own.cache_context("cond") if name == "wan" else nullcontext():
            return torch.stack([own(**one, return_dict=False)[0] for one in calls]) + 0

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model)
        with parallelize(own, preset, transport=transport):
            return outputs_of(own)

    plain, of_ranks = outputs_of(copy.deepcopy(model)), run_ranks(4, work)
    with torch.no_grad():
        exact = torch.stack([model(**one, return_dict=False)[0] for one in calls])
    assert not torch.equal(plain, exact)
    torch.testing.assert_close(of_ranks[0], plain, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(output, of_ranks[0]) for output in of_ranks)


def test_a_cache_that_calibrates_is_refused():
    """It would measure each rank's own tokens."""
    pipe = PIPELINES["flux"](heads=12)

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        own.transformer.enable_cache(MagCacheConfig(calibrate=True))
        with parallelize(own, transport=transport):
            raise AssertionError("entered")

    with pytest.raises(UserError, match="has the cache hook MagCacheHeadHook"):
        run_ranks(2, work)


# Compilers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [False, True])
def test_a_model_compiled_after_parallelize_is_refused(block, alone):
    """The whole before entering, and a block or the whole inside."""
    model, inputs = sd3_transformer(3), sd3_inputs(1, 2, 3, 2)
    engine = parallelize(model, transport=alone)
    part = model.transformer_blocks[1] if block else model
    message = rf"^{'transformer_blocks.1' if block else 'the transformer'} is compiled by torch\.compile"
    if not block:
        part.compile()
        with pytest.raises(UserError, match=message), engine:
            raise AssertionError("entered")
        assert not model._forward_pre_hooks
        part._compiled_call_impl = None
    with torch.no_grad(), engine:
        model(**inputs)
        part.compile()
        with pytest.raises(UserError, match=message):
            model(**inputs)


def test_a_model_that_is_compiled_from_outside_is_refused(alone):
    model, inputs = sd3_transformer(3), sd3_inputs(1, 2, 3, 2)
    refused = pytest.raises(UserError, match=r"^the transformer is compiled by torch\.compile")
    with torch.no_grad(), parallelize(model, transport=alone), refused:
        torch.compile(model, backend="eager")(**inputs)


# Gradients ------------------------------------------------------------------------------------------------------------


def call_with(size: int, wanted: str, mode: Any, training: bool = False) -> bool:
    """Whether the output of a call requires gradients, where an argument does, or only parameters."""
    make, inputs_of = FAMILIES["flux"]
    model = make(4).train(training)

    def work(transport: Any) -> bool:
        own, inputs = copy.deepcopy(model), inputs_of(1, 3, 4, 5)
        if wanted in inputs:
            inputs[wanted].requires_grad_()
        with mode(), parallelize(own, transport=transport):
            return bool(own(**inputs)[0].requires_grad)

    return run_ranks(size, work, timeout_s=20.0)[0]


@pytest.mark.parametrize("name", ["hidden_states", "encoder_hidden_states", "pooled_projections"])
def test_an_argument_that_requires_gradients_is_refused(name):
    with pytest.raises(UserError, match=rf"^gradients are wanted for {name}, but none pass between ranks: .*no_grad"):
        call_with(2, name, torch.enable_grad)
    assert not call_with(2, name, torch.no_grad)
    assert call_with(1, name, torch.enable_grad)


def test_training_is_refused_and_a_forgotten_no_grad_is_not():
    with pytest.raises(UserError, match="gradients are wanted for the parameters of a model in training mode"):
        call_with(2, "parameters", torch.enable_grad, training=True)
    assert not call_with(2, "parameters", torch.no_grad, training=True)
    assert not call_with(2, "parameters", torch.enable_grad)
    assert call_with(1, "parameters", torch.enable_grad, training=True)

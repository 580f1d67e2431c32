"""What the engine refuses, in words that help: models that it does not know, ranks that do not fit, caches,
compilers, gradients and arguments; on entering and at each call, since a user may change a model in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from diffusers.models.attention_processor import (
    FusedJointAttnProcessor2_0,
    PAGJointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor
from on_ranks import check_alike, on_ranks, outputs_of, refused
from planned_models import PLANNED
from seams import choose_backend, hooks_of
from test_engine_pipelines import inpainting
from tiny_models import FAMILIES, flux2_transformer, flux_transformer, sd3_inputs, sd3_transformer
from tiny_pipelines import PIPELINES
from torch import nn
from value_tables import beside

from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")
STEPS = 6


# Models ---------------------------------------------------------------------------------------------------------------


def changed(make: Callable[[int], nn.Module], change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make(4)
        change(model)
        return model

    return made


def with_processor(make: Callable[[int], nn.Module], processor: Any, number: int = 0) -> Any:
    """A model of which one layer has another attention processor."""

    def change(model: Any) -> None:
        model.set_attn_processor({**model.attn_processors, [*model.attn_processors][number]: processor})

    return changed(make, change)


def first_processor(model: Any) -> Any:
    return model.transformer_blocks[0].attn.processor


class UnetPipeline:
    """A pipeline without a transformer."""

    unet = nn.Linear(2, 2)


ADAPTED = SD3IPAdapterJointAttnProcessor2_0(hidden_size=32, ip_hidden_states_dim=32, head_dim=8)
MODELS: dict[str, Callable[[], Any]] = {
    "unknown": lambda: nn.Linear(2, 2),
    "a U-Net's pipeline": UnetPipeline,
    "fused attention": with_processor(sd3_transformer, FusedJointAttnProcessor2_0(), 1),
    "IP-adapter": with_processor(sd3_transformer, ADAPTED),
    "PAG": with_processor(sd3_transformer, PAGJointAttnProcessor2_0()),
    "KV cache": with_processor(flux2_transformer, Flux2KVAttnProcessor()),
    "fused projections": changed(flux_transformer, lambda model: model.fuse_qkv_projections()),
    "backend": changed(flux_transformer, lambda model: choose_backend(first_processor(model), "flash")),
    "parallel": changed(flux_transformer, lambda model: setattr(first_processor(model), "_parallel_config", object())),
    "unknown attention": changed(sd3_transformer, lambda model: setattr(model.proj_out, "processor", object())),
    "compiled": changed(sd3_transformer, lambda model: model.compile()),
    "compiled from outside": lambda: torch.compile(sd3_transformer(4)),
}
REFUSALS = beside(__file__)


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_is_not_as_its_family_has_it_is_refused_and_left_as_it_was(case, alone):
    model = MODELS[case]()
    before = dict(getattr(model, "attn_processors", {}))
    with pytest.raises(UserError, match=REFUSALS["models"][case]), parallelize(model, transport=alone):
        raise AssertionError("entered")
    assert dict(getattr(model, "attn_processors", {})) == before
    assert not (isinstance(model, nn.Module) and hooks_of(model))


@pytest.mark.parametrize(("ranks", "heads", "settings", "tokens", "message"), REFUSALS["ranks"])
def test_ranks_that_do_not_fit(ranks, heads, settings, tokens, message):
    refused(message, sd3_transformer(heads), sd3_inputs(1, *tokens, 2), size=ranks, **settings)


# Arguments ------------------------------------------------------------------------------------------------------------

IMAGES = "ip_adapter_image_embeds"


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("sd3", {"block_controlnet_hidden_states": [torch.zeros(1)]}, "block_controlnet_hidden_states.*ControlNet"),
        ("sd3", {"joint_attention_kwargs": {"scale": 2.0, "hint": 1}}, r"\(hint\) reach no parallel attention"),
        ("flux", {"controlnet_block_samples": [torch.zeros(1)]}, "controlnet_block_samples.*ControlNet"),
        *((family, {"joint_attention_kwargs": {IMAGES: torch.zeros(1, 3, 12)}}, IMAGES) for family in ("sd3", "flux")),
        ("flux", {"joint_attention_kwargs": {"ip_hidden_states": 1}}, "ip_hidden_states"),
        ("flux2", {"kv_cache_mode": "extract"}, "cache of reference images"),
        ("qwen", {"attention_kwargs": {"hint": 1}}, r"attention_kwargs \(hint\)"),
    ],
)
def test_call_arguments_that_a_shard_would_misread(family, extra, message):
    make, inputs_of = FAMILIES[family]
    refused(message, make(3), inputs_of(1, 2, 3, 2) | extra, size=1)


def test_positional_arguments_are_checked_and_counted_like_named_ones(alone):
    model, inputs = sd3_transformer(3), sd3_inputs(1, 2, 3, 2)
    with torch.no_grad(), parallelize(model, transport=alone) as engine:
        model(*inputs.values())
        assert engine.counter.step == 0
        with pytest.raises(UserError, match=r"block_controlnet_hidden_states.*ControlNet"):
            model(*inputs.values(), [torch.zeros(1)])


# Caches ---------------------------------------------------------------------------------------------------------------


def painting(family: str) -> tuple[Any, Callable[[Any], torch.Tensor]]:
    """A pipeline, and what paints latents of it or of a copy; of Qwen-Image with guidance."""
    pipe, arguments = PIPELINES[family](heads=12), inpainting(family)[1]
    pipe.set_progress_bar_config(disable=True)
    settings = arguments | {"height": 32, "width": 32, "num_inference_steps": STEPS, "output_type": "latent"}

    def painted(own: Any) -> torch.Tensor:
        with torch.no_grad():
            return own(**settings, generator=torch.Generator().manual_seed(0)).images

    return pipe, painted


@pytest.mark.parametrize("family", ["flux", "qwen"])
def test_a_cache_by_which_ranks_would_disagree_is_refused(family):
    """On entering, and at a call if it was put on later, however that was done; without it the image is as ever."""
    pipe, painted = painting(family)
    plain = painted(pipe)
    message = r"transformer_blocks\.0 has the cache hook FBCHeadBlockHook, .*transformer\.disable_cache.*"
    message += r"step_cache first_block with step_cache_threshold 0\.3"
    cached = copy.deepcopy(pipe)
    cached.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    refused(message, cached, size=3)

    def run(own: Any, _: Any) -> None:
        torch.testing.assert_close(painted(own), plain, rtol=0, atol=1e-4)
        apply_first_block_cache(own.transformer, FirstBlockCacheConfig(threshold=0.3))
        painted(own)

    refused(message, pipe, size=3, run=run)


BROADCAST = PyramidAttentionBroadcastConfig(
    spatial_attention_block_skip_range=2,
    spatial_attention_timestep_skip_range=(-1, 1001),
    current_timestep_callback=lambda: 500,
    spatial_attention_block_identifiers=("transformer_blocks",),
)
HALVING = FasterCacheConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500)
INSTEAD = r".*transformer\.disable_cache\(\).*step_cache first_block"


@pytest.mark.parametrize(
    ("name", "config", "guidance", "message"),
    [
        *(("wan", SeaCacheConfig(), parts, "has the cache hook SeaCacheRootHook, " + INSTEAD) for parts in (1, 2)),
        *(("flux", HALVING, parts, "has the cache hook FasterCacheDenoiserHook, " + INSTEAD) for parts in (1, 2)),
        ("flux", MagCacheConfig(calibrate=True), 1, "has the cache hook MagCacheHeadHook"),
        ("flux", BROADCAST, 2, "guidance_parallel 2 and the cache hook"),
    ],
    ids=["sea", "sea, guided", "faster", "faster, guided", "calibrating", "counting, guided"],
)
def test_caches_that_clash_are_refused_by_name(name, config, guidance, message):
    """SeaCache decides by a rank's own latents, and so would what calibrates; FasterCache halves the batch, beside
    tokens' values of its own; what counts calls would count those of a part of the ranks."""
    model = PLANNED["wan"].model() if name == "wan" else FAMILIES["flux"][0](4)
    model.enable_cache(config)
    refused(message, model, guidance_parallel=guidance)


def test_one_rank_may_decide_for_itself(alone):
    (pipe, painted), (same, _) = painting("qwen"), painting("qwen")
    for one in (pipe, same):
        one.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.3))
    with parallelize(same, transport=alone):
        assert torch.equal(painted(same), painted(pipe))


RATIOS = MagCacheConfig(threshold=0.5, max_skip_steps=2, num_inference_steps=STEPS, mag_ratios=[1.0] * STEPS)
TAYLOR = TaylorSeerCacheConfig(2, disable_cache_before_step=2)


APPLIED = {
    PyramidAttentionBroadcastConfig: apply_pyramid_attention_broadcast,
    MagCacheConfig: apply_mag_cache,
    TaylorSeerCacheConfig: apply_taylorseer_cache,
}
OF_BLOCKS = replace(BROADCAST, spatial_attention_block_identifiers=("blocks",))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "config", "preset"),
    [
        ("flux pipeline", BROADCAST, "tapa"),
        ("flux pipeline", RATIOS, "tapa"),
        ("qwen pipeline", TAYLOR, "tapa"),
        pytest.param("qwen pipeline", RATIOS, "tapa", marks=pytest.mark.exhaustive),
        pytest.param("flux pipeline", TAYLOR, "tapa", marks=pytest.mark.exhaustive),
        ("wan", OF_BLOCKS, "tapa"),
        ("wan", RATIOS, "tapa"),
        ("wan", replace(TAYLOR, cache_identifiers=[r"blocks\.\d\.attn1"]), "lossless"),
        ("sd3", OF_BLOCKS, "lossless"),
        ("sd3", RATIOS, "tapa"),
    ],
    ids=lambda of: of if isinstance(of, str) else type(of).__name__,
)
def test_caches_that_count_calls_give_one_processs_values(name, config, preset):
    """Of pipelines, and of bare transformers: of a class by a plan; and SD3's, whose last block returns no text, which
    has no cache contexts and so no TaylorSeer. Whatever layers a cache leaves out, all ranks do, and what travels in
    tensors' place is none the worse for it."""
    family, _, of_pipeline = name.partition(" ")
    if of_pipeline:
        target, painted = painting(family)
    else:
        wan = PLANNED["wan"]
        target = wan.model() if name == "wan" else sd3_transformer(4, layers=3)
        call = wan.call() if name == "wan" else sd3_inputs(1, 6, 7, 5)
        calls = [call | {"timestep": call["timestep"] - 20 * step} for step in range(STEPS)]

    def run(own: Any, _: Any = None) -> list[torch.Tensor]:
        if of_pipeline:
            return [painted(own)]
        with own.cache_context("cond") if name == "wan" else nullcontext():
            return outputs_of(own, *calls)

    def begin(own: Any) -> None:
        APPLIED[type(config)](own.transformer if of_pipeline else own, config)

    exact, cached = run(copy.deepcopy(target)), copy.deepcopy(target)  # contexts reach hooks of before a first use
    begin(cached)
    plain = run(cached)
    assert max(float((x - y).abs().max()) for x, y in zip(plain, exact, strict=True)) > 1e-4
    of_ranks = on_ranks(4, target, run=run, begin=begin, restored=bool(of_pipeline), preset=preset)
    check_alike(of_ranks, plain, 1e-5 if of_pipeline else 1e-4, 0.0 if of_pipeline else 1e-4)


# Compilers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["", "transformer_blocks.1", "from outside", "before entering"])
def test_a_model_compiled_after_parallelize_is_refused(what, alone):
    model, inputs = sd3_transformer(3), sd3_inputs(1, 2, 3, 2)
    engine, called, part = parallelize(model, transport=alone), model, what if "blocks" in what else ""
    refusal = pytest.raises(UserError, match=rf"^{part or 'the transformer'} is compiled by torch\.compile")
    if what == "before entering":
        model.compile()
        with refusal, engine:
            raise AssertionError("entered")
        return
    with torch.no_grad(), engine:
        model(**inputs)
        if what == "from outside":
            called = torch.compile(model, backend="eager")
        else:
            model.get_submodule(part).compile()
        with refusal:
            called(**inputs)


# Gradients ------------------------------------------------------------------------------------------------------------


def call_with(size: int, wanted: str, mode: Any, training: bool = False) -> bool:
    """Whether the output of a call requires gradients, where an argument does, or only parameters."""
    make, inputs_of = FAMILIES["flux"]

    def run(own: Any, _: Any) -> bool:
        inputs = inputs_of(1, 3, 4, 5)
        if wanted in inputs:
            inputs[wanted].requires_grad_()
        with mode():
            return bool(own(**inputs)[0].requires_grad)

    return on_ranks(size, make(4).train(training), run=run)[0].found


@pytest.mark.parametrize("name", ["hidden_states", "encoder_hidden_states", "pooled_projections"])
def test_an_argument_that_requires_gradients_is_refused(name):
    with pytest.raises(UserError, match=rf"^gradients are wanted for {name}.*no_grad"):
        call_with(2, name, torch.enable_grad)
    assert not call_with(2, name, torch.no_grad)
    assert call_with(1, name, torch.enable_grad)


def test_training_is_refused_and_a_forgotten_no_grad_is_not():
    with pytest.raises(UserError, match="gradients are wanted for the parameters of a model in training mode"):
        call_with(2, "parameters", torch.enable_grad, training=True)
    assert not call_with(2, "parameters", torch.no_grad, training=True)
    assert not call_with(2, "parameters", torch.enable_grad)
    assert call_with(1, "parameters", torch.enable_grad, training=True)

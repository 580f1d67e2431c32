"""What the engine refuses, in words that help, and how it counts steps and guidance branches."""

from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import (
    FusedJointAttnProcessor2_0,
    PAGJointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor
from tiny_models import FAMILIES, flux2_transformer, flux_transformer, sd3_inputs, sd3_transformer
from torch import nn

from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld, run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize


@pytest.fixture
def alone():
    """The transport of a world of one rank."""
    transport = LoopbackTransport(LoopbackWorld(1), 0)
    yield transport
    transport.close()


def refused(size: int, model: nn.Module, settings: dict[str, Any] | None = None, **inputs: object) -> str:
    """The error of a call on `size` ranks that share `model`'s weights, each with a model of its own."""
    weights = model.state_dict()

    def work(transport: LoopbackTransport) -> None:
        own = type(model).from_config(model.config).eval()
        own.load_state_dict(weights)
        with parallelize(own, transport=transport, **settings or {}):
            own(**inputs)

    with pytest.raises(UserError) as caught:
        run_ranks(size, work, timeout_s=30.0)
    return str(caught.value)


def test_unknown_models_are_refused_with_the_known_families(alone):
    with pytest.raises(UserError, match=r"no adapter for Linear; known families: SD3 / SD3\.5, FLUX.*docs/models.md"):
        parallelize(nn.Linear(2, 2), transport=alone)


def test_a_pipeline_without_transformer_is_refused(alone):
    class UnetPipeline:
        unet = nn.Linear(2, 2)

    with pytest.raises(UserError, match="a UnetPipeline has no transformer: give a DiT pipeline or its transformer"):
        parallelize(UnetPipeline(), transport=alone)


def test_a_pipelines_transformer_is_taken(alone):
    class Pipeline:
        transformer = sd3_transformer(3)

    assert parallelize(Pipeline(), transport=alone).model is Pipeline.transformer


def test_a_custom_attention_processor_is_refused_by_name(alone):
    model = sd3_transformer(3)
    names = list(model.attn_processors)
    model.set_attn_processor({**model.attn_processors, names[1]: FusedJointAttnProcessor2_0()})
    with pytest.raises(UserError) as caught, parallelize(model, transport=alone):
        raise AssertionError("entered")
    assert names[1] in str(caught.value) and "FusedJointAttnProcessor2_0" in str(caught.value)
    assert "unload the adapter or unfuse" in str(caught.value)
    assert type(model.attn_processors[names[0]]).__name__ == "JointAttnProcessor2_0"


def ip_adapter() -> nn.Module:
    model = sd3_transformer(4)
    name = next(iter(model.attn_processors))
    adapted = SD3IPAdapterJointAttnProcessor2_0(hidden_size=32, ip_hidden_states_dim=32, head_dim=8)
    model.set_attn_processor({**model.attn_processors, name: adapted})
    return model


def perturbed_guidance() -> nn.Module:
    model = sd3_transformer(4)
    model.set_attn_processor({**model.attn_processors, next(iter(model.attn_processors)): PAGJointAttnProcessor2_0()})
    return model


def key_value_cache() -> nn.Module:
    model = flux2_transformer(4)
    model.set_attn_processor({**model.attn_processors, next(iter(model.attn_processors)): Flux2KVAttnProcessor()})
    return model


def fused() -> nn.Module:
    model = flux_transformer(4)
    model.fuse_qkv_projections()
    return model


def with_processor_setting(name: str, value: object) -> nn.Module:
    model = flux_transformer(4)
    setattr(next(iter(model.attn_processors.values())), name, value)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ip_adapter, "is a SD3IPAdapterJointAttnProcessor2_0, which has no parallel form"),
        (perturbed_guidance, "is a PAGJointAttnProcessor2_0, which has no parallel form"),
        (key_value_cache, "is a Flux2KVAttnProcessor, which has no parallel form"),
        (fused, r"transformer_blocks\.0\.attn has fused projections: call transformer\.unfuse_qkv_projections"),
        (lambda: with_processor_setting("_attention_backend", "flash"), "uses the attention backend flash.*reset"),
        (lambda: with_processor_setting("_parallel_config", object()), "is parallel already"),
    ],
    ids=["IP-adapter", "PAG", "KV cache", "fused", "backend", "parallel"],
)
def test_attention_that_is_not_the_familys_own_is_refused(make, message, alone):
    model = make()
    before = [id(processor) for processor in model.attn_processors.values()]
    with pytest.raises(UserError, match=message), parallelize(model, transport=alone):
        raise AssertionError("entered")
    assert [id(processor) for processor in model.attn_processors.values()] == before
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("family", "extra", "message"),
    [
        ("flux", {"controlnet_block_samples": [torch.zeros(1)]}, "run without a ControlNet"),
        ("flux", {"joint_attention_kwargs": {"ip_hidden_states": 1}}, "ip_hidden_states"),
        ("flux2", {"kv_cache_mode": "extract"}, "cache of reference images"),
        ("qwen", {"attention_kwargs": {"hint": 1}}, r"attention_kwargs \(hint\)"),
    ],
)
def test_call_arguments_of_other_families(family, extra, message, alone):
    make, inputs_of = FAMILIES[family]
    with pytest.raises(UserError, match=message), parallelize(make(3), transport=alone) as engine, torch.no_grad():
        engine.model(**inputs_of(1, 2, 3, 2), **extra)


def test_attention_that_the_adapter_does_not_know_is_refused(alone):
    model = sd3_transformer(3)
    model.extra = nn.Linear(2, 2)
    model.extra.processor = object()
    before = dict(model.attn_processors)
    with (
        pytest.raises(UserError, match=r"extra\.processor is a object, which has no parallel"),
        parallelize(model, transport=alone),
    ):
        raise AssertionError("entered")
    assert model.attn_processors == before
    assert not model._forward_pre_hooks and not model.pos_embed._forward_hooks


def compiled_in_place() -> nn.Module:
    model = sd3_transformer(3)
    model.compile()
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [(compiled_in_place, "the transformer"), (lambda: torch.compile(sd3_transformer(3)), "the transformer")],
    ids=["in place", "wrapped"],
)
def test_a_compiled_model_is_refused(make, name, alone):
    with pytest.raises(
        UserError, match=f"^{name} is compiled by torch.compile.*model that is not compiled, with compile=True"
    ):
        parallelize(make(), transport=alone)


def test_more_ranks_than_image_tokens():
    message = refused(6, sd3_transformer(8), **sd3_inputs(1, 1, 5, 3))
    assert "6 ranks for 5 image tokens" in message and "at most 5 ranks or a larger image" in message


def test_more_ranks_than_heads():
    message = refused(4, sd3_transformer(3), {"ring": 1}, **sd3_inputs(1, 3, 3, 2))
    assert "ring 1: 4 ranks and 3 attention heads allow ring 2, 4" in message
    message = refused(4, sd3_transformer(3), {"ring": 3}, **sd3_inputs(1, 3, 3, 2))
    assert "ring 3: 4 ranks and 3 attention heads allow ring 2, 4 (a divisor of the ranks" in message


def test_ranks_that_do_not_fill_the_machine():
    with pytest.raises(UserError, match="start 12 ranks, or use --machine local"):
        run_ranks(2, lambda transport: parallelize(sd3_transformer(3), transport=transport, machine="aurora"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"block_controlnet_hidden_states": [torch.zeros(1)]}, "run without a ControlNet"),
        (
            {"joint_attention_kwargs": {"scale": 2.0, "hint": 1}},
            r"joint_attention_kwargs \(hint\) reach no parallel attention",
        ),
    ],
)
def test_call_arguments_that_a_shard_would_misread(extra, message, alone):
    model = sd3_transformer(3)
    with pytest.raises(UserError, match=message), parallelize(model, transport=alone), torch.no_grad():
        model(**sd3_inputs(1, 2, 3, 2), **extra)


def test_positional_arguments_are_checked_and_counted_like_named_ones(alone):
    model, inputs = sd3_transformer(3), sd3_inputs(1, 2, 3, 2)
    with torch.no_grad(), parallelize(model, transport=alone) as engine:
        model(*inputs.values())
        assert engine.counter.step == 0
        with pytest.raises(UserError, match="run without a ControlNet"):
            model(*inputs.values(), [torch.zeros(1)])


def test_an_unknown_preset_is_refused(alone):
    with pytest.raises(UserError, match="did you mean flat"):
        parallelize(sd3_transformer(3), preset="flatt", transport=alone)


def test_the_engine_counts_a_models_calls(alone):
    model, inputs = sd3_transformer(3), sd3_inputs(2, 2, 3, 2)
    with torch.no_grad(), parallelize(model, transport=alone) as engine:
        assert engine.counter.step == -1
        for step, timestep in enumerate((900.0, 600.0, 300.0)):
            model(**inputs | {"timestep": torch.full((2,), timestep)})
            assert (engine.counter.step, engine.counter.branch) == (step, 0)
        model(**inputs | {"timestep": torch.full((2,), 300.0)})
        assert (engine.counter.step, engine.counter.branch) == (2, 1)

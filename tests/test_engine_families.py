"""All model families on any number of ranks: token counts that divide nothing, LoRA, quantised layers, two branches."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from covering import all_but, examples, thorough
from exactness import Case, Expected, check_ranks, parallel_outputs
from hypothesis import given
from hypothesis import strategies as st
from planned_models import PLANNED
from tiny_models import FAMILIES, HEADS
from torch import nn

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize

WORLDS = (1, 2, 3, 4, 5, 6, 7, *((12, 24) if thorough() else ()))  # large ones have tests of their own

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.mark.parametrize("family", FAMILIES)
@given(
    size=st.sampled_from(WORLDS),
    height=st.integers(6, 13),
    width=st.integers(6, 17),
    text=st.integers(1, 77),
    batch=st.integers(1, 2),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
@examples(2, exhaustive=12)
def test_equals_one_process(family, size, height, width, text, batch, dtype):
    case = Case(HEADS[family], height, width, text, batch, dtype=dtype, family=family)
    expected = Expected.of(case)
    machine = "aurora" if size in (12, 24) else "local"
    of_ranks = run_ranks(size, lambda t: parallel_outputs(t, expected.model, case, machine))
    check_ranks(of_ranks, expected, family)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "size"), all_but([("flux", 24), *((family, 7) for family in FAMILIES)], FAMILIES, (7, 24))
)
def test_prime_and_large_worlds(family, size):
    case = Case(HEADS[family], 6, 7, 5, dtype=torch.bfloat16, family=family)
    expected = Expected.of(case)
    check_ranks(run_ranks(size, lambda t: parallel_outputs(t, expected.model, case, "local")), expected, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_restores_the_model(family):
    make, inputs_of = FAMILIES[family]
    inputs = inputs_of(1, 5, 4, 3)
    shared = make(6)  # one random generator serves all threads: weights are drawn once
    with torch.no_grad():
        plain = shared(**inputs).sample

    def work(transport: Any) -> None:
        model = copy.deepcopy(shared)
        before = snapshot(model)
        with torch.no_grad(), parallelize(model, transport=transport, preset="v_first"):
            assert snapshot(model) != before
            model(**inputs)
        assert snapshot(model) == before
        with torch.no_grad():
            assert torch.equal(model(**inputs).sample, plain)

    run_ranks(2, work)


def snapshot(model: nn.Module) -> list[tuple]:
    """Of every module: its class, its processor, its hooks, what stands in its instance dictionary."""
    return [
        (name, type(m), id(getattr(m, "processor", 0)), len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
        for name, m in model.named_modules()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_branches_of_different_text_length(family):
    """As true classifier-free guidance calls the model: at one timestep with two prompts."""
    make, inputs_of = FAMILIES[family]
    calls = [inputs_of(1, 6, 7, text) | {"timestep": torch.full((1,), t)} for t in (0.9, 0.4) for text in (11, 2)]
    with torch.no_grad():
        model = make(6)
        plain = [model(**call).sample for call in calls]

    def work(transport: Any) -> list:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, preset="v_first") as engine:
            outputs = []
            for call in calls:
                outputs.append((engine.counter.step, engine.counter.branch, own(**call).sample))
            return [(engine.counter.step, engine.counter.branch), outputs]

    for (step, branch), outputs in run_ranks(3, work):
        assert (step, branch) == (1, 1)
        for expected, (_, _, output) in zip(plain, outputs, strict=True):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def with_lora(model: nn.Module) -> nn.Module:
    """The model with a random LoRA on every q, k, v and fused projection."""
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_qkv_mlp_proj"]
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    return model.eval()


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a scale for each output channel."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(layer.weight.detach() / scale).to(torch.int8))
        self.register_buffer("scale", scale.detach())
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def with_int8(model: nn.Module) -> nn.Module:
    """The model with every linear layer of its attention quantised."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name.startswith(("to_", "add_")):
                setattr(module, name, Int8Linear(child))
    return model


@pytest.mark.parametrize("change", [with_lora, with_int8])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_without_a_weight_to_view(family, change):
    make, inputs_of = FAMILIES[family]
    inputs = inputs_of(1, 6, 7, 5)
    untouched, changed = make(6), change(make(6))
    with torch.no_grad():
        plain = changed(**inputs).sample
        assert not torch.allclose(untouched(**inputs).sample, plain, atol=1e-4)

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(changed)
        with torch.no_grad(), parallelize(own, transport=transport, preset="v_first"):
            return own(**inputs).sample

    for output in run_ranks(3, work):
        torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.5])
@pytest.mark.parametrize("family", ["flux2", "wan"])
def test_the_scale_of_a_lora_is_passed_on(family, scale):
    """Which diffusers takes out of a call's arguments by name, in a family and by a plan."""
    if family == "wan":
        model, call = with_lora(PLANNED["wan"].model()), PLANNED["wan"].call() | {"attention_kwargs": {"scale": scale}}
    else:
        make, inputs_of = FAMILIES[family]
        model, call = with_lora(make(6)), inputs_of(1, 6, 7, 5) | {"joint_attention_kwargs": {"scale": scale}}
    with torch.no_grad():
        plain = model(**call).sample

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport):
            return own(**call).sample

    for output in run_ranks(2, work):
        torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-5)


def test_qwen_with_reference_images_at_a_timestep_of_their_own():
    """`zero_cond_t`: the tokens of further images are modulated as noise-free ones, by an index over all tokens."""
    make, inputs_of = FAMILIES["qwen"]
    inputs = inputs_of(2, 6, 7, 5) | {"img_shapes": [[(1, 4, 7), (1, 2, 7)]] * 2}
    model = make(6, zero_cond_t=True)
    with torch.no_grad():
        plain = model(**inputs).sample

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport):
            return own(**inputs).sample

    for output in run_ranks(5, work):
        torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-5)


def test_a_flux_single_block_computes_its_mlp_once_q_and_k_are_on_their_way():
    """One whose forward somebody else has replaced keeps that one."""
    make, inputs_of = FAMILIES["flux"]
    shared, inputs = make(6, num_single_layers=2), inputs_of(1, 5, 4, 3)
    with torch.no_grad():
        plain = shared(**inputs).sample

    def work(transport: Any) -> None:
        model, called = copy.deepcopy(shared), []
        first, second = model.single_transformer_blocks
        second.forward = others = partial(type(second).forward, second)
        parts = {"v": first.attn.to_v, "k": first.attn.to_k, "mlp": first.proj_mlp, "out": first.proj_out}
        parts |= {"mlp 2": second.proj_mlp, "v 2": second.attn.to_v}
        for name, part in parts.items():
            part.register_forward_hook(lambda *_, name=name: called.append(name))
        with torch.no_grad(), parallelize(model, transport=transport, preset="v_first"):
            output = model(**inputs).sample
            assert second.forward is others
        assert called == ["v", "k", "mlp", "out", "mlp 2", "v 2"]
        assert second.forward is others and "forward" not in vars(first)
        torch.testing.assert_close(output, plain)

    run_ranks(2, work)

"""All model families on any number of ranks: token counts that divide nothing, two branches, an order of messages."""

from functools import partial
from typing import Any

import pytest
import torch
from covering import all_but, examples, thorough
from exactness import Case, Expected, check_ranks, parallel_outputs
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import check_alike, on_ranks, outputs_of
from tiny_models import FAMILIES, HEADS
from torch import nn

from cocodiff.comm.loopback import run_ranks

WORLDS = (1, 2, 3, 4, 5, 6, 7, *((12, 24) if thorough() else ()))  # large ones have tests of their own

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def check_case(case: Case, size: int, machine: str = "local") -> None:
    expected = Expected.of(case)
    of_ranks = run_ranks(size, lambda t: parallel_outputs(t, expected.model, case, machine))
    check_ranks(of_ranks, expected, case.family)


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
    check_case(case, size, "aurora" if size in (12, 24) else "local")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "size"), all_but([("flux", 24), *((family, 7) for family in FAMILIES)], FAMILIES, (7, 24))
)
def test_prime_and_large_worlds(family, size):
    check_case(Case(HEADS[family], 6, 7, 5, dtype=torch.bfloat16, family=family), size)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_branches_of_different_text_length(family):
    """As true classifier-free guidance calls the model: at one timestep with two prompts."""
    make, inputs_of = FAMILIES[family]
    calls = [inputs_of(1, 6, 7, text) | {"timestep": torch.full((1,), t)} for t in (0.9, 0.4) for text in (11, 2)]
    model, counted = make(6), set()

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        found = [outputs_of(own, call)[0] for call in calls]
        counted.add((engine.counter.step, engine.counter.branch))
        return found

    check_alike(on_ranks(3, model, run=run, preset="v_first"), outputs_of(model, *calls))
    assert counted == {(1, 1)}


def with_lora(model: nn.Module) -> nn.Module:
    """The model with a random LoRA on every q, k, v and fused projection."""
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_qkv_mlp_proj"]
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    return model.eval()


def test_a_flux_single_block_computes_its_mlp_once_q_and_k_are_on_their_way():
    """One whose forward somebody else has replaced keeps that one."""
    make, inputs_of = FAMILIES["flux"]
    model, inputs = make(6, num_single_layers=2), inputs_of(1, 5, 4, 3)
    expected, second = outputs_of(model, inputs), model.single_transformer_blocks[1]
    second.forward = partial(type(second).forward, second)

    def run(own: Any, _: Any) -> list[torch.Tensor]:
        called: list[str] = []
        first, second = own.single_transformer_blocks
        parts = {"v": first.attn.to_v, "k": first.attn.to_k, "mlp": first.proj_mlp, "out": first.proj_out}
        parts |= {"mlp 2": second.proj_mlp, "v 2": second.attn.to_v}
        hooks = [part.register_forward_hook(lambda *_, name=name: called.append(name)) for name, part in parts.items()]
        found = outputs_of(own, inputs)
        assert called == ["v", "k", "mlp", "out", "mlp 2", "v 2"]
        for hook in hooks:
            hook.remove()
        return found

    check_alike(on_ranks(2, model, run=run, preset="v_first"), expected)

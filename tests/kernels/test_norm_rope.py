"""q and k in one pass of a kernel: as close to the truth as by the model's modules, and only where it does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from exactness import Case
from on_ranks import VARIANTS, check_exact
from tiny_models import FAMILIES, HEADS
from torch import nn

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine.engine import parallelize
from cocodiff.kernels import Kernels
from cocodiff.models.streams import FusedLinear, Rotary, norm_rope

pytestmark = pytest.mark.usefixtures("one_thread_a_rank", "sycl_on_cpu")


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_the_kernel_are_as_exact_as_without(family, dtype):
    case = Case(HEADS[family], 6, 7, 5, batch=2, dtype=dtype, family=family)
    check_exact(3, case.model(), [case.inputs()], VARIANTS, kernels="sycl")


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_and_every_q_and_k_go_through_the_kernels_on_several_ranks(family):
    """And the trace says so. One rank alone keeps the modules: it has one process's bits."""
    make, inputs_of = FAMILIES[family]
    models = [make(HEADS[family]) for _ in range(2)]
    norms = [m for name, m in models[0].named_modules() if name.split(".")[-1] in NORMS and isinstance(m, PLAIN)]

    def work(transport: Any) -> dict[tuple[str, str], int]:
        with torch.no_grad(), parallelize(models[transport.rank], transport=transport, kernels="sycl") as engine:
            models[transport.rank](**inputs_of(1, 6, 7, 5))
            return engine.trace.kernels()

    assert run_ranks(1, work) == [{}]
    for ran in run_ranks(2, work):
        assert ran.keys() == {(op, "sycl") for op in ("pack", "unpack", "qk_norm_rope")}
        assert ran["qk_norm_rope", "sycl"] == len(norms) > 0


NORMS, PLAIN = ("norm_q", "norm_k", "norm_added_q", "norm_added_k"), (RMSNorm, nn.RMSNorm)
L, D = 3, 16
ANGLES = torch.rand(L, D // 2, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, -1)
FLUX = Rotary("pairs", (ANGLES.cos(), ANGLES.sin()))


def hooked(register: Any) -> nn.Module:
    norm = nn.RMSNorm(D, 1e-6)
    register(norm, lambda *_: None)
    return norm


def test_a_fused_layer_that_does_more_than_multiply_is_called_whole():
    layer, x_BLC = nn.Linear(4, 6), torch.randn(1, L, 4)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    fused = FusedLinear(layer, x_BLC)
    later_BLC = fused.channels(4, None)  # asked for before the first ones
    assert torch.equal(torch.cat([fused.channels(0, 4), later_BLC], -1), layer(x_BLC))


@pytest.mark.parametrize(
    ("norm", "rotary"),
    [
        (nn.LayerNorm(D), FLUX),
        (RMSNorm(D, 1e-6, bias=True), FLUX),
        (hooked(nn.Module.register_forward_hook), FLUX),
        (hooked(nn.Module.register_forward_pre_hook), FLUX),
        (nn.RMSNorm(D), FLUX),
        (nn.RMSNorm(D, 1e-6, dtype=torch.float64), FLUX),
        (None, Rotary()),
        (nn.RMSNorm(D, 1e-6), Rotary("pairs", (ANGLES.double().cos(), ANGLES.double().sin()))),
    ],
    ids=["layer_norm", "bias", "hook", "pre_hook", "no_epsilon", "another_dtype", "nothing_to_do", "another_precision"],
)
def test_what_the_kernel_does_not_do_is_left_to_the_modules(norm, rotary):
    x_BLHD, ran = torch.randn(1, L, 2, D), []
    kernels = Kernels("sycl", lambda op, path: ran.append((op, path)))
    with torch.no_grad():
        found = norm_rope(x_BLHD, norm, rotary, kernels)
        assert torch.equal(found, norm_rope(x_BLHD, norm, rotary, Kernels("torch")))
    assert not ran and (norm is not None or found is x_BLHD)


def test_gradients_are_left_to_the_modules():
    x_BLHD = torch.randn(1, L, 2, D, requires_grad=True)
    norm_rope(x_BLHD, nn.RMSNorm(D, 1e-6), FLUX, Kernels("sycl")).sum().backward()
    assert x_BLHD.grad is not None

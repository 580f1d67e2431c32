"""Latte on several ranks: hidden states are transposed between frames and places, and no attention is split."""

import copy
from typing import Any

import pytest
import torch
from diffusers import LatteTransformer3DModel

from cocodiff.comm.loopback import run_ranks
from cocodiff.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

FRAMES, SIDE = 5, 6  # neither they nor the 9 places divide by most numbers of ranks


def latte(frames: int = FRAMES, layers: int = 2) -> LatteTransformer3DModel:
    torch.manual_seed(0)
    return LatteTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=layers,
        cross_attention_dim=32,
        attention_bias=True,
        sample_size=SIDE,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=24,
        video_length=frames,
    ).eval()


def inputs(batch: int = 2, frames: int = FRAMES, dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, frames, SIDE, SIDE, generator=noise).to(dtype),
        "timestep": torch.tensor([500] * batch),
        "encoder_hidden_states": torch.randn(batch, 7, 24, generator=noise).to(dtype),
    } | more


def on_ranks(size: int, model: Any, call: dict[str, Any], preset: str = "tapa", **settings: Any) -> list[torch.Tensor]:
    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, preset, transport=transport, **settings):
            return own(**call).sample

    return run_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_smoke(size):
    model, call = latte(), inputs()
    with torch.no_grad():
        plain = model(**call).sample
    for settings in ({"preset": "flat"}, {}, {"preset": "split"}, {"chunks": 2}, {"chunks": 4, "preset": "split"}):
        for out in on_ranks(size, model, call, **settings):
            print(size, settings, (out - plain).abs().max().item())
            torch.testing.assert_close(out, plain)

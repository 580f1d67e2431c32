"""The random FLUX transformer of `cocodiff bench peers`, and the inputs of a run of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cocodiff_bench.common import Values

if TYPE_CHECKING:
    from torch import Tensor

Inputs = dict[str, Any]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
HEAD_DIM, CHANNELS, TEXT_CHANNELS, POOLED = 32, 16, 64, 32
LEAD_IN = 3  # calls before the warm-up: as many as the engine compares inputs in, and as a codec's predictions need
STEPS = 50  # of the run, or more where more calls are measured


def flux(values: Values) -> Any:
    """The same random FluxTransformer2DModel on every rank."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return (
        FluxTransformer2DModel(
            patch_size=1,
            in_channels=CHANNELS,
            num_layers=values["double"],
            num_single_layers=values["single"],
            attention_head_dim=HEAD_DIM,
            num_attention_heads=values["heads"],
            joint_attention_dim=TEXT_CHANNELS,
            pooled_projection_dim=POOLED,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        .to(getattr(torch, DTYPES[values["dtype"]]))
        .eval()
    )


def run_inputs(values: Values) -> list[Inputs]:
    """Of every call of a run: noise gives way to a picture, in equal steps, and the picture turns into another one."""
    import torch

    side, text, noise = values["side"], values["text"], torch.Generator().manual_seed(1)
    dtype = getattr(torch, DTYPES[values["dtype"]])
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    start, one, other = (torch.randn(1, side * side, CHANNELS, generator=noise) for _ in range(3))
    alike = {
        "encoder_hidden_states": torch.randn(1, text, TEXT_CHANNELS, generator=noise).to(dtype),
        "pooled_projections": torch.randn(1, POOLED, generator=noise).to(dtype),
        "img_ids": torch.stack([torch.zeros_like(y), y, x], dim=-1).reshape(side * side, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }
    found = []
    for number in range(values["repeats"] + LEAD_IN + 1):
        sigma = 1 - number / steps_of(values)
        angle = sigma * math.pi / 2
        picture = math.sin(angle) * one + math.cos(angle) * other
        sample = (sigma * start + (1 - sigma) * picture).to(dtype)
        found.append({"hidden_states": sample, "timestep": torch.tensor([sigma]), **alike})
    return found


def in_fp32(inputs: Inputs) -> Inputs:
    return {name: tensor.float() for name, tensor in inputs.items()}


def step(model: Any, inputs: Inputs) -> Tensor:
    return model(**inputs, return_dict=False)[0]


def steps_of(values: Values) -> int:
    """Of the run that every variant makes."""
    return max(STEPS, values["repeats"] + LEAD_IN + 1)

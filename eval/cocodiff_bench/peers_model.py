"""The random transformers of `cocodiff bench peers`, and the inputs of a run of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff_bench.common import Values

if TYPE_CHECKING:
    from torch import Tensor

Inputs = dict[str, Any]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
HEAD_DIM, CHANNELS, TEXT_CHANNELS, POOLED = 32, 16, 64, 32
LEAD_IN = 3  # calls before the warm-up: as many as the engine compares inputs in, and as a codec's predictions need
STEPS = 50  # of the run, or more where more calls are measured


class Benched(NamedTuple):
    """A class of transformers. config: of the class in diffusers. inputs: a call's arguments beside the text, from what
    is denoised, [1, tokens, CHANNELS], and its noise level. text_travels: whether text is attended to jointly."""

    title: str
    class_name: str
    config: Callable[[Values], dict[str, Any]]
    inputs: Callable[[Values, Any, float], Inputs]
    text_travels: bool = True


def tokens_of(values: Values) -> int:
    """Of the image, or of all frames of a video."""
    return int(values["frames"] * values["side"] ** 2)


def random_model(values: Values) -> Any:
    """The same random transformer on every rank."""
    import diffusers
    import torch

    torch.manual_seed(0)
    benched = MODELS[values["model"]]
    heads = {"attention_head_dim": HEAD_DIM, "num_attention_heads": values["heads"], "in_channels": CHANNELS}
    model = getattr(diffusers, benched.class_name)(**heads, **benched.config(values))
    return model.to(getattr(torch, DTYPES[values["dtype"]])).eval()


def flux_config(values: Values) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "num_layers": values["double"],
        "num_single_layers": values["single"],
        "joint_attention_dim": TEXT_CHANNELS,
        "pooled_projection_dim": POOLED,
        "guidance_embeds": False,
        "axes_dims_rope": (8, 12, 12),
    }


def flux_inputs(values: Values, sample: Tensor, sigma: float) -> Inputs:
    import torch

    side = values["side"]
    frame, y, x = torch.meshgrid(*map(torch.arange, (values["frames"], side, side)), indexing="ij")
    return {
        "hidden_states": sample,
        "timestep": torch.tensor([sigma]),
        "img_ids": torch.stack([frame, y, x], dim=-1).flatten(0, 2).float(),
        "txt_ids": torch.zeros(values["text"], 3),
    }


def wan_config(values: Values) -> dict[str, Any]:
    return {
        "patch_size": (1, 1, 1),
        "out_channels": CHANNELS,
        "num_layers": values["double"] + values["single"],
        "text_dim": TEXT_CHANNELS,
        "freq_dim": POOLED,
        "ffn_dim": 8 * values["heads"] * HEAD_DIM // 3,  # about the real ones' share
    }


def wan_inputs(values: Values, sample: Tensor, sigma: float) -> Inputs:
    import torch

    video = sample.transpose(1, 2).unflatten(2, (values["frames"], values["side"], values["side"]))
    return {"hidden_states": video.contiguous(), "timestep": torch.tensor([1000 * sigma])}


def qwen_config(values: Values) -> dict[str, Any]:
    return {
        "patch_size": 1,
        "out_channels": CHANNELS,
        "num_layers": values["double"] + values["single"],
        "joint_attention_dim": TEXT_CHANNELS,
        "axes_dims_rope": (8, 12, 12),
    }


def qwen_inputs(values: Values, sample: Tensor, sigma: float) -> Inputs:
    import torch

    shape = (values["frames"], values["side"], values["side"])
    return {"hidden_states": sample, "timestep": torch.tensor([sigma]), "img_shapes": [[shape]]}


MODELS = {
    "flux": Benched("FLUX", "FluxTransformer2DModel", flux_config, flux_inputs),
    "wan": Benched("Wan", "WanTransformer3DModel", wan_config, wan_inputs, text_travels=False),
    "qwen-image": Benched("Qwen-Image", "QwenImageTransformer2DModel", qwen_config, qwen_inputs),
}


def run_inputs(values: Values) -> list[Inputs]:
    """Of every call of a run: noise gives way to a picture, in equal steps, and the picture turns into another one."""
    import torch

    text, noise, benched = values["text"], torch.Generator().manual_seed(1), MODELS[values["model"]]
    dtype = getattr(torch, DTYPES[values["dtype"]])
    start, one, other = (torch.randn(1, tokens_of(values), CHANNELS, generator=noise) for _ in range(3))
    alike = {"encoder_hidden_states": torch.randn(1, text, TEXT_CHANNELS, generator=noise).to(dtype)}
    if values["model"] == "flux":
        alike["pooled_projections"] = torch.randn(1, POOLED, generator=noise).to(dtype)
    found = []
    for number in range(values["repeats"] + LEAD_IN + 1):
        sigma = 1 - number / steps_of(values)
        angle = sigma * math.pi / 2
        picture = math.sin(angle) * one + math.cos(angle) * other
        sample = (sigma * start + (1 - sigma) * picture).to(dtype)
        found.append(benched.inputs(values, sample, sigma) | alike)
    return found


def in_fp32(inputs: Inputs) -> Inputs:
    return {name: value.float() if hasattr(value, "float") else value for name, value in inputs.items()}


def step(model: Any, inputs: Inputs) -> Tensor:
    return model(**inputs, return_dict=False)[0]


def steps_of(values: Values) -> int:
    """Of the run that every variant makes."""
    return max(STEPS, values["repeats"] + LEAD_IN + 1)

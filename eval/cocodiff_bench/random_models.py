"""The random transformers of diffusers' classes, and the inputs of a run of each.

They are small for `cocodiff bench peers`, and have real models' shapes for `bench step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cocodiff.config.packages import import_diffusers

Inputs = dict[str, Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Sizes(NamedTuple):
    """The sizes of a random transformer and of its calls."""

    heads: int  # number of attention heads
    double: int  # number of blocks with separate weights for image and text
    single: int  # number of blocks with the same weights for image and text
    side: int  # tokens along the edge of an image or frame
    text: int  # number of text tokens
    head_dim: int = 32  # channels of a head
    frames: int = 1  # frames of a video; 1 for an image
    channels: int = 16  # channels of an input token
    text_channels: int = 64  # channels of a text token
    pooled: int = 32  # channels of the pooled prompt, the one vector of a whole prompt
    batch: int = 1  # number of images in one call
    dtype: str = "fp32"  # a name in DTYPES
    device: str = "cpu"  # a name of a torch device

    @property
    def tokens(self) -> int:
        """The number of tokens of the image, or of all frames of a video."""
        return self.frames * self.side**2


class BenchmarkModel(NamedTuple):
    """A class of diffusers' transformers to benchmark, with the arguments that build and call a model of it."""

    title: str  # name of the model's family in results
    class_name: str  # name of the class in diffusers
    config: Callable[[Sizes], dict[str, Any]]  # returns the arguments of the class
    inputs: Callable[[Sizes, Any], Inputs]  # returns arguments that only this class has; takes the noisy [B, tokens, C]
    timesteps: int = 1  # value of the argument `timestep` at noise level 1
    text_travels: bool = True  # True if text tokens are in the same attention as image tokens, so ranks exchange them
    channels: int = 64  # channels of an input token of the real models
    text_channels: int = 4096  # channels of a text token of the real models
    pooled_channels: int = 0  # channels of the real models' pooled prompt; 0 if they take none


def random_model(benched: BenchmarkModel, sizes: Sizes) -> Any:
    """Return a transformer with random weights, the same on every rank, on the device of `sizes`.

    Args:
        benched: its class.
        sizes: its sizes, device and dtype.
    """
    diffusers = import_diffusers()
    torch.manual_seed(0)
    heads = {"attention_head_dim": sizes.head_dim, "num_attention_heads": sizes.heads, "in_channels": sizes.channels}
    usual = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[sizes.dtype])
    try:
        with torch.device(sizes.device):
            return getattr(diffusers, benched.class_name)(**heads, **benched.config(sizes)).eval()
    finally:
        torch.set_default_dtype(usual)


def rotary_axes(sizes: Sizes) -> tuple[int, int, int]:
    """Return the numbers of a head's channels that the rotary embedding rotates by frame, by row and by column."""
    along = sizes.head_dim // 32 * 14
    return sizes.head_dim - 2 * along, along, along


def places(sizes: Sizes, axes: int) -> Tensor:
    """Return the position of every image token, [tokens, axes]: frame, row, column, then zeros.

    Args:
        sizes: the number of frames, and of tokens along their edges.
        axes: number of columns, 3 or more.
    """
    grid = torch.meshgrid(*map(torch.arange, (sizes.frames, sizes.side, sizes.side)), indexing="ij")
    found = torch.zeros(sizes.tokens, axes)
    found[:, :3] = torch.stack(grid, dim=-1).flatten(0, 2)
    return found


def in_frames(sizes: Sizes, x: Tensor) -> Tensor:
    """Return image tokens as a video, a view.

    Args:
        sizes: numbers of frames and of tokens along a frame's edge.
        x: the tokens, [B, tokens, C channels], which become [B, C, frames, side, side].
    """
    return x.transpose(1, 2).unflatten(2, (sizes.frames, sizes.side, sizes.side))


FLUX = BenchmarkModel(
    "FLUX",
    "FluxTransformer2DModel",
    lambda sizes: {
        "patch_size": 1,
        "num_layers": sizes.double,
        "num_single_layers": sizes.single,
        "joint_attention_dim": sizes.text_channels,
        "pooled_projection_dim": sizes.pooled,
        "guidance_embeds": False,
        "axes_dims_rope": rotary_axes(sizes),
    },
    lambda sizes, _: {"img_ids": places(sizes, 3), "txt_ids": torch.zeros(sizes.text, 3)},
    pooled_channels=768,
)
FLUX_2 = BenchmarkModel(
    "FLUX.2",
    "Flux2Transformer2DModel",
    lambda sizes: {
        "num_layers": sizes.double,
        "num_single_layers": sizes.single,
        "joint_attention_dim": sizes.text_channels,
        "guidance_embeds": False,
        "axes_dims_rope": (sizes.head_dim // 4,) * 4,
    },
    lambda sizes, _: {"img_ids": places(sizes, 4), "txt_ids": pad(torch.arange(sizes.text).float()[:, None], (3, 0))},
    channels=128,
    text_channels=15360,
)
SD3 = BenchmarkModel(
    "SD3",
    "SD3Transformer2DModel",
    lambda sizes: {
        "out_channels": sizes.channels,
        "num_layers": sizes.double,
        "joint_attention_dim": sizes.text_channels,
        "caption_projection_dim": sizes.heads * sizes.head_dim,
        "pooled_projection_dim": sizes.pooled,
        "pos_embed_max_size": 192,
        "qk_norm": "rms_norm",
    },
    # A token is two by two places of the latents, which all get the same numbers here.
    lambda sizes, sample: {
        "hidden_states": in_frames(sizes, sample)[:, :, 0].repeat_interleave(2, 2).repeat_interleave(2, 3)
    },
    timesteps=1000,
    channels=16,
    pooled_channels=2048,
)
WAN = BenchmarkModel(
    "Wan",
    "WanTransformer3DModel",
    lambda sizes: {
        "patch_size": (1, 1, 1),
        "out_channels": sizes.channels,
        "num_layers": sizes.double + sizes.single,
        "text_dim": sizes.text_channels,
        "freq_dim": sizes.pooled,
        "ffn_dim": 8 * sizes.heads * sizes.head_dim // 3,  # about the real ones' share
    },
    lambda sizes, sample: {"hidden_states": in_frames(sizes, sample).contiguous()},
    timesteps=1000,
    text_travels=False,
)
QWEN_IMAGE = BenchmarkModel(
    "Qwen-Image",
    "QwenImageTransformer2DModel",
    lambda sizes: {
        "patch_size": 1,
        "out_channels": sizes.channels,
        "num_layers": sizes.double + sizes.single,
        "joint_attention_dim": sizes.text_channels,
        "axes_dims_rope": rotary_axes(sizes),
    },
    lambda sizes, _: {"img_shapes": [[(sizes.frames, sizes.side, sizes.side)]] * sizes.batch},
    text_channels=3584,
)
# Small models for `bench peers`.
MODELS = {"flux": FLUX, "wan": WAN, "qwen-image": QWEN_IMAGE}
# Classes by family of real models, for any of their shapes.
OF_FAMILIES = {"FLUX.1": FLUX, "FLUX.2": FLUX_2, "SD3 / SD3.5": SD3, "Qwen-Image": QWEN_IMAGE}


def run_inputs(benched: BenchmarkModel, sizes: Sizes, calls: int, steps: int) -> list[Inputs]:
    """Return random arguments for the first `calls` calls of a model in a denoising run, a mapping by name for each.

    All calls have one prompt. Noise turns in equal steps into a picture, which changes on the way, as a model's
    estimate does.

    Args:
        benched: the model's class.
        sizes: the model's sizes.
        calls: number of calls.
        steps: number of steps of the whole run.
    """
    noise = torch.Generator().manual_seed(1)
    dtype = DTYPES[sizes.dtype]

    def drawn(*shape: int) -> Tensor:
        """Return normally distributed random numbers, float32 [batch, *shape], the next of one seed."""
        return torch.randn(sizes.batch, *shape, generator=noise)

    start, one, other = (drawn(sizes.tokens, sizes.channels) for _ in range(3))
    alike = {"encoder_hidden_states": drawn(sizes.text, sizes.text_channels).to(sizes.device, dtype)}
    if benched.pooled_channels:
        alike["pooled_projections"] = drawn(sizes.pooled).to(sizes.device, dtype)
    found = []
    for number in range(calls):
        sigma = 1 - number / steps
        angle = sigma * math.pi / 2
        picture = math.sin(angle) * one + math.cos(angle) * other
        sample = (sigma * start + (1 - sigma) * picture).to(dtype)
        own = {"hidden_states": sample, "timestep": torch.full((sizes.batch,), benched.timesteps * sigma)}
        own |= benched.inputs(sizes, sample)
        found.append({name: x.to(sizes.device) if hasattr(x, "to") else x for name, x in own.items()} | alike)
    return found


def in_fp32(inputs: Inputs) -> Inputs:
    """Return the arguments of a call of the model, by name, with all tensors converted to fp32."""
    return {name: value.float() if hasattr(value, "float") else value for name, value in inputs.items()}


def step(model: Any, inputs: Inputs) -> Tensor:
    """Call a transformer once, for one denoising step, and return its output.

    Args:
        model: the transformer.
        inputs: the call's arguments by name.
    """
    return model(**inputs, return_dict=False)[0]


def run(model: Any, of_steps: Sequence[Inputs], branches: int) -> None:
    """Call a transformer for all steps of a denoising run, to time it. Outputs are dropped.

    Args:
        model: the transformer.
        of_steps: the arguments of each step's call.
        branches: calls of the model in a step: 1, or 2 with guidance. The second has another prompt.
    """
    for inputs in of_steps:
        step(model, inputs)
        if branches == 2:
            step(model, inputs | {"encoder_hidden_states": -inputs["encoder_hidden_states"]})

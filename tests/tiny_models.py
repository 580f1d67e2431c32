"""Random models of the real architectures, small enough for any test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def random_transformer(class_name: str, seed: int, settings: dict[str, Any]) -> Any:
    """Of a class in diffusers, with weights of its own in every norm, where diffusers begins with ones: one norm's
    weights taken for another's are seen."""
    import diffusers

    torch.manual_seed(seed)
    model = getattr(diffusers, class_name)(**settings)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def sd3_transformer(heads: int, *, layers: int = 2, dual: tuple[int, ...] = (), seed: int = 0, **overrides: Any) -> Any:
    """A random SD3 transformer with `heads` heads of 8 channels over latents of 4 channels (patch 1)."""
    settings: dict[str, Any] = {
        "sample_size": 16,
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": layers,
        "attention_head_dim": 8,
        "num_attention_heads": heads,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "caption_projection_dim": heads * 8,
        "pos_embed_max_size": 24,
        "qk_norm": "rms_norm",
        "dual_attention_layers": dual,
    }
    return random_transformer("SD3Transformer2DModel", seed, settings | overrides)


def noise_of(seed: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """What draws one tensor after the other, by their shapes."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


def sd3_inputs(batch: int, height: int, width: int, text: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Call arguments for `sd3_transformer`: an image grid of height x width tokens and `text` text tokens."""
    noise = noise_of(height * 1000 + width * 10 + text, dtype)
    return {
        "hidden_states": noise(batch, 4, height, width),
        "encoder_hidden_states": noise(batch, text, 16),
        "pooled_projections": noise(batch, 16),
        "timestep": torch.full((batch,), 500.0),
    }


def flux_transformer(heads: int, *, seed: int = 0, **overrides: Any) -> Any:
    """A random FLUX.1 transformer: 1 double and 1 single block, heads of 8 channels, 4 channels a token."""
    settings: dict[str, Any] = {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": heads,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4),
    }
    return random_transformer("FluxTransformer2DModel", seed, settings | overrides)


def flux2_transformer(heads: int, *, seed: int = 0, **overrides: Any) -> Any:
    """A random FLUX.2 transformer: 1 double and 2 single blocks, heads of 8 channels, 4 channels a token."""
    settings: dict[str, Any] = {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": heads,
        "joint_attention_dim": 16,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (2, 2, 2, 2),
    }
    return random_transformer("Flux2Transformer2DModel", seed, settings | overrides)


def qwen_transformer(heads: int, *, seed: int = 0, **overrides: Any) -> Any:
    """A random Qwen-Image transformer of 2 blocks with heads of 8 channels, 4 channels a token."""
    settings: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": heads,
        "joint_attention_dim": 16,
        "axes_dims_rope": (4, 2, 2),
    }
    return random_transformer("QwenImageTransformer2DModel", seed, settings | overrides)


def sequence_inputs(batch: int, height: int, width: int, text: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the families that take image tokens [B, S, C] have in common."""
    noise = noise_of(height * 1000 + width * 10 + text, dtype)
    return {
        "hidden_states": noise(batch, height * width, 4),
        "encoder_hidden_states": noise(batch, text, 16),
        "timestep": torch.full((batch,), 0.5),
    }


def flux_inputs(batch: int, height: int, width: int, text: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Call arguments for `flux_transformer`."""
    return sequence_inputs(batch, height, width, text, dtype) | {
        "pooled_projections": torch.linspace(-1, 1, 16).repeat(batch, 1).to(dtype),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": grid_ids(height, width, 3),
        "txt_ids": torch.zeros(text, 3),
    }


def flux2_inputs(batch: int, height: int, width: int, text: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Call arguments for `flux2_transformer`; position ids come with a batch dimension, as its pipelines give them."""
    txt_ids = torch.zeros(text, 4)
    txt_ids[:, 3] = torch.arange(text)
    return sequence_inputs(batch, height, width, text, dtype) | {
        "guidance": torch.full((batch,), 3.5),
        "img_ids": grid_ids(height, width, 4).repeat(batch, 1, 1),
        "txt_ids": txt_ids.repeat(batch, 1, 1),
    }


def qwen_inputs(batch: int, height: int, width: int, text: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Call arguments for `qwen_transformer`; with more than two text tokens some of them are padding."""
    mask = torch.ones(batch, text)
    if text > 2:
        mask[-1, text // 2 :] = 0
        mask[-1, -1] = 1  # holes in the middle are allowed as well
    shapes = {"img_shapes": [[(1, height, width)]] * batch}
    return sequence_inputs(batch, height, width, text, dtype) | shapes | {"encoder_hidden_states_mask": mask}


def grid_ids(height: int, width: int, axes: int) -> torch.Tensor:
    """Positions of an image's tokens: [height * width, axes], row and column in the second and third axis."""
    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)
    return ids.flatten(0, 1)


FAMILIES = {
    "sd3": (sd3_transformer, sd3_inputs),
    "flux": (flux_transformer, flux_inputs),
    "flux2": (flux2_transformer, flux2_inputs),
    "qwen": (qwen_transformer, qwen_inputs),
}
HEADS = {"sd3": 38, "flux": 24, "flux2": 48, "qwen": 24}
"""The real models' head counts."""


def sd3_inpaint_pipeline(heads: int = 12, seed: int = 0) -> Any:
    """A random StableDiffusion3InpaintPipeline without text encoders: 64 x 64 pixels, 8 x 8 latents of 16 channels."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3InpaintPipeline

    transformer = sd3_transformer(heads, seed=seed, sample_size=8, in_channels=33, out_channels=16)
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        norm_num_groups=2,
        sample_size=64,
        layers_per_block=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
    ).eval()
    return StableDiffusion3InpaintPipeline(
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )

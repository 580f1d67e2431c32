"""Random models of the real architectures, small enough for any test."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from value_tables import beside

SMALL = beside(__file__)  # settings by the names that classes share


def small(class_name: str, settings: dict[str, Any]) -> Any:
    """A transformer of a class in diffusers, with the settings given and those of SMALL that it has."""
    import diffusers

    kind = getattr(diffusers, class_name)
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in SMALL.items() if name in known} | settings)


def random_transformer(class_name: str, seed: int, settings: dict[str, Any]) -> Any:
    """A small one with weights of its own in every norm, where diffusers begins with ones: one norm's weights taken
    for another's are seen."""
    torch.manual_seed(seed)
    model = small(class_name, settings)
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model.eval()


def sd3_transformer(heads: int, *, layers: int = 2, dual: tuple[int, ...] = (), seed: int = 0, **overrides: Any) -> Any:
    """A random SD3 transformer with `heads` heads of 8 channels over latents of 4 channels (patch 1)."""
    settings = {"num_layers": layers, "num_attention_heads": heads, "caption_projection_dim": heads * 8}
    settings |= {"sample_size": 16, "patch_size": 1, "pooled_projection_dim": 16, "pos_embed_max_size": 24}
    settings |= {"qk_norm": "rms_norm", "dual_attention_layers": dual}
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
    settings = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": heads}
    settings |= {"pooled_projection_dim": 16, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4)}
    return random_transformer("FluxTransformer2DModel", seed, settings | overrides)


def flux2_transformer(heads: int, *, seed: int = 0, **overrides: Any) -> Any:
    """A random FLUX.2 transformer: 1 double and 2 single blocks, heads of 8 channels, 4 channels a token."""
    settings = {"num_layers": 1, "num_attention_heads": heads}
    settings |= {"timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)}
    return random_transformer("Flux2Transformer2DModel", seed, settings | overrides)


def qwen_transformer(heads: int, *, seed: int = 0, **overrides: Any) -> Any:
    """A random Qwen-Image transformer of 2 blocks with heads of 8 channels, 4 channels a token."""
    settings = {"patch_size": 1, "num_attention_heads": heads, "axes_dims_rope": (4, 2, 2)}
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
    from diffusers import StableDiffusion3InpaintPipeline
    from tiny_pipelines import assembled, image_vae

    transformer = sd3_transformer(heads, seed=seed, sample_size=8, in_channels=33, out_channels=16)
    torch.manual_seed(seed)
    vae = image_vae(16, (4, 4, 4, 4), mid_block_add_attention=True, sample_size=64, scaling_factor=0.18215)
    return assembled(StableDiffusion3InpaintPipeline, transformer, vae, 3)


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a random LoRA on every q, k, v and fused projection."""
    from peft import LoraConfig

    targets = ["to_q", "to_k", "to_v", "to_qkv_mlp_proj"]
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False))
    return model.eval()

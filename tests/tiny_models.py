"""Random models of the real architectures, small enough for any test."""

from __future__ import annotations

from typing import Any

import torch


def sd3_transformer(heads: int, *, layers: int = 2, dual: tuple[int, ...] = (), seed: int = 0, **overrides: Any) -> Any:
    """A random SD3 transformer with `heads` heads of 8 channels over latents of 4 channels (patch 1)."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "sample_size": 16, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": layers,
        "attention_head_dim": 8, "num_attention_heads": heads, "joint_attention_dim": 16, "pooled_projection_dim": 16,
        "caption_projection_dim": heads * 8, "pos_embed_max_size": 24, "qk_norm": "rms_norm",
        "dual_attention_layers": dual,
    }  # fmt: skip
    return SD3Transformer2DModel(**settings | overrides).eval()


def sd3_inputs(batch: int, height: int, width: int, text: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Call arguments for `sd3_transformer`: an image grid of height x width tokens and `text` text tokens."""
    generator = torch.Generator().manual_seed(height * 1000 + width * 10 + text)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden_states": noise(batch, 4, height, width),
        "encoder_hidden_states": noise(batch, text, 16),
        "pooled_projections": noise(batch, 16),
        "timestep": torch.full((batch,), 500.0),
    }


def sd3_inpaint_pipeline(heads: int = 12, seed: int = 0) -> Any:
    """A random StableDiffusion3InpaintPipeline without text encoders: 64 x 64 pixels, 8 x 8 latents of 16 channels."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3InpaintPipeline

    transformer = sd3_transformer(heads, seed=seed, sample_size=8, in_channels=33, out_channels=16)
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=16, norm_num_groups=2, sample_size=64,
        layers_per_block=1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0,
    ).eval()  # fmt: skip
    return StableDiffusion3InpaintPipeline(
        transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(), text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip

"""VAEs by their published architectures."""

from __future__ import annotations

from typing import Any

KL = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TI2V = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2}
TI2V |= {"in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
TI2V |= {name: [1.0] * 48 for name in ("latents_mean", "latents_std")}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd3.5": ("AutoencoderKL", KL),
    "flux.1": ("AutoencoderKL", KL),
    "flux.2": ("AutoencoderKLFlux2", {}),
    "qwen-image": ("AutoencoderKLQwenImage", {}),
    "wan2.2": ("AutoencoderKLWan", {}),
    "ti2v": ("AutoencoderKLWan", TI2V),
}
LATENT_CHANNELS = {"flux.2": 32, "ti2v": 48}


def real_vae(name: str, **settings: Any) -> Any:
    """A model's VAE, with other settings where these are given."""
    import diffusers

    kind, published = KINDS[name]
    return getattr(diffusers, kind)(**{**published, **settings}).eval()


def picture_sizes(name: str, factor: int, frames: int, height: int, width: int) -> tuple[list[int], list[int]]:
    """The sizes of an image or a video of one row, and of its latents. factor: pixels of a latent pixel's side."""
    of_images = KINDS[name][0] in ("AutoencoderKL", "AutoencoderKLFlux2")
    of_frames: tuple[list[int], list[int]] = ([], []) if of_images else ([frames], [1 + frames // 4])
    latent = [1, LATENT_CHANNELS.get(name, 16), *of_frames[1], height // factor, width // factor]
    return [1, 3, *of_frames[0], height, width], latent

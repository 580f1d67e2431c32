"""VAEs by their published architectures, which `real_vaes.yaml` has."""

from __future__ import annotations

from typing import Any

from value_tables import beside

VAES: dict[str, dict[str, Any]] = beside(__file__)


def real_vae(name: str, **settings: Any) -> Any:
    """A model's VAE, with other settings where these are given."""
    import diffusers

    settings = VAES[name]["settings"] | settings
    if "z_dim" in settings:
        settings |= dict.fromkeys(("latents_mean", "latents_std"), [1.0] * settings["z_dim"])
    return getattr(diffusers, VAES[name]["kind"])(**settings).eval()


def picture_sizes(name: str, factor: int, frames: int, height: int, width: int) -> tuple[list[int], list[int]]:
    """The sizes of an image or a video of one row, and of its latents. factor: pixels of a latent pixel's side."""
    of_images = VAES[name]["kind"] in ("AutoencoderKL", "AutoencoderKLFlux2")
    of_frames: tuple[list[int], list[int]] = ([], []) if of_images else ([frames], [1 + frames // 4])
    latent = [1, VAES[name]["channels"], *of_frames[1], height // factor, width // factor]
    return [1, 3, *of_frames[0], height, width], latent

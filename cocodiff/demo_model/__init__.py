"""The embedded model: a small inpainting diffusion transformer that ships with the package, so that everything runs
offline.

`load_pipeline()` returns an unmodified diffusers pipeline. `prompt_embeddings()` returns the constant that it takes in
place of a prompt, as there are no text encoders. `MODEL_CARD.md` describes its training and its limits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WEIGHTS = Path(__file__).parent / "weights"
SAMPLES = Path(__file__).parent / "samples"
PROMPT_TOKENS = 6
PROMPT_WIDTH = 32


def load_pipeline(dtype: torch.dtype | None = None, weights: Path = WEIGHTS) -> Any:
    """Load the embedded model as a `StableDiffusion3InpaintPipeline` on the CPU. It never downloads anything.

    Call it with `image`, `mask_image`, `height` and `width` (multiples of 8, at most 128), `guidance_scale=1`, and
    `**prompt_embeddings(batch)` in place of prompts. Images are grey in [0, 1], with three equal channels, as the
    pipeline requires.

    Parameters
    ----------
    dtype : torch.dtype, optional
        By default float32.
    weights : Path
        Folder of another model of the same kind.

    Returns
    -------
    StableDiffusion3InpaintPipeline
    """
    import torch
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers' image processors, unused here, would warn about torchvision
    try:
        from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3InpaintPipeline

        from .vae import LappedTransformVAE
    finally:
        logging.set_verbosity(level)

    dtype = dtype or torch.float32
    transformer = SD3Transformer2DModel.from_pretrained(
        weights, torch_dtype=dtype, use_safetensors=True, local_files_only=True
    )
    vae = LappedTransformVAE.from_config(json.loads((weights / "vae_config.json").read_text()))
    # diffusers' own `to(dtype)` warns about an empty list of float32 modules.
    torch.nn.Module.to(vae, dtype)
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(json.loads((weights / "scheduler_config.json").read_text()))
    texts = dict.fromkeys(f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3"))
    return StableDiffusion3InpaintPipeline(transformer=transformer, scheduler=scheduler, vae=vae.eval(), **texts)


def prompt_embeddings(batch: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the constant prompt that the model was trained with, as keyword arguments of the pipeline.

    Parameters
    ----------
    batch : int
        Number of images.
    dtype : torch.dtype, optional
        By default float32.

    Returns
    -------
    dict
        `prompt_embeds` [batch, 6, 32]: the first unit vectors, so that every token can learn a part of its own.
        `pooled_prompt_embeds` [batch, 32]: zero.
    """
    import torch

    tokens = torch.eye(PROMPT_TOKENS, PROMPT_WIDTH, dtype=dtype or torch.float32)
    return {
        "prompt_embeds": tokens.repeat(batch, 1, 1),
        "pooled_prompt_embeds": torch.zeros(batch, PROMPT_WIDTH, dtype=tokens.dtype),
    }

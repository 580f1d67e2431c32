"""Prompts become embeddings on one rank, whose text encoders are gone before the first denoising step."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cocodiff.errors import UserError
from cocodiff.models.family import Pipelines

if TYPE_CHECKING:
    import torch

Embeddings = dict[str, Any]  # arguments of a pipeline call for one image: tensors of one row


def encode(
    pipelines: Pipelines, pipe: Any, prompts: Sequence[str], guided: bool, device: torch.device
) -> list[Embeddings]:
    """The embeddings of each prompt, on the CPU, by the pipeline's own `encode_prompt`.

    pipe: with text encoders, which are moved to `device`. guided: whether the negative prompt is needed too.
    Raises UserError where the encoders fail or give numbers that are not finite.
    """
    import torch

    for name, part in pipe.components.items():
        if name.startswith("text_encoder") and part is not None:
            part.to(device)
    with torch.no_grad():
        wanted = guided and pipelines.negative is not None
        negative = _encode_one(pipelines, pipe, pipelines.negative or "", device) if wanted else {}
        against = {f"negative_{name}": value for name, value in negative.items()}
        return [_encode_one(pipelines, pipe, prompt, device) | against for prompt in prompts]


def _encode_one(pipelines: Pipelines, pipe: Any, prompt: str, device: torch.device) -> Embeddings:
    import torch

    try:
        values = pipe.encode_prompt(prompt, **pipelines.also, device=device)
    except Exception as error:  # none of our code runs in there: the encoders' files do not fit together
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"{type(pipe).__name__} cannot encode the prompt with the model's text encoders and tokenizers "
            f"({type(error).__name__}: {text}); copy them again"
        ) from error
    named = dict(zip(pipelines.encoded, values, strict=True))
    if "prompt_embeds_mask" in named and named["prompt_embeds_mask"] is None:
        # Qwen-Image's encode_prompt leaves out a mask that masks nothing; its call would warn that it is missing.
        named["prompt_embeds_mask"] = torch.ones(named["prompt_embeds"].shape[:2], dtype=torch.long)
    for name, value in named.items():
        if name and value is not None and not bool(torch.isfinite(value).all()):
            raise UserError(
                f"the model's text encoders give NaN or Inf as {name}: use a wider --dtype, or copy their weights again"
            )
    return {name: value.cpu() for name, value in named.items() if name and value is not None}


def no_prompt(pipelines: Pipelines, transformer: Any, dtype: torch.dtype) -> Embeddings:
    """Zero embeddings, for pipelines saved without text encoders; the same for the negative prompt. Of one token, or
    of as many as all prompts have, where that is told."""
    import torch

    config, zero = transformer.config, {}
    negative = () if pipelines.negative is None else tuple(f"negative_{name}" for name in pipelines.encoded if name)
    for name in (*filter(None, pipelines.encoded), *negative):
        if name.endswith("_mask"):
            zero[name] = torch.ones(1, 1, dtype=torch.long)
        elif "pooled" in name:
            zero[name] = torch.zeros(1, config.pooled_projection_dim, dtype=dtype)
        else:
            width = config.get("joint_attention_dim") or config.text_dim
            zero[name] = torch.zeros(1, pipelines.also.get("max_sequence_length", 1), width, dtype=dtype)
    return zero


def free_unused() -> None:
    """Returns the memory of what nobody refers to any more; modules are full of reference cycles."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()

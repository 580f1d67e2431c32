"""Models by name: the embedded one, a folder in diffusers' layout, or a hub id."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cocodiff.errors import UserError

EMBEDDED = "embedded"
# What a folder's model_index.json names, and the pipeline that inpaints with it.
INPAINT_CLASSES = {
    "StableDiffusion3Pipeline": "StableDiffusion3InpaintPipeline",
    "StableDiffusion3Img2ImgPipeline": "StableDiffusion3InpaintPipeline",
    "StableDiffusion3InpaintPipeline": "StableDiffusion3InpaintPipeline",
}
# Parts that a pipeline may be saved without; loading wants to be told so.
TEXT_PARTS = (
    "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3", "image_encoder",
    "feature_extractor",
)  # fmt: skip
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Model:
    """A pipeline ready to be called. prompt_kwargs: batch size -> prompt arguments; guidance_scale None: its own."""

    name: str
    pipe: Any
    prompt_kwargs: Callable[[int], dict[str, Any]]
    guidance_scale: float | None


def check_model(name: str, ranks: int) -> None:
    """What can be said of a model before it is loaded. Raises UserError for a folder without loadable weights, an
    unknown family, and more ranks than the model has heads or tokens at its own size."""
    if name == EMBEDDED:
        folder = Path(str(resources.files("cocodiff.demo_model"))) / "weights"
        shape = next(iter(sorted(folder.rglob("config.json"), key=lambda path: "transformer" not in str(path))), None)
    else:
        folder = Path(name)
        if not folder.exists() and name.count("/") == 1 and not name.startswith((".", "/")):
            return  # a hub id: known only when it is fetched
        _check_folder(folder)
        shape = folder / "transformer" / "config.json"
    if shape is None or not shape.is_file():
        raise UserError(f"model {name}: no transformer/config.json; give a folder in diffusers' layout")
    config = json.loads(shape.read_text())
    heads = config.get("num_attention_heads")
    side = config.get("sample_size", 0) // max(1, config.get("patch_size", 1))
    if heads and ranks > heads:
        raise UserError(f"{ranks} ranks for the {heads} attention heads of model {name}: use at most {heads} ranks")
    if side and ranks > side * side:
        raise UserError(f"{ranks} ranks for the {side * side} image tokens of model {name}: use at most {side * side}")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"model {folder}: no such folder; give one in diffusers' layout, or leave --model away")
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(f"model {folder}: no model_index.json; save the pipeline there with pipe.save_pretrained(...)")
    family = json.loads(index.read_text()).get("_class_name", "")
    if family not in INPAINT_CLASSES:
        raise UserError(f"model {folder} is a {family or 'pipeline of no name'}; known: {', '.join(INPAINT_CLASSES)}")
    for part in ("transformer", "vae"):
        files = list((folder / part).glob("*")) if (folder / part).is_dir() else []
        if any(file.suffix == ".safetensors" for file in files):
            continue
        pickles = [file.name for file in files if file.suffix in PICKLES]
        if pickles:
            raise UserError(
                f"model {folder}: {part} has pickle weights only ({pickles[0]}), which can run code when loaded; "
                f"save it again with pipe.save_pretrained(..., safe_serialization=True)"
            )
        raise UserError(f"model {folder}: {part} has no .safetensors weights; copy them there")


def load_model(name: str, dtype: Any, prompt: str, guidance: float | None) -> Model:
    """Loads a pipeline on the CPU. Only safetensors are read, never pickles.

    Raises UserError when the model cannot be loaded from there.
    """
    if name == EMBEDDED:
        from cocodiff.demo_model import load_pipeline, prompt_embeddings

        return Model(name, load_pipeline(dtype), lambda batch: prompt_embeddings(batch, dtype), 1.0)
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    local = Path(name).is_dir()
    index = json.loads((Path(name) / "model_index.json").read_text()) if local else None
    kind = getattr(diffusers, INPAINT_CLASSES[index["_class_name"] if index else "StableDiffusion3InpaintPipeline"])
    absent = {part: None for part in TEXT_PARTS if index is not None and not (index.get(part) or [None])[0]}
    try:
        pipe = kind.from_pretrained(name, torch_dtype=dtype, use_safetensors=True, local_files_only=local, **absent)
    except (OSError, ValueError) as error:
        raise UserError(f"model {name} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if pipe.text_encoder is not None:
        return Model(name, pipe, lambda batch: {"prompt": [prompt] * batch}, guidance)
    if prompt:
        raise UserError(f"model {name} has no text encoders, so it takes no --prompt: leave it away")
    return Model(name, pipe, lambda batch: _no_prompt(pipe, batch, dtype), guidance if guidance is not None else 1.0)


def _no_prompt(pipe: Any, batch: int, dtype: Any) -> dict[str, Any]:
    """Zero embeddings, for pipelines saved without text encoders."""
    import torch

    config = pipe.transformer.config
    return {
        "prompt_embeds": torch.zeros(batch, 1, config.joint_attention_dim, dtype=dtype),
        "pooled_prompt_embeds": torch.zeros(batch, config.pooled_projection_dim, dtype=dtype),
    }

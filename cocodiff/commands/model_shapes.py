"""The shape of a model by its name, from a file, or of a folder in diffusers' layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cocodiff.commands.model_checks import read_shape
from cocodiff.config import find_shipped, from_mapping, read_yaml
from cocodiff.errors import UserError
from cocodiff.planning.memory import ModelShape, shape_of_config


def load_shape(name: str) -> ModelShape:
    """A model's shape by its name in configs/models, from a YAML file, or of a folder in diffusers' layout."""
    folder = Path(name)
    if folder.is_dir():
        found = [path for path in (folder / "transformer" / "config.json", folder / "config.json") if path.is_file()]
        if not found:
            raise UserError(f"--model {name} holds no transformer/config.json: give a folder in diffusers' layout")
        return shape_of_folder(found[0])
    path = find_shipped("model", "models", name)
    try:
        return from_mapping(ModelShape, read_yaml(path), path.name)
    except TypeError as error:
        missing = str(error).partition("missing ")[2] or str(error)
        raise UserError(f"model file {path.name}: missing {missing}; see configs/models/flux.1.yaml") from error


def shape_of_folder(path: Path) -> ModelShape:
    """The shape of the transformer of a config.json; its parameters are counted without any memory for them."""
    import diffusers
    import torch

    config = read_shape(path)
    kind = str(config.get("_class_name"))
    built = getattr(diffusers, kind, None)
    if built is None or not hasattr(built, "from_config"):
        raise UserError(f"{path}: diffusers has no class {kind}: give a folder with a transformer of diffusers")
    try:
        with torch.device("meta"):
            model = built.from_config(config)
    except Exception as error:  # diffusers' code on the user's file
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: {kind} cannot be made of it ({type(error).__name__}: {text})") from error
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    shape = shape_of_config(kind, model.config, numbers)
    return replace(shape, name=(path.parents[1] if path.parent.name == "transformer" else path.parent).resolve().name)

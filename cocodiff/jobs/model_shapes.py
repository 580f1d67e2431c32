"""The shape of a model by its name, from a file, or of a folder in diffusers' layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocodiff.config.config import check_choice, find_shipped, from_mapping, read_yaml
from cocodiff.config.errors import UserError
from cocodiff.config.files import read_json
from cocodiff.jobs.model_checks import read_shape, stored_values
from cocodiff.models import FAMILIES, families, load_family
from cocodiff.models.family import EXPERTS, Family
from cocodiff.planner.case import ModelShape, shape_of_config


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
        return shape_of_mapping(read_yaml(path), path.name)
    except TypeError as error:
        missing = str(error).partition("missing ")[2] or str(error)
        raise UserError(f"model file {path.name}: missing {missing}; see configs/models/flux.1.yaml") from error


def family_of_shape(name: str) -> str | None:
    """The family that a model's file names, by the model's name in configs/models or the file."""
    family = read_yaml(find_shipped("model", "models", name)).get("family")
    return None if family is None else str(family)


def shape_of_mapping(values: Mapping[str, Any], where: str) -> ModelShape:
    """Of a model file: fields of ModelShape (one by its former name as well), and `family`, for absent ones."""
    given = {"unsharded_copies" if key == "entrance" else key: value for key, value in values.items()}
    if "family" not in given:
        return from_mapping(ModelShape, given, where)
    family = str(given.pop("family"))
    check_choice(f"family of model file {where}", family, [name for name in FAMILIES if load_family(name).planned])
    return from_mapping(ModelShape, load_family(family).shape_facts() | given, where)


def shape_of_folder(path: Path) -> ModelShape:
    """The shape of the transformer of a config.json; its parameters are counted without any memory for them."""
    import torch

    config = read_shape(path)
    kind = str(config.get("_class_name"))
    family = family_of_class(kind)
    if family is None:
        import diffusers

        if not hasattr(getattr(diffusers, kind, None), "from_config"):
            raise UserError(f"{path}: diffusers has no class {kind}: give a folder with a transformer of diffusers")
        known = ", ".join(family.class_name for family in families() if family.planned)
        why = next((f"; {one.unplanned}" for one in families() if one.class_name == kind and one.unplanned), "")
        raise UserError(f"the memory of a {kind} is not known; known are {known}{why}")
    try:
        with torch.device("meta"):
            model = family.import_transformer().from_config(config)
    except Exception as error:  # diffusers' code on the user's file
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: {kind} cannot be made of it ({type(error).__name__}: {text})") from error
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    whole = path.parent.name == "transformer"
    folder = path.parents[1] if whole else path.parent
    experts = 1 + (whole and (folder / EXPERTS[1] / "config.json").is_file())  # alike, both in memory
    shape = shape_of_config(family, model.config, experts * numbers)
    return replace(shape, name=folder.resolve().name, **(of_other_parts(shape, family, folder) if whole else {}))


def of_other_parts(shape: ModelShape, family: Family, folder: Path) -> dict[str, Any]:
    """Facts of a model's text encoders and VAE, from the headers of their weights and the model's index."""

    def numbers(part: Path) -> int:
        return sum(stored_values(part).values())

    encoders, vae = sum(map(numbers, folder.glob("text_encoder*"))), numbers(folder / "vae")
    index = folder / "model_index.json"
    told = read_json(index) if family.token_vae is not None and index.is_file() else {}
    size = family.token_vae if told.get("expand_timesteps") else shape.vae
    video = {"video": family.pipelines[0].video_of(told)} if told else {}
    return {"encoders": encoders, "vae": replace(size, parameters=vae) if size and vae else size} | video


def family_of_class(name: str) -> Family | None:
    """The family whose transformer's class has this name; None where none has of whose shape enough is known."""
    return next((family for family in families() if family.planned and family.class_name == name), None)

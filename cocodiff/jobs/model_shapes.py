"""The shape of a model (`ModelShape`), read from a model file or from a folder in diffusers' layout."""

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
    """Return the sizes of a model that decide its memory and time. Raise UserError if it cannot be found or read.

    Only a configuration and headers of weights are read, no weights.

    name: name of a file in configs/models, path of a YAML file, or folder in diffusers' layout
    """
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
    """Return the name of the family of models (such as "FLUX.1") that a model file gives; None if it gives none.

    name: name of a file in configs/models, or path of a YAML file
    """
    family = read_yaml(find_shipped("model", "models", name)).get("family")
    return None if family is None else str(family)


def shape_of_mapping(values: Mapping[str, Any], where: str) -> ModelShape:
    """Return the sizes of a model that a YAML file of a model (configs/models) describes.

    Raise UserError for unknown keys or an unknown family, and TypeError if required fields are missing.

    Args:
        values: content of the file: fields of ModelShape by name, and `family`, the family of models whose facts are
            used for absent fields. `entrance` is accepted for `unsharded_copies`, which had that name before.
        where: name of the file, for errors
    """
    given = {"unsharded_copies" if key == "entrance" else key: value for key, value in values.items()}
    if "family" not in given:
        return from_mapping(ModelShape, given, where)
    family = str(given.pop("family"))
    check_choice(f"family of model file {where}", family, [name for name in FAMILIES if load_family(name).planned])
    return from_mapping(ModelShape, load_family(family).shape_facts() | given, where)


def shape_of_folder(path: Path) -> ModelShape:
    """Return the sizes of the transformer that a config.json in diffusers' layout describes.

    The model is built without memory for its weights. If the file is in the folder `transformer` of a pipeline, text
    encoders, VAE and a second transformer are included. Raise UserError if the class is unknown or cannot be built from
    the file.

    Args:
        path: the config.json
    """
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
    except Exception as error:  # from diffusers, for wrong settings in the user's file
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: {kind} cannot be made of it ({type(error).__name__}: {text})") from error
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    whole = path.parent.name == "transformer"
    folder = path.parents[1] if whole else path.parent
    # A second transformer has the size of the first, and both are in memory.
    experts = 1 + (whole and (folder / EXPERTS[1] / "config.json").is_file())
    shape = shape_of_config(family, model.config, experts * numbers)
    return replace(shape, name=folder.resolve().name, **(of_other_parts(shape, family, folder) if whole else {}))


def of_other_parts(shape: ModelShape, family: Family, folder: Path) -> dict[str, Any]:
    """Return the fields of ModelShape `encoders`, `vae` and, for some models of videos, `video`, by name.

    They are read from the headers of the weights and from model_index.json.

    Args:
        shape: shape of the transformer
        family: facts about the transformer's family of models
        folder: folder of the pipeline
    """

    def numbers(part: Path) -> int:
        """Return the number of values in a part's weights."""
        return sum(stored_values(part).values())

    encoders, vae = sum(map(numbers, folder.glob("text_encoder*"))), numbers(folder / "vae")
    index = folder / "model_index.json"
    told = read_json(index) if family.token_vae is not None and index.is_file() else {}
    size = family.token_vae if told.get("expand_timesteps") else shape.vae
    video = {"video": family.pipelines[0].video_of(told)} if told else {}
    return {"encoders": encoders, "vae": replace(size, parameters=vae) if size and vae else size} | video


def family_of_class(name: str) -> Family | None:
    """Return the family of models whose transformer is a given class of diffusers; None if `plan` knows none.

    name: name of the class, such as "FluxTransformer2DModel"
    """
    return next((family for family in families() if family.planned and family.class_name == name), None)

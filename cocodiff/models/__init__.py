"""The model families, one file each: an adapter, and a `Family` record with all other facts about the family."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from typing import Any

from cocodiff.config.errors import UserError
from cocodiff.config.registry import load
from cocodiff.models.family import EXPERTS, Family, Pipelines

# The import string of each family's record, which is imported at its first use.
FAMILIES: dict[str, str] = {
    "SD3 / SD3.5": "cocodiff.models.sd3:FAMILY",
    "FLUX.1": "cocodiff.models.flux:FAMILY",
    "FLUX.2": "cocodiff.models.flux2:FAMILY",
    "Qwen-Image": "cocodiff.models.qwen_image:FAMILY",
    "Wan": "cocodiff.models.wan:FAMILY",
    "Latte": "cocodiff.models.latte:FAMILY",
}


def load_family(name: str) -> Family:
    """Return the description of the model family with this name, one of the keys of FAMILIES."""
    return load(FAMILIES, name)


def families() -> Iterator[Family]:
    """Return the descriptions of all model families."""
    return map(load_family, FAMILIES)


def family_of(model: object, plan: object = None) -> Family:
    """Return the description of the family that a transformer belongs to, or one by which a plan runs it
    (`by_plan.py`).

    Raise UserError if there is neither.

    Args:
        plan: the user's plan of where tokens are cut and gathered, which precedes the family; None to look it up.
    """
    for family in families() if plan is None else ():
        if family.has(type(model)):
            return family
    return import_module("cocodiff.models.by_plan").family_by_plan(model, plan, FAMILIES)


def pipelines_of(pipeline: str, model: str, transformer: str = "") -> Pipelines:
    """Return the set of diffusers' pipelines that can load a model's weights.

    Raise UserError if the model's pipeline is not known.

    Args:
        pipeline: the class that the model's `model_index.json` names.
        model: the model's name, for the error.
        transformer: class of its transformer, which may run by a plan without a family.
    """
    known = [pipelines for family in families() for pipelines in family.pipelines]
    for pipelines in known:
        if pipeline in pipelines.classes:
            return pipelines
    plans = import_module("cocodiff.models.plans")
    if transformer in {*plans.PLANS, *plans.OWN}:
        kind: Any = getattr(import_module("diffusers"), pipeline, None)
        if hasattr(kind, "prepare_latents") and not {"image", "video"} & {*signature(kind.__call__).parameters}:
            return Pipelines.of_class(kind)
    names = ", ".join(name for pipelines in known for name in pipelines.classes)
    raise UserError(f"model {model} is a {pipeline or 'pipeline of no name'}; known: {names}")


def experts_of(target: Any) -> list[Any]:
    """Return the transformers of a pipeline as a list; of a bare transformer, itself. Wan 2.2 has two that take turns
    in a run.

    Raise UserError if there is none, or for two of different classes.
    """
    from torch import nn

    found = [target] if isinstance(target, nn.Module) else [getattr(target, name, None) for name in EXPERTS]
    models = [model for model in found if isinstance(model, nn.Module)]
    if not models:
        raise UserError(f"a {type(target).__name__} has no transformer: give a DiT pipeline or its transformer")
    if len({type(model) for model in models}) > 1:
        names = " and a ".join(type(model).__name__ for model in models)
        raise UserError(f"the {' and '.join(EXPERTS)} of this pipeline are a {names}: give a pipeline with two alike")
    return models

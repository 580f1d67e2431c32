"""The transformers of a pipeline that take turns in a run: Wan 2.2's two experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from cocodiff.errors import UserError
from cocodiff.models.family import EXPERTS


def experts_of(target: Any) -> list[nn.Module]:
    """The transformers of a pipeline that has some, or the transformer itself. Raises UserError where there is none,
    and for two that ranks cannot share alike."""
    found = [target] if isinstance(target, nn.Module) else [getattr(target, name, None) for name in EXPERTS]
    models = [model for model in found if isinstance(model, nn.Module)]
    if not models:
        raise UserError(f"a {type(target).__name__} has no transformer: give a DiT pipeline or its transformer")
    if len({type(model) for model in models}) > 1:
        names = " and a ".join(type(model).__name__ for model in models)
        raise UserError(f"the {' and '.join(EXPERTS)} of this pipeline are a {names}: give a pipeline with two alike")
    return models

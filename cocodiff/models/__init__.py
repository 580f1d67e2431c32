"""One thin adapter per model family."""

from torch import nn

from cocodiff.errors import UserError
from cocodiff.models.adapter import Adapter
from cocodiff.models.sd3 import SD3Adapter

ADAPTERS: dict[str, Adapter] = {"SD3 / SD3.5": SD3Adapter()}


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter of a model's family. Raises UserError that lists the known ones."""
    for adapter in ADAPTERS.values():
        if adapter.matches(model):
            return adapter
    raise UserError(f"no adapter for {type(model).__name__}; known families: {', '.join(ADAPTERS)}")

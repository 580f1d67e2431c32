"""One thin adapter per model family."""

from torch import nn

from cocodiff.errors import UserError
from cocodiff.models.adapter import Adapter
from cocodiff.models.flux import FluxAdapter
from cocodiff.models.flux2 import Flux2Adapter
from cocodiff.models.qwen_image import QwenImageAdapter
from cocodiff.models.sd3 import SD3Adapter

ADAPTERS: dict[str, Adapter] = {
    "SD3 / SD3.5": SD3Adapter(),
    "FLUX.1": FluxAdapter(),
    "FLUX.2": Flux2Adapter(),
    "Qwen-Image": QwenImageAdapter(),
}


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter of a model's family. Raises UserError that lists the known ones."""
    for adapter in ADAPTERS.values():
        if adapter.matches(model):
            return adapter
    raise UserError(
        f"no adapter for {type(model).__name__}; known families: {', '.join(ADAPTERS)}; "
        f"docs/new-model.md tells how one is written"
    )

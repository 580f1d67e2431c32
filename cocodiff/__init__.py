"""cocodiff: distributed inference of diffusion transformers on machines with unequal links.

with cocodiff.parallelize(pipe, preset="tapa", machine="aurora") as engine:
    image = pipe(...).images[0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cocodiff.config import Config
from cocodiff.errors import PeerLost, UserError

if TYPE_CHECKING:
    from cocodiff.engine import Engine

__all__ = ["Config", "PeerLost", "UserError", "parallelize"]
__version__ = "0.1.0"


def parallelize(target: Any, preset: str = "tapa", **settings: Any) -> Engine:
    """Makes a diffusers pipeline or transformer parallel over all ranks; see `cocodiff.engine.parallelize`."""
    from cocodiff.engine import parallelize as parallelize_now  # torch takes seconds to import; Config does not need it

    return parallelize_now(target, preset, **settings)

"""cocodiff: distributed inference of diffusion transformers on machines with unequal links.

with cocodiff.parallelize(pipe, preset="tapa", machine="aurora") as engine:
    image = pipe(...).images[0]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocodiff.config import Config
from cocodiff.errors import PeerLost, UserError

if TYPE_CHECKING:
    from cocodiff.arrays import restore
    from cocodiff.engine import parallelize
    from cocodiff.verification import verify

__all__ = ["Config", "PeerLost", "UserError", "parallelize", "restore", "verify"]
__version__ = "0.1.0"


WHERE = {"parallelize": "cocodiff.engine", "restore": "cocodiff.arrays", "verify": "cocodiff.verification"}


def __getattr__(name: str) -> Any:
    """Functions, when they are asked for: torch takes seconds to import; Config does not need it."""
    if name not in WHERE:
        raise AttributeError(f"module cocodiff has no attribute {name}")
    return getattr(import_module(WHERE[name]), name)

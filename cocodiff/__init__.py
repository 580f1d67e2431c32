"""cocodiff: distributed inference of diffusion transformers on machines with unequal links.

with cocodiff.parallelize(pipe, preset="tapa", machine="aurora") as engine:
    image = pipe(...).images[0]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cocodiff.config.config import Config
from cocodiff.config.errors import PeerLost, UserError

if TYPE_CHECKING:
    from cocodiff.engine.engine import parallelize
    from cocodiff.engine.verification import verify
    from cocodiff.jobs.arrays import restore

__all__ = ["Config", "PeerLost", "UserError", "parallelize", "restore", "verify"]
__version__ = "0.1.0"


# The modules of the functions that are imported at their first use.
WHERE = {
    "parallelize": "cocodiff.engine.engine",
    "restore": "cocodiff.jobs.arrays",
    "verify": "cocodiff.engine.verification",
}


def __getattr__(name: str) -> Any:
    """Import one of the functions in WHERE at its first use, and return it.

    Importing cocodiff stays quick that way: Config needs no torch, which takes seconds to import. Raise AttributeError
    for any other name.
    """
    if name not in WHERE:
        raise AttributeError(f"module cocodiff has no attribute {name}")
    return getattr(import_module(WHERE[name]), name)

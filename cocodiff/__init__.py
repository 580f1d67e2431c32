"""cocodiff: distributed inference of diffusion transformers on machines with unequal links.

with cocodiff.parallelize(pipe, preset="tapa", machine="aurora") as engine:
    image = pipe(...).images[0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cocodiff.config import Config
from cocodiff.errors import PeerLost, UserError

if TYPE_CHECKING:
    from cocodiff.engine import Engine
    from cocodiff.verification import Verification

__all__ = ["Config", "PeerLost", "UserError", "parallelize", "verify"]
__version__ = "0.1.0"


def parallelize(target: Any, preset: str = "tapa", **settings: Any) -> Engine:
    """Makes a diffusers pipeline or transformer parallel over all ranks; see `cocodiff.engine.parallelize`."""
    from cocodiff.engine import parallelize as parallelize_now  # torch takes seconds to import; Config does not need it

    return parallelize_now(target, preset, **settings)


def verify(
    target: Any, inputs: Mapping[str, Any] | None = None, *, ranks: Sequence[int] = (2, 3), plan: Any = None
) -> Verification:
    """Compares a pipeline's transformer on several ranks with one process; see `cocodiff.verification.verify`."""
    from cocodiff.verification import verify as verify_now

    return verify_now(target, inputs, ranks=ranks, plan=plan)

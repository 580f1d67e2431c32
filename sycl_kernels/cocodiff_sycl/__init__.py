"""cocodiff's hot data movement as SYCL: sources, the C library that compiles and launches them, and its cache.

Names are imported when they are first used: most runs on a CPU never launch a kernel.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cocodiff_sycl.find import Unavailable
    from cocodiff_sycl.ops import SyclOps, open_cpu, open_xpu
    from cocodiff_sycl.rows import Rows

__all__ = ["Rows", "SyclOps", "Unavailable", "open_cpu", "open_xpu"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{ {'Unavailable': 'find', 'Rows': 'rows'}.get(name, 'ops') }"), name)

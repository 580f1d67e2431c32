"""Places where tests look behind public names, each a function that says what it looks at.

Every other test file is kept from private attributes by ruff (SLF001). Prefer what a user can see.
"""

from __future__ import annotations

from typing import Any

import torch


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """List the forward hooks on a module and on all of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return found

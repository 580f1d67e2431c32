"""Places where tests look behind public names, each a function that says what it looks at.

Every other test file is kept from private attributes by ruff (SLF001). Prefer what a user can see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cocodiff.jobs import arrays


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """List the forward hooks on a module and on all of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return found


def save_as_restore(array: Any, path: Path) -> None:
    """Save an array, the volume or the mask by the file's name, as `cocodiff.restore` hands it to its job."""
    arrays._save(array, path)


def words_of_restore(options: dict[str, Any]) -> list[str]:
    """Return the words of the command line that `cocodiff.restore` makes of its options."""
    return arrays._words(options)


def error_of_restore(code: int, said: str) -> Exception:
    """Return what `cocodiff.restore` raises for a job's exit code and output."""
    return arrays._error(code, said, Path("folder"))

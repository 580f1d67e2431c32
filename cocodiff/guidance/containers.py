"""The tensors in what a model takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A result or argument with its tensors changed, in the containers that they stand in."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {name: mapped(one, change) for name, one in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    if isinstance(value, tuple | list):
        parts = [mapped(one, change) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value

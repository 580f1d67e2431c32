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


def choose_backend(processor: Any, name: str) -> None:
    """Have a processor of diffusers attend by a backend, whether or not it is installed."""
    processor._attention_backend = name


def plan_of_diffusers(model: Any) -> dict[str, Any]:
    """List where diffusers' own context parallelism cuts and gathers the tokens of a model."""
    return model._cp_plan


def interrupt(pipe: Any) -> None:
    """Have a pipeline of diffusers leave out its further steps, as its users do from a callback."""
    pipe._interrupt = True

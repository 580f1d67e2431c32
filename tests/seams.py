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


def bytes_held_of_parts(engine: Any) -> list[int]:
    """List what codecs of an engine keep: those of this rank's part of guidance, and those of all ranks together."""
    return [ranks.strategy.codec.bytes_held() for ranks in engine._guided.sequences]


def step_caches_of(engine: Any) -> Any:
    """Give the step caches that an engine attaches to its model on entering."""
    return engine._caches


def end_guidance_of(pipe: Any) -> None:
    """Set the scale of guidance of a pipeline of diffusers to 1 while it runs, as diffusers' guide says."""
    pipe._guidance_scale = 1.0

"""Places where tests look behind public names, each a function that says what it looks at.

Every other test file is kept from private attributes by ruff (SLF001). Prefer what a user can see.
"""

from __future__ import annotations

from typing import Any

import torch

from cocodiff.comm.transport import LaneOwner
from cocodiff.engine.engine import Engine
from cocodiff.engine.step_cache import FirstBlockCache


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """List the forward hooks on a module and on all of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return found


def step_caches_of(engine: Engine) -> FirstBlockCache:
    """Look at what the step cache of an engine with one model keeps."""
    (cache,) = engine._caches
    return cache


def steps_of(engine: Engine) -> int | None:
    """Look at how many steps an engine takes its pipeline's run to have."""
    return engine._steps()


def lanes_of(transport: LaneOwner) -> set[str]:
    """Look at the names of the lanes that a rank has."""
    return {*transport._lanes}


def number_of(storage: torch.UntypedStorage) -> int:
    """Look at what tells memory apart that has no address, as on meta."""
    return storage._cdata

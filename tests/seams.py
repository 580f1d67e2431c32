"""Places where tests look behind public names, each a function that says what it looks at.

Every other test file is kept from private attributes by ruff (SLF001). Prefer what a user can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """List the forward hooks on a module and on all of its parts."""
    found: list[Any] = []
    for part in module.modules():
        found += [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return found


def noise_of(inpainter: Any, keys: Sequence[int]) -> list[torch.Generator]:
    """Give the generators that an inpainter draws the noise of images with these keys from."""
    return list(inpainter._generators(keys))


@contextmanager
def unpacking_changed(pipe: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """A FLUX.2 pipeline that changes its latents before it unpacks them, while the block lasts."""
    unpack = type(pipe)._unpatchify_latents
    pipe._unpatchify_latents = lambda latents: unpack(change(latents))
    yield
    del pipe._unpatchify_latents

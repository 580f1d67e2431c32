"""What follows from the layouts of tensors, worked out once and then looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

KEPT = 2048  # results of one owner; a run has fewer layouts, and one that has more starts again


def known(
    kept: dict[Any, Any], make: Callable[..., Any], tensors: Sequence[Tensor | None], words: tuple[Any, ...]
) -> Any:
    """make(*tensors, *words), or what it gave before for the same words and tensors of the same layouts.

    make may look at shapes, strides, dtypes and devices, at nothing else of a tensor. What it raises is not kept.
    """
    key = make.__name__, words, *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    found = kept.get(key)
    if found is None:
        found = make(*tensors, *words)
        if len(kept) >= KEPT:
            kept.clear()
        kept[key] = found
    return found

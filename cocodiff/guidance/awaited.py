"""The output of a call that other ranks compute: a tensor that waits for its values when these are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cocodiff.guidance.containers import mapped


class Awaited(Tensor):
    """A tensor whose values are on their way: the buffer that they come into. Its shape, and views of it, are there at
    once; whatever else is asked of it waits for the values first, and is then asked of a plain tensor."""

    _wait: Callable[[], object]

    @classmethod
    def over(cls, buffer: Tensor, wait: Callable[[], object]) -> Awaited:
        """wait: returns when the values are in the buffer; called whenever somebody asks for them."""
        awaited = buffer.as_subclass(cls)
        awaited._wait = wait
        return awaited

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WITHOUT_VALUES or (func in VIEWS and _is_view(func, args)):
            wait = args[0]._wait
            found = super().__torch_function__(func, types, args, kwargs or {})
            return mapped(found, lambda x: cls.over(x, wait))

        def here(x: Tensor) -> Tensor:
            if not isinstance(x, Awaited):
                return x
            x._wait()
            return x.as_subclass(Tensor)

        return func(*mapped(args, here), **mapped(dict(kwargs or {}), here))


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


def _functions(*names: str) -> set[Any]:
    """The methods of these names, and the functions of torch."""
    return {getattr(of, name) for name in names for of in (Tensor, torch) if hasattr(of, name)}


WITHOUT_VALUES = frozenset(
    _getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_xpu", "is_cpu", "nbytes")
    | _functions("size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous")
    | {Tensor.__len__}
)
VIEWS = frozenset(
    _functions("chunk", "split", "narrow", "select", "unbind", "view", "transpose", "permute", "squeeze", "unsqueeze")
    | {Tensor.__getitem__}
)


def _is_view(func: Any, args: tuple[Any, ...]) -> bool:
    if func is not Tensor.__getitem__:
        return isinstance(args[0], Awaited)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(one is None or one is ... or type(one) in (int, slice) for one in index)

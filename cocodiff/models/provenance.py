"""Which tensors hold this rank's own tokens, followed through whatever a model computes; and attention, taken where
torch computes it. Both see torch's functions through `TorchFunctionMode`, torch's own way to do so: it holds for the
thread that enters it, and nothing is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary


class Marks:
    """Tensors that hold a shard's tokens: those that were cut, and all that is computed of one."""

    def __init__(self) -> None:
        self._marked: Any = WeakIdKeyDictionary()

    def add(self, x: Tensor) -> None:
        self._marked[x] = True

    def remove(self, x: Tensor) -> None:
        self._marked.pop(x, None)

    def __contains__(self, x: object) -> bool:
        return isinstance(x, Tensor) and x in self._marked

    def any_of(self, values: Iterable[Any]) -> bool:
        """Whether one of the values, or of what lists among them hold, is marked."""
        return any(self.any_of(x) if isinstance(x, list | tuple) else x in self for x in values)

    def follow(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Marks what a function of torch has computed of marked tensors."""
        if self.any_of(args) or self.any_of(kwargs.values()):
            self._add_all(args[0] if function is Tensor.__setitem__ else output)

    def _add_all(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.add(value)
        elif isinstance(value, list | tuple):
            for x in value:
                self._add_all(x)


class TorchFunctions(TorchFunctionMode):
    """While it is entered, `attend` is called in the place of torch's scaled_dot_product_attention, with its arguments.

    marks: follows what other functions compute; None not to."""

    def __init__(self, attend: Callable[..., Tensor], marks: Marks | None = None) -> None:
        super().__init__()
        self._attend, self._marks = attend, marks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        output = func(*args, **kwargs)
        if self._marks is not None:
            self._marks.follow(func, args, kwargs, output)
        return output

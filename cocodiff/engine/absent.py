"""Parameters whose values are on other ranks, and which of torch's functions need no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def functions_named(*names: str) -> set[Any]:
    """Return the methods of tensors of these names, and the functions of torch."""
    return {getattr(of, name) for name in names for of in (Tensor, torch) if hasattr(of, name)}


PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_xpu", "is_cpu", "nbytes")
WITHOUT_VALUES = frozenset(
    {getattr(Tensor, name).__get__ for name in (*PROPERTIES, "is_meta", "grad")}
    | functions_named(
        "size", "dim", "stride", "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous"
    )
    | {Tensor.__len__}
)
SET_DATA = vars(Tensor.__base__)["data"].__set__
OF_PARAMETERS = functions_named("requires_grad_", "_has_compatible_shallow_copy_type")


class AbsentParameter(nn.Parameter):
    """A parameter of which this rank keeps a part. It tells its shape, dtype and device; whatever else is done with it,
    or with what it holds, calls its `fetch` first, which makes it a plain one again or raises UserError."""

    fetch: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in WITHOUT_VALUES or func in OF_PARAMETERS or (func == SET_DATA and args[0] is args[1]):
                return func(*args, **kwargs)
            if func is Tensor.to:  # to where it is, as it is
                same = args[0].new_empty(0)
                if func(same, *args[1:], **kwargs) is same:
                    return args[0]
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, AbsentParameter):
                one.fetch()
        return func(*args, **kwargs)

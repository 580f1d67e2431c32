"""Puts calls of ours in the place of a module's own, for the length of a `with` block, where others do so too.

Offloading takes its hooks off after each image and puts them on again, and with them whatever has been put around
`forward` since. So ours is no attribute that others wrap, keep or drop: it goes around the `forward` of the moment, for
the length of a call, and what somebody has kept of it does nothing once it is put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

Function = Callable[..., Any]


def replace(of: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute of an object; the returned function puts the old one back, unless others have set it since."""
    before = vars(of).get(name, of)
    vars(of)[name] = value

    def put_back() -> None:
        if vars(of).get(name) is value:
            vars(of).pop(name) if before is of else vars(of).update({name: before})

    return put_back


def signature_of(module: Any) -> inspect.Signature:
    """What a module is called with, by its class: somebody's own `forward` may take `*args`."""
    return inspect.signature(MethodType(type(module).forward, module))


def replace_forward(module: Any, compute: Function) -> Callable[[], None]:
    """In each call of a module, `compute(forward, ...)` stands in the place of `forward(...)`, whatever that is then;
    of several the last one is outermost. The returned function takes it away."""
    call = module._call_impl
    if not isinstance(call, _Call):
        module._call_impl = call = _Call(module)
    call.computes.append(compute)

    def put_back() -> None:
        call.computes.remove(compute)
        if not call.computes and vars(module).get("_call_impl") is call:
            del module._call_impl

    return put_back


class _Call:
    """In the place of torch's `_call_impl`, which looks up `forward` and runs a module's hooks before and after it."""

    def __init__(self, module: Any) -> None:
        self.computes: list[Function] = []
        self._module, self._call = module, module._call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._module.forward
        for compute in self.computes:
            forward = wraps(forward)(partial(compute, forward))
        put_back = replace(self._module, "forward", forward)
        try:
            return self._call(*args, **kwargs)
        finally:
            put_back()


def replace_method(of: Any, name: str, compute: Function) -> Callable[[], None]:
    """Calls `compute` in the place of an object's method; the returned function puts the method back."""
    before, computes = getattr(of, name), [compute]
    put_back = replace(of, name, wraps(before)(lambda *args, **kwargs: (computes or [before])[0](*args, **kwargs)))

    def end() -> None:
        computes.clear()
        put_back()

    return end

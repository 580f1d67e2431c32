"""Ours in the place of a module's own calls, while others put theirs there too.

Offloading takes its hooks off after each image and puts them on again, and with them whatever lies around `forward`
since. So ours goes around the `forward` of the moment, for the length of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any


def signature_of(module: Any) -> inspect.Signature:
    """What a module is called with, by its class: somebody's own `forward` may take `*args`."""
    return inspect.signature(MethodType(type(module).forward, module))


def replace(of: Any, name: str, value: Any) -> Callable[[], None]:
    """Sets an attribute; the returned function puts the old one back, unless others have set it since."""
    before = vars(of).get(name, of)
    vars(of)[name] = value

    def put_back() -> None:
        if vars(of).get(name) is value:
            vars(of).pop(name) if before is of else vars(of).update({name: before})

    return put_back


def replace_forward(module: Any, compute: Callable[..., Any]) -> Callable[[], None]:
    """In each call of a module, `compute(forward, ...)` stands in the place of `forward(...)`; of several the last one
    is outermost. The returned function takes it away, also from what somebody has kept of the module's call."""
    call = module._call_impl
    if getattr(call, "func", None) is not call_with:
        call = module._call_impl = partial(call_with, [], module, call)
    computes = call.args[0]
    computes.append(compute)

    def put_back() -> None:
        computes.remove(compute)
        if not computes:
            del module._call_impl

    return put_back


def call_with(computes: list[Any], module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's `_call_impl`, which looks up `forward` and runs a module's hooks around it."""
    forward = module.forward
    for compute in computes:
        forward = wraps(forward)(partial(compute, forward))
    put_back = replace(module, "forward", forward)
    try:
        return call(*args, **kwargs)
    finally:
        put_back()

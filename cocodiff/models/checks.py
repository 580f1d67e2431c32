"""Checks that refuse transformers which ranks cannot share, with errors that help. They run when a model is made
parallel, and at each of its calls, since a user may change it in between."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff.config.errors import UserError

# Caches of diffusers that decide by the number of calls, which is the same on all ranks. On several ranks they were
# found to give one process's images. Others decide by a rank's own tokens, or are not known.
COUNTING_CACHES = ("PyramidAttentionBroadcastHook", "MagCacheHeadHook", "MagCacheBlockHook", "TaylorSeerCacheHook")


def check_not_compiled(modules: Iterable[tuple[str, nn.Module]], is_traced: bool = False) -> None:
    """Raise UserError for modules of a model that torch.compile has compiled.

    Args:
        modules: with their names, "" for the transformer itself
        is_traced: True if compiled code is calling the modules
    """
    for name, module in modules:
        if is_traced or module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise UserError(
                f"{name or 'the transformer'} is compiled by torch.compile, which would keep the attention it saw: "
                f"parallelize the model that is not compiled, with compile=True"
            )


def never_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook of a model, so that it raises UserError if torch.compile traces the model's caller. Return the
    hook."""

    def call(is_traced: bool, model: nn.Module, *arguments: Any) -> Any:
        check_not_compiled([("", model)], is_traced=is_traced)
        return hook(model, *arguments)

    untraced = torch.compiler.disable(call)
    return lambda *args: untraced(torch.compiler.is_dynamo_compiling(), *args)


def check_caches(modules: Iterable[tuple[str, nn.Module]], own: str, ranks: int) -> str:
    """Return the class name of a hook by which diffusers caches blocks' outputs, "" if the model has none.

    Raise UserError for such a cache beside our `step_cache`. On several ranks raise it also for a cache by which each
    rank decides itself what to compute: ranks that disagree wait for each other forever.

    Args:
        modules: with their names, the transformer first
        own: the setting `step_cache`
        ranks: number of ranks
    """
    found = ""
    for name, hook in stateful_hooks(modules):
        found, config = found or type(hook).__name__, getattr(hook, "config", None)
        if own != "none":
            raise UserError(
                f"step_cache {own} and the cache hook {found} would both leave blocks out: call "
                f"transformer.disable_cache() first, or choose step_cache none"
            )
        kind, other = type(hook).__name__, ", or a cache that goes by steps (docs/models.md)"
        if kind.startswith("FBC"):
            other = f" with step_cache_threshold {hook.threshold}, which ranks decide alike"
        if ranks > 1 and (kind not in COUNTING_CACHES or getattr(config, "calibrate", False)):
            raise UserError(
                f"{name or 'the transformer'} has the cache hook {kind}, by which each rank would decide from its "
                f"own tokens what to compute, and ranks would disagree: call transformer.disable_cache() first, and "
                f"choose step_cache first_block{other}"
            )
    return found


def stateful_hooks(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    """Yield diffusers' hooks that keep something between calls, each as the name of its module and the hook.

    Args:
        modules: with their names.
    """
    for name, module in modules:
        registry: Any = vars(module).get("_diffusers_hook")
        yield from ((name, hook) for hook in (registry.hooks.values() if registry else ()) if hook._is_stateful)


def called_often(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the transformer and its blocks, with names. These are checked in each call.

    Compilers and caches are put on these modules, and they are few enough.
    """
    lists = [(name, part) for name, part in model.named_children() if isinstance(part, nn.ModuleList)]
    return [("", model), *((f"{name}.{number}", block) for name, part in lists for number, block in enumerate(part))]


def check_no_gradients(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise UserError for a call of the model whose gradients are wanted, since none pass between ranks.

    They are wanted if an argument requires them or the model is in training mode. Parameters alone require them in
    every script without `no_grad`.

    Args:
        arguments: those of the call, by name.
    """
    if not torch.is_grad_enabled():
        return
    wanted = [name for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad]
    if not wanted and model.training and any(x.requires_grad for x in model.parameters()):
        wanted = ["the parameters of a model in training mode"]
    if wanted:
        raise UserError(
            f"gradients are wanted for {', '.join(wanted)}, but none pass between ranks: call the transformer in "
            f"torch.no_grad(), or on one rank"
        )


def signature_of(module: Any) -> inspect.Signature:
    """Return the signature of a module's forward as its class defines it. A `forward` that replaces it may take
    `*args`."""
    return inspect.signature(MethodType(type(module).forward, module))


def replace(of: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object. Return a function that puts the old one back, unless others have set it since.

    Args:
        of: the object.
        name: the attribute.
        value: its new value.
    """
    before = vars(of).get(name, of)
    vars(of)[name] = value

    def put_back() -> None:
        if vars(of).get(name) is value:
            vars(of).pop(name) if before is of else vars(of).update({name: before})

    return put_back


def replace_forward(module: Any, compute: Callable[..., Any]) -> Callable[[], None]:
    """Have `compute(forward, ...)` called in place of a module's `forward(...)`. Return a function that undoes this.

    If several are set, the last one is outermost. It holds also for references to the module's call that others keep.
    """
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
    """Call a module, with functions around its forward.

    It replaces torch's `_call_impl`, which looks up `forward` and runs the module's hooks.

    Args:
        computes: the functions, each called with the next forward and the arguments; the last one is outermost.
        call: torch's `_call_impl` of the module.
    """
    forward = module.forward
    for compute in computes:
        forward = wraps(forward)(partial(compute, forward))
    put_back = replace(module, "forward", forward)
    try:
        return call(*args, **kwargs)
    finally:
        put_back()

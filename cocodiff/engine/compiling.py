"""torch.compile of a model's blocks, for the length of a run: `docs/models.md` tells what is compiled and what is not.

Nothing is sent from inside a graph. A block is compiled without its call, so hooks on it run before and after its
graphs; each of its attention modules, in which messages are sent, breaks the graph and runs as it is. Ranks compile
each by itself, between messages, and wait for a rank that compiles as for one that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from cocodiff.comm.trace import Trace
from cocodiff.config.errors import UserError
from cocodiff.models.adapter import attends
from cocodiff.models.checks import called_often, replace, replace_forward, stateful_hooks

BACKEND = "inductor"
REASON = "cocodiff sends messages between ranks here"  # by which a break of ours is told from others
Function = Callable[..., Any]


class Compiler:
    """torch.compile for one engine, and an account of what it did on this rank. backend: torch's name of the compiler.
    paused: while all blocks run as they are. graphs, seconds: that were compiled, and what that took; later: how many
    of them after the first step of a run."""

    def __init__(self, trace: Trace, is_later: Callable[[], bool] = lambda: False) -> None:
        """is_later: whether a first step is over."""
        self._trace, self._is_later = trace, is_later
        self.backend: Any = BACKEND
        self.paused = False
        self.graphs, self.later, self.seconds = 0, 0, 0.0
        self._breaks_before = 0
        self._compiled: dict[Function, Function] = {}
        self._outside: dict[Function, Function] = {}

    def __str__(self) -> str:
        """In words; empty where nothing is compiled."""
        if not self.graphs:
            return ""
        return (
            f"compiled {self.graphs} graphs in {self.seconds:.1f} s, {self.later} of them after the first step; "
            f"{other_breaks() - self._breaks_before} graph breaks beside those at attention"
        )

    def compiled(self, function: Function) -> Function:
        """A function, compiled where blocks are. It is compiled anew for each shape and kind of its arguments."""
        if function not in self._compiled:
            self._compiled[function] = torch.compile(copy_of(function), backend=self._compile, dynamic=False)
        return self._compiled[function]

    def outside(self, function: Function) -> Function:
        """A function that breaks graphs and runs as it is, with all that it calls: the same one for all modules of a
        class, which share graphs by it."""
        if function not in self._outside:
            self._outside[function] = torch.compiler.disable(function, reason=REASON)
        return self._outside[function]

    # Entering and leaving -------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Raises UserError for a model whose blocks are to be compiled and cannot be."""
        blocks = self.blocks_of(model)
        if not blocks:
            raise UserError(
                f"{type(model).__name__} has no list of blocks that attend, which alone are compiled: run it without "
                f"compile"
            )
        for name, hook in stateful_hooks(model.named_modules()):
            raise UserError(
                f"{name or 'the transformer'} has the cache hook {type(hook).__name__}, and compiled blocks have no "
                f"place for what it decides: call transformer.disable_cache(), or run without compile"
            )
        self.check_forwards(model)

    def check_forwards(self, model: nn.Module) -> None:
        """Raises UserError for a block whose forward is not its class's."""
        for name, block in self.blocks_of(model):
            if "forward" in vars(block):
                raise UserError(
                    f"{name} cannot be compiled: its forward was replaced, as hooks for offloading do: remove them, or "
                    f"run without compile"
                )

    def attach(self, model: nn.Module, forwards: Mapping[type, Function]) -> Callable[[], None]:
        """Compiles a model's blocks; the returned function puts the old ones back. forwards: that stand in for those of
        some classes of blocks."""
        blocks, undo = self.blocks_of(model), ExitStack()
        self._breaks_before = other_breaks()
        for _, block in blocks:
            for part in parts_outside(block):
                undo.callback(replace(part, "_call_impl", MethodType(self.outside(type(part)._call_impl), part)))
            compiled = MethodType(self.compiled(forwards.get(type(block), type(block).forward)), block)
            undo.callback(replace_forward(block, partial(self._unless_paused, compiled)))
        return undo.close

    def _unless_paused(self, compiled: Function, plain: Function, *args: Any, **kwargs: Any) -> Any:
        return (plain if self.paused else compiled)(*args, **kwargs)

    def blocks_of(self, model: nn.Module) -> list[tuple[str, Any]]:
        """Those that are compiled, with their names."""
        return [(name, block) for name, block in called_often(model)[1:] if any(map(attends, block.modules()))]

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """A backend of torch.compile: the usual one, counted."""
        from torch._dynamo import lookup_backend

        started = time.perf_counter()
        with self._trace.span("compile"):
            run = lookup_backend(self.backend)(graph, inputs)
        self.graphs += 1
        self.later += self._is_later()
        self.seconds += time.perf_counter() - started
        return run


def parts_outside(block: nn.Module) -> list[Any]:
    """Parts of a block that break its graphs: where messages are sent, and what else has hooks."""
    parts = (part for part in block.modules() if part is not block)
    return [part for part in parts if attends(part) or part._forward_hooks or part._forward_pre_hooks]


def copy_of(function: Any) -> Function:
    """The same function with code of its own: torch keeps what it compiled, and counts it, by code object, and other
    engines compile the same blocks."""
    code, given = function.__code__.replace(), function.__defaults__
    copy = FunctionType(code, function.__globals__, function.__name__, given, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def other_breaks() -> int:
    """Graph breaks of this process so far that are not ours."""
    from torch._dynamo.utils import counters

    return sum(count for reason, count in counters["graph_break"].items() if REASON not in reason)

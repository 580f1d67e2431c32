"""torch.compile of a model's blocks, for the length of a run. `docs/models.md` says what is compiled and what is not.

Nothing is sent from inside a graph. A block is compiled without its call, so hooks on it run before and after its
graphs. Each of its attention modules, in which messages are sent, breaks the graph and runs uncompiled. Each rank
compiles by itself, between messages; other ranks wait for it as for one that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from cocodiff.comm.trace import Trace
from cocodiff.config.errors import UserError
from cocodiff.models.adapter import attends
from cocodiff.models.checks import called_often, replace, replace_forward, stateful_hooks

BACKEND = "inductor"
REASON = "cocodiff sends messages between ranks here"  # the reason that torch records for cocodiff's graph breaks
Function = Callable[..., Any]


class Compiler:
    """The use of torch.compile by one engine, with counts of what it compiled on this rank."""

    def __init__(self, trace: Trace, is_later: Callable[[], bool] = lambda: False) -> None:
        """Set up the compiler. Nothing is compiled yet.

        Args:
            trace: takes the times.
            is_later: returns True after the first step of a run; graphs compiled then are counted in `later`.
        """
        self._trace, self._is_later = trace, is_later
        self.backend: Any = BACKEND  # torch's name of the compiler, or a function
        self.paused = False  # True while all blocks run uncompiled
        # graphs compiled, graphs among them that were compiled after the first step, seconds of compilation
        self.graphs, self.later, self.seconds = 0, 0, 0.0
        self._breaks_before = 0
        self._compiled: dict[Function, Function] = {}
        # Returns a function in a form that breaks graphs: it runs uncompiled, with everything that it calls. Equal
        # functions give the same object, so that all modules of a class share their graphs.
        self.outside: Callable[[Function], Function] = cache(partial(torch.compiler.disable, reason=REASON))

    def __str__(self) -> str:
        """Return a summary of the graphs that were compiled on this rank, or "" if there were none."""
        if not self.graphs:
            return ""
        return (
            f"compiled {self.graphs} graphs in {self.seconds:.1f} s, {self.later} of them after the first step; "
            f"{other_breaks() - self._breaks_before} graph breaks beside those at attention"
        )

    def compiled(self, function: Function) -> Function:
        """Return a function in compiled form; the same object for the same function.

        It is compiled at its first call, and again for each other shape and type of its arguments.
        """
        if function not in self._compiled:
            self._compiled[function] = torch.compile(copy_of(function), backend=self._compile, dynamic=False)
        return self._compiled[function]

    # Entering and leaving -------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        """Raise UserError if a model's blocks cannot be compiled: none attends, a cache hook is on them, or a forward
        was replaced."""
        blocks = self.blocks_of(model)
        if not blocks:
            wrong = f"{type(model).__name__} has no list of blocks that attend, which alone are compiled"
            raise UserError(f"{wrong}: run it without compile")
        for name, hook in stateful_hooks(model.named_modules()):
            hooked = f"{name or 'the transformer'} has the cache hook {type(hook).__name__}"
            remedy = "call transformer.disable_cache(), or run without compile"
            raise UserError(f"{hooked}, and compiled blocks have no place for what it decides: {remedy}")
        self.check_forwards(model)

    def check_forwards(self, model: nn.Module) -> None:
        """Raise UserError if a model has a block whose `forward` was replaced, as hooks for offloading do."""
        for name, block in self.blocks_of(model):
            if "forward" in vars(block):
                wrong = f"{name} cannot be compiled: its forward was replaced, as hooks for offloading do"
                raise UserError(f"{wrong}: remove them, or run without compile")

    def attach(self, model: nn.Module, forwards: Mapping[type, Function]) -> Callable[[], None]:
        """Replace the forward of a model's blocks by compiled ones. Return a function that puts the old ones back.

        A block is compiled at its first call.

        Args:
            model: the model.
            forwards: functions to compile in place of `forward`, by class of block.
        """
        blocks, undo = self.blocks_of(model), ExitStack()
        self._breaks_before = other_breaks()
        for _, block in blocks:
            for part in parts_outside(block):
                undo.callback(replace(part, "_call_impl", MethodType(self.outside(type(part)._call_impl), part)))
            compiled = MethodType(self.compiled(forwards.get(type(block), type(block).forward)), block)
            undo.callback(replace_forward(block, partial(self._unless_paused, compiled)))
        return undo.close

    def _unless_paused(self, compiled: Function, plain: Function, *args: Any, **kwargs: Any) -> Any:
        """Call a block's compiled forward, or its plain one while `paused` is set. It replaces the block's forward.

        Args:
            compiled: the compiled forward.
            plain: the block's own forward.
            args: the block's arguments.
            kwargs: its keyword arguments.
        """
        return (plain if self.paused else compiled)(*args, **kwargs)

    def blocks_of(self, model: nn.Module) -> list[tuple[str, Any]]:
        """Return a model's blocks that are compiled, those that contain attention, as pairs of name and module."""
        return [(name, block) for name, block in called_often(model)[1:] if any(map(attends, block.modules()))]

    def _compile(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph with the backend, count it, and return the compiled function. torch.compile calls this as its
        backend.

        Args:
            graph: the graph, a `torch.fx.GraphModule`.
            inputs: example inputs.
        """
        from torch._dynamo import lookup_backend

        started = time.perf_counter()
        with self._trace.span("compile"):
            run = lookup_backend(self.backend)(graph, inputs)
        self.graphs += 1
        self.later += self._is_later()
        self.seconds += time.perf_counter() - started
        return run


def parts_outside(block: nn.Module) -> list[Any]:
    """Return the modules in a block that break its graphs: attention modules, and modules with hooks."""
    parts = (part for part in block.modules() if part is not block)
    return [part for part in parts if attends(part) or part._forward_hooks or part._forward_pre_hooks]


def copy_of(function: Any) -> Function:
    """Return a copy of a function with a code object of its own.

    torch keeps and counts compiled code by code object, and other engines compile the same blocks.
    """
    code, given = function.__code__.replace(), function.__defaults__
    copy = FunctionType(code, function.__globals__, function.__name__, given, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def other_breaks() -> int:
    """Return the number of graph breaks in this process so far, apart from those that cocodiff makes on purpose."""
    from torch._dynamo.utils import counters

    return sum(count for reason, count in counters["graph_break"].items() if REASON not in reason)

"""Plans: the places where a transformer's tokens are cut into shards and gathered again, as data; and a model with a
plan.

A plan is like `_cp_plan` of diffusers' models. It is a dictionary from names of modules to cuts of a module's arguments
(by name) or of its output (by number), or to gathers of its output. `Cut` and `Gather` stand for diffusers'
ContextParallelInput and ContextParallelOutput, which are accepted as well. In a module's name `*` stands for one part
of it, and `-1` for the last of a list; "" is the transformer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import BoundArguments
from typing import Any, NamedTuple

from torch import Tensor, nn

from cocodiff.config.errors import UserError
from cocodiff.models.checks import signature_of


@dataclass(frozen=True)
class Cut:
    """An entry of a plan: a tensor of all tokens is cut, and each rank continues with its own tokens."""

    dim: int = 1  # dimension of the tokens
    ndim: int | None = None  # only tensors with this number of dimensions are cut; None: all
    tokens: str = ""  # a name for these tokens, for use in `of`; in a family's plan their segment, such as "image"
    # For instance in a mask over the tokens of a video and of its text.
    of: tuple[str, ...] = ()  # names of several sorts of tokens, one after the other in `dim`: each is cut by itself


@dataclass(frozen=True)
class Gather:
    """An entry of a plan: a tensor of each rank's tokens is gathered, and every rank continues with all tokens."""

    dim: int = 1  # dimension of the tokens
    tokens: str = ""  # in a family's plan the name of these tokens' segment, such as "image"


Cuts = tuple[Cut, ...]  # cuts of one value: for a tensor the first of fitting `ndim`, for a list one for each entry
Plan = Mapping[str, Any]


class Step(NamedTuple):
    """The entry of a plan for one module of a model: what is cut before it is called, and cut or gathered after."""

    name: str  # name of the module
    module: nn.Module  # the module
    arguments: Mapping[str, Cuts]  # cuts of arguments by name
    outputs: Mapping[int, Cuts]  # cuts of outputs by number
    gathers: Mapping[int, Gather]  # gathers of outputs by number


def steps_of(plan: Plan, model: nn.Module) -> Iterator[Step]:
    """Yield the entries of a plan, each with its module of a model. A pattern such as `blocks.*` gives one for each
    module.

    Raise UserError for malformed entries and absent modules.
    """
    modules = dict(model.named_modules())
    for pattern, value in plan.items():
        wanted, parts = pattern, pattern.split(".")
        if "-1" in parts:
            listed = modules.get(".".join(parts[: parts.index("-1")]))
            wanted = pattern.replace("-1", str(len(listed) - 1)) if isinstance(listed, nn.ModuleList) else pattern
        found = [name for name in modules if _fits(name.split("."), parts)] if "*" in pattern else [wanted]
        if not found or found[0] not in modules:
            raise UserError(f"the plan cuts at {pattern!r}, which {type(model).__name__} has not: correct its name")
        done = _read(pattern, value)
        yield from (Step(name, modules[name], *done) for name in found)


def _fits(name: list[str], pattern: list[str]) -> bool:
    """Return True if a module's name matches a pattern of a plan. Both are given as their parts between dots."""
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def _read(where: str, value: Any) -> tuple[dict[str, Cuts], dict[int, Cuts], dict[int, Gather]]:
    """Read an entry of a plan. Return cuts of arguments by name, cuts of outputs by number, and gathers of outputs by
    number.

    Args:
        where: the entry's key in the plan, for errors.
        value: the entry, in our form or diffusers'.
    """
    if not isinstance(value, Mapping):
        gathers = {number: _gather(where, one) for number, one in enumerate(_listed(value)) if one is not None}
        return {}, {}, gathers
    gathers = {name: _gather(where, one) for name, one in value.items() if _is_gather(one)}
    cut = {name: one for name, one in value.items() if name not in gathers}
    cuts = {name: tuple(_cut(where, name, part) for part in _listed(one)) for name, one in cut.items()}
    outputs = {name: of for name, of in cuts.items() if isinstance(name, int)}
    return {name: of for name, of in cuts.items() if name not in outputs}, outputs, gathers


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _is_gather(one: Any) -> bool:
    return isinstance(one, Gather) or hasattr(one, "gather_dim")


def _gather(where: str, one: Any) -> Gather:
    """Return a gather of a plan, given in our form or diffusers'. Raise UserError for anything else.

    Args:
        where: the entry's key in the plan, for the error.
        one: the gather.
    """
    if not _is_gather(one):
        raise UserError(
            f"the plan at {where!r} has a {type(one).__name__}: give Cut or Gather, or a dictionary of them"
        )
    return one if isinstance(one, Gather) else Gather(one.gather_dim)


def _cut(where: str, name: str | int, one: Any) -> Cut:
    """Return a cut of a plan, given in our form or diffusers'. Raise UserError for anything else.

    Args:
        where: the entry's key in the plan, for the error.
        name: name of the argument or number of the output that is cut.
        one: the cut.
    """
    if isinstance(one, Cut):
        return one
    if not hasattr(one, "split_dim"):
        raise UserError(f"the plan at {where!r} has a {type(one).__name__} for {name!r}: give Cut or Gather")
    if one.split_output is isinstance(name, str):
        raise UserError(
            f"the plan at {where!r}: outputs are cut by their number, arguments by their name, not {name!r}"
        )
    return Cut(one.split_dim, one.expected_dims)


class ShardedModel:
    """A model that several ranks run by a plan (where tokens are cut and gathered), while the engine is entered.

    Here the plan names all tokens by segments of the model's sequence, such as "image", as a family's plan does.
    """

    def __init__(self, plan: Plan, model: nn.Module, host: Any) -> None:
        """Read the plan. The model is not changed yet.

        Args:
            host: the engine, whose `sequence` is the ranks that share the current call.
        """
        self._model, self._host = model, host
        self._steps = list(steps_of(plan, model))

    def attach(self) -> Callable[[], None]:
        """Put the hooks that cut and gather tokens on the model. Return a function that takes them off."""
        undo = ExitStack()
        undo.callback(self._model.register_forward_pre_hook(lambda *_: self._check_in_place()).remove)
        for step in self._steps:
            self._put_on(step, undo)
        return undo.close

    def _cut(self, cut: Cut, whole: Tensor, name: str) -> Tensor:
        """Return this rank's tokens of a tensor that has all of them.

        Args:
            cut: the dimension and the name of the tokens.
            whole: the tensor.
            name: the argument's or output's name, for errors.
        """
        return self._host.sequence.cut(cut.tokens, whole, cut.dim)

    def _gather(self, gather: Gather, x: Tensor, name: str) -> Tensor:
        """Return the tokens of all ranks, gathered from each rank's own. All ranks call this.

        Args:
            gather: the dimension and the name of the tokens.
            x: this rank's tokens.
            name: the output's name, for errors.
        """
        return self._host.sequence.gather(x, gather.tokens, gather.dim)

    def _check_in_place(self) -> None:
        """Raise UserError if a module that cuts or gathers tokens was replaced in the model: its hooks would not be
        called."""
        for step in self._steps:
            if self._model.get_submodule(step.name) is not step.module:
                raise UserError(
                    f"a {type(step.module).__name__} where tokens are cut or gathered was replaced inside the `with` "
                    f"block, as a LoRA does that is loaded or unloaded: do so before the block"
                )

    def _put_on(self, step: Step, undo: ExitStack) -> None:
        """Put the hooks of one entry of the plan on its module, and register their removal with `undo`."""
        module = step.module
        if step.arguments:
            signature = signature_of(module)

            def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
                bound = signature.bind(*args, **kwargs)
                self._cut_arguments(step, bound.arguments)
                return as_given(bound, args, kwargs)

            undo.callback(module.register_forward_pre_hook(cut, with_kwargs=True).remove)
        if step.outputs or step.gathers:
            undo.callback(module.register_forward_hook(lambda _, __, output: self._cut_output(step, output)).remove)

    def _cut_arguments(self, step: Step, arguments: dict[str, Any]) -> None:
        """Replace arguments of a module's call by this rank's tokens of them, in place, as an entry of the plan says.

        Raise UserError for an argument that the module does not have.
        """
        for name, cuts in step.arguments.items():
            if name not in arguments and name not in signature_of(step.module).parameters:
                raise UserError(f"the plan cuts {name!r} of {step.name or 'the transformer'}, which takes none such")
            if arguments.get(name) is not None:
                arguments[name] = self._cut_value(cuts, arguments[name], name)

    def _cut_output(self, step: Step, output: Any) -> Any:
        """Return a module's output with some of its tensors cut or gathered, as an entry of the plan says.

        Raise UserError for an output that the module does not have.
        """
        by_name = hasattr(output, "values") and not isinstance(output, Tensor)
        parts = [output] if isinstance(output, Tensor) else list(output.values() if by_name else output)
        missing = {*step.outputs, *step.gathers}.difference(range(len(parts)))
        if missing:
            raise UserError(f"the plan names output {min(missing)} of {step.name}, which has {len(parts)}, from 0")
        for number, cuts in step.outputs.items():
            parts[number] = self._cut_value(cuts, parts[number], f"{step.name} {number}")
        for number, gather in step.gathers.items():
            parts[number] = self._gather(gather, parts[number], f"{step.name} {number}")
        if isinstance(output, Tensor):
            return parts[0]
        return type(output)(**dict(zip(output, parts, strict=True))) if by_name else type(output)(parts)

    def _cut_value(self, cuts: Cuts, value: Any, name: str) -> Any:
        """Return this rank's tokens of a tensor, or of the tensors in a nested list or dictionary. Other values are
        unchanged.

        Args:
            cuts: for a tensor, the first one that fits its dimensions is used; for a list, one for each entry.
            value: the tensor, list or dictionary.
            name: the argument's or output's name, for errors.
        """
        if isinstance(value, Tensor):
            cut = next((cut for cut in cuts if cut.ndim in (None, value.ndim)), None)
            return value if cut is None else self._cut(cut, value, name)
        if isinstance(value, dict):
            return {key: self._cut_value(cuts, x, name) for key, x in value.items()}
        if isinstance(value, list | tuple):
            several = cuts * len(value) if len(cuts) == 1 else cuts
            if len(several) != len(value):
                raise UserError(f"the plan has {len(cuts)} cuts for {name!r}, which is {len(value)} tensors")
            return type(value)(self._cut_value((one,), x, name) for one, x in zip(several, value, strict=True))
        return value


def as_given(
    bound: BoundArguments, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return changed arguments of a call as (args, kwargs), each by position or by name as the caller gave it.

    Names matter to diffusers, which removes the scale of LoRA layers by name.

    Args:
        bound: the arguments after the change.
        args: the caller's by position.
        kwargs: the caller's by name.
    """
    return bound.args[: len(args)], {name: bound.arguments.get(name, value) for name, value in kwargs.items()}

"""Plans: where the tokens of a transformer are cut into shards and gathered again, as data.

A plan is what diffusers' models have as `_cp_plan`, a dictionary from module names to what is cut of a module's
arguments (by name) or of its output (by number), or to how its output is gathered; with `Cut` and `Gather` in the place
of diffusers' ContextParallelInput and ContextParallelOutput, which are taken as well. In a module's name `*` stands for
one part of it, and `-1` for the last of a list; "" is the transformer itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from cocodiff.errors import UserError


@dataclass(frozen=True)
class Cut:
    """A tensor of which each rank keeps its own tokens.

    dim     the dimension of the tokens
    ndim    of the tensors that are cut: those with another number of dimensions stay whole; None for all
    tokens  a name for these tokens, to be used in `of`
    of      the names of several sorts of tokens that follow each other in this dimension, each of which is cut for
            itself: a mask over the tokens of a video and of its text, for instance
    """

    dim: int = 1
    ndim: int | None = None
    tokens: str = ""
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gather:
    """A module's output, of which every rank gets all tokens back. dim: the dimension of the tokens."""

    dim: int = 1


Cuts = tuple[Cut, ...]  # of one value: for a tensor the first that fits its dimensions, for a list one for each entry
Plan = Mapping[str, Any]


class Step(NamedTuple):
    """What a plan does at one module: cuts of arguments by name, cuts of outputs and gathers by number."""

    name: str
    module: nn.Module
    arguments: Mapping[str, Cuts]
    outputs: Mapping[int, Cuts]
    gathers: Mapping[int, Gather]


def steps_of(plan: Plan, model: nn.Module) -> Iterator[Step]:
    """The plan's entries for the modules of a model. Raises UserError for what no plan can say, and for a module that
    is not there."""
    modules = dict(model.named_modules())
    for pattern, value in plan.items():
        wanted, parts = pattern, pattern.split(".")
        if "-1" in parts:
            listed = modules.get(".".join(parts[: parts.index("-1")]))
            wanted = pattern.replace("-1", str(len(listed) - 1)) if isinstance(listed, nn.ModuleList) else pattern
        found = [name for name in modules if _fits(name.split("."), parts)] if "*" in pattern else [wanted]
        if not found or found[0] not in modules:
            raise UserError(f"the plan cuts at {pattern!r}, which {type(model).__name__} has not: correct its name")
        arguments, outputs, gathers = _read(pattern, value)
        for name in found:
            yield Step(name, modules[name], arguments, outputs, gathers)


def _fits(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatchcase, name, pattern))


def _read(where: str, value: Any) -> tuple[dict[str, Cuts], dict[int, Cuts], dict[int, Gather]]:
    arguments: dict[str, Cuts] = {}
    outputs: dict[int, Cuts] = {}
    gathers: dict[int, Gather] = {}
    if not isinstance(value, Mapping):
        listed = value if isinstance(value, list | tuple) else [value]
        gathers = {number: _gather(where, one) for number, one in enumerate(listed) if one is not None}
        return arguments, outputs, gathers
    for name, one in value.items():
        if _is_gather(one):
            gathers[name] = _gather(where, one)
            continue
        cuts = tuple(_cut(where, name, part) for part in (one if isinstance(one, list | tuple) else [one]))
        if isinstance(name, int):
            outputs[name] = cuts
        else:
            arguments[name] = cuts
    return arguments, outputs, gathers


def _is_gather(one: Any) -> bool:
    return isinstance(one, Gather) or hasattr(one, "gather_dim")


def _gather(where: str, one: Any) -> Gather:
    if not _is_gather(one):
        raise UserError(
            f"the plan at {where!r} has a {type(one).__name__}: give Cut or Gather, or a dictionary of them"
        )
    return one if isinstance(one, Gather) else Gather(one.gather_dim)


def _cut(where: str, name: str | int, one: Any) -> Cut:
    if isinstance(one, Cut):
        return one
    if not hasattr(one, "split_dim"):
        raise UserError(f"the plan at {where!r} has a {type(one).__name__} for {name!r}: give Cut or Gather")
    if one.split_output is isinstance(name, str):
        raise UserError(
            f"the plan at {where!r}: outputs are cut by their number, arguments by their name, not {name!r}"
        )
    return Cut(one.split_dim, one.expected_dims)

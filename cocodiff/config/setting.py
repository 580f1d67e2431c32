"""One record for each option of a command and each setting of the engine: what it is, what it takes, where it is given.

A dataclass of settings gives each of its fields a record by `setting`. Its checks and docstring, the flags and keys of
settings files, their help, and what a sweep may vary are all made from these records.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache, reduce
from math import inf
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cocodiff.config.errors import UserError, check_choice

T = TypeVar("T")
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """One option: `--name`, a line of help, its default (None with `required`) and type.

    many: it takes several values of that type.
    choices: the words it takes, in a table of the registry too, or a function that returns them; () for any. They are
    looked up at every use.
    numbers: whether a number in a settings file is taken for the text that it is written as.

    Of settings of the engine alone:
    least, most: of its numbers; wanted: what to give instead of an unfit value, by default what type and least say.
    given: where, beside Python. "sweep": in presets, which a flag overrides, and in the points of a sweep; "run": the
    same, but for all points of a sweep alike; "machine": by a flag, for every preset alike; "code": in presets alone.
    only_with: another setting and the values of it without one of which this one does nothing.
    """

    name: str
    help: str
    default: Any = None
    type: Any = str
    many: bool = False
    choices: Iterable[str] | Callable[[], Iterable[str]] = ()
    required: bool = False
    numbers: bool = False
    least: float = -inf
    most: float = inf
    wanted: str = ""
    given: Literal["sweep", "run", "machine", "code"] = "sweep"
    only_with: tuple[str, ...] | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it takes; () where it takes any."""
        return tuple(self.choices() if callable(self.choices) else self.choices)

    @property
    def closed(self) -> bool:
        """Whether it takes nothing but its choices; one that is a number or a word takes numbers too."""
        return self.type is str and bool(self.words)

    @property
    def kinds(self) -> tuple[type, ...]:
        return get_args(self.type) or (self.type,)

    def checked(self, value: Any) -> Any:
        """A setting's value in its type: a number of a word of digits, a tuple of several. None stays where it is the
        default. Raises UserError for a value that is none to take."""
        if self.closed:
            check_choice(self.name, value, self.words)
        if self.type == int | str and isinstance(value, str) and value.isdecimal():
            value = int(value)
        if self.many and isinstance(value, Iterable) and not isinstance(value, str):
            value = tuple(value)
        several = value if isinstance(value, tuple) else (value,)
        missing = value is None and self.default is None
        if not missing and (isinstance(value, tuple) != self.many or not all(map(self._takes, several))):
            at_least = f" of at least {self.least:g}" if self.least > -inf else ""
            wanted = self.wanted or " or ".join((NAMES[self.kinds[0]] + at_least, *self.words))
            raise UserError(f"{self.name} is {value!r}: give {wanted}")
        return value

    def _takes(self, value: Any) -> bool:
        if isinstance(value, str):
            return str in self.kinds and (not self.choices or value in self.words)
        if isinstance(value, bool):
            return bool in self.kinds
        numbers = (int, float) if float in self.kinds else self.kinds
        return isinstance(value, numbers) and self.least <= value <= self.most


def setting(default: T, help: str, **about: Any) -> T:
    """A field of a dataclass of settings; `about`: of the fields of `Option` all but name, type and many, which are
    told by the annotation."""
    return field(default=default, metadata={"option": Option("", help, default, **about)})


def settings_of(record: Any) -> dict[str, Option]:
    """The settings of a dataclass by their names."""
    return _read_fields(record)


@cache
def _read_fields(record: type[Any]) -> dict[str, Option]:
    hints, found = get_type_hints(record), {}
    for one in fields(record):
        hint = hints[one.name]
        many = get_origin(hint) is tuple  # tuple[float, ...]
        kinds = [kind for kind in get_args(hint) or (hint,) if kind not in (NoneType, ...)]
        found[one.name] = replace(one.metadata["option"], name=one.name, type=reduce(operator.or_, kinds), many=many)
    return found


def described(record: type[Any]) -> str:
    """The settings of a dataclass for its docstring, a line each."""
    return "\n".join(f"    {one.name}: {one.help}." for one in settings_of(record).values())

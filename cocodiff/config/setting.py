"""One record for each option of a command and each setting of the engine: its meaning, its values, and where it may be
given.

A dataclass of settings gives each of its fields a record by `setting`. Its checks and docstring, the flags and keys of
settings files, their help, and the choice of settings that a sweep may vary are all made from these records.
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
    """The description of one option of a command (`--name`) or of one setting of the engine, by which values are parsed
    and checked.

    The fields from `least` on are used for settings of the engine only.
    """

    name: str  # the option's name, without dashes
    help: str  # one line of help
    default: Any = None  # None if `required`
    type: Any = str  # type of one value, or a union such as int | str
    many: bool = False  # True if it takes several values of `type`
    # They are names, a table of the registry, or a function that returns them, read at every use.
    choices: Iterable[str] | Callable[[], Iterable[str]] = ()  # the words that it takes; (): any word
    required: bool = False  # True if the user must give it
    numbers: bool = False  # True if a number in a settings file is taken as the text that it is written as
    least: float = -inf  # smallest number it takes
    most: float = inf  # largest number it takes
    wanted: str = ""  # words for its values in errors; by default made from type, `least` and choices
    # "sweep": in presets, by a flag, and in each point of a sweep; "run": in presets and by a flag, with one value for
    # all points of a sweep; "machine": by a flag, for every preset; "code": in presets only.
    given: Literal["sweep", "run", "machine", "code"] = "sweep"  # where users may give it, apart from Python
    only_with: tuple[str, ...] | None = None  # another setting, then its values with which this one has an effect

    @property
    def words(self) -> tuple[str, ...]:
        """The words that the option takes, such as names of presets; () if it takes any text or only numbers."""
        return tuple(self.choices() if callable(self.choices) else self.choices)

    @property
    def closed(self) -> bool:
        """True if the option takes nothing but its `words`. An option that takes a number or a word is not closed."""
        return self.type is str and bool(self.words)

    @property
    def kinds(self) -> tuple[type, ...]:
        """The Python types that one value of the option may have, such as (int, str)."""
        return get_args(self.type) or (self.type,)

    def checked(self, value: Any) -> Any:
        """Return a value of this setting, converted to its type, or raise UserError if the setting does not take it.

        A text of digits becomes a number if the setting takes numbers or words, and several values become a tuple. None
        is returned as it is if it is the default.
        """
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
        """Return True if the setting takes this single value: its type is right, and it is one of the words or within
        the limits."""
        if isinstance(value, str):
            return str in self.kinds and (not self.choices or value in self.words)
        if isinstance(value, bool):
            return bool in self.kinds
        numbers = (int, float) if float in self.kinds else self.kinds
        return isinstance(value, numbers) and self.least <= value <= self.most


def setting(default: T, help: str, **about: Any) -> T:
    """Return a dataclass field for one setting, with the `Option` that describes it in the field's metadata.

    Args:
        default: the setting's default value.
        help: one line of help.
        about: further fields of `Option`, but for name, type and many, which follow from the field's name and
            annotation.
    """
    return field(default=default, metadata={"option": Option("", help, default, **about)})


def settings_of(record: Any) -> dict[str, Option]:
    """Return the `Option` of every field of a dataclass of settings, by the field's name."""
    return _read_fields(record)


@cache
def _read_fields(record: type[Any]) -> dict[str, Option]:
    """Compute what `settings_of` returns, and cache it: name, type and many of each `Option` are filled in from its
    field."""
    hints, found = get_type_hints(record), {}
    for one in fields(record):
        hint = hints[one.name]
        many = get_origin(hint) is tuple  # tuple[float, ...]
        kinds = [kind for kind in get_args(hint) or (hint,) if kind not in (NoneType, ...)]
        found[one.name] = replace(one.metadata["option"], name=one.name, type=reduce(operator.or_, kinds), many=many)
    return found


def described(record: type[Any]) -> str:
    """Return the settings of a dataclass as text for its docstring: one line "name: help." for each."""
    return "\n".join(f"    {one.name}: {one.help}." for one in settings_of(record).values())

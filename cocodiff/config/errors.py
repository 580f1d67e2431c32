"""The errors that end a run early: a mistake that the user can correct, and a rank that was lost. Also checks of names
that suggest the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake: one line with the values and the remedy. The command line prints it and exits with code 2."""


class OwnRankError(UserError):
    """A mistake that perhaps only this rank can detect, such as a missing device. This rank prints the error itself and
    exits with code 1."""


class PeerLost(RuntimeError):
    """The loss of another rank, which died, failed or stopped responding. Every survivor raises it and exits with code
    1.

    Args:
        rank: number of the lost rank.
        reason: what happened to it, as the end of a sentence that begins with "rank 3".
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)  # exceptions are pickled by these arguments
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def check_keys(values: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise UserError if one of the keys in `values` is unknown. The message names the first such key and the known key
    nearest to it.

    Args:
        values: the keys to check, or a mapping with these keys.
        known: all valid keys.
        where: the origin of the keys, such as a file's name, which begins the message.
    """
    known = list(known)
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{suggestion(key, known)}; known: {', '.join(known)}")


def check_choice(what: str, value: str, choices: Iterable[str], hint: str = "") -> None:
    """Raise UserError if a value is not among its valid choices. The message suggests the nearest choice and lists all
    of them.

    Args:
        what: the word for the value in the message, such as "preset".
        value: the value that the user gave.
        choices: all valid values.
        hint: more text after the list of choices, such as another kind of value that would be valid.
    """
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(choices) + (f", {hint}" if hint else "")
        raise UserError(f"unknown {what} {value!r}{suggestion(str(value), choices)}; choose from {listed}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean X?", with the known word X nearest to `word`, or "" if no known word is near. It ends an
    error message."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else ""

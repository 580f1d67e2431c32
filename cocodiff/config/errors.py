"""The ways a run ends early: a mistake the user can mend, and a peer that is gone. And errors that suggest a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake: one line with the values and the remedy. The command line prints it and exits with 2."""


class OwnRankError(UserError):
    """A mistake that this rank alone may see, such as a device that is not there: it says so itself, whatever its
    number, and exits with 1."""


class PeerLost(RuntimeError):
    """Another rank died, failed or fell silent. The message names it; every survivor raises this and exits with 1."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)  # with which exceptions are pickled
        self.rank, self.reason = rank, reason

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def check_keys(values: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in values:
        if key not in known:
            raise UserError(f"{where}: unknown key {key}{suggestion(key, known)}; known: {', '.join(known)}")


def check_choice(what: str, value: str, choices: Iterable[str], hint: str = "") -> None:
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(choices) + (f", {hint}" if hint else "")
        raise UserError(f"unknown {what} {value!r}{suggestion(str(value), choices)}; choose from {listed}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" for the nearest known word, else ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]}?" if near else ""

"""A command's words, and the line in which it refuses them."""

from __future__ import annotations

import pytest

from cocodiff.cli.main import main


def words(command: str, *more: object, **options: object) -> list[str]:
    """With options by their names, and what else follows."""
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [command, *given, *map(str, more)]


def refusal(capsys: pytest.CaptureFixture[str], run: list[str]) -> str:
    """The one line that is said of a mistake, and nothing else of cocodiff's."""
    capsys.readouterr()
    assert main(run) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cocodiff: ")]
    return line

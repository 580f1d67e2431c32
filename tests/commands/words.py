"""A command's words."""

from __future__ import annotations


def words(command: str, *more: object, **options: object) -> list[str]:
    """With options by their names, and what else follows."""
    given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [command, *given, *map(str, more)]

"""Texts that tests compare as a whole, in one file: the name of a test, then its text, each line behind a bar."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).with_name("snapshots.txt")


def read() -> dict[str, str]:
    """Read the texts by the names of their tests."""
    texts: dict[str, list[str]] = {}
    name = ""
    for line in FILE.read_text().splitlines():
        if line.startswith("|"):
            texts[name].append(line[1:])
        elif line:
            name = line
            texts[name] = []
    return {name: "\n".join(lines) for name, lines in texts.items()}


@contextlib.contextmanager
def rewritten() -> Iterator[dict[str, str]]:
    """The texts, which are written back, sorted by name. One process at a time."""
    with FILE.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        texts = read()
        yield texts
        FILE.write_text("\n".join(f"{name}\n{_barred(texts[name])}" for name in sorted(texts)))


def _barred(text: str) -> str:
    return "".join(f"|{line}\n" for line in text.split("\n"))

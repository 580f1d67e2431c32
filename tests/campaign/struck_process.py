"""A process of `cocodiff` that is struck at some moment. Its arguments are JSON of the moment and the strike, and the
words.

A moment is a stage of STAGES and how many operations that stage has before: each call of its functions, each change
that they make to files, and each return is one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from campaign.strikes import ADDS, Strike, watch_operations

from cocodiff.jobs.store import Store

NOTED = "jobs.store.Store.add"  # the one function of the stage "write": its odd operations are returns
STAGES: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("jobs.yaml").read_text())["stages"]


def count(stage: str, number: int, folder: str, strike: Strike) -> None:
    """Have the strike come at an operation in this or a forked process. folder: of the files whose changes count."""
    left, inside = number, 0

    def operation(event: str, path: object = None) -> None:
        nonlocal left
        left -= 1
        if (left < 0 and event in ADDS) if strike.fault == "no space" else left == -1:
            strike(path)

    def heard(event: str, path: object) -> None:
        within = str(path).startswith(folder) or not str(path).startswith("/")  # a part of a tree that is removed
        if inside and within and stage != NOTED:
            operation(event, path)

    def watching(whole: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            inside += 1
            try:
                operation("call")
                found = whole(*arguments, **named)
                operation("return")
                return found
            finally:
                inside -= 1

        return watched

    for path in STAGES.get(stage, [NOTED]):
        replace_function(path, watching)
    watch_operations(heard)


def replace_function(path: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a module or a class of the product by what `make` makes of it."""
    *outer, name = path.split(".")
    owner: Any = import_module("cocodiff_eval" if outer[0] == "harness" else "cocodiff")
    for one in outer:
        owner = getattr(owner, one, None) or import_module(f"{owner.__name__}.{one}")
    setattr(owner, name, make(getattr(owner, name)))


def observe(notes: Path) -> None:
    """Note the number of each unit that is done in a file."""

    def noting(add: Callable[..., None]) -> Callable[..., None]:
        def add_and_note(store: Store, number: int, made: Any) -> None:
            add(store, number, made)
            with notes.open("a") as file:
                file.write(f"{number}\n")

        return add_and_note

    replace_function(NOTED, noting)


def main() -> int:
    from cocodiff.cli.main import main as cocodiff

    given, words = json.loads(sys.argv[1]), sys.argv[2:]
    sys.argv[1:] = words
    tempfile.tempdir = os.environ["TMPDIR"] = given["temporary"]
    if not given["ignored"]:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and whoever it starts inherits that
    observe(Path(given["notes"]))
    if "strike" in given:
        strike = Strike(**given["strike"])
        strike.know_rank(strike if given["stage"] == "start" else lambda: None)
        count(given["stage"], given["number"], str(Path(words[words.index("--out") + 1]).parent), strike)
    return cocodiff()

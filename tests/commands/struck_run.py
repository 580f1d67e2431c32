"""`cocodiff`, killed where it touches files of its results. Arguments: a stage of STAGES, how many file operations that
stage has before, how many milliseconds later the kill comes, who is killed (`all` or `one` rank), and the words."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cocodiff.cli import main as cocodiff

# By stage the functions in which file operations are counted.
STAGES = {
    "create": ["inpaint.create_files"],
    "write": ["restore_stack.Results.add", "samples.Parts.keep", "journal.Journal.add"],
    "put together": ["inpaint.rows_of_parts"],
    "hand over": ["inpaint.hand_over"],
    "publish": ["outputs.OutputFolder.publish"],
}
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def main() -> int:
    stage, count, delay_ms, who, *words = sys.argv[1:]
    out = words[words.index("--out") + 1]
    parent, _, name = out.rpartition("/")
    left, inside = int(count), False

    def strike() -> None:
        os.kill(0 if who == "all" else os.getpid(), signal.SIGKILL)

    def count_down(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if inside and event in OPERATIONS and f"{parent}/" in str(arguments[0]) and name in str(arguments[0]):
            left -= 1
            if left == -1:
                threading.Timer(float(delay_ms) / 1000, strike).start() if float(delay_ms) else strike()

    def watching(whole: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            nonlocal inside
            inside = True
            try:
                return whole(*arguments, **named)
            finally:
                inside = False

        return watched

    for path in STAGES[stage]:
        module, *outer, function = path.split(".")
        owner: Any = import_module(f"cocodiff.commands.{module}")
        for one in outer:
            owner = getattr(owner, one)
        setattr(owner, function, watching(getattr(owner, function)))
    sys.addaudithook(count_down)
    sys.argv[1:] = words
    return cocodiff()


if __name__ == "__main__":
    sys.exit(main())

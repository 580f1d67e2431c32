"""`cocodiff`, struck at a moment of a run. Arguments: JSON of the moment and the strike, and the words. A moment is a
stage of STAGES and how many operations that stage has before: each call of its functions, each file that they touch in
the folder of results, and each return is one."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from strikes import Strike

from cocodiff.cli.main import main as cocodiff

# By stage the functions in which operations are counted. Results are created or published in the last ones.
STAGES = {
    "start": [],  # before the ranks meet
    "load": ["harness.session.load_requested"],
    "attend": ["engine.engine.Engine.attend"],
    "write": [
        "harness.slices.SliceJob.write",
        "harness.items.Parts.keep",
        "harness.images.ImageJob.write",
        "jobs.journal.Journal.add",
    ],
    "create": ["jobs.folder.OutputFolder.open", "harness.slices.SliceJob.begin", "harness.sweep.SweepJob.begin"],
    "put together": ["harness.job.put_together"],
    "hand over": ["harness.slices.SliceJob.complete", "harness.sweep.SweepJob.complete", "harness.session.finish"],
    "publish": ["jobs.folder.OutputFolder.publish"],
}
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def count(stage: str, number: int, folder: str, strike: Strike) -> None:
    """Has the strike come at an operation in this or a forked process."""
    left, inside = number, 0

    def operation(event: str, path: object = None, adds: bool = False) -> None:
        nonlocal left
        left -= 1
        if (left < 0 and adds) if strike.fault == "no space" else left == -1:
            strike(path)

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if inside and event in OPERATIONS and str(arguments[0]).startswith(folder):
            adds = event == "os.mkdir" or (event == "open" and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)))
            operation(event, arguments[0], adds)

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

    for path in STAGES[stage]:
        owner, name = owner_of(path)
        setattr(owner, name, watching(getattr(owner, name)))
    sys.addaudithook(heard)


def owner_of(path: str) -> tuple[Any, str]:
    """The module or class of a function, and its name there."""
    *outer, name = path.split(".")
    owner: Any = import_module("cocodiff_eval" if outer[0] == "harness" else "cocodiff")
    for one in outer:
        owner = getattr(owner, one, None) or import_module(f"{owner.__name__}.{one}")
    return owner, name


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Has a folder on a disk of its own while the block lasts, which takes so much more. Raises PermissionError where
    this user may not mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise PermissionError(ctypes.get_errno(), "unshare")
    below = os.open(folder, os.O_DIRECTORY)
    kib += sum(path.lstat().st_blocks // 2 + 4 for path in folder.rglob("*"))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", folder], check=True)
    under = Path(f"/proc/self/fd/{below}")
    shutil.copytree(under, folder, dirs_exist_ok=True)
    try:
        yield
    finally:
        for path in under.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(folder, under, dirs_exist_ok=True)


def main() -> int:
    given = json.loads(sys.argv[1])
    words = sys.argv[2:]
    sys.argv[1:] = words
    tempfile.tempdir = os.environ["TMPDIR"] = given["temporary"]
    disk: Any = nullcontext()
    if "strike" in given:
        strike = Strike(**given["strike"])
        folder = str(Path(words[words.index("--out") + 1]).parent)
        strike.know_rank(strike if given["stage"] == "start" else lambda: None)
        if strike.fault == "full disk":
            disk = small_disk(Path(folder), strike.amount)
        elif strike.fault in ("flipped", "lost"):
            strike.spoil_messages(given["victim"])
        else:
            count(given["stage"], given["number"], folder, strike)
    with disk:
        return cocodiff()


if __name__ == "__main__":
    sys.exit(main())

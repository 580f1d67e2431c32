"""A process of `cocodiff` that is struck at some moment. Its arguments are JSON of the moment and the strike, and the
words.

A moment is a stage of STAGES and how many operations that stage has before: each call of its functions, each change
that they make to files, and each return is one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from campaign.strikes import ADDS, MESSAGES, Strike, watch_operations
from syncs import Syncs

from cocodiff.jobs.journal import PARTIAL, Entry, Journal

NOTED = "jobs.journal.Journal.add"  # a stage by itself: its odd operations are returns
# By stage the functions in which operations are counted. Results are created or published in the last ones.
STAGES = {
    "start": [],  # before the ranks meet
    "load": ["harness.session.load_requested"],
    "attend": ["engine.engine.Engine.attend"],
    "write": ["harness.slices.SliceJob.write", "harness.items.Parts.keep", "harness.images.ImageJob.write", NOTED],
    "create": ["jobs.folder.OutputFolder.open", "harness.slices.SliceJob.begin", "harness.sweep.SweepJob.begin"],
    "put together": ["harness.job.put_together"],
    "hand over": ["harness.slices.SliceJob.complete", "harness.sweep.SweepJob.complete", "harness.session.finish"],
    "publish": ["jobs.folder.OutputFolder.publish"],
}


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


def observe(notes: Path, partial: Path, alone: bool) -> None:
    """Note each line of a journal in a file: its batch, and which results are not on the disk then, as far as this
    process wrote them all (`alone`)."""
    syncs = Syncs()

    def unsynced() -> list[str]:
        folders = (".progress/samples", ".progress/results", "images")
        written = (paths for name in folders if (paths := [*(partial / name).glob("*")]))
        return syncs.behind(next(written, []))

    def noting(add: Callable[..., None]) -> Callable[..., None]:
        def add_and_note(journal: Journal, entry: Entry) -> None:
            behind = unsynced() if alone else []
            add(journal, entry)
            with notes.open("a") as file:
                file.write(json.dumps([entry.number, behind]) + "\n")

        return add_and_note

    os.fsync = syncs.sync
    replace_function(NOTED, noting)


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Have a folder on a disk of its own while the block lasts, which takes so much more. Raises PermissionError where
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
    from cocodiff.cli.main import main as cocodiff

    given, words = json.loads(sys.argv[1]), sys.argv[2:]
    sys.argv[1:] = words
    os.environ.update(given["environment"])
    tempfile.tempdir = os.environ["TMPDIR"] = given["temporary"]
    out, disk = Path(words[words.index("--out") + 1]), nullcontext[None]()
    if not given["ignored"]:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and whoever it starts inherits that
    observe(Path(given["notes"]), out / PARTIAL, alone=given["replicas"] == 1 and "--resume" not in words)
    if "strike" in given:
        strike = Strike(**given["strike"])
        strike.know_rank(strike if given["stage"] == "start" else lambda: None)
        if strike.fault == "full disk":
            disk = small_disk(out.parent, strike.amount)
        elif strike.fault in MESSAGES:
            strike.spoil_messages(given["victim"])
        else:
            count(given["stage"], given["number"], str(out.parent), strike)
    with disk:
        return cocodiff()

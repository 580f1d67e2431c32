"""Records of the emulations that run, and an end for processes that killed ones have left. Namespaces go by
themselves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from cocodiff.errors import UserError

TOKEN = "COCODIFF_EMULATION"  # in the environment of every program started in an emulation


def _folder() -> Path:
    """The folder of records, made if need be. Raises UserError where it is not this user's alone: records say which
    processes are killed. The kernels' cache asks more of a folder (`cocodiff_sycl`), and imports torch."""
    folder = Path(tempfile.gettempdir()) / f"cocodiff-emulations-{os.geteuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()
    except OSError as error:
        raise UserError(f"cannot keep records of emulations in {folder}: {error.strerror}; set TMPDIR") from error
    if not stat.S_ISDIR(about.st_mode):
        raise UserError(f"{folder} is no folder but a file or a link, where emulations are on record: remove it")
    if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{folder}, where emulations are on record, can be written by others (owner {about.st_uid}, mode "
            f"{stat.S_IMODE(about.st_mode):04o}): remove it, or set TMPDIR to a folder of your own"
        )
    return folder


@contextlib.contextmanager
def registered() -> Iterator[str]:
    """The token of a new emulation, on record for as long as this process lives. First ends what others left."""
    folder = _folder()
    token = secrets.token_hex(8)
    path = folder / token
    with contextlib.ExitStack() as stack:
        with _locked(folder):  # until it is locked itself, a new record looks like one that was left
            end_leftovers()
            record = stack.enter_context(path.open("w"))
            fcntl.flock(record, fcntl.LOCK_EX)
        try:
            yield token
        finally:
            path.unlink()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def end_leftovers() -> int:
    """Kills the processes of emulations whose own process is gone; returns how many."""
    ended = 0
    for path in _folder().iterdir():
        with contextlib.suppress(FileNotFoundError), path.open("r+") as record:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # it runs
            ended += kill_all(path.name, ())
            path.unlink(missing_ok=True)
    return ended


def kill_all(token: str, namespaces: Collection[int]) -> int:
    """Kills every process that was started with the token, or is in one of the namespaces (inodes). Not this one."""
    mark, inside = f"{TOKEN}={token}".encode(), {f"net:[{inode}]" for inode in namespaces}
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it may end while we look
            own = str((entry / "ns" / "net").readlink()) in inside
            if own or mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed

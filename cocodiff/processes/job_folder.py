"""The folder of a job of processes, such as that in which forked ranks meet: gone with the job however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PREFIX = "cocodiff-job-"
OWNER = "owner"  # locked for as long as a process of the job lives
YOUNG_S = 60.0  # a folder without that file may have just been made


@contextlib.contextmanager
def job_folder(prefix: str = PREFIX, ended: Callable[[Path], object] = lambda _: None) -> Iterator[Path]:
    """A new folder for a job of this process and those it forks. Removes what killed jobs have left; ended: called with
    each of their folders before."""
    _clear_ended_jobs(Path(tempfile.gettempdir()), prefix, ended)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    pending = folder / f".{OWNER}"
    with pending.open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        pending.rename(folder / OWNER)  # locked before it has that name: another start would take it for a dead job's
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _clear_ended_jobs(parent: Path, prefix: str = PREFIX, ended: Callable[[Path], object] = lambda _: None) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
                continue
            if not (folder / OWNER).exists():
                if time.time() - status.st_mtime > YOUNG_S:
                    shutil.rmtree(folder)
                continue
            with (folder / OWNER).open("r+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, an OSError: it runs
                ended(folder)
                shutil.rmtree(folder)

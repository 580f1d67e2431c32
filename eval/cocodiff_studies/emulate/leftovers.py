"""Records of the emulations that run, and an end for processes that killed ones have left. Namespaces go by
themselves."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

from cocodiff.processes.job_folder import job_folder

PREFIX = "cocodiff-emulation-"
TOKEN = "COCODIFF_EMULATION"  # in the environment of every program started in an emulation


@contextlib.contextmanager
def registered() -> Iterator[str]:
    """The token of a new emulation, on record for as long as this process lives: the name of a folder. First ends what
    killed ones have left."""
    with job_folder(PREFIX, lambda folder: kill_all(folder.name, ())) as folder:
        yield folder.name


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

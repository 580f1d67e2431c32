"""The processes of an emulation: started in their namespaces, watched, and ended together; and an end for those that
killed emulations have left. Namespaces go by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from cocodiff.processes.children import StopRequest, fork, signal_all, stop_requests
from cocodiff.processes.job_folder import job_folder

GRACE_S = 2.0  # what ranks get to notice a bad end and to clean up
PREFIX = "cocodiff-emulation-"
TOKEN = "COCODIFF_EMULATION"  # in the environment of every program started in an emulation


def fork_all(jobs: Sequence[Callable[[], int]]) -> int:
    """Runs every job in a process of its own and returns the exit code of all: 0, or that of the first bad end.

    A job returns its exit code or does not return at all. After a bad end the others get GRACE_S, then they are killed;
    on STOPS they are told with SIGTERM first. What this process ignores, as under nohup, it goes on ignoring.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    with stop_requests() as stop:
        try:
            for rank, job in enumerate(jobs):
                children[fork(partial(_told, job), signal.SIG_DFL)] = rank
            return _attend(children, stop)
        finally:
            signal_all(children, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)


def _told(job: Callable[[], int]) -> int:
    try:
        return job()
    except BaseException as error:
        print(f"cocodiff: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1


def _attend(children: dict[int, int], stop: StopRequest) -> int:
    """Waits for all children, which it takes out of `children` as they end."""
    code, deadline, told = 0, float("inf"), False
    while children and time.monotonic() < deadline:
        if stop.asked and not told:
            told, deadline = True, time.monotonic() + GRACE_S
            signal_all(children, signal.SIGTERM)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid not in children:
            time.sleep(0.02)
            continue
        rank = children.pop(pid)
        if status and not told and not code:
            deadline = time.monotonic() + GRACE_S
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                print(f"cocodiff: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
                code = 1
            elif code != 2:  # a user's mistake has been told
                print(f"cocodiff: rank {rank} left with code {code}", file=sys.stderr)
    if told:
        print("cocodiff: interrupted; every rank was ended", file=sys.stderr)
        return 130
    return code


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

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

GRACE_S = 2.0  # what ranks get to notice a bad end and to clean up
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


def new_token() -> str:
    """The token of a new emulation: this process, and when it began. First ends what killed emulations have left."""
    for token in {token for _, token in _others() if token}:
        if _began(token.partition("-")[0]) != token:
            kill_all(token, ())
    return _began(str(os.getpid()))


def kill_all(token: str, namespaces: Collection[int]) -> int:
    """Kills every process that was started with the token, or is in one of the namespaces (inodes). Not this one."""
    inside = {f"net:[{inode}]" for inode in namespaces}
    killed = 0
    for entry, own_token in _others():
        with contextlib.suppress(OSError):  # it may end while we look
            if str((entry / "ns" / "net").readlink()) in inside or own_token == token:
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


def _others() -> Iterator[tuple[Path, str]]:
    """The other processes of this host that we may look into, by their folders, with the token that each was started
    with, "" where there was none."""
    mark = f"{TOKEN}=".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                tokens = (one.removeprefix(mark) for one in variables if one.startswith(mark))
                yield entry, next(tokens, b"").decode(errors="replace")


def _began(process: str) -> str:
    """A process by its number and the time of its start, in ticks; "" where there is none."""
    try:
        return f"{process}-{Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return ""

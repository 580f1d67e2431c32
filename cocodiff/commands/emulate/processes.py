"""The processes of an emulation: started in their namespaces, watched, and ended together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

GRACE_S = 2.0  # what ranks get to notice a bad end and to clean up
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # asked of the parent, it ends all ranks


class StopRequest:
    """A signal handler that only takes note: an exception from it could strike anywhere, and lose a process."""

    asked = False

    def __call__(self, *_: Any) -> None:
        self.asked = True


def die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when its parent goes; also after it has become another program."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it went before we asked


def fork_all(jobs: Sequence[Callable[[], int]]) -> int:
    """Runs every job in a process of its own and returns the exit code of all: 0, or that of the first bad end.

    A job returns its exit code or does not return at all. After a bad end the others get GRACE_S, then they are killed;
    on STOPS they are told with SIGTERM first. What this process ignores, as under nohup, it goes on ignoring.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stop, parent = StopRequest(), os.getpid()
    heeded = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    children: dict[int, int] = {}
    try:
        for rank, job in enumerate(jobs):
            pid = os.fork()
            if pid == 0:
                _child(job, parent)
            children[pid] = rank
        return _attend(children, stop)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _child(job: Callable[[], int], parent: int) -> None:
    code = 1
    try:
        die_with_parent(parent)
        for number in STOPS:  # Ctrl-C and a hangup reach the whole terminal group; the parent decides
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = job()
    except BaseException as error:
        print(f"cocodiff: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _attend(children: dict[int, int], stop: StopRequest) -> int:
    """Waits for all children, which it takes out of `children` as they end."""
    code, deadline, told = 0, float("inf"), False
    while children and time.monotonic() < deadline:
        if stop.asked and not told:
            told, deadline = True, time.monotonic() + GRACE_S
            for pid in children:
                os.kill(pid, signal.SIGTERM)
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

"""Helpers of what starts processes: their environment, stopping on a signal, children that die with their parent."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # asked of the parent, they end all children

OF_LAUNCHERS = re.compile(  # variables by which a process knows that it is a launcher's rank
    "(PMIX?|PALS|OMPI_COMM_WORLD|MPI|SLURM|TORCHELASTIC)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$"
)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no rank of the launcher that started this one."""
    return {name: value for name, value in environment.items() if not OF_LAUNCHERS.match(name)}


class StopRequest:
    """A signal handler that only takes note: an exception from it could strike anywhere, and lose a process."""

    asked = False

    def __call__(self, *_: Any) -> None:
        self.asked = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Takes note of STOPS while the block lasts. What is ignored stays so (nohup ignores SIGHUP)."""
    stop = StopRequest()
    heeded = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fork(job: Callable[[], int], on_terminate: Any) -> int:
    """A process that runs a job and ends with its exit code, 1 where it raises. It dies with its parent, and of STOPS
    heeds SIGTERM alone, which the parent sends: Ctrl-C and a hangup reach the whole terminal group."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, on_terminate)
        code = job()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def die_with_parent(parent: int) -> None:
    """Linux: the kernel kills this process when its parent goes; also after it has become another program."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it went before we asked


def signal_all(children: Iterable[int], number: signal.Signals) -> None:
    for pid in children:
        os.kill(pid, number)

"""Processes of this host: whether there is room for them, forking, signals that reach all, an end with their parent."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import python_words
from cocodiff.config.errors import UserError

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # asked of the parent, they end all children

AGAIN_S = 0.05  # until an interrupt that was swallowed is raised again
STOP_S = 10.0  # for a job to end once it has been asked to
PROC = Path("/proc")
# Bytes of a CPU rank's own beside weights and activations, once a step has run. About half are pages of imports that
# ranks share after a fork until Python counts references in them; the rest are connections' and lanes' buffers, kernels
# that oneDNN compiles, and what the C library's allocator holds.
LIBRARIES = 26 * 2**20
FILES, FILES_OF_A_PEER = 16, 4  # that a rank has open at least: measured on 6 and 12 ranks over gloo


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


def ignore_stops() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def keep_interrupts() -> None:
    """Raise an interrupt again a moment later where Python has swallowed it.

    Python drops what is raised in a weak reference's callback or a finaliser and prints a traceback instead, so a run
    that was asked to stop just then would go on.
    """
    report = sys.unraisablehook

    def raise_again() -> None:
        time.sleep(AGAIN_S)
        number = next((one for one in (signal.SIGTERM, signal.SIGINT) if callable(signal.getsignal(one))), None)
        if number is not None:  # else the work is done, and stops are ignored
            os.kill(os.getpid(), number)

    def hook(swallowed: sys.UnraisableHookArgs) -> None:
        if isinstance(swallowed.exc_value, KeyboardInterrupt):
            start_new_thread(raise_again, ())  # a `threading.Thread` takes locks that the callback may hold
        else:
            report(swallowed)

    sys.unraisablehook = hook


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
        ignore_stops()
        keep_interrupts()
        signal.signal(signal.SIGTERM, on_terminate)
        code = job()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel (Linux) send this process a signal when its parent ends, also once it runs another program."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # it went before we asked


def dependent_words(call: str, folder: str = "") -> list[str]:
    """Return the command that runs our command line in a process that ends with this one (`run_dependent`).

    call: Python that calls `main`, and may use json and sys. folder: is removed where this process has ended first.
    """
    names = "import json; from cocodiff.cli.main import main; from cocodiff.jobs.children import run_dependent"
    return python_words(f"{names}; sys.exit(run_dependent(lambda: {call}, {os.getpid()}, {folder!r}))")


def run_dependent(call: Callable[[], int], parent: int, folder: str) -> int:
    """Return the exit code of a call, which is interrupted when `parent`, the process that started this one, ends."""

    def clean() -> None:
        if os.getppid() != parent and folder:
            shutil.rmtree(folder, ignore_errors=True)

    def give_up() -> None:
        clean()
        os._exit(1)

    def interrupt(*_: Any) -> None:
        # A library may have swallowed the interrupt, or hold Python's lock for good.
        patience = threading.Timer(STOP_S, give_up)
        patience.daemon = True
        patience.start()
        signal.alarm(int(2 * STOP_S))
        raise KeyboardInterrupt

    try:
        keep_interrupts()
        signal.signal(signal.SIGTERM, interrupt)
        die_with_parent(parent, signal.SIGTERM)
        return call()
    finally:
        signal.alarm(0)
        clean()


def signal_all(children: Iterable[int], number: signal.Signals) -> None:
    for pid in children:
        os.kill(pid, number)


def check_room(ranks: int) -> None:
    """Raises UserError where so many forked ranks would take more memory, processes or open files than there are."""
    memory = _available_memory()
    if memory is not None and ranks * LIBRARIES > memory:
        said = f"each takes {LIBRARIES >> 20} MiB at least and {memory >> 20} MiB are available"
        remedy = f"start up to {memory // LIBRARIES} here, or ranks on several hosts with mpiexec or torchrun"
        raise UserError(f"--ranks {ranks}: {said}: {remedy}")
    processes = _allowed_processes()
    if processes is not None and ranks >= processes:
        said = f"this host lets you have {processes} processes (ulimit -u, kernel.pid_max)"
        raise UserError(f"--ranks {ranks}: {said}: start fewer")
    files, allowed = FILES + FILES_OF_A_PEER * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if ranks > 1 and allowed != resource.RLIM_INFINITY and files > allowed:
        said = f"each has at least {files} files open, as connections, and may have {allowed}"
        raise UserError(f"--ranks {ranks}: {said}: allow more with ulimit -n {2 * files}, or start fewer")


def _available_memory() -> int | None:
    """Bytes; None where the system does not tell."""
    listed = PROC / "meminfo"
    found = re.search(r"^MemAvailable:\s+(\d+)", listed.read_text(), re.MULTILINE) if listed.exists() else None
    return int(found[1]) * 1024 if found else None


def _allowed_processes() -> int | None:
    listed = PROC / "sys" / "kernel" / "pid_max"
    limits = [int(listed.read_text())] if listed.exists() else []
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return min(limits + ([] if soft == resource.RLIM_INFINITY else [soft]), default=None)

"""The child processes of a job on this host: their start, signals to all of them, their end with their parent.

This module also checks that the host has memory, processes and open files for them.
"""

from __future__ import annotations

import ctypes
import os
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
from cocodiff.config.files import available_memory

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # each, sent to the parent, ends all children

AGAIN_S = 0.05  # delay until an interrupt that Python dropped is raised again
STOP_S = 10.0  # longest time for a job to end after SIGTERM
GONE_S = 1.0  # longest time from the end of a process's first thread to that of its last one
# Bytes that a CPU rank needs besides weights and activations after its first step. About half are pages of imported
# modules, which are shared after a fork until Python changes reference counts in them. The rest are buffers of
# connections and lanes, kernels compiled by oneDNN, and memory that the C library's allocator keeps.
LIBRARIES = 26 * 2**20
# Least number of open files of a rank, and how many each peer adds: measured with 6 and 12 ranks over gloo.
FILES, FILES_OF_A_PEER = 16, 4


class StopRequest:
    """A signal handler that only sets the flag `asked`, which the loop of a process that has children reads.

    An exception could interrupt any line, and leave a child unattended.
    """

    asked = False  # True once a signal has arrived

    def __call__(self, *_: Any) -> None:
        """Set the flag. Python calls this with the signal's number and the stack frame, which are ignored."""
        self.asked = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGINT, SIGTERM, SIGHUP and SIGQUIT in a flag while the block lasts, instead of ending this process.

    Yield the flag. Signals that are ignored stay ignored, for instance SIGHUP under nohup. The earlier handlers are
    restored.
    """
    stop = StopRequest()
    heeded = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stops() -> None:
    """Ignore SIGINT, SIGTERM, SIGHUP and SIGQUIT from now on: in forked children, and while Python exits."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def keep_interrupts() -> None:
    """Install a hook that sends this process SIGTERM or SIGINT again if Python has dropped a KeyboardInterrupt.

    Python drops exceptions in callbacks of weak references and in finalisers, and only prints a traceback. A run that
    was interrupted there would continue.
    """
    report = sys.unraisablehook

    def raise_again() -> None:
        time.sleep(AGAIN_S)
        number = next((one for one in (signal.SIGTERM, signal.SIGINT) if callable(signal.getsignal(one))), None)
        if number is not None:  # else the work is done, and both signals are ignored
            os.kill(os.getpid(), number)

    def hook(swallowed: sys.UnraisableHookArgs) -> None:
        if isinstance(swallowed.exc_value, KeyboardInterrupt):
            start_new_thread(raise_again, ())  # a `threading.Thread` takes locks that the callback may hold
        else:
            report(swallowed)

    sys.unraisablehook = hook


def fork(job: Callable[[], int], on_terminate: Any) -> int:
    """Fork a process that runs `job` and exits with its result, or with 1 if it raises. Return the process id.

    The process is killed when its parent ends. It ignores the signals of Ctrl-C and of a hangup, which reach every
    process of the terminal. Only the parent sends it SIGTERM.

    Args:
        job: function that returns an exit code
        on_terminate: handler for SIGTERM in the process, as `signal.signal` takes it
    """
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
    """Have the Linux kernel send this process a signal when its parent ends. It stays in force after an exec.

    Args:
        parent: process id of the parent; if it has ended already, the signal is sent at once
        number: the signal
    """
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # it ended before this call


def dependent_words(call: str, folder: str = "") -> list[str]:
    """Return the command, as a list of words, that runs cocodiff's `main` in a process that ends when this one ends.

    Args:
        call: Python expression that calls `main`; it may use json, sys and Launch
        folder: folder that the process removes if this one ends first; "" for none
    """
    names = "import json; from cocodiff.cli.main import Launch, main; from cocodiff.jobs.children import run_dependent"
    return python_words(f"{names}; sys.exit(run_dependent(lambda: {call}, {os.getpid()}, {folder!r}))")


def run_dependent(call: Callable[[], int], parent: int, folder: str) -> int:
    """Return the result of `call`, run as the whole work of a process that must not outlive its parent.

    KeyboardInterrupt is raised in it on SIGTERM, or when the parent ends. If it then does not end within STOP_S, the
    process exits.

    Args:
        call: function that returns an exit code
        parent: id of the process that started this one
        folder: folder to remove at the end if the parent has ended; "" for none
    """

    asked = threading.Event()  # SIGTERM has come

    def clean() -> None:
        # The kernel sends it when the first thread of the parent ends. Until the last one has, the parent's id stays.
        late = time.monotonic() + GONE_S
        while asked.is_set() and os.getppid() == parent and time.monotonic() < late:
            time.sleep(0.01)
        if os.getppid() != parent and folder:
            shutil.rmtree(folder, ignore_errors=True)

    def give_up() -> None:
        clean()
        os._exit(1)

    def interrupt(*_: Any) -> None:
        asked.set()
        # If a library drops the interrupt, the timer ends the process; if one keeps Python's lock, the alarm does.
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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent once more at the end of another thread of the parent
        clean()


def signal_all(children: Iterable[int], number: signal.Signals) -> None:
    """Send the signal `number` to all processes of `children`, which are process ids."""
    for pid in children:
        os.kill(pid, number)


def check_room(ranks: int) -> None:
    """Raise UserError if this host lacks memory, processes or open files for `ranks` forked processes."""
    memory = available_memory()
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


def _allowed_processes() -> int | None:
    """Return the largest number of processes that this user may have; None if the system does not report it."""
    listed = Path("/proc/sys/kernel/pid_max")
    limits = [int(listed.read_text())] if listed.exists() else []
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return min(limits + ([] if soft == resource.RLIM_INFINITY else [soft]), default=None)

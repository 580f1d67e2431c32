"""The output of a command on the terminal: rank 0's progress bars and results.

This module also keeps messages of libraries off the terminal, unless --log_level asks for them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TextIO

FEW_S = 5.0  # time of the first steps from which the rest of a job is estimated
JOB_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
# Variables with the number of threads of a process. A library whose own is not set follows the first one.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def quiet_libraries(level: str) -> None:
    """Keep the libraries' warnings, progress bars and advice off the terminal. Call it before torch is imported.

    level: value of --log_level; with "debug" or "info" all messages are shown instead
    """
    if level in ("debug", "info"):
        logging.basicConfig(level=level.upper())
        return
    warnings.simplefilter("ignore")
    for name, value in {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "2",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("torch", "diffusers", "transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


def keep_libraries_off_stderr(log: int) -> None:
    """Redirect what C and C++ libraries write to stderr into a file. Python's own output is shown on stderr as before.

    Gloo, for example, writes several lines for each failed connection, and no setting stops it. Nothing changes if
    libraries are not quieted (`quiet_libraries`).

    log: descriptor of the file, which is open
    """
    if os.environ.get("TORCH_CPP_LOG_LEVEL") not in ("ERROR", "FATAL"):
        return
    with suppress(OSError):  # it may be closed
        encoding = getattr(sys.stderr, "encoding", None)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=encoding, errors="backslashreplace")
        os.dup2(log, 2)


def limit_threads(ranks: int, launched: bool = False) -> None:
    """Divide the cores among this host's ranks by the variables for numbers of threads. Call it before torch is loaded.

    Variables that the user has set keep their values. If OMP_NUM_THREADS is set, nothing is divided: the last bits of
    sums depend on the number of threads, which should then not depend on the number of ranks.

    NumPy's and SciPy's OpenBLAS gets one thread unless OPENBLAS_NUM_THREADS is set. They solve many small systems, for
    which its threads would wait for each other: on cores that other processes use too, the methods without a model
    would take twice as long.
    Torch's threads sleep after some 20 microseconds of waiting for each other: on such cores they would spin away the
    time that the others need, and a job would take up to nine times as long.

    Args:
        ranks: number of ranks on this host
        launched: True if a launcher such as mpiexec started them, which may have bound each to some cores
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if os.environ.get(THREADS[0]):
        return
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}
    shared = _shared_cores(own) if launched else own
    share = str(max(1, min(len(own), len(shared) // ranks)))
    for name in THREADS:
        os.environ.setdefault(name, share)


def _shared_cores(own: set[int]) -> set[int]:
    """Return the numbers of the cores that a launcher's ranks on this host share.

    A launcher may have bound each rank to some of its cores (`--cpu-bind`), a share that must not be divided again. So
    these are the cores of the parent process, the launcher, as far as Linux grants them to this process. It grants
    cores that the binding had removed, but none outside of a container, even if the launcher runs outside of it.

    own: the cores that this rank may use now, which are returned alone if the others are unknown
    """
    try:
        os.sched_setaffinity(0, own | {*range(os.sysconf("SC_NPROCESSORS_CONF"))})
        granted = os.sched_getaffinity(0)
        os.sched_setaffinity(0, own)
        return own | (granted & os.sched_getaffinity(os.getppid()))
    except (OSError, AttributeError):  # forbidden, or another system
        return own


def threads() -> dict[str, str | None]:
    """Return the number of threads of each library, as text, by its environment variable such as OMP_NUM_THREADS.

    A library whose own variable is not set follows OMP_NUM_THREADS. None if neither is set.
    """
    return {name: os.environ.get(name, os.environ.get(THREADS[0])) for name in THREADS}


def _bar(**own: Any) -> Any:
    """Return a tqdm progress bar on stderr, which is drawn less often if stderr is no terminal.

    own: arguments of tqdm, which replace the usual ones
    """
    from tqdm import tqdm

    seen = sys.stderr.isatty()
    usual: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0.2 if seen else 15.0, "leave": seen}
    return tqdm(file=BarStream(sys.stderr), **usual | own)


def progress_bar(description: str, total: int, shown: bool) -> Any:
    """Return a tqdm progress bar on stderr that counts steps, of training or a benchmark; `update` advances it.

    Args:
        description: text before the bar
        total: number of steps in all
        shown: False to draw nothing
    """
    return _bar(total=total, desc=description, unit="step", disable=not shown)


def span(seconds: float) -> str:
    """Return a duration in seconds as text for the user, such as "53.7 s", "14.2 min" or "3.1 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


class JobBar:
    """The progress bar of a whole job on stderr: the items that all replicas have finished, items per hour, time left.

    It is a context manager. A thread of its own draws it, since other replicas finish items while this rank waits.
    This rank also reports its steps within an item by `begin` and `advance`, so that a bar of few long items moves.
    """

    def __init__(self, total: int, unit: str, done: Callable[[], int], shown: bool) -> None:
        """Prepare the bar. It is drawn from `__enter__` on.

        Args:
            total: number of items in the job
            unit: word for the items: "slices", "prompts" or another one
            done: function that returns the number of items that all replicas have finished
            shown: False to draw nothing
        """
        self.total, self._unit, self._done, self.shown = total, unit, done, shown
        self._items = self._steps = self._of = self._expected = 0
        self._seen: list[tuple[float, int]] = []  # when `advance` was called, and its number of steps
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="progress", daemon=True)

    def __enter__(self) -> JobBar:
        """Begin to draw the bar, if it is shown. The items that are finished by now count as an earlier start's."""
        if self.shown:
            self._first, self._since = self._done(), time.monotonic()
            begun = {"total": self.total, "initial": self._first, "desc": self._told(self._first)}
            self._bar = _bar(**begun, bar_format=JOB_BAR, smoothing=0, mininterval=0)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw the bar a last time and close it. Exceptions of the block are passed on."""
        if self.shown:
            self._ended.set()
            self._thread.join()
            self._draw()
            self._bar.close()

    def begin(self, items: int, steps: int) -> None:
        """Report that this rank begins a batch of items, such as slices, that take `steps` denoising steps together."""
        self._items, self._of, self._steps = items, steps, 0

    def expect_steps(self, steps: int) -> None:
        """Set the approximate number of denoising steps that this rank has left, for an estimate of the job's time.

        The estimate is printed once as a line, after the steps of the first FEW_S seconds, if the bar is shown.
        """
        self._expected = steps if self.shown else 0

    def advance(self, steps: int) -> None:
        """Report that this rank has done `steps` more denoising steps. It may print the estimate of the job's time."""
        self._steps += steps
        if not self._expected:
            return
        self._seen.append((time.monotonic(), steps))
        passed = self._seen[-1][0] - self._seen[0][0]
        done = sum(count for _, count in self._seen[1:])
        if passed > FEW_S:
            left = self._expected - done - self._seen[0][1]
            self._expected = 0
            self.say(f"about {span(passed / done * max(left, 0))} to go, as the first calls of the model show")

    def say(self, text: str) -> None:
        """Print a line on stdout without breaking the bar."""
        if not self.shown:
            say(text)
            return
        with self._bar.get_lock():  # tqdm's own function for this clears only bars on sys.stderr itself
            self._bar.clear(nolock=True)
            say(text)
            self._bar.refresh(nolock=True)

    def _redraw(self) -> None:
        """Draw the bar at intervals until the job has ended, on a thread of its own."""
        interval_s = 0.5 if sys.stderr.isatty() else 15.0
        while not self._ended.wait(interval_s):
            with suppress(OSError):  # `done` reads files
                self._draw()

    def _draw(self) -> None:
        """Draw the bar once. Items that this rank has begun count by the share of their steps that is done."""
        done = self._done()
        under_way = self._items * min(1.0, self._steps / self._of) if self._of else 0.0
        self._bar.total, self._bar.n = self.total, min(float(self.total), done + under_way)
        self._bar.set_description_str(self._told(done), refresh=True)

    def _told(self, done: int) -> str:
        """Return the text before the bar, such as "12 of 80 slices, 150 an hour".

        The rate counts only the items that were finished since this start.

        Args:
            done: number of finished items, with those of earlier starts
        """
        hours = (time.monotonic() - self._since) / 3600
        rate = f", {(done - self._first) / hours:.0f} an hour" if done > self._first else ""
        return f"{done} of {self.total} {self._unit}{rate}"


def reading_bar(shown: bool) -> Callable[[range, str], Iterable[int]]:
    """Return a function that shows a progress bar on stderr while a loop reads slices.

    The function takes the slices' numbers and a text that describes the work. It returns the same numbers as an
    iterable to loop over. The bar appears after two seconds.

    Args:
        shown: False for a function that shows nothing
    """
    about = {"unit": "slice", "disable": not shown, "delay": 2, "leave": False}
    return lambda numbers, what: _bar(iterable=numbers, desc=what, **about)


def say(text: str = "") -> None:
    """Print a line on stdout. If its reader has ended or the disk is full, all further output is discarded instead."""
    try:
        print(text, flush=True)
    except OSError:
        stop_writing(sys.stdout)


def note(text: str) -> None:
    """Print a line on stderr, such as a remark on the work. Only results go to stdout. A closed stderr is ignored."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_streams() -> None:
    """Open the null device for each of stdin, stdout and stderr that this process was started without.

    Else files that are opened later would take the descriptors 0 to 2, and receive what is printed.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)  # takes the lowest number that is free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def stop_writing(stream: TextIO) -> None:
    """Discard everything that is written to a stream from now on, and what is still in its buffer.

    stream: sys.stdout or sys.stderr, whose reader has ended
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class BarStream:
    """A wrapper of stderr for progress bars that discards output if the reader has ended, so that no run fails then."""

    def __init__(self, stream: TextIO) -> None:
        """Wrap a stream. All that is not defined here is the stream's own."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text to the stream, or discard it if its reader has ended. Return the text's length."""
        with suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if its reader has not ended."""
        with suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

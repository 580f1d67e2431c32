"""Output on the terminal: rank 0's progress and results. Messages of libraries are shown only with --log_level."""

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

FEW_S = 5.0  # what the first calls of a model take by which a job's time is estimated
JOB_BAR = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # the others follow the first, if not set


def quiet_libraries(level: str) -> None:
    """Keeps the libraries' warnings, progress bars and advice off the terminal. Call before importing torch."""
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
    """Sends what libraries write on stderr themselves to a file descriptor, where `quiet_libraries` has quieted them;
    what Python writes goes where it went. Gloo's errors cannot be quieted otherwise: it writes several lines on each
    connection that comes to nothing."""
    if os.environ.get("TORCH_CPP_LOG_LEVEL") not in ("ERROR", "FATAL"):
        return
    with suppress(OSError):  # it may be closed
        encoding = getattr(sys.stderr, "encoding", None)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=encoding, errors="backslashreplace")
        os.dup2(log, 2)


def limit_threads(ranks: int, launched: bool = False) -> None:
    """Shares the cores among local ranks, before numpy or torch are imported. What the user has set stays, and where
    OMP_NUM_THREADS is set every library follows it: the last bits of sums depend on threads, and must not depend on how
    many ranks share a host. launched: by a launcher, which may have bound them."""
    if os.environ.get(THREADS[0]):
        return
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}
    shared = _shared_cores(own) if launched else own
    share = str(max(1, min(len(own), len(shared) // ranks)))
    for name in THREADS:
        os.environ.setdefault(name, share)


def _shared_cores(own: set[int]) -> set[int]:
    """Return the cores that a launcher had for this host's ranks, this rank's own among them.

    It may have bound each rank to some of these (`--cpu-bind`), which are not to be divided again. Where all ranks may
    use no more than some of the machine's, as in a container, the launcher may use more where it is outside of it. So
    these are the launcher's, as far as Linux grants them here: it gives nobody cores outside of a container's, whoever
    asks, while it gives back those that a process was bound away from."""
    try:
        os.sched_setaffinity(0, own | {*range(os.sysconf("SC_NPROCESSORS_CONF"))})
        granted = os.sched_getaffinity(0)
        os.sched_setaffinity(0, own)
        return own | (granted & os.sched_getaffinity(os.getppid()))
    except (OSError, AttributeError):  # forbidden, or another system
        return own


def threads() -> dict[str, str | None]:
    """Threads of this rank's arithmetic, by the variables that say it."""
    return {name: os.environ.get(name, os.environ.get(THREADS[0])) for name in THREADS}


def _bar(**own: Any) -> Any:
    """A bar on stderr, drawn seldom where that goes to a file."""
    from tqdm import tqdm

    seen = sys.stderr.isatty()
    usual: dict[str, Any] = {"dynamic_ncols": True, "mininterval": 0.2 if seen else 15.0, "leave": seen}
    return tqdm(file=BarStream(sys.stderr), **usual | own)


def progress_bar(description: str, total: int, shown: bool) -> Any:
    """A bar on stderr: for rank 0, and only where somebody watches or a log is wanted."""
    return _bar(total=total, desc=description, unit="step", disable=not shown)


def span(seconds: float) -> str:
    """Return a time in words, as "53.7 s", "14.2 min" or "3.1 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


class JobBar:
    """The progress of a whole job on stderr: what all replicas have done, how much an hour, the time left.

    It is drawn by a thread of its own, since other replicas get on while this rank waits. `begin` and `advance` tell
    what this rank is at, so that a job of few long items moves as well. A context manager.
    """

    def __init__(self, total: int, unit: str, done: Callable[[], int], shown: bool) -> None:
        """total: how many slices, prompts or runs (`unit`) the job has; done: how many are finished by now, all
        replicas together; shown: whether anybody watches."""
        self.total, self._unit, self._done, self.shown = total, unit, done, shown
        self._items = self._steps = self._of = self._expected = 0
        self._seen: list[tuple[float, int]] = []  # when steps ended, and how many
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="progress", daemon=True)

    def __enter__(self) -> JobBar:
        if self.shown:
            self._first, self._since = self._done(), time.monotonic()
            begun = {"total": self.total, "initial": self._first, "desc": self._told(self._first)}
            self._bar = _bar(**begun, bar_format=JOB_BAR, smoothing=0, mininterval=0)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown:
            self._ended.set()
            self._thread.join()
            self._draw()
            self._bar.close()

    def begin(self, items: int, steps: int) -> None:
        """This rank begins so many items, which take so many steps together."""
        self._items, self._of, self._steps = items, steps, 0

    def expect_steps(self, steps: int) -> None:
        """Take note that this rank has about so many steps before it, and say after the first few how long they take.

        A line is said once, where somebody watches.
        """
        self._expected = steps if self.shown else 0

    def advance(self, steps: int) -> None:
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
        """A line on stdout that leaves the bar whole."""
        if not self.shown:
            say(text)
            return
        with self._bar.get_lock():  # tqdm's own function for this clears only bars on sys.stderr itself
            self._bar.clear(nolock=True)
            say(text)
            self._bar.refresh(nolock=True)

    def _redraw(self) -> None:
        interval_s = 0.5 if sys.stderr.isatty() else 15.0
        while not self._ended.wait(interval_s):
            with suppress(OSError):  # of a journal
                self._draw()

    def _draw(self) -> None:
        done = self._done()
        under_way = self._items * min(1.0, self._steps / self._of) if self._of else 0.0
        self._bar.total, self._bar.n = self.total, min(float(self.total), done + under_way)
        self._bar.set_description_str(self._told(done), refresh=True)

    def _told(self, done: int) -> str:
        hours = (time.monotonic() - self._since) / 3600
        rate = f", {(done - self._first) / hours:.0f} an hour" if done > self._first else ""
        return f"{done} of {self.total} {self._unit}{rate}"


def reading_bar(shown: bool) -> Callable[[range, str], Iterable[int]]:
    """A function that wraps the numbers of slices while they are read, and shows a bar on stderr after two seconds."""
    about = {"unit": "slice", "disable": not shown, "delay": 2, "leave": False}
    return lambda numbers, what: _bar(iterable=numbers, desc=what, **about)


def say(text: str = "") -> None:
    """A line on stdout. Where nobody reads it any more, or the disk is full, it is lost, and the work goes on."""
    try:
        print(text, flush=True)
    except OSError:
        stop_writing(sys.stdout)


def note(text: str) -> None:
    """Says on stderr what is being done, as progress bars do: stdout holds results alone."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def open_streams() -> None:
    """Open the standard streams that this process was started without, to nowhere: files would take their numbers."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)  # takes the lowest number that is free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def stop_writing(stream: TextIO) -> None:
    """Sends what is written to a stream from now on to nowhere, what its buffer holds included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class BarStream:
    """A stream for progress bars, which are lost where nobody reads them any more: no run ends because of them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

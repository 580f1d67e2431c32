"""`cocodiff` in processes forked from one that has imported everything: what a start costs is paid once a session.

For tests of what a command does once it runs. A start itself, and what a launcher starts, needs a Python of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launching import end_group

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["warm_imports"])


class Started:
    """A `cocodiff` that runs in a session of its own, with its output in files; in the manner of subprocess.Popen."""

    def __init__(self, words: Sequence[object], stdout: Path, stderr: Path | None = None) -> None:
        """stderr: None for the file of stdout."""
        files = str(stdout), None if stderr is None else str(stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        arguments = [str(word) for word in words], files, environment, str(Path.cwd())
        self._process = FORKS.Process(target=_run, args=arguments)
        self._process.start()
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("cocodiff", timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def cocodiff(*words: object, folder: Path, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """A command to its end. folder: takes the files of its output."""
    out, err = folder / "cocodiff.stdout", folder / "cocodiff.stderr"
    process = Started(words, out, err)
    try:
        code = process.wait(timeout_s)
    finally:
        end_group(process.pid)
    done = subprocess.CompletedProcess([str(word) for word in words], code, out.read_text(), err.read_text())
    out.unlink()
    err.unlink()
    return done


def _run(words: list[str], files: tuple[str, str | None], environment: dict[str, str], folder: str) -> None:
    """In the forked process."""
    from cocodiff.cli import main

    os.setsid()
    for descriptor, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if file else os.dup(1)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.exit(main(words))

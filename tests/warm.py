"""Programs in processes forked from one that has imported everything: what a start costs is paid once a session.

For tests of what a program does once it runs. A start itself, and what a launcher starts, needs a Python of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import forkserver, get_context
from pathlib import Path

from launching import TESTS, end_group

from cocodiff.jobs.children import ignore_stops

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["warm_imports"])
COCODIFF = "cocodiff.cli.main"


def start_server() -> None:
    """Starts the server that has imported everything, unless it runs. Python 3.11 gives it no sys.path, and it passes
    over what it cannot import without a word, so it must find this folder by its environment."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Started:
    """A program that runs in a session of its own, with its output in files; in the manner of subprocess.Popen."""

    def __init__(
        self,
        words: Sequence[object],
        stdout: Path,
        stderr: Path | None = None,
        module: str = COCODIFF,
        ignored: Sequence[int] = (),
    ) -> None:
        """stderr: None for the file of stdout. module: whose `main` is called, with the words in `sys.argv`. ignored:
        signals that it finds ignored."""
        files = str(stdout), None if stderr is None else str(stderr)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        start_server()
        arguments = module, [str(word) for word in words], files, environment, str(Path.cwd()), tuple(ignored)
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


def forked(
    *words: object, folder: Path, module: str = COCODIFF, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """A program to its end. folder: takes the files of its output for so long."""
    out, err = folder / "forked.stdout", folder / "forked.stderr"
    process = Started(words, out, err, module)
    try:
        code = process.wait(timeout_s)
    finally:
        end_group(process.pid)
    done = subprocess.CompletedProcess([str(word) for word in words], code, out.read_text(), err.read_text())
    out.unlink()
    err.unlink()
    return done


def note_test() -> None:
    """Note what a forked process runs as its test's, where coverage is on (`mutate.py`)."""
    if "coverage" in sys.modules and (running := sys.modules["coverage"].Coverage.current()):
        running.switch_context(os.environ.get("PYTEST_CURRENT_TEST", ""))


def _run(
    module: str,
    words: list[str],
    files: tuple[str, str | None],
    environment: dict[str, str],
    folder: str,
    ignored: Sequence[int],
) -> None:
    """In the forked process."""
    os.setsid()
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for descriptor, file in enumerate(files, start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if file else os.dup(1)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    note_test()
    os.chdir(folder)
    sys.argv = [module, *words]
    code = import_module(module).main()
    ignore_stops()  # as `cocodiff.cli.main.program` does
    sys.exit(code)

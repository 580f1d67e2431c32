"""Ranks under a real mpiexec, forked from the Python of `warm` that has imported everything.

The launcher starts `warm_rank.py` in each rank's place, which hands over what a rank has from it: environment, folder,
standard files and the line to the launcher's process manager. For tests of what ranks do once they run; those of how
a launcher starts them use `launching.mpiexec`.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

from launching import TESTS, mpiexec
from warm import FORKS, note_test, start_server

RANK = TESTS / "warm_rank.py"


def warm_mpiexec(
    ranks: int, file: Path | str, *arguments: str, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """As `launching.mpiexec`."""
    start_server()
    with tempfile.TemporaryDirectory() as folder, Forks(f"{folder}/line") as forks:
        return mpiexec(ranks, RANK, forks.place, str(file), *arguments, timeout_s=timeout_s, bare=True)


class File:
    """An open file on its way to a forked process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


class Forks:
    """Forks a rank for each `warm_rank.py` that asks, and tells it how its rank ended. A context manager."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(place)
        self._listener.listen(64)
        self._end, self._ended = os.pipe()
        self._ranks: dict[socket.socket, Any] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)  # one: processes may be polled by one alone

    def __enter__(self) -> Forks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ended)
        self._thread.join()
        self._listener.close()
        os.close(self._end)

    def _serve(self) -> None:
        while True:
            sentinels = {process.sentinel: line for line, process in self._ranks.items()}
            for one in connection.wait([self._listener, self._end, *self._ranks, *sentinels]):
                if one is self._listener:
                    self._fork(self._listener.accept()[0])
                elif one == self._end:
                    for process in self._ranks.values():
                        process.kill()
                        process.join()
                    return
                elif one in sentinels:
                    self._tell(sentinels[one])
                elif one in self._ranks:
                    self._pass_on(one)

    def _fork(self, line: socket.socket) -> None:
        _, numbers, *_ = socket.recv_fds(line, 1, 8)
        with line.makefile("rb") as words:
            given = json.loads(words.readline())
        process = FORKS.Process(target=run_rank, args=(given, [File(number) for number in numbers]))
        process.start()
        for number in numbers:
            os.close(number)
        self._ranks[line] = process

    def _pass_on(self, line: socket.socket) -> None:
        """A signal; or the end of who asked, with which the rank ends."""
        signals = line.recv(1)
        process = self._ranks[line]
        if not signals:
            process.kill()
        elif process.is_alive():
            os.kill(process.pid, signals[0])

    def _tell(self, line: socket.socket) -> None:
        process = self._ranks.pop(line)
        process.join()
        with suppress(OSError):  # the launcher may have ended it
            line.sendall(f"{process.exitcode}\n".encode())
        line.close()


def run_rank(given: dict[str, Any], files: list[File]) -> None:
    """In the forked process: a program from its start to the end of its Python."""
    os.setsid()
    *standard, manager = files
    for number, file in enumerate(standard):
        os.dup2(file.number, number)
        os.close(file.number)
    os.set_inheritable(manager.number, True)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(given["environment"], PMI_FD=str(manager.number))
    note_test()
    os.chdir(given["folder"])
    code: object = 0
    try:
        run_program(given["words"])
    except SystemExit as left:
        code = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - no public name ends a Python in order
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def run_program(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")

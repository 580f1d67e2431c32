"""Starts test programs on ranks of their own: under a real mpiexec, or forked by a fresh Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cocodiff.comm import launch

TESTS = Path(__file__).parent


def with_options(words: Sequence[str], *more: str) -> list[str]:
    """A command's words with further options, each in the place of the one of its name if there is one."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return [word for group in groups if group and group[0] not in more for word in group] + list(more)


def find_mpiexec() -> str:
    """As the commands find it. Raises where there is none."""
    found = launch.find_mpiexec()
    if found is None:
        raise FileNotFoundError(f"no mpiexec beside {sys.executable} or on PATH: install the extra local-mpi")
    return found


def mpiexec(
    ranks: int, file: Path | str, *arguments: str, timeout_s: float = 240.0, bare: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a Python file on `ranks` ranks of one MPI job. Hydra, which would kill survivors at once, is told not to.
    bare: by a Python without the environment's packages."""
    launcher = find_mpiexec()
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False).stdout
    patience = ["-disable-auto-cleanup"] if "Intel" in version or "HYDRA" in version else []
    python = [sys.executable, *(["-I", "-S"] if bare else [])]
    return run([launcher, *patience, "-n", str(ranks), *python, str(file), *arguments], timeout_s)


def run(command: Sequence[str], timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process group of its own, which ends with it, in time or not.

    Raises subprocess.TimeoutExpired with the output so far.
    """
    quiet = {"I_MPI_FABRICS": "shm", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | quiet | {"PYTHONPATH": path},
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        end_group(process.pid)
        output, errors = process.communicate()
        raise subprocess.TimeoutExpired(command, timeout_s, output, errors) from late
    finally:
        end_group(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def fake(program: Path, body: str = "true") -> None:
    """Writes a program that is a script."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/usr/bin/env bash\n{body}\n")
    program.chmod(0o755)


def end_group(leader: int) -> None:
    """Kills what is left of a process group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def assert_succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"

"""The launch of this process: alone, forked by us, by torchrun or by an MPI launcher; maybe on an emulated machine.

This module also finds MPI launchers. It reads only the environment, and the list of nodes that it names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.config.errors import UserError

# Variables with a rank's number on its node, by launcher; the first that is set counts.
LOCAL_RANK = (
    "LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "MPI_LOCALRANKID",
    "PMIX_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
MPI_RANK = ("PMI_RANK", "PALS_RANKID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
MPI_SIZE = ("PMI_SIZE", "PMIX_SIZE", "OMPI_COMM_WORLD_SIZE")  # PALS sets no such variable
RANKS = "COCODIFF_RANKS"  # variable with the number of ranks, set by a job's script; a launcher's own has precedence
# Variables of srun's tasks. A batch script and salloc's shell have no step's number, or one of ten digits.
STEP, STEP_SIZE = ("SLURM_STEP_ID", "SLURM_STEPID"), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
OF_LAUNCHERS = re.compile(  # variables by which a process recognises that it is a launcher's rank
    f"(PMIX?|PALS|OMPI_COMM_WORLD|MPI|SLURM|TORCHELASTIC)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|{RANKS}$"
)
# torch.distributed's backends by type of device, the preferred one first. Those of xpu are both oneCCL.
BACKENDS = {"cpu": ("gloo",), "xpu": ("xccl", "ccl"), "cuda": ("nccl",)}
STARTED = {"alone": "alone", "forked": "by --ranks", "torchrun": "by torchrun", "mpi": "by MPI"}  # kinds, in words
EMULATED = "COCODIFF_EMULATED"  # variable that describes an emulated machine to its ranks, as JSON


class Contact(NamedTuple):
    """The result of the ranks' first contact: what a rank needs to connect to the watch, which notices lost ranks."""

    rank: int  # number of this rank
    size: int  # number of ranks
    address: tuple[str, int]  # host and port of the watch, which is on rank 0
    key: str  # the run's secret, by which the watch knows its ranks
    listener: socket.socket | None  # listening socket of the watch, on rank 0
    store: Any  # torch.distributed's store, or the path of its file; None if there is none yet
    interface: str = ""  # address that rank 0 listens on; "" on other ranks
    on_loopback: bool = True  # True if the watch has a loopback address, so that all ranks are on one host


@dataclass(frozen=True)
class Launch:
    """The start of this process as its launcher's environment describes it."""

    kind: str = "alone"  # "alone", "forked", "torchrun" (srun's too) or "mpi"
    rank: int | None = 0  # in the whole run; None if an MPI launcher does not set it
    size: int | None = 1  # number of ranks of the whole run; None if an MPI launcher does not set it
    local_rank: int = 0  # index among the ranks of this node
    local_size: int | None = None  # number of ranks on this node; None if unknown
    meeting: Contact | None = None  # of forked ranks, which need no first contact; None for others
    guessed: bool = False  # True if the size assumes the same number of ranks on every node of the job
    cause: int | None = None  # descriptor of a file that takes the end of the rank by which a job fails

    @property
    def speaks(self) -> bool:
        """True if this process may write to the terminal: on rank 0, and if the rank is unknown."""
        return not self.rank


def detect(environment: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that environment variables show: torchrun's, MPI's, srun's or none.

    Raise UserError if they have no valid rank.

    Args:
        environment: the variables; by default those of this process.
    """
    env = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" in env or all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        rank, size = _number(env, ("RANK",)), _number(env, ("WORLD_SIZE",))
        if rank is None or size is None:
            raise UserError("TORCHELASTIC_RUN_ID is set without RANK and WORLD_SIZE: unset it, or start with torchrun")
        sizes = (*MPI_SIZE, RANKS) if any(map(env.get, MPI_RANK)) else MPI_SIZE
        started = 1 if "TORCHELASTIC_RUN_ID" in env else _number(env, sizes) or 1
        if started > size:
            told = f"RANK={rank} and WORLD_SIZE={size} in the environment"
            remedy = "unset RANK and WORLD_SIZE, which something else has left there"
            raise UserError(f"{told}, where an MPI launcher started {started} ranks: {remedy}")
        if (_number(env, ("MASTER_PORT",)) or 0) > 65535:
            raise UserError(f"MASTER_PORT={env['MASTER_PORT']!r} in the environment: give a port up to 65535")
        kind = "torchrun"
    elif (rank := _number(env, MPI_RANK)) is not None:
        kind, size = "mpi", _number(env, MPI_SIZE)
        if size is None:
            return _without_size(env, rank)
    elif any(re.fullmatch("[0-9]{1,9}", env.get(name, "")) for name in STEP) and (_number(env, STEP_SIZE) or 1) > 1:
        kind, rank, size = "torchrun", _number(env, ("SLURM_PROCID",)) or 0, _number(env, STEP_SIZE)
    else:
        return Launch()
    if size is not None and rank >= size:
        raise UserError(f"the launcher's environment has rank {rank} of {size}: ranks go from 0 to {size - 1}")
    return Launch(kind, rank, size, _number(env, LOCAL_RANK) or 0, _number(env, LOCAL_SIZE))


def _without_size(env: Mapping[str, str], rank: int) -> Launch:
    """Return the launch of a rank whose MPI launcher does not set the number of ranks.

    The size is that of COCODIFF_RANKS. Without it, under PALS, it is guessed as this node's ranks times the job's
    nodes. It is None if neither is known, or if this rank's number is not below it and so shows that it is wrong. Ranks
    with lower numbers cannot tell that; all ranks compare their sizes when they meet.

    Args:
        env: the environment variables.
        rank: this rank.
    """
    size, local_size, guessed = _number(env, (RANKS,)), _number(env, LOCAL_SIZE), False
    if size is None and "PALS_LOCAL_SIZE" in env and local_size:
        with suppress(OSError, ValueError):  # the file has a line for each node, or with some schedulers for each rank
            size, guessed = local_size * len({*Path(env.get("PBS_NODEFILE", "")).read_text().split()}), True
    known = size if size is not None and size > rank else None
    return Launch("mpi", rank, known, _number(env, LOCAL_RANK) or 0, local_size, guessed=guessed)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables without those by which a process recognises that it is a launcher's rank.

    They are for a child process that is not a rank of the launcher that started this one.
    """
    return {name: value for name, value in environment.items() if not OF_LAUNCHERS.match(name)}


def emulated() -> dict[str, Any]:
    """Return the emulated machine that this rank runs on, as a mapping with "machine", "nodes" and "scale".

    It is empty on a real machine. Raise UserError if the variable that describes it, COCODIFF_EMULATED, is invalid.
    """
    try:
        return dict(json.loads(os.environ.get(EMULATED) or "{}"))
    except (ValueError, TypeError) as error:
        found = f"{EMULATED}={os.environ[EMULATED][:40]!r}"
        raise UserError(f"{found}: cocodiff emulate alone sets it: unset it") from error


def python_words(code: str) -> list[str]:
    """Return the words of a command that runs a line of Python in a new process.

    `python -m` would import files of the working folder, such as a random.py, instead of the library's.
    """
    return [sys.executable, "-c", f"import sys; sys.path[0] or sys.path.pop(0); {code}"]


def find_mpiexec() -> str | None:
    """Return the path of the mpiexec that belongs to the MPI library that mpi4py loads.

    It is this environment's own, else the system's. None if there is none.
    """
    own = Path(sys.prefix) / "bin" / "mpiexec"
    return str(own) if own.exists() else system_mpiexec()


def system_mpiexec() -> str | None:
    """Return the path of the first mpiexec on PATH that is not in this or another Python environment; None if there is
    none.

    Another activated environment, also conda's, may have its own, but mpi4py does not look there for a library. It does
    in the environment of our base Python.
    """
    own, base = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()

    def is_environment(prefix: Path) -> bool:
        """Return True if a folder is this environment's, or another's that is not our base Python's."""
        marked = (prefix / "pyvenv.cfg").exists() or (prefix / "conda-meta").is_dir()
        return prefix == own or (marked and prefix != base)

    for folder in filter(None, os.environ.get("PATH", "").split(os.pathsep)):
        found = shutil.which("mpiexec", path=folder)
        places = [Path(folder).resolve(), Path(found).resolve().parent] if found else []
        if found and not any(is_environment(place.parent) for place in places):
            return found
    return None


def _number(env: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the whole number in the first of some environment variables that is set; None if none is.

    Raise UserError if it is not a number.

    Args:
        env: the environment variables.
        names: the variables to look at, in this order.
    """
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", env[name]):
        found = f"{name}={env[name][:40]!r} in the environment"
        raise UserError(f"{found}: launchers set a number from 0 on; unset it to use none")
    return int(env[name])

"""The start of MPI, and queries to it before there is a transport.

This module imports no torch. Some launchers do not set the number of ranks, which is needed before the cores are
divided among them.
"""

from __future__ import annotations

import os
import shutil
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import RANKS, Launch, detect
from cocodiff.comm.peers import Limits
from cocodiff.comm.presence import Presence, limited_start
from cocodiff.config.errors import UserError

# Memory for messages and windows of a host's ranks. If it is full, a process that writes to it is killed.
SHARED_MEMORY = Path("/dev/shm")
BUILD = "build mpi4py on the launcher's MPI, or start with the mpiexec of the MPI that it loads"


def lacking_shared_memory(ranks: int) -> str:
    """Return a line for the user if /dev/shm is too small for MPI's messages between `ranks` ranks of this host; else
    "".

    The line says what to do. Intel MPI 2021.17 took 2.9 MiB for each of 2 ranks, 1.8 for each of 12, and over ofi 176
    KiB in all.
    """
    least = 256 if os.environ.get("I_MPI_FABRICS") == "ofi" else 2048 * (ranks + 1)
    free = shutil.disk_usage(SHARED_MEMORY).free >> 10 if SHARED_MEMORY.exists() else least
    if free >= least:
        return ""
    lack = f"{SHARED_MEMORY} has {free} KiB free, and MPI needs {least} for {ranks} ranks of a host"
    return f"{lack}: enlarge it (docker run --shm-size=1g), or with Intel MPI export I_MPI_FABRICS=ofi, which needs 256"


def initialised_mpi() -> Any:
    """Start MPI with full thread support, unless it has been started. Return mpi4py's MPI module.

    `cocodiff.comm.connect` finishes it: after a fault MPI_Finalize would wait for dead ranks. Raise RuntimeError if the
    library grants less than MPI_THREAD_MULTIPLE, and UserError if there is too little shared memory.
    """
    ranks = detect().local_size or 2
    if "mpi4py.MPI" not in sys.modules and ranks > 1 and (lack := lacking_shared_memory(ranks)):
        raise UserError(lack)
    import mpi4py

    mpi4py.rc.finalize = False
    mpi4py.rc.threads = True
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(f"{MPI.Get_library_version().splitlines()[0]} grants no MPI_THREAD_MULTIPLE: use gloo")
    return MPI


def broadcast_over_mpi(world: Any, text: str | None) -> str:
    """Return rank 0's text on every rank, by MPI. mpi4py's own calls for objects would unpickle messages.

    Args:
        world: the communicator of all ranks, which call this together.
        text: rank 0's; None on other ranks.
    """
    content = bytearray((text or "").encode())
    length = array("q", [len(content)])
    world.Bcast(length)
    content = content or bytearray(length[0])
    world.Bcast(content)
    return content.decode()


def count_ranks(launch: Launch, limits: Limits) -> Launch:
    """Return the launch with the number of ranks that MPI counts, for launchers that do not set it. The call starts MPI
    and waits until all ranks have started.

    Raise UserError if MPI cannot be asked, or is not the launcher's.
    """
    try:
        with limited_start(limits, launch.rank, Presence.of_job(launch)):
            size = initialised_mpi().COMM_WORLD.Get_size()
    except (ImportError, RuntimeError) as error:
        said = f"nobody tells how many ranks there are, and MPI cannot be asked ({' '.join(str(error).split())})"
        raise UserError(f"{said}: {BUILD}") from error
    _check_launcher(launch, size)
    return replace(launch, size=size, guessed=False)


def check_told_size(launch: Launch, world: Any) -> None:
    """Raise UserError on all ranks of MPI's world if some ranks' environment has another number of ranks."""
    size = world.Get_size()
    _check_launcher(launch, size)
    told = array("q", [0] * size)
    world.Allgather(array("q", [size if launch.guessed else launch.size or size]), told)
    if wrong := {*told} - {size}:
        found = f"the environment tells {min(wrong)} rank(s), and MPI counts {size}"
        raise UserError(f"{found}: unset {RANKS}, or export {RANKS}={size}")


def _check_launcher(launch: Launch, size: int) -> None:
    """Raise UserError if MPI counts fewer ranks than the launcher must have started: it is not the launcher's MPI.

    Args:
        launch: the start of this process.
        size: number of ranks by MPI.
    """
    least = max((launch.rank or 0) + 1, launch.local_size or 1)
    if size < least:
        raise UserError(f"the launcher has started {least} ranks or more, and MPI counts {size}: {BUILD}")

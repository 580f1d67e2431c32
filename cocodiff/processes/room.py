"""Checks, before ranks are forked, that the host can take so many: too many would bring it down."""

from __future__ import annotations

import re
import resource
from pathlib import Path

from cocodiff.errors import UserError

PROC = Path("/proc")
# Bytes of a CPU rank's own beside weights and activations, once a step has run (docs/measurements/once.md). About half
# are pages of the imports that ranks share after a fork until Python counts references in them; the rest are buffers of
# connections and lanes, kernels that oneDNN compiles, and what the C library's allocator holds.
LIBRARIES = 26 * 2**20
FILES, FILES_OF_A_PEER = 16, 4  # that a rank has open at least: measured on 6 and 12 ranks over gloo


def check_room(ranks: int) -> None:
    """Raises UserError where so many forked ranks would take more memory, processes or open files than there are."""
    memory = _available_memory()
    if memory is not None and ranks * LIBRARIES > memory:
        raise UserError(
            f"--ranks {ranks}: each takes {LIBRARIES >> 20} MiB at least and {memory >> 20} MiB are available: start "
            f"up to {memory // LIBRARIES} here, or ranks on several hosts with mpiexec or torchrun"
        )
    processes = _allowed_processes()
    if processes is not None and ranks >= processes:
        raise UserError(
            f"--ranks {ranks}: this host lets you have {processes} processes (ulimit -u, kernel.pid_max): start fewer"
        )
    files, allowed = FILES + FILES_OF_A_PEER * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if ranks > 1 and allowed != resource.RLIM_INFINITY and files > allowed:
        raise UserError(
            f"--ranks {ranks}: each has at least {files} files open, as connections, and may have {allowed}: "
            f"allow more with ulimit -n {2 * files}, or start fewer"
        )


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

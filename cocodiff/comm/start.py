"""How ranks of one job find each other: a limit for a start that nothing else watches yet, and the launcher's store.

Until the watch is open (`health.py`) a rank that never comes is a wait without end inside MPI_Init or a store. Here
such a wait ends with one line that names who is missing: ranks of one host leave their process number in a folder of
the job's, so that the others see which of them died, were stopped or never came.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cocodiff.comm.health import Limits
from cocodiff.comm.launch import LOCAL_SIZE, MPI_RANK, MPI_SIZE
from cocodiff.errors import PeerLost, UserError

# What is alike on the ranks of one MPI job and differs between jobs, by launcher; asked in this order.
JOBS = (("PALS_APID",), ("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("I_MPI_HYDRA_UUID",))
LOOK_S = 0.25


class Presence:
    """The process numbers of a job's ranks on this host, each in a file of its rank's name.

    Use `of_this_job` for an MPI job; tests name a folder themselves.
    """

    def __init__(self, folder: Path, rank: int, local_ranks: int) -> None:
        """local_ranks: how many ranks of the job are on this host."""
        self.folder, self.rank, self.local_ranks = folder, rank, local_ranks

    @classmethod
    def of_this_job(cls, environment: Mapping[str, str] | None = None) -> Presence | None:
        """None where the launcher does not tell rank and numbers."""
        env = os.environ if environment is None else environment
        numbers = [next((env[name] for name in names if env.get(name, "").isdigit()), "") for names in
                   (MPI_RANK, LOCAL_SIZE, MPI_SIZE)]  # fmt: skip
        if not numbers[0] or not (numbers[1] or numbers[2]):
            return None
        named = next((names for names in JOBS if all(name in env for name in names)), None)
        job = " ".join(env[name] for name in named) if named else str(os.getppid())
        word = hashlib.sha256(job.encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"cocodiff-start-{os.geteuid()}" / word
        return cls(folder, int(numbers[0]), int(numbers[1] or numbers[2]))

    def announce(self) -> None:
        """Leaves this rank's process number. A folder that others may write to is not used: then nobody is named."""
        with contextlib.suppress(OSError):
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                return
            _clear_ended_jobs(self.folder.parent, self.folder)
            self.folder.mkdir(exist_ok=True)
            whole = self.folder / f".{self.rank}"
            whole.write_text(str(os.getpid()))
            whole.rename(self.folder / str(self.rank))

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / str(self.rank)).unlink(missing_ok=True)
            self.folder.rmdir()  # by the last one

    def faults(self) -> dict[int, str]:
        """The ranks of this host that died or are stopped, and which of the two."""
        found = {}
        for rank, process in sorted(self._processes().items()):
            state = _state(process)
            if state in ("", "Z", "X"):
                found[rank] = "died before the ranks had met"
            elif state in ("T", "t"):
                found[rank] = "is stopped"
        return found

    def absent(self) -> str:
        """Who is missing, in words."""
        there = sorted(self._processes())
        if len(there) < self.local_ranks:
            return f"of this host's {self.local_ranks} ranks only {', '.join(map(str, there)) or 'none'} began"
        return f"all {self.local_ranks} ranks of this host began: a rank of another host is missing, or hangs"

    def _processes(self) -> dict[int, int]:
        found: dict[int, int] = {}
        with contextlib.suppress(OSError):
            if self._is_ours():
                for path in self.folder.iterdir():
                    if path.name.isdigit():
                        found[int(path.name)] = int(path.read_text())
        return found

    def _is_ours(self) -> bool:
        status = self.folder.parent.lstat()
        return status.st_uid == os.geteuid() and status.st_mode & 0o170022 == 0o040000


def _state(process: int) -> str:
    """The kernel's letter for what a process does; "" where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _clear_ended_jobs(folder: Path, own: Path) -> None:
    """Removes what jobs that were killed have left."""
    for job in folder.iterdir():
        if job == own or not job.is_dir():
            continue
        with contextlib.suppress(OSError, ValueError):
            if not any(_state(int(path.read_text())) for path in job.iterdir()):
                shutil.rmtree(job)


@contextlib.contextmanager
def limited_start(limits: Limits, rank: int | None, presence: Presence | None, where: str) -> Iterator[None]:
    """For calls of a library in which all ranks meet before the watch is open, and which nothing can interrupt. Ends
    this process with one line where a rank of this host died, has been stopped for `timeout_s`, or where the meeting
    takes longer than `start_s`. where: the call's name."""
    over = threading.Event()
    watching = (over, limits, rank, presence, where)
    threading.Thread(target=_end_late_start, args=watching, name="start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _end_late_start(
    over: threading.Event, limits: Limits, rank: int | None, presence: Presence | None, where: str
) -> None:
    began, stopped_since = time.monotonic(), dict[int, float]()
    while not over.wait(LOOK_S):
        now, faults = time.monotonic(), presence.faults() if presence is not None else {}
        stopped_since = {one: stopped_since.get(one, now) for one, what in faults.items() if what == "is stopped"}
        reason = next((f"rank {one} {what}" for one, what in faults.items() if one not in stopped_since), "")
        for one, since in stopped_since.items():
            if now - since > limits.timeout_s:
                reason = f"rank {one} has been stopped for {limits.timeout_s:g} s"
        if not reason and now - began > limits.start_s:
            reason = f"the ranks did not meet within {limits.start_s:g} s in {where}"
            reason += f"; {presence.absent()}" if presence is not None else ""
        if reason:
            who = "" if rank is None else f"[rank {rank}] "
            os.write(2, f"cocodiff: {who}{reason}\n".encode())
            os._exit(1)


@cache
def launcher_store(host: str, port: int, rank: int, size: int, hosted: bool, attempt: str, start_s: float) -> Any:
    """The store of torchrun, or of whoever set MASTER_ADDR and MASTER_PORT, kept as long as the process: a later run of
    the same ranks meets at the same one. hosted: rank 0 has none to connect to and makes it.

    Raises PeerLost where rank 0 does not answer within `start_s`.
    """
    import torch.distributed as dist

    try:
        store = dist.TCPStore(
            host, port, size, is_master=rank == 0 and not hosted, timeout=timedelta(seconds=start_s),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except dist.DistError as error:
        where = f"does not answer at {host}:{port} within {start_s:g} s"
        raise PeerLost(0, f"{where} ({str(error).splitlines()[0]})") from error
    return dist.PrefixStore(f"cocodiff/{attempt}", store)


def environment_store(rank: int, size: int, start_s: float, environment: Mapping[str, str] | None = None) -> Any:
    """`launcher_store` by the environment. Raises UserError where that says no address."""
    env = os.environ if environment is None else environment
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise UserError(f"MASTER_ADDR is {host!r} and MASTER_PORT {port!r}: set them to where rank 0 can be reached")
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return launcher_store(host, int(port), rank, size, hosted, env.get("TORCHELASTIC_RESTART_COUNT", "0"), start_s)


def next_run(store: Any, rank: int) -> Any:
    """A part of a store that no earlier run of the same processes has written to. All ranks call it as often."""
    import torch.distributed as dist

    return dist.PrefixStore(f"run{store.add(f'opened/{rank}', 1)}", store)


def told_by_rank_0(store: Any, word: str | None, start_s: float) -> str:
    """Rank 0's `word`, None elsewhere, on every rank. Raises PeerLost where it does not come within `start_s`."""
    import torch.distributed as dist

    if word is not None:
        store.set("meeting", word)
    try:
        store.wait(["meeting"], timedelta(seconds=start_s))
    except dist.DistError as error:
        raise PeerLost(0, f"did not start within {start_s:g} s") from error
    return bytes(store.get("meeting")).decode()

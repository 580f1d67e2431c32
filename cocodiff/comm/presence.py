"""Which ranks of an MPI job have begun, and a limit for calls in which they all meet before anything else watches them.

Until the watch is open (`health.py`) a rank that never comes is a wait without end inside MPI_Init. Ranks of one host
leave their process numbers in a folder of the job's, so that the others see which of them died, were stopped or never
came. Who looks is a process of its own, this file run as a program: MPI_Init lets no other Python thread run. So this
file imports nothing but the standard library. Before it ends its rank it leaves there why, for those that look later.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cocodiff.comm.health import Limits
    from cocodiff.comm.launch import Launch

# What is alike on the ranks of one MPI job and differs between jobs, by launcher; asked in this order.
JOBS = (("PALS_APID",), ("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("I_MPI_HYDRA_UUID",))
LOOK_S = 0.25


class Presence:
    """The process numbers of a job's ranks on this host, each in a file of its rank's name; behind that of a rank that
    is ended by its watching process stands why."""

    def __init__(self, folder: Path, rank: int, local_ranks: int) -> None:
        """folder: the job's own, in one that belongs to this user alone. local_ranks: the job's ranks on this host."""
        self.folder, self.rank, self.local_ranks = folder, rank, local_ranks

    @classmethod
    def of_job(cls, launch: Launch, environment: Mapping[str, str] | None = None) -> Presence | None:
        """That of an MPI launcher's job; None for other launches, and where it does not tell ranks and their number."""
        local_ranks = launch.local_size or launch.size
        if launch.kind != "mpi" or launch.rank is None or local_ranks is None:
            return None
        env = os.environ if environment is None else environment
        named = next((names for names in JOBS if all(name in env for name in names)), ())
        job = " ".join(env[name] for name in named) or str(os.getppid())
        word = hashlib.sha256(job.encode()).hexdigest()[:16]
        return cls(Path(tempfile.gettempdir()) / f"cocodiff-start-{os.geteuid()}" / word, launch.rank, local_ranks)

    def announce(self) -> None:
        """Leaves this rank's process number. Where that cannot be done in safety nobody will be named."""
        with contextlib.suppress(OSError):
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                return
            self._clear_ended_jobs()
            self.folder.mkdir(exist_ok=True)
            self._write(str(os.getpid()))

    def first_reason(self, process: int, reason: str) -> str:
        """Why a rank of this host was ended before, else `reason`. Leaves that behind this rank's process number, for
        those that look later; to be called before it is ended."""
        reason = next((word for _, word in self._entries().values() if word), reason)
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._write(f"{process} {reason}")
        return reason

    def withdraw(self) -> None:
        """Take this rank's number away: when the ranks have met, others watch over it."""
        with contextlib.suppress(OSError):
            (self.folder / str(self.rank)).unlink(missing_ok=True)
            self.folder.rmdir()  # by the last one

    def faults(self) -> dict[int, str]:
        """The ranks of this host that died or are stopped, and which of the two."""
        faults = dict.fromkeys(("", "Z", "X"), "died before the ranks had met")
        faults |= dict.fromkeys(("T", "t"), "is stopped")
        states = {rank: _state(process) for rank, (process, _) in sorted(self._entries().items())}
        return {rank: faults[state] for rank, state in states.items() if state in faults}

    def describe_present(self) -> str:
        """Return in words which of this host's ranks have come, or that all have. Who is missing cannot be said: a rank
        that never came has left no number here."""
        there = sorted(self._entries())
        if len(there) < self.local_ranks:
            return f"of this host's {self.local_ranks} ranks there are {', '.join(map(str, there)) or 'none'}"
        there_are = f"all {self.local_ranks} ranks of this host are there"
        return f"{there_are}: one of them hangs, or one of another host is missing"

    def _write(self, content: str) -> None:
        whole = self.folder / f".{self.rank}"
        whole.write_text(content)
        whole.rename(self.folder / str(self.rank))

    def _entries(self) -> dict[int, tuple[int, str]]:
        found: dict[int, tuple[int, str]] = {}
        with contextlib.suppress(OSError):
            if self._is_ours():
                for path in self.folder.iterdir():
                    if path.name.isdigit():
                        found[int(path.name)] = _parsed(path)
        return found

    def _is_ours(self) -> bool:
        status = self.folder.parent.lstat()
        return status.st_uid == os.geteuid() and status.st_mode & 0o170022 == 0o040000

    def _clear_ended_jobs(self) -> None:
        """Removes what jobs that were killed have left."""
        for job in self.folder.parent.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if job != self.folder and not any(_state(_parsed(path)[0]) for path in job.iterdir()):
                    shutil.rmtree(job)


def _parsed(path: Path) -> tuple[int, str]:
    process, _, word = path.read_text().partition(" ")
    return int(process), word


def _state(process: int) -> str:
    """The kernel's letter for what a process does; "" where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@contextlib.contextmanager
def limited_start(limits: Limits, rank: int | None, presence: Presence | None, call: str) -> Iterator[None]:
    """For a library's call in which all ranks meet before the watch is open. Kills this process, with a line that says
    why, where a rank of this host died, has been stopped for `timeout_s`, or the call takes longer than `start_s`."""
    if presence is not None:
        presence.announce()
    there = [str(presence.folder), str(presence.local_ranks)] if presence is not None else ["", "0"]
    shown = "" if rank is None else str(rank)
    words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), shown, call, *there]
    watching = subprocess.Popen([*words, str(limits.timeout_s), str(limits.start_s)], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        watching.kill()
        watching.wait()


def watch_start(
    process: int, rank: str, call: str, presence: Presence | None, timeout_s: float, start_s: float
) -> None:
    """The main loop of the watching process; returns when the rank's process is gone."""
    began, stopped_since = time.monotonic(), dict[int, float]()
    while os.getppid() == process:
        time.sleep(LOOK_S)
        now, faults = time.monotonic(), presence.faults() if presence is not None else {}
        stopped_since = {one: stopped_since.get(one, now) for one, what in faults.items() if what == "is stopped"}
        reason = next((f"rank {one} {what}" for one, what in faults.items() if one not in stopped_since), "")
        for one, since in stopped_since.items():
            if now - since > timeout_s:
                reason = f"rank {one} has been stopped for {timeout_s:g} s"
        if not reason and now - began > start_s:
            reason = f"the ranks did not meet within {start_s:g} s in {call}"
            reason += f"; {presence.describe_present()}" if presence is not None else ""
        if reason:
            reason = presence.first_reason(process, reason) if presence is not None else reason
            os.write(2, f"cocodiff: {f'[rank {rank}] ' if rank else ''}{reason}\n".encode())
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    process, rank, call, folder, local_ranks, timeout_s, start_s = sys.argv[1:]
    there = Presence(Path(folder), int(rank or 0), int(local_ranks)) if folder else None
    watch_start(int(process), rank, call, there, float(timeout_s), float(start_s))

"""The ranks of an MPI job that have started, and a time limit for calls in which all ranks meet before the watch is
open.

Until the watch is open (`health.py`), a rank that never starts would make the others wait for ever in MPI_Init. Ranks
of one host write their process numbers to a folder of the job, so that the others see which of them died, were stopped
or never started. A separate process looks at it, because MPI_Init lets no other Python thread run. It is this file run
as a program, so this file imports only the standard library. Before that process ends its rank, it writes the reason
there for the other ranks' processes.
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

# Variables that are the same on the ranks of one MPI job and differ between jobs, by launcher; the first set counts.
JOBS = (("PALS_APID",), ("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("I_MPI_HYDRA_UUID",))
LOOK_S = 0.25  # seconds between two looks


class Presence:
    """The folder in which the ranks of an MPI job on this host write their process numbers, one file per rank.

    It shows which of them have started or died. If a rank is ended by its watching process, the reason follows its
    number.
    """

    def __init__(self, folder: Path, rank: int, local_ranks: int) -> None:
        """Take the folder in which the job's ranks on this host write their process numbers. Nothing is written yet.

        Args:
            folder: the job's own, inside a folder that belongs to this user only.
            rank: this rank.
            local_ranks: number of the job's ranks on this host.
        """
        self.folder, self.rank, self.local_ranks = folder, rank, local_ranks

    @classmethod
    def of_job(cls, launch: Launch, environment: Mapping[str, str] | None = None) -> Presence | None:
        """Return the folder of an MPI launcher's job. Return None for other launches, or if rank or number of ranks is
        unknown.

        Args:
            environment: the variables that tell jobs apart; by default those of this process.
        """
        local_ranks = launch.local_size or launch.size
        if launch.kind != "mpi" or launch.rank is None or local_ranks is None:
            return None
        env = os.environ if environment is None else environment
        named = next((names for names in JOBS if all(name in env for name in names)), ())
        job = " ".join(env[name] for name in named) or str(os.getppid())
        word = hashlib.sha256(job.encode()).hexdigest()[:16]
        return cls(Path(tempfile.gettempdir()) / f"cocodiff-start-{os.geteuid()}" / word, launch.rank, local_ranks)

    def announce(self) -> None:
        """Write this rank's process number (PID) to its file, where the host's other ranks see if it lives. Remove the
        folders of this user's ended jobs.

        If the folder of all jobs' folders is not this user's alone, or cannot be written, there is no file. Errors then
        cannot say which rank died.
        """
        with contextlib.suppress(OSError):
            self.folder.parent.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                return
            self._clear_ended_jobs()
            self.folder.mkdir(exist_ok=True)
            self._write(str(os.getpid()))

    def first_reason(self, process: int, reason: str) -> str:
        """Return the reason why another rank of this host was ended before, else `reason`. Write it behind this rank's
        process number.

        The watching process calls this before it ends its rank, so that all ranks report the same reason.

        Args:
            process: number of this rank's process.
            reason: why this rank is about to be ended.
        """
        reason = next((word for _, word in self._entries().values() if word), reason)
        with contextlib.suppress(OSError):
            if self._is_ours():
                self._write(f"{process} {reason}")
        return reason

    def withdraw(self) -> None:
        """Remove this rank's file. It is called once the ranks have met, when the watch over connections replaces this
        one."""
        with contextlib.suppress(OSError):
            (self.folder / str(self.rank)).unlink(missing_ok=True)
            self.folder.rmdir()  # succeeds for the last rank

    def faults(self) -> dict[int, str]:
        """Return the ranks of this host that have died or are stopped: by number, a phrase that says which."""
        faults = dict.fromkeys(("", "Z", "X"), "died before the ranks had met")
        faults |= dict.fromkeys(("T", "t"), "is stopped")
        states = {rank: _state(process) for rank, (process, _) in sorted(self._entries().items())}
        return {rank: faults[state] for rank, state in states.items() if state in faults}

    def describe_present(self) -> str:
        """Return a phrase, for an error, that lists the ranks of this host that have started.

        Missing ranks cannot be named, since they left no process number.
        """
        there = sorted(self._entries())
        if len(there) < self.local_ranks:
            return f"of this host's {self.local_ranks} ranks there are {', '.join(map(str, there)) or 'none'}"
        there_are = f"all {self.local_ranks} ranks of this host are there"
        return f"{there_are}: one of them hangs, or one of another host is missing"

    def _write(self, content: str) -> None:
        """Write this rank's file, so that no other process sees a part of it."""
        whole = self.folder / f".{self.rank}"
        whole.write_text(content)
        whole.rename(self.folder / str(self.rank))

    def _entries(self) -> dict[int, tuple[int, str]]:
        """Return, by rank, the process number in its file and the reason why it was ended ("" if it was not)."""
        found: dict[int, tuple[int, str]] = {}
        with contextlib.suppress(OSError):
            if self._is_ours():
                for path in self.folder.iterdir():
                    if path.name.isdigit():
                        found[int(path.name)] = _parsed(path)
        return found

    def _is_ours(self) -> bool:
        """Return True if the folder that holds all jobs' folders belongs to this user, and no one else can write to
        it."""
        status = self.folder.parent.lstat()
        return status.st_uid == os.geteuid() and status.st_mode & 0o170022 == 0o040000

    def _clear_ended_jobs(self) -> None:
        """Remove the folders of this user's earlier jobs none of whose processes still exists."""
        for job in self.folder.parent.iterdir():
            with contextlib.suppress(OSError, ValueError):
                if job != self.folder and not any(_state(_parsed(path)[0]) for path in job.iterdir()):
                    shutil.rmtree(job)


def _parsed(path: Path) -> tuple[int, str]:
    """Return the process number in a rank's file, and the reason why that rank was ended ("" if it was not)."""
    process, _, word = path.read_text().partition(" ")
    return int(process), word


def _state(process: int) -> str:
    """Return the kernel's letter for the state of a process; "" if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


@contextlib.contextmanager
def limited_start(limits: Limits, rank: int | None, presence: Presence | None) -> Iterator[None]:
    """Limit the time of MPI_Init, in the `with` block: all ranks meet in it before the watch is open.

    This process is killed, with a line that gives the reason, if a rank of this host died or has been stopped for
    `timeout_s`. The same happens if the call takes longer than `start_s`. A separate process watches it.

    Args:
        rank: this rank, for the line; None if unknown.
        presence: the process numbers of this host's ranks; None if they are not known.
    """
    if presence is not None:
        presence.announce()
    there = [str(presence.folder), str(presence.local_ranks)] if presence is not None else ["", "0"]
    shown = "" if rank is None else str(rank)
    words = [sys.executable, "-I", "-S", __file__, str(os.getpid()), shown, *there]
    watching = subprocess.Popen([*words, str(limits.timeout_s), str(limits.start_s)], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        watching.kill()
        watching.wait()


def watch_start(process: int, rank: str, presence: Presence | None, timeout_s: float, start_s: float) -> None:
    """Run the main loop of the process that watches a rank during its start, and kills the rank if a limit is exceeded.

    Return when the rank's process has ended.

    Args:
        process: number of the rank's process.
        rank: for messages; "" if unknown.
        presence: the process numbers of this host's ranks; None if they are not known.
        timeout_s: longest time that a rank may be stopped.
        start_s: longest time of the call.
    """
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
            reason = f"the ranks did not meet within {start_s:g} s in MPI_Init"
            reason += f"; {presence.describe_present()}" if presence is not None else ""
        if reason:
            reason = presence.first_reason(process, reason) if presence is not None else reason
            os.write(2, f"cocodiff: {f'[rank {rank}] ' if rank else ''}{reason}\n".encode())
            os.kill(process, signal.SIGKILL)
            return


if __name__ == "__main__":
    process, rank, folder, local_ranks, timeout_s, start_s = sys.argv[1:]
    there = Presence(Path(folder), int(rank or 0), int(local_ranks)) if folder else None
    watch_start(int(process), rank, there, float(timeout_s), float(start_s))

"""Network namespaces without names: each lives as long as a process is in it or a descriptor of it is open.

So nothing remains when the process that made them dies, however it dies, and two emulations cannot collide.

`python -m cocodiff_studies.namespaces PROGRAM...` is a rank of an MPI launcher that enters its tile and then becomes
the program. The launcher starts all ranks in the same way; a rank finds its tile by its number in the launcher's
environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from cocodiff.comm.launch import detect
from cocodiff.config.errors import UserError
from cocodiff.jobs.children import die_with_parent

CLONE_NEWNET = 0x40000000
OWN = "/proc/thread-self/ns/net"
TILES = "COCODIFF_EMULATION_TILES"  # the paths of the tiles' namespaces, by rank


def _system(call: str, *arguments: int) -> None:
    """Call a function of the C library with integer arguments. Raise OSError if it returns anything but 0.

    Args:
        call: the function's name, such as "setns".
        arguments: its arguments.
    """
    if getattr(ctypes.CDLL(None, use_errno=True), call)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)


class Namespace:
    """An open network namespace of Linux, in which programs see only the network interfaces that are put there."""

    def __init__(self) -> None:
        """Make a new namespace. The calling thread stays in its own.

        Raise PermissionError without the right to make one.
        """
        home = os.open(OWN, os.O_RDONLY)
        try:
            _system("unshare", CLONE_NEWNET)
            self.descriptor = os.open(OWN, os.O_RDONLY)
            _system("setns", home, CLONE_NEWNET)
        finally:
            os.close(home)

    @property
    def path(self) -> str:
        """The file path by which other processes of the same user can enter the namespace, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def inode(self) -> int:
        """The inode number by which the kernel identifies the namespace."""
        return os.fstat(self.descriptor).st_ino

    def enter(self) -> None:
        """Move the calling thread into the namespace for good."""
        _system("setns", self.descriptor, CLONE_NEWNET)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread into the namespace for the `with` block, and back after it."""
        home = os.open(OWN, os.O_RDONLY)
        try:
            self.enter()
            yield
        finally:
            _system("setns", home, CLONE_NEWNET)
            os.close(home)

    def run(self, program: str, lines: Sequence[str]) -> None:
        """Run commands of `ip` or `tc` in the namespace, in one batch. Raise UserError with the program's message if
        one fails.

        Args:
            program: "ip" or "tc".
            lines: the commands, each without the program's name.
        """
        with self.inside():
            text = "\n".join(lines) + "\n"
            done = subprocess.run([program, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise UserError(f"cannot set the emulated network up: {program} says: {said}")

    def set(self, settings: dict[str, str]) -> None:
        """Write kernel settings of the namespace.

        Args:
            settings: values by path below /proc/sys/net.
        """
        with self.inside():
            for name, value in settings.items():
                Path("/proc/sys/net", name).write_text(value)

    def close(self) -> None:
        """Close the file descriptor by which this process holds the namespace."""
        os.close(self.descriptor)


def main(words: Sequence[str]) -> None:
    """Enter the network namespace of this rank's tile, and replace this process by a program.

    An MPI launcher starts this for each rank of an emulated machine.

    Args:
        words: the program and its arguments.
    """
    try:
        rank = detect().rank
    except UserError as error:
        raise SystemExit(f"cocodiff: {error}") from error
    if rank is None:
        raise SystemExit("cocodiff: the MPI launcher does not say which rank this is")
    die_with_parent(os.getppid())
    descriptor = os.open(os.environ[TILES].split(":")[rank], os.O_RDONLY)
    _system("setns", descriptor, CLONE_NEWNET)
    os.close(descriptor)
    os.execvp(words[0], list(words))

"""Compiled kernels in a file: whole and of this machine, or not taken."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cocodiff_sycl.find import Unavailable, cpu_features

DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Kept:
    """The file of a device's compiled kernels: a digest, then what `Library` saves.

    about: device, driver and lanes. The digest is of these, of this CPU's instructions and of the bytes, because a
    driver that is given a damaged program, or one for instructions that are not here, may end the process.
    """

    path: Path
    about: str

    def read(self) -> bytes | None:
        """What was kept, or None where there is nothing or not what was written here."""
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        digest, compiled = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        return compiled if compiled and digest == self._digest(compiled) else None

    def write(self, compiled: bytes) -> None:
        """Puts the file in place at once, so that no process reads half of it. Raises Unavailable."""
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            fresh.write_bytes(self._digest(compiled) + compiled)
            fresh.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise Unavailable(
                f"cannot write the kernels' cache {self.path.parent}: {error.strerror}; set COCODIFF_CACHE"
            ) from error

    def _digest(self, compiled: bytes) -> bytes:
        return hashlib.sha256(f"{self.about}\0{cpu_features()}\0".encode() + compiled).digest()

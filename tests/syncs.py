"""Files that are not on the disk yet."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class Syncs:
    """Which files this process has synced since they were last written, as far as it calls `sync` for `os.fsync`."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}  # of the last write, by the file's number
        self._sync = os.fsync

    def sync(self, descriptor: int) -> None:
        self._sync(descriptor)
        found = os.fstat(descriptor)
        self._times[found.st_ino] = found.st_mtime_ns

    def behind(self, paths: Iterable[Path]) -> list[str]:
        """Name the files that are not empty and were written since they were last synced, if ever."""
        files = [(path.name, path.stat()) for path in paths if path.is_file()]
        return sorted(name for name, of in files if of.st_size and self._times.get(of.st_ino) != of.st_mtime_ns)

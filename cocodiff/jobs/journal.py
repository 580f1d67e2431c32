"""What a job has finished so far, kept with its unfinished results, so that another start can go on.

A job is a list of batches (of slices, of prompts). Each replica adds a line to a journal of its own for every batch
whose results are on the disk, with checksums of these results and of the line itself. A damaged line is dropped, and so
is one whose results are no longer there: its batch is done again.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.config.files import flush, replace_text

PARTIAL = ".cocodiff.partial"  # the hidden folder of unfinished results, in that of results
FOLDER = ".progress"  # within the hidden one
_HEADER, _CLAIMS = "job.json", "claims"


class Entry(NamedTuple):
    """A finished batch. number: among the job's; size: its slices or prompts; rows: what is to be known of them; sums:
    checksums of their results."""

    number: int
    size: int
    rows: list[Any]
    sums: Sequence[int] = ()

    def line(self) -> bytes:
        """As it stands in a journal: its checksum, and itself."""
        data = json.dumps(self._asdict(), allow_nan=False).encode()
        return b"[%d, %b]\n" % (zlib.crc32(data), data)

    @classmethod
    def of_line(cls, line: bytes) -> Entry | None:
        """None for a damaged line: its batch counts as not done."""
        try:
            checksum, fields = json.loads(line)
            if checksum != zlib.crc32(json.dumps(fields).encode()):
                return None
            return cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None


class Kept(NamedTuple):
    """How much of a job is finished: `done` of `total` slices or prompts, as `unit` says."""

    done: int
    total: int
    unit: str

    def __str__(self) -> str:
        return f"{self.done} of {self.total} {self.unit}"


class Journal:
    """A replica's journal of one start."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def add(self, entry: Entry) -> None:
        """Returns when the line is on the disk. One of which a part was written is dropped by the next start."""
        line = entry.line()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())


class Reader:
    """Reads the journals of a folder, at each call what was added since the last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of each journal

    def entries(self) -> list[Entry]:
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + whole
            found += [entry for line in data[:whole].splitlines() if (entry := Entry.of_line(line)) is not None]
        return found


class Journals:
    """The folder of a job's journals in that of its unfinished results."""

    def __init__(self, results: Path) -> None:
        self.folder = results / FOLDER

    def begin(self, settings: Mapping[str, Any], total: int, unit: str, overwrite: bool) -> None:
        """settings: all that the results depend on; overwrite: whether they may replace those of an earlier run."""
        self.folder.mkdir()
        self._write({"settings": settings, "total": total, "unit": unit, "overwrite": overwrite})

    def expect(self, total: int) -> None:
        """What the job turns out to have."""
        header = self.header()
        if header is not None and header["total"] != total:
            self._write({**header, "total": total})

    def _write(self, header: Mapping[str, Any]) -> None:
        replace_text(self.folder / _HEADER, json.dumps(header, indent=1))

    def header(self) -> dict[str, Any] | None:
        """What `begin` was given; None where there is nothing to go on with."""
        try:
            found = json.loads((self.folder / _HEADER).read_text())
            known = {"settings": dict(found["settings"]), "total": int(found["total"]), "unit": str(found["unit"])}
            return {**found, **known}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def kept(self) -> Kept | None:
        """None where no batch is finished."""
        header, done = self.header(), sum(entry.size for entry in self.finished().values())
        return Kept(done, header["total"], header["unit"]) if header is not None and done else None

    def finished(self) -> dict[int, Entry]:
        """The finished batches by their numbers."""
        try:
            return {entry.number: entry for entry in Reader(self.folder).entries()}
        except OSError:
            return {}

    def keep(self, entries: Iterable[Entry]) -> None:
        """Goes on with these entries alone. Before any is added."""
        older = [*self.folder.glob("*.jsonl")]
        unfinished = self.folder / "kept.partial"
        unfinished.write_bytes(b"".join(entry.line() for entry in entries))
        flush(unfinished)
        unfinished.replace(self.folder / f"{time.time_ns()}-kept.jsonl")
        for path in older:
            path.unlink()

    def open_journal(self, name: str) -> Journal:
        """A journal; no two of a job have the same name."""
        return Journal(self.folder / f"{name}.jsonl")

    def open_claims(self) -> None:
        """Before any batch is claimed; the claims of an earlier start are void."""
        shutil.rmtree(self.folder / _CLAIMS, ignore_errors=True)
        (self.folder / _CLAIMS).mkdir(parents=True)

    def claim(self, number: int) -> bool:
        """Whether a batch is the caller's now: nobody else has claimed it."""
        try:
            os.close(os.open(self.folder / _CLAIMS / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        """Nothing is left to go on with."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

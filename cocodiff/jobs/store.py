"""A store of what a job has finished so far, beside its unfinished results, so that another start can go on.

A job is a list of units of work: batches of slices, prompts, trials. What a unit makes is one file, which is written
beside and renamed into place. A unit is done when its file is there and can be read; one whose file is damaged or gone
is done again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.config.files import appearing, flush, replace_text

PARTIAL = ".cocodiff.partial"  # the hidden folder of unfinished results, in that of results
FOLDER = ".progress"  # within the hidden one
ROWS = "rows"
Made = Iterable[tuple[str, Any]]  # what a unit has made: arrays by their names, and lists of plain data called ROWS
_HEADER = "job.json"


class Kept(NamedTuple):
    """The part of a job that is finished."""

    done: int  # slices, samples or prompts; 0 where units are finished that count as none, such as those of a test
    total: int
    unit: str  # "slices", "samples" or "prompts"

    def __str__(self) -> str:
        return f"{self.done} of {self.total} {self.unit}"


class Store:
    """The files of a job's units, by their numbers, in the folder of its unfinished results."""

    def __init__(self, results: Path) -> None:
        self.folder = results / FOLDER

    def begin(self, settings: Mapping[str, Any], counts: Sequence[int], total: int, unit: str, overwrite: bool) -> None:
        """Write what the job is.

        settings: all that the results depend on
        counts: the slices or prompts (`unit`) of each unit of work
        total: how many of these the job has as far as is known
        overwrite: True if they may replace those of an earlier run
        """
        self.folder.mkdir()
        header = {"settings": settings, "counts": [*counts], "total": total, "unit": unit, "overwrite": overwrite}
        self._write(header)

    def expect(self, total: int) -> None:
        """Write how many slices or prompts the job turns out to have."""
        header = self.header()
        if header is not None and header["total"] != total:
            self._write({**header, "total": total})

    def _write(self, header: Mapping[str, Any]) -> None:
        replace_text(self.folder / _HEADER, json.dumps(header, indent=1))

    def header(self) -> dict[str, Any] | None:
        """Return what `begin` was given; None where there is nothing to go on with."""
        try:
            found = json.loads((self.folder / _HEADER).read_text())
            known = {"settings": dict(found["settings"]), "total": int(found["total"]), "unit": str(found["unit"])}
            return {**found, **known, "counts": [*map(int, found["counts"])]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def kept(self) -> Kept | None:
        """Return how much is finished; None where no unit is."""
        header = self.header()
        if header is None:
            return None
        done = [header["counts"][number] for number in self.finished() if number < len(header["counts"])]
        return Kept(sum(done), header["total"], header["unit"]) if done else None

    @property
    def is_damaged(self) -> bool:
        """True if units are there, or journals of an older version, without a record of what they belong to."""
        return self.header() is None and (bool(self.finished()) or any(self.folder.glob("*.jsonl")))

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.npz"))

    def finished(self) -> set[int]:
        """Return the numbers of the units that are done."""
        return {int(path.stem) for path in self.folder.glob("*.npz")}

    def add(self, number: int, made: Made) -> None:
        """Save what a unit has made, one after the other; return when it is on the disk."""
        from numpy.lib.format import write_array

        rows: list[Any] = []
        with appearing(self._path(number)) as unfinished:
            with zipfile.ZipFile(unfinished, "w") as file:
                for name, one in made:
                    if name == ROWS:
                        rows += one
                        continue
                    with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                        write_array(member, one, allow_pickle=False)
                file.writestr(ROWS, json.dumps(rows))
            flush(unfinished)

    def rows(self, numbers: Iterable[int]) -> list[Any]:
        """Return the rows of some units in this order."""
        found = []
        for number in numbers:
            with self.open(number) as unit:
                found += json.loads(unit[ROWS])
        return found

    def open(self, number: int) -> Any:
        """Return a unit's arrays by their names, which are read when they are asked for, as a context manager."""
        import numpy as np

        return np.load(self._path(number), allow_pickle=False)

    def is_whole(self, number: int, holds: Callable[[int], bool] = lambda number: True) -> bool:
        """Return True if a unit's file can be read, by its checksums, and what lies elsewhere of it (`holds`)."""
        try:
            with zipfile.ZipFile(self._path(number)) as file:
                return file.testzip() is None and holds(number)
        except Exception:  # zipfile, numpy and each format raise kinds of their own for a damaged file
            return False

    def drop(self, number: int) -> None:
        """Remove a unit, which is to be done again."""
        self._path(number).unlink()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.npz"

    def open_claims(self) -> str:
        """Return the name of a new folder of claims; those of an earlier start are void."""
        name = f"claims-{time.time_ns()}"
        (self.folder / name).mkdir()
        return name

    def claim(self, claims: str, number: int) -> bool:
        """Return True if a unit is the caller's now: nobody else has claimed it."""
        try:
            os.close(os.open(self.folder / claims / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        """Nothing is left to go on with."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

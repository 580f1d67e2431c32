"""The store of a job's finished units of work, from which another start of the job continues.

A job is a list of numbered units: batches of slices, prompts, trials. The results of a unit are one file, which is
written under another name and then renamed. A unit is done if its file exists and can be read. A unit with a damaged
file is done again.
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

PARTIAL = ".cocodiff.partial"  # hidden folder of unfinished results, in the folder of results
FOLDER = ".progress"  # folder of the store, in PARTIAL
ROWS = "rows"  # name of a unit's plain data
Made = Iterable[tuple[str, Any]]  # a unit's results: pairs of a name and an array, or of ROWS and a list of plain data
_HEADER = "job.json"  # file of what `Store.begin` was given


class KeptCount(NamedTuple):
    """The count of what a job has finished, for messages such as "12 of 80 slices"."""

    done: int  # number of finished slices, samples or prompts; units of work that belong to a test count 0
    total: int  # number of slices, samples or prompts in the whole job
    unit: str  # word for what is counted: "slices", "samples" or "prompts"

    def __str__(self) -> str:
        """Return the count as text, such as "12 of 80 slices"."""
        return f"{self.done} of {self.total} {self.unit}"


class Store:
    """The files of a job's finished units of work, one .npz file a unit, from which an interrupted job continues.

    A unit is a batch of slices, a prompt or a trial. It has a number from 0 on.
    """

    def __init__(self, results: Path) -> None:
        """Name the store's folder. Nothing is read or written.

        results: folder of the job's unfinished results, in which the store's folder is
        """
        self.folder = results / FOLDER

    def begin(self, settings: Mapping[str, Any], counts: Sequence[int], total: int, unit: str, overwrite: bool) -> None:
        """Make the store's folder and write the description of the job, at the job's first start.

        Args:
            settings: everything that the results depend on, by name
            counts: number of slices or prompts in each unit of work
            total: number of slices or prompts in the whole job, as far as it is known
            unit: what is counted: "slices", "samples" or "prompts"
            overwrite: True if the results may replace those of an earlier run
        """
        self.folder.mkdir()
        header = {"settings": settings, "counts": [*counts], "total": total, "unit": unit, "overwrite": overwrite}
        self._write(header)

    def expect(self, total: int) -> None:
        """Write the total of the job's slices or prompts into its description, when it becomes known.

        Before `begin` has written a description, nothing changes.
        """
        header = self.header()
        if header is not None and header["total"] != total:
            self._write({**header, "total": total})

    def _write(self, header: Mapping[str, Any]) -> None:
        """Replace the file that describes the job. `header` has the arguments of `begin` by name."""
        replace_text(self.folder / _HEADER, json.dumps(header, indent=1))

    def header(self) -> dict[str, Any] | None:
        """Return the description of the job, the arguments of `begin` by name. None if it is missing or damaged."""
        try:
            found = json.loads((self.folder / _HEADER).read_text())
            known = {"settings": dict(found["settings"]), "total": int(found["total"]), "unit": str(found["unit"])}
            return {**found, **known, "counts": [*map(int, found["counts"])]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def kept(self) -> KeptCount | None:
        """Return how many slices or prompts are finished. None if no unit of work is, or the job is not described."""
        header = self.header()
        if header is None:
            return None
        done = [header["counts"][number] for number in self.finished() if number < len(header["counts"])]
        return KeptCount(sum(done), header["total"], header["unit"]) if done else None

    @property
    def is_damaged(self) -> bool:
        """True if there are finished units of work, or files of an older version, but no readable description."""
        return self.header() is None and (bool(self.finished()) or any(self.folder.glob("*.jsonl")))

    @property
    def bytes(self) -> int:
        """The size of the files of all finished units of work, in bytes."""
        return sum(path.stat().st_size for path in self.folder.glob("*.npz"))

    def finished(self) -> set[int]:
        """Return the numbers of the units of work that are finished."""
        return {int(path.stem) for path in self.folder.glob("*.npz")}

    def add(self, number: int, made: Made) -> None:
        """Save the results of a unit of work as its file, and return when they are on the disk.

        Args:
            number: number of the unit
            made: its results in the order in which they are made: pairs of a name and an array, or of ROWS and a list
                of plain data. An iterator holds only one array in memory at a time
        """
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
        """Return the plain data of some finished units of work as one list.

        numbers: the units' numbers, in whose order their rows are joined
        """
        found = []
        for number in numbers:
            with self.open(number) as unit:
                found += json.loads(unit[ROWS])
        return found

    def open(self, number: int) -> Any:
        """Open the file of a finished unit of work, and return it as a context manager.

        It is also a mapping from names of results to arrays, which are read on access.
        """
        import numpy as np

        return np.load(self._path(number), allow_pickle=False)

    def array(self, number: int, name: str) -> Any:
        """Return an array of a finished unit of work, read from its file.

        Args:
            number: number of the unit
            name: name of the array, as given to `add`
        """
        with self.open(number) as unit:
            return unit[name]

    def is_whole(self, number: int, holds: Callable[[int], bool] = lambda number: True) -> bool:
        """Return True if the file of a unit of work is undamaged by its checksums, and `holds(number)` is True.

        Args:
            number: number of the unit
            holds: function of the number that is True if the unit's results outside the store are intact
        """
        try:
            with zipfile.ZipFile(self._path(number)) as file:
                return file.testzip() is None and holds(number)
        except Exception:  # for damaged files zipfile, numpy and other formats raise many types
            return False

    def drop(self, number: int) -> None:
        """Remove the file of a unit of work, such as a damaged one, so that the unit is done again."""
        self._path(number).unlink()

    def _path(self, number: int) -> Path:
        """Return the path of the file of unit `number`."""
        return self.folder / f"{number}.npz"

    def open_claims(self) -> str:
        """Make a new folder in which processes claim units of work, so that none is done twice. Return its name.

        It is called at each start of the job, since claims of an earlier start no longer count.
        """
        name = f"claims-{time.time_ns()}"
        (self.folder / name).mkdir()
        return name

    def claim(self, claims: str, number: int) -> bool:
        """Claim a unit of work for the caller and return True. Return False if another process has claimed it.

        Args:
            claims: result of `open_claims`
            number: number of the unit
        """
        try:
            os.close(os.open(self.folder / claims / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        """Remove the store with all finished units of work, after which a job has nothing to continue from."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

"""What an earlier start has left, as far as it is whole: the files of results, and what was written of finished slices.
A kill may have left half of it, a purge of old files a part, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cocodiff_eval.formats.volume import VolumeFile

from cocodiff.commands.journal import Entry
from cocodiff.commands.restore_stack import Results
from cocodiff.commands.samples import Batch, PartsOfSettings
from cocodiff.commands.session import Session
from cocodiff.commands.tasks import Task, result_files

Sizes = dict[str, int]


class KeptSlices:
    """Which finished batches of slices are still there as they were written."""

    def __init__(self, session: Session, tasks: Sequence[Task], batches: Sequence[Batch], results: Results) -> None:
        self._session, self._tasks, self._batches, self._results = session, tasks, batches, results
        self._created = CreatedFiles(session.job.output.journals.folder)

    def has(self, entry: Entry) -> bool:
        """entry: of the queue's batches; those after the results' are trials of settings for a bound on quality."""
        job, (trial, number) = self._session.job, divmod(entry.number, len(self._batches))
        batch, presets = self._batches[number], list(job.presets)
        if trial:
            assert job.quality is not None, "without a bound there are no trials"
            settings = [*job.quality.rungs]
            tried = PartsOfSettings(job.output.journals.folder, settings).of[settings[trial - 1]]
            return tried.holds(batch, settings[trial - 1 : trial])
        if not batch.whole:
            modes = [*self._session.engines] if batch.compared and job.quality is None else presets
            return self._results.parts.holds(batch, modes)
        task = self._tasks[batch.task]
        if not all(map(self._created.has, result_files(task, presets, self._results.folder, batch.of).values())):
            return False
        try:
            return self._results.checksums(task, batch, presets) == entry.sums
        except Exception:  # each format raises kinds of its own for a damaged file
            return False


class CreatedFiles:
    """Which files of results an earlier start has made. What stands in no record, has become smaller or
    cannot be read is made again.

    For each file of results, by its name, the record has the size in bytes of what `VolumeFile.create` made: of the
    file, or of every file below it.
    """

    def __init__(self, folder: Path) -> None:
        """folder: of the job's journals, where the record lies."""
        self._path = folder / "created.json"
        self._sizes: dict[str, Sizes] = {}
        self._whole: dict[str, bool] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            found = json.loads(self._path.read_text())
            self._sizes = {name: {str(part): int(size) for part, size in of.items()} for name, of in found.items()}

    def has(self, file: VolumeFile) -> bool:
        name = file.path.name
        if name not in self._whole:
            self._whole[name] = name in self._sizes and _is_whole(file, self._sizes[name])
        return self._whole[name]

    def create(self, files: Iterable[VolumeFile]) -> None:
        """Makes those that there are not."""
        missing = [file for file in files if not self.has(file)]
        for file in missing:
            self._sizes.pop(file.path.name, None)
        self._write()
        for file in missing:
            if file.path.is_dir() and not file.path.is_symlink():
                shutil.rmtree(file.path)
            else:
                file.path.unlink(missing_ok=True)
            file.create()
            self._sizes[file.path.name] = {"": 0, **_sizes(file.path)}
        self._write()

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".partial")
        unfinished.write_text(json.dumps(self._sizes))
        unfinished.replace(self._path)


def _is_whole(file: VolumeFile, sizes: Sizes) -> bool:
    try:
        if any((file.path / part).stat().st_size < size for part, size in sizes.items()):
            return False
        if [*sizes] != [""] or file.path.is_file():  # else there is nothing before a slice is written
            file.read(0)
    except Exception:  # each format raises kinds of its own for a damaged file
        return False
    return True


def _sizes(path: Path) -> Sizes:
    parts = [path] if path.is_file() else [part for part in path.rglob("*") if part.is_file()]
    return {"" if part == path else str(part.relative_to(path)): part.stat().st_size for part in parts}

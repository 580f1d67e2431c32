"""The files of results that an earlier start has made, as far as they are whole: a kill may have left half of them, a
purge of old files a part, or none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cocodiff_eval.formats.volume import VolumeFile

Sizes = dict[str, int]


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

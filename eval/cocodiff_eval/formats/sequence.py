"""Sequences of TIFF files, a slice each: a folder, or a pattern such as `scan/recon_*.tif`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from cocodiff.errors import UserError
from cocodiff.files import is_there
from cocodiff_eval.formats.tiff import StackFile, open_tiff
from cocodiff_eval.formats.tiff_metadata import read_metadata
from cocodiff_eval.formats.volume import (
    Metadata,
    RawVolume,
    VolumeFile,
    check_file,
    format_shape,
    is_folder,
    one_line,
    quiet_libraries,
    reading,
)

TIFF_SUFFIXES = (".tif", ".tiff")
_NUMBER = re.compile(r"^(?P<before>.*?)(?P<number>\d+)(?P<after>\D*)$", re.DOTALL)


def is_pattern(path: str) -> bool:
    """Whether a path names several files, and none of that very name exists."""
    return any(sign in path for sign in "*?[") and "\0" not in path and not is_there(path)


def holds_slices(path: str) -> bool:
    """Whether a path names a folder that has TIFF files in it."""
    try:
        return is_folder(path) and bool(_slices_in(path))
    except PermissionError:
        return False


def open_sequence(path: str) -> RawVolume:
    """The TIFF files of a folder or a pattern as one stack, in the order of their numbers; reads headers only.

    Raises UserError that names the file: for a number that is missing or comes twice, for files of several names, and
    for a file that holds something else than one slice of the first one's shape and type.
    """
    found = _listed(path)
    numbers = [number for number, _ in found]
    files = [file for _, file in found]
    if numbers:
        _check_numbers(path, numbers, files)
    first = open_tiff(files[0])
    for file in files:
        _check_like(file, files[0], first)

    def read(index: int) -> np.ndarray:
        return open_tiff(files[index]).reader(0)

    stem = _stem(path, files[0])
    metadata = replace(first.metadata, kind="sequence", details={**first.metadata.details, "files": files})
    return RawVolume(path, stem, (len(files), *first.shape[1:]), first.dtype, 3, read, metadata)


def _slices_in(folder: str) -> list[Path]:
    return [one for one in Path(folder).iterdir() if one.suffix.lower() in TIFF_SUFFIXES and one.name[0] != "."]


def _listed(path: str) -> list[tuple[int, str]]:
    """Numbers and files in order."""
    if is_pattern(path):
        folder, parts = Path(), [*Path(path).parts]
        while len(parts) > 1 and is_there(folder / parts[0]):  # signs in the names of folders are their own
            folder /= parts.pop(0)
        try:
            rest = str(Path(*parts))
            fitting = [*folder.glob(rest)] or [*folder.glob(rest.replace("[", "[[]"))]
            files = [one for one in fitting if not one.is_dir()]
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"{path}: {one_line(error)}; give a pattern such as scan/recon_*.tif") from error
        wrong = next((one for one in files if one.suffix.lower() not in TIFF_SUFFIXES), None)
        if wrong is not None:
            raise UserError(f"{path}: {wrong} is no TIFF (.tif, .tiff); only those may be given as one stack")
        if not files:
            raise UserError(f"{path}: no such file; no name fits this pattern (quoted, so that the shell leaves it?)")
    else:
        files = _slices_in(path)
        if not files:
            raise UserError(f"{path}: is a directory; name the files in it, e.g. {Path(path) / '*.png'}")
    families: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for file in files:
        match = _NUMBER.match(file.name.removesuffix(file.suffix))
        key = (match["before"], match["after"]) if match else (file.stem, "")
        families[key].append((int(match["number"]) if match else 0, str(file)))
    if len(families) > 1:
        names = sorted(families, key=lambda name: len(families[name]))
        odd, usual = families[names[0]][0][1], "*".join(names[-1])
        pattern = Path(files[0]).parent / f"{usual}{files[0].suffix}"
        raise UserError(
            f"{path}: {Path(odd).name} has another name than {usual}{files[0].suffix}, so they are no one stack; give "
            f"the files of one, as '{pattern}'"
        )
    return sorted(next(iter(families.values())))


def _check_numbers(path: str, numbers: Sequence[int], files: Sequence[str]) -> None:
    steps = [after - before for before, after in pairwise(numbers)]
    if not steps:
        return
    if (least := min(steps)) == 0:
        twice = steps.index(0)
        raise UserError(f"{path}: {files[twice]} and {files[twice + 1]} have the same number; remove or rename one")
    for index, step in enumerate(steps):
        if step != least:
            name = Path(files[index]).name
            match = _NUMBER.match(Path(name).stem)
            assert match is not None
            missing = str(numbers[index] + least).zfill(len(match["number"]))
            suffix = Path(name).suffix
            raise UserError(
                f"{path}: {match['before']}{missing}{match['after']}{suffix} is missing after {name}: put it there, or "
                "give the parts before and after it as sequences of their own"
            )


def _check_like(file: str, first_file: str, first: RawVolume) -> None:
    import tifffile

    check_file(file)
    damaged = reading(f"{file}: not a readable TIFF", "save it again")
    with quiet_libraries(), damaged, tifffile.TiffFile(file) as tiff:
        page = tiff.pages.first
        shape, dtype, pages, white = page.shape, page.dtype, len(tiff.pages), page.photometric == 0
    if pages != 1 or first.ndim != 2:
        raise UserError(f"{file}: holds {pages} slices, and a file of a sequence holds one; give it by itself")
    if white is not (first.metadata.details["photometric"] == 0):
        raise UserError(f"{file}: 0 is white in it or in {first_file}, not in both; save all slices in one way")
    if shape[:2] != first.shape[1:] or dtype is None or dtype.newbyteorder("=") != first.dtype:
        raise UserError(
            f"{file}: holds {format_shape(shape)} voxels of {dtype}, and {first_file} {format_shape(first.shape[1:])} "
            f"of {first.dtype}; the slices of a stack are alike"
        )


def _stem(path: str, first: str) -> str:
    """The name that files of a pattern have in common, else that of their folder."""
    if is_pattern(path):
        match = _NUMBER.match(Path(first).stem)
        common = (match["before"] if match else Path(first).stem).strip("_-. ")
        return common or Path(first).resolve().parent.name
    return Path(path).resolve().name


class SequenceFiles(VolumeFile):
    """A folder of TIFF files, a slice each, with the names and the metadata of the input's where it is a sequence."""

    def _create(self) -> None:
        self.path.mkdir()

    def write(self, index: int, image_YX: np.ndarray) -> None:
        final = self._file(index)
        hidden = self.path / f".{final.path.name}.partial"
        unfinished = replace(final, path=hidden, metadata=self._metadata_of(index))
        unfinished.create()
        unfinished.write(0, image_YX)
        unfinished.path.replace(final.path)

    def read(self, index: int) -> np.ndarray:
        return open_tiff(str(self._file(index).path)).reader(0).astype(self.dtype)

    @property
    def _first(self) -> int:
        return self.region.start[0] if self.region is not None else 0

    @cached_property
    def _sources(self) -> Sequence[str]:
        of_sequence = self.metadata.kind == "sequence"
        return self.metadata.details["files"][self._first :] if of_sequence else ()

    def _metadata_of(self, index: int) -> Metadata:
        """The source file's own: description and date may differ from slice to slice."""
        import tifffile

        if not self._sources:
            return self.metadata
        with quiet_libraries(), tifffile.TiffFile(self._sources[index]) as tiff:
            return read_metadata(tiff)

    def _file(self, index: int) -> StackFile:
        if self._sources:
            name = Path(self._sources[index]).name
        else:
            width = max(5, len(str(self._first + self.shape[0])))
            name = f"slice_{self._first + index:0{width}}.tif"
        return StackFile(
            self.path / name, (1, *self.shape[1:]), self.dtype, 2, self.metadata, self.provenance, self.region
        )

"""TIFF files, which hold one slice or a stack of pages, and sequences of them, which hold a slice each.

A sequence is given as a folder, or as a pattern such as `scan/recon_*.tif`.
"""

from __future__ import annotations

import glob
import math
import os
import re
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from decimal import Decimal
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import is_folder, is_there
from cocodiff.config.grouping import by_key
from cocodiff.config.packages import hide_broken
from cocodiff_eval.data.axes import count_leading
from cocodiff_eval.data.tiff_metadata import ORIENTATION, read_metadata, tiff_options, traits_of_scan
from cocodiff_eval.data.volume import (
    Metadata,
    NewVolume,
    Stack,
    as_volume_shape,
    check_file,
    check_memory,
    format_shape,
    quiet_libraries,
    reading,
    same_channels,
    start_of,
)


def tifffile_library() -> Any:
    """Import and return tifffile. A broken imagecodecs is hidden from it, as it reads most files without."""
    hide_broken("imagecodecs")
    return import_module("tifffile")


def open_tiff(file: str) -> Stack:
    """Open a TIFF file as a volume. Voxels are not read yet, except from a colour image whose channels are equal.

    Raise UserError for damaged files, for colour, and for images of different shapes or dtypes in one file.
    """
    tifffile = tifffile_library()
    damaged = reading(f"{file}: not a readable TIFF", "save it again")
    with quiet_libraries() as messages, damaged, tifffile.TiffFile(file) as tiff:
        series = list(tiff.series)
        planes = [page for one in series for page in one.pages] if tiff.is_ome else []
        missing = [number for number, page in enumerate(planes) if page is None]
        metadata = read_metadata(tiff) if series else Metadata()
    if missing:
        told = "; ".join([f"{len(missing)} planes, slice {missing[0]} the first", *messages[:1]])[:200]
        raise UserError(
            f"{file}: its OME-XML names what is not there ({told}); put all its files here, or save it again"
        )
    # If the chain of pages breaks off, tifffile only logs it, and gives the slices before that.
    broken = [text for text in messages if re.search("invalid|failed|corrupt", text) and "GDAL_NODATA" not in text]
    if broken:
        raise UserError(f"{file}: a damaged TIFF, cut short perhaps ({broken[0][:120]}); copy or save it again")
    if not series:
        raise UserError(f"{file}: a TIFF without images; save it again")
    check_samples(file, [one.keyframe for one in series])
    shapes = {(one.shape, one.dtype) for one in series}
    if len(shapes) > 1:
        listed = ", ".join(sorted(format_shape(shape) for shape, _ in shapes)[:4])
        raise UserError(f"{file}: holds images of different shapes or dtypes ({listed}); save each as its own file")
    first = series[0]
    if first.dtype is None:
        raise UserError(f"{file}: the TIFF's sample type is unknown; save it as 8 or 16 bit or as float32")
    # NumPy has two names for integers of 64 bits, and Zarr's library knows only one of them.
    stem, dtype = Path(file).stem, np.dtype(first.dtype.newbyteorder("=").str)
    # A stack of 3 or 4 slices, saved without saying so, is marked as the planes of one colour image (SYX); colour
    # images themselves come with their channels interleaved (YXS).
    if "S" in first.axes and (first.axes != "SYX" or len(series) > 1):
        if first.axes != "YXS" or len(series) > 1:
            raise UserError(f"{file}: a stack of colour images {format_shape(first.shape)}; save it as grey")
        check_memory(file, first.shape, dtype.itemsize)
        image_YX = same_channels(_TiffReader(file, first.shape).whole(), file)
        volume_shape = as_volume_shape(image_YX.shape, file, dtype.itemsize)
        return Stack(file, stem, volume_shape, dtype, 2, lambda index: image_YX, metadata)
    axes, shape = str(first.axes), tuple(first.shape)
    if len(series) > 1:  # pages appended one by one
        if len(shape) != 2:
            raise UserError(f"{file}: holds {len(series)} stacks; save each as a file of its own")
        axes, shape = f"I{axes}", (len(series), *shape)
    if len(shape) > 3:  # ImageJ and OME hyperstacks carry axes of length 1
        axes = "".join(axis for axis, side in zip(axes, shape, strict=True) if side > 1)
        shape = tuple(side for side in shape if side > 1)
    count_leading(axes, shape, file)
    volume_shape = as_volume_shape(shape, file, dtype.itemsize)
    if first.dataoffset is None and sum(len(one.pages) for one in series) != volume_shape[0]:
        check_memory(file, volume_shape, dtype.itemsize, working=0)  # one compressed volume is read as a whole
    return Stack(file, stem, volume_shape, dtype, len(shape), _TiffReader(file, volume_shape).read, metadata)


def check_samples(file: str, pages: Sequence[Any]) -> None:
    """Raise UserError unless all pages of a TIFF file have one photometric interpretation, and it is grey or RGB.

    Samples of others, such as a palette's indices, are no intensities. Callers check everything else about colours.

    Args:
        file: the file, for the error.
        pages: pages of tifffile.
    """
    kinds = {int(page.photometric): getattr(page.photometric, "name", "unknown") for page in pages}
    if len(kinds) > 1 or max(kinds) > 2:  # min is white, min is black, RGB
        raise UserError(
            f"{file}: samples of photometric interpretation {', '.join(kinds.values())}, not all intensities of one "
            "kind; save it as grey (8 or 16 bit; in ImageJ after Image > Lookup Tables > Grays)"
        )


class _TiffReader:
    """A reader of a TIFF file's slices: page by page if pages are slices, else from a memory map, else all at once.

    All slices are read at once from a single compressed volume. Each process opens the file for itself. Ranks forked
    after the input was checked would otherwise share one file position and read each other's bytes.
    """

    def __init__(self, file: str, shape: tuple[int, ...]) -> None:
        """Prepare to read a file as `shape`, [N, Y, X]. The file is opened at the first read."""
        self.file, self.shape = file, shape
        self.process = 0
        self.series: list[Any] = []
        self.pages: list[Any] = []
        self.volume: np.ndarray | None = None

    def _open(self) -> None:
        """Open the file unless this process has done so."""
        if self.process != os.getpid():
            tiff = tifffile_library().TiffFile(self.file)
            weakref.finalize(self, tiff.close)
            self.series = list(tiff.series)
            self.pages = [page for one in self.series for page in one.pages]
            self.process = os.getpid()

    def whole(self) -> np.ndarray:
        """Return the whole first image series of the file, as a memory map if the file allows it."""
        with quiet_libraries(), self._errors("its image"):
            self._open()
            first = self.series[0]
            for page in first.pages if first.dataoffset is None else ():
                _check_segments(page)
            return np.asarray(first.asarray(out="memmap" if first.dataoffset is not None else None))

    def read(self, index: int) -> np.ndarray:
        """Return slice `index`, [Y, X]."""
        with quiet_libraries(), self._errors(f"slice {index}"):
            if self.volume is None:
                self._open()
                if len(self.pages) == self.shape[0]:
                    _check_segments(self.pages[index])
                    return np.asarray(self.pages[index].asarray()).reshape(self.shape[1:])
                self.volume = self.whole().reshape(self.shape)
            return np.asarray(self.volume[index])

    def _errors(self, what: str) -> AbstractContextManager[None]:
        """Return a context that turns errors of reading, such as damaged data or a missing codec, into a UserError.

        Args:
            what: what cannot be read, such as "slice 3".
        """
        others = {"imagecodecs": "save it uncompressed"}
        return reading(f"{self.file}: {what} cannot be read", "the file may be damaged", others)


def _check_segments(page: Any) -> None:
    """Raise ValueError for strips or tiles of a TIFF page that are not stored. They would be read as 0."""
    if page.is_contiguous:
        return
    count = math.prod(page.chunked)
    there = sum(1 for start, size in zip(page.dataoffsets, page.databytecounts, strict=False) if start and size)
    if there < count:
        raise ValueError(f"{count - there} of {count} strips or tiles of page {page.index} are not there")


def write_tiff(new: NewVolume) -> None:
    """Write a result as a TIFF, slice after slice; uncompressed unless it is sparse. A large one becomes a BigTIFF."""
    tifffile = tifffile_library()
    big = math.prod(new.shape) * new.dtype.itemsize > 2**32 - 2**25
    opening, options = tiff_options(new)
    options |= {"compression": "zlib"} if new.sparse else {}
    with quiet_libraries(), tifffile.TiffWriter(new.path, bigtiff=big, **opening) as writer:
        writer.write(new.slices(), shape=new.stored_shape, dtype=new.dtype, **options)


TIFF_SUFFIXES = (".tif", ".tiff")


class Slice(NamedTuple):
    """A file of a sequence, with its name cut at the number that counts the files."""

    number: Decimal  # 0 for a name without a number
    file: Path  # the file
    before: str  # the file's name before the digits
    digits: str  # the number as written; "" for a name without one
    after: str  # the file's name after the digits, without its suffix

    def name(self, digits: str) -> str:
        """Return the file's name with other digits in the number's place."""
        return f"{self.before}{digits}{self.after}{self.file.suffix}"


def is_pattern(path: str) -> bool:
    """Return True if a path is a pattern of file names. A file that has that very name is no pattern."""
    return any(sign in path for sign in "*?[") and "\0" not in path and not is_there(path)


def holds_slices(path: str) -> bool:
    """Return True if a path is a folder that has TIFF files in it."""
    try:
        return is_folder(path) and bool(_slices_in(path))
    except PermissionError:
        return False


def open_sequence(path: str) -> Stack:
    """Open the TIFF files of a folder or a pattern as one stack, in the order of their numbers. Only headers are read.

    A remark names the first file that has another voxel size, date, software or description than the first one.

    Raise UserError, naming the file, for a number that is missing or occurs twice, and for files of several naming
    schemes. Raise it also for a file that does not hold exactly one slice of the first one's shape and dtype.
    """
    slices = _listed(path)
    _check_numbers(path, slices)
    files = [str(one.file) for one in slices]
    first = open_tiff(files[0])
    traits, remarks = [_check_like(file, files[0], first) for file in files], [*first.metadata.remarks]
    if odd := next((place for place, one in enumerate(traits) if one != traits[0]), 0):
        words = " and ".join(word for word, value in traits[odd].items() if value != traits[0][word])
        remarks.append(f"{files[odd]}: another {words} than {files[0]} has: they may be slices of two scans")

    def read(index: int) -> np.ndarray:
        return open_tiff(files[index]).reader(0)

    details = {**first.metadata.details, "files": files}
    metadata = replace(first.metadata, kind="sequence", details=details, remarks=remarks)
    return Stack(path, _stem(path, slices[0]), (len(files), *first.shape[1:]), first.dtype, 3, read, metadata)


def _slices_in(folder: str) -> list[Path]:
    """Return the TIFF files in a folder, in any order."""
    return [one for one in Path(folder).iterdir() if one.suffix.lower() in TIFF_SUFFIXES and one.name[0] != "."]


def _matching(path: str) -> list[Path]:
    """Return the TIFF files of a folder or a pattern. Raise UserError if there are none, or if the pattern fits other
    files."""
    if is_pattern(path):
        folder, parts = Path(), [*Path(path).parts]
        while len(parts) > 1 and is_there(folder / parts[0]):  # an existing folder's name is no pattern
            folder /= parts.pop(0)
        find = partial(glob.glob, root_dir=folder, recursive=True)
        rest = str(Path(*parts))
        files = [folder / one for one in find(rest) or find(rest.replace("[", "[[]")) if not (folder / one).is_dir()]
        wrong = next((one for one in files if one.suffix.lower() not in TIFF_SUFFIXES), None)
        if wrong is not None:
            raise UserError(f"{path}: {wrong} is no TIFF (.tif, .tiff); only those may be given as one stack")
        if not files:
            raise UserError(f"{path}: no such file; no name fits this pattern (quoted, so that the shell leaves it?)")
    else:
        files = _slices_in(path)
        if not files:
            raise UserError(f"{path}: is a directory; name the files in it, e.g. {Path(path) / '*.png'}")
    return files


def _listed(path: str) -> list[Slice]:
    """Return the files of one stack, cut at their numbers, in the order of these.

    Raise UserError for files of several stacks; it has a pattern for one of them.

    Args:
        path: a folder or a pattern of names.
    """
    families = by_key((tuple(re.split(r"\d+", file.stem)), file) for file in _matching(path)).values()
    stacks = sorted((stack for family in families for stack in _divide(family)), key=len)
    if len(stacks) > 1:
        odd, usual, pattern = stacks[0][0].file.name, stacks[-1][0].name("*"), _pattern(stacks[-1])
        remedy = f"give the files of one, as '{pattern}'" if pattern else "put those of one into a folder of their own"
        raise UserError(f"{path}: {odd} has another name than {usual}, so they are no one stack; {remedy}")
    return stacks[0]


def _divide(files: Sequence[Path]) -> list[list[Slice]]:
    """Divide files whose names differ only in numbers into stacks, each in the order of its slices' numbers.

    The number that counts slices is one that increases from each file to the next. Of several such numbers it is the
    one with the most even steps; all files are then one stack. If no number increases so, it is the one with the most
    values, and files that differ only in it are a stack.
    """
    fractions = {tuple(map(len, re.findall(r"(?<=\d\.)\d+", file.stem))) for file in files}
    numeral = r"(\d+(?:\.\d+)?)" if len(fractions) == 1 else r"(\d+)"  # decimals all have the same length
    names = {file: [*re.split(numeral, file.stem), "", ""] for file in files}
    columns = [*zip(*names.values(), strict=True)]
    places = [place for place in range(1, len(columns), 2) if len({*columns[place]}) > 1] or [max(1, len(columns) - 4)]
    numbers = {file: [Decimal(parts[place] or 0) for place in places] for file, parts in names.items()}
    ordered = sorted(files, key=numbers.__getitem__)
    steps = [{b - a for a, b in pairwise(column)} for column in zip(*map(numbers.__getitem__, ordered), strict=True)]
    rises = [min(of_place, default=1) > 0 for of_place in steps]
    varied = [len({*columns[place]}) for place in places]
    chosen = max(range(len(places)), key=lambda n: (rises[n], varied[n], -len(steps[n]), n))
    slices, at = list[Slice](), places[chosen]
    for file in ordered:
        before, digits, after = "".join(names[file][:at]), names[file][at], "".join(names[file][at + 1 :])
        slices.append(Slice(numbers[file][chosen], file, before, digits, after))
    return [*by_key((() if rises[chosen] else (one.before, one.after), one) for one in slices).values()]


def _pattern(stack: Sequence[Slice]) -> str:
    """Return a pattern of names that fits the files of a stack and no others; "" if there is none."""
    one = stack[0]._replace(before=glob.escape(stack[0].before), after=glob.escape(stack[0].after))
    patterns = [str(one.file.parent / one.name(sign)) for sign in ("*", "[0-9]*", "?" * len(one.digits))]
    fitting = (pattern for pattern in patterns if {*_matching(pattern)} == {each.file for each in stack})
    return next(fitting, "") if one.digits else str(one.file)


def _check_numbers(path: str, slices: Sequence[Slice]) -> None:
    """Raise UserError if a slice of a sequence is missing, or if two files have the same number.

    A slice is missing if a step between numbers is larger than the smallest one.

    Args:
        path: as the user named the sequence, for the error.
        slices: its files in order.
    """
    steps = [after.number - before.number for before, after in pairwise(slices)]
    least = min(filter(None, steps), default=Decimal(1))
    for (one, other), step in zip(pairwise(slices), steps, strict=True):
        if not step:
            raise UserError(f"{path}: {one.file} and {other.file} have the same number; remove or rename one")
        if step != least:
            missing = one.name(f"{one.number + least:0{len(one.digits)}f}")
            raise UserError(
                f"{path}: {missing} is missing after {one.file.name}: put it there, or give the parts before and after "
                "it as sequences of their own"
            )


def _check_like(file: str, first_file: str, first: Stack) -> dict[str, Any]:
    """Return what a file of a stack should share with the stack's other files, such as the voxel size, by name.

    These are the `traits_of_scan`, for the caller to compare. Raise UserError if the file does not hold one slice.
    Raise it also if shape, dtype, orientation, or whether 0 is white, differ from the first file's.

    Args:
        first_file: name of the stack's first file.
        first: this first file, opened.
    """
    tifffile = tifffile_library()
    check_file(file)
    damaged = reading(f"{file}: not a readable TIFF", "save it again")
    with quiet_libraries(), damaged, tifffile.TiffFile(file) as tiff:
        page, pages = tiff.pages.first, len(tiff.pages)
        traits, turned = traits_of_scan(page), page.tags.valueof(ORIENTATION, 1)
    if pages != 1 or first.ndim != 2:
        raise UserError(f"{file}: holds {pages} slices, and a file of a sequence holds one; give it by itself")
    if (page.photometric == 0) is not (first.metadata.details["photometric"] == 0):
        raise UserError(f"{file}: 0 is white in it or in {first_file}, not in both; save all slices in one way")
    if turned != first.metadata.details["orientation"]:
        raise UserError(f"{file}: has orientation {turned}, and {first_file} another; save all slices in one way")
    if page.shape[:2] != first.shape[1:] or page.dtype is None or page.dtype.newbyteorder("=") != first.dtype:
        raise UserError(
            f"{file}: holds {format_shape(page.shape)} voxels of {page.dtype}, and {first_file} "
            f"{format_shape(first.shape[1:])} of {first.dtype}; the slices of a stack are alike"
        )
    return traits


def _stem(path: str, first: Slice) -> str:
    """Return a name for a sequence: the beginning of the names that a pattern fits, or else the folder's name."""
    if is_pattern(path):
        return first.before.strip("_-. ") or first.file.resolve().parent.name
    return Path(path).resolve().name


def write_sequence(new: NewVolume) -> None:
    """Write a result as a folder of TIFF files, one for each slice.

    If the input is a sequence, its names and the metadata of each file are kept, as description and date may differ
    from slice to slice.
    """
    tifffile = tifffile_library()
    new.path.mkdir()
    first, *_ = start_of(new.region)
    sources = new.metadata.details["files"][first:] if new.metadata.kind == "sequence" else ()
    width = max(5, len(str(first + new.shape[0])))
    for index, image_YX in enumerate(new.slices()):
        name, metadata = f"slice_{first + index:0{width}}.tif", new.metadata
        if sources:
            name = Path(sources[index]).name
            with quiet_libraries(), tifffile.TiffFile(sources[index]) as tiff:
                metadata = read_metadata(tiff)
        one = replace(new, path=new.path / name, shape=(1, *new.shape[1:]), ndim=2, metadata=metadata)
        write_tiff(replace(one, read=[image_YX].__getitem__))

"""The common parts of all formats: volumes, regions of them, results that are to be written, and checks.

A reader knows the shape and dtype at once and reads one slice at a time, so a stack may be larger than memory. Every
failure is a `UserError` that names the file and the remedy.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import irregular
from cocodiff.jobs.declared import OF_VOXELS, Declared, find_missing

# least bytes of memory for each voxel of a slice at work, besides the stored one: the slice normalised and filled, in
# float64
WORKING_BYTES = 16
KEPT_BYTES = 128 * 2**20  # most bytes of slices that are kept because they were decoded together
MOST_LISTED = 8  # datasets of a file that an error lists
MOST_VALUES = 10_000  # values of an attribute; larger ones are not kept as plain data
Triple = tuple[int, int, int]  # numbers of slices, rows and columns
Reader = Callable[[int], np.ndarray]  # function from a slice's number to the slice, [Y, X]
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # texts for JSON, as Zarr writes fill values


@dataclass(frozen=True)
class Metadata:
    """The metadata of a file's voxels, such as their size, which results keep."""

    kind: str = ""  # a key of `formats.FORMATS`, but "hdf5" for HDF5
    axes: str = ""  # names as in the file, with slices, rows and columns last; "" if the file names none
    # None also if a side is no length
    voxel_size: tuple[float, float, float] | None = None  # sides along slices, rows, columns in `unit`; None if unknown
    unit: str = ""  # as UDUNITS spells it ("micrometer"); "" if unknown
    description: str = ""  # free text
    byteorder: str = "<"  # "<" or ">": byte order of the stored voxels
    attributes: Mapping[str, Any] = field(default_factory=dict)  # the file's own attributes, as JSON can hold them
    details: Mapping[str, Any] = field(default_factory=dict)  # further data for a writer of the same format
    remarks: Sequence[str] = ()  # lines that the user is to read
    declared: Declared = field(default_factory=dict)  # what the array's attributes declare of its values


@dataclass(frozen=True)
class Region:
    """The part of a volume that is restored: from `start` to before `stop`, each [slice, row, column]."""

    start: Triple  # first slice, row and column
    stop: Triple  # slice, row and column behind the last ones

    @property
    def shape(self) -> Triple:
        """The number of slices, rows and columns."""
        slices, rows, columns = (stop - start for start, stop in zip(self.start, self.stop, strict=True))
        return slices, rows, columns


def start_of(region: Region | None) -> Triple:
    """Return [slice, row, column] of the input where a region begins; zeros for None, the whole input."""
    return region.start if region is not None else (0, 0, 0)


@dataclass(frozen=True)
class Stack:
    """A slice or a stack of slices in a file, as an input of a command. Slices are read one at a time."""

    path: str  # as the user wrote it
    name: str  # for an input: unique within a run, and safe as a file name
    shape: Triple  # [N, Y, X]; N is 1 for a single slice
    dtype: np.dtype  # of the slices that `read` returns, in native byte order
    ndim: int  # 2 for a slice, 3 for a stack, also for one of a single slice
    reader: Reader  # gives a slice as the file stores it
    metadata: Metadata = field(default_factory=Metadata)  # the file's, such as the voxel size
    labels: bool = False  # True for a label image, whose non-zero values are labels
    region: Region | None = None  # the part of the file's volume that this is; None for all of it
    whole: Triple | None = None  # shape of the file's volume, if this is a part of it

    def cropped(self, region: Region) -> Stack:
        """Return the part of this volume in a region. The region must lie inside the volume."""
        first, rows, columns = map(slice, region.start, region.stop)

        def read(index: int) -> np.ndarray:
            return np.asarray(self.reader(first.start + index))[rows, columns]

        return replace(self, shape=region.shape, reader=read, region=region, whole=self.shape)

    def as_truth(self) -> Stack:
        """Return this volume as floats, with NaN for voxels that its attributes declare missing.

        A volume without such declarations is returned unchanged.
        """

        def read(index: int) -> np.ndarray:
            image_YX = self.reader(index)
            return np.where(find_missing(self.metadata.declared, image_YX), np.nan, image_YX)

        return replace(self, dtype=np.dtype(np.float64), reader=read) if self.metadata.declared else self

    def as_map(self) -> Stack:
        """Return this volume without the declarations of its values, such as the one that means "missing".

        Results of another quantity, such as an uncertainty, are written like it.
        """
        details = {**self.metadata.details, "without": OF_VOXELS}
        return replace(self, metadata=replace(self.metadata, details=details))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def numbers(self) -> range:
        """The numbers of the slices in the input, of which this may be a part."""
        first, *_ = start_of(self.region)
        return range(first, first + len(self))

    def place(self, index: int, row: int, column: int) -> str:
        """Return a phrase that names a voxel of slice `index` by its place in the input, for messages."""
        _, top, left = start_of(self.region)
        found = f"row {top + row}, column {left + column}"
        return f"slice {self.numbers[index]}, {found}" if self.ndim == 3 else found

    def read(self, index: int) -> np.ndarray:
        """Return slice `index` as [Y, X] in the native dtype. Raise UserError if the file cannot be read there."""
        return np.ascontiguousarray(self.reader(index), dtype=self.dtype)


@dataclass(frozen=True)
class NewVolume:
    """A result that is to be written, read slice by slice."""

    path: Path  # the file or folder to write
    shape: Triple  # [N, Y, X]
    dtype: np.dtype  # in native byte order
    ndim: int  # 2 to store the one slice as [Y, X], 3 to store [N, Y, X]
    read: Reader  # gives a slice, [Y, X]
    metadata: Metadata = field(default_factory=Metadata)  # the input's, which the result keeps
    provenance: Mapping[str, Any] = field(default_factory=dict)  # how the result was made; empty to write none
    region: Region | None = None  # the part of the input that it is; None for all of it
    # It is compressed, or slices of zeros are not stored, as far as the format goes.
    sparse: bool = False  # True for a volume of mostly zeros, which should take little of the disk

    @property
    def stored(self) -> np.dtype:
        """The dtype of the voxels in the file, with its byte order."""
        return self.dtype.newbyteorder(">" if self.metadata.byteorder == ">" else "<")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array in the file."""
        return self.shape[-self.ndim :]

    def slices(self) -> Iterator[np.ndarray]:
        """Return an iterator over all slices [Y, X] in order."""
        return map(self.read, range(self.shape[0]))

    def write_raw(self, file: BinaryIO) -> None:
        """Write the voxels of all slices at the end of a file. Slices of zeros of a sparse volume become holes."""
        for image_YX in self.slices():
            if self.sparse and not image_YX.any():
                file.seek(image_YX.size * self.stored.itemsize, os.SEEK_CUR)
            else:
                file.write(image_YX.astype(self.stored).tobytes())
        file.truncate()

    def notes(self) -> dict[str, Any]:
        """Return how the result was made (its provenance), as plain data for the file's metadata; empty if there is
        none."""
        notes = dict(self.provenance)
        if notes and self.region is not None:
            notes["region"] = {"start": list(self.region.start), "stop": list(self.region.stop)}
        return notes


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise a UserError if the file system or a library refuses to write a new file in the `with` block.

    A full or failing disk stays an OSError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        if f"errno = {errno.ENOSPC}," in str(error) or str(error).endswith(" written"):  # messages of HDF5 and numpy
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        option = "--out" if isinstance(error, OSError) else "--format"
        raise UserError(f"{path}: cannot be written ({one_line(error)}); choose another {option}") from error


@contextlib.contextmanager
def reading(what: str, remedy: str, others: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Raise a one-line UserError for every error of a library that reads a file in the `with` block. The file may be
    damaged.

    Args:
        what: the file and what is wrong with it.
        remedy: what the user can do.
        others: other remedies, by words in the library's message for which they hold.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        fitting = next((other for words, other in others.items() if words in str(error)), remedy)
        raise UserError(f"{what} ({one_line(error)}); {fitting}") from error


def format_only_remarks(path: str, things: Sequence[str], moved: Sequence[str] = ()) -> list[str]:
    """Return lines for the user on metadata of an input that results keep only in the input's own format.

    Args:
        path: the input.
        things: names of metadata that only whole results keep, not results of a region.
        moved: names of metadata that results of a region keep too.
    """
    lines = (("whole results", things), ("results", moved))
    return [f"{path}: {which} of its own format alone keep {', '.join(said)}" for which, said in lines if said]


def filled(path: str, there: int, shape: Sequence[int], chunks: Sequence[int], value: Any) -> list[str]:
    """Return a line for the user, in a list, if some chunks of an array are not stored in the file; else [].

    Args:
        path: the file.
        there: number of chunks that are stored.
        shape: the array's.
        chunks: the shape of a chunk.
        value: the fill value, which missing chunks are read as.
    """
    count = math.prod(-(-side // chunk) for side, chunk in zip(shape, chunks, strict=True))
    told = f"{path}: {count - there} of {count} chunks are not stored and are read as {value}"
    return [told] if there < count else []


def by_slabs(read: Callable[[int, int], np.ndarray], shape: Triple, itemsize: int, depth: int) -> Reader:
    """Return a function that reads slices one by one, and keeps those that were decoded together with the last one.

    A chunk of a file may hold many slices.

    Args:
        read: gives the slices from one number to before another, [n, Y, X].
        shape: [N, Y, X] of the volume.
        itemsize: bytes of a voxel.
        depth: slices in a chunk. If these exceed KEPT_BYTES, slices are read one by one.
    """
    depth = depth if depth * shape[1] * shape[2] * itemsize <= KEPT_BYTES else 1

    @lru_cache(maxsize=1)
    def slab(number: int) -> np.ndarray:
        return read(number * depth, min((number + 1) * depth, shape[0]))

    return lambda index: np.asarray(slab(index // depth)[index % depth])


def plain(value: Any) -> Any:
    """Return a value, such as an attribute of a file, as data that JSON can hold.

    NumPy's values become Python's. NaN, infinities and values without such a form become text, and so do long lists.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, np.ndarray) and value.size > MOST_VALUES:
        return f"({value.size} values)"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value] if len(value) <= MOST_VALUES else f"({len(value)} values)"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE[str(value)]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str | bool | int | float | None) else str(value)


# A function of the numbers of slices and a title. It returns an iterable of the numbers, and may show the progress.
Progress = Callable[[range, str], Iterable[int]]


def unwatched(numbers: range, what: str) -> Iterable[int]:
    """Return the numbers unchanged. This is the `Progress` that shows nothing.

    Args:
        what: the title that others show.
    """
    return numbers


@contextlib.contextmanager
def quiet_libraries() -> Iterator[list[str]]:
    """Keep the messages of Pillow and tifffile off the user's terminal in the `with` block.

    Yield the list that tifffile's messages are added to.
    """
    texts: list[str] = []

    def kept(record: logging.LogRecord) -> bool:
        texts.append(re.sub(r"^<[^>]*> *", "", " ".join(record.getMessage().split())))
        return False

    logger = logging.getLogger("tifffile")
    logger.addFilter(kept)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield texts
    finally:
        logger.removeFilter(kept)


def one_line(error: BaseException) -> str:
    """Return the message of a library's error on one line, never empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_file(file: str) -> None:
    """Raise UserError unless a path is a regular file. Opening a named pipe or a device may never return."""
    try:
        kind = irregular(file)
    except (FileNotFoundError, NotADirectoryError):
        parts = (Path(file.partition(":")[0]), *Path(file).parents)
        if whole := next((str(one) for one in parts if one.is_file()), ""):
            raise UserError(f"{file}: {whole} is a file; only HDF5 has datasets in it, as scan.h5:/data") from None
        raise UserError(f"{file}: no such file; check the path (relative paths start at {Path.cwd()})") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; check the path") from error
    except ValueError as error:  # a null character
        raise UserError(f"{file!r}: {error}; check the path") from error
    if kind == "a directory":
        raise UserError(f"{file}: is a directory; name the files in it, e.g. {Path(file) / '*.png'}")
    if kind:
        raise UserError(f"{file}: is {kind}; save its data as a regular file")


def check_memory(path: str, shape: tuple[int, ...], itemsize: int, working: int = WORKING_BYTES) -> None:
    """Raise UserError if an array exceeds this machine's memory. A damaged header can claim any number of voxels.

    Args:
        path: the file, for the error.
        shape: the array's.
        itemsize: bytes of a stored voxel.
        working: further bytes for each voxel while it is processed.
    """
    needed = math.prod(shape) * (itemsize + working)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"{path}: claims {format_shape(shape)} voxels of {8 * itemsize} bit, which take {needed / 2**30:,.0f} GiB "
            f"or more to work on, and this machine has {memory / 2**30:,.0f} GiB; if they are that many indeed, save "
            "them as smaller slices"
        )


def as_volume_shape(shape: tuple[int, ...], path: str, itemsize: int) -> Triple:
    """Return the shape [Y, X] or [N, Y, X] of an array as [N, Y, X]. Raise UserError for others, and for slices that
    exceed memory.

    Args:
        shape: the array's.
        path: its file, for the error.
        itemsize: bytes of a voxel.
    """
    if len(shape) not in (2, 3):
        raise UserError(
            f"{path}: {len(shape)} dimensions {format_shape(shape)}; a slice has 2 (rows, columns) and a stack 3 "
            "(slices, rows, columns): save the part to restore in that form"
        )
    check_memory(path, shape[-2:], itemsize)
    return (shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1])


def stack_of_array(file: str, voxels: np.ndarray, metadata: Metadata) -> Stack:
    """Return an array, with its metadata, as a volume that is read slice by slice.

    Args:
        file: the file that it is from.
        voxels: [Y, X] or [N, Y, X], which may be mapped to memory.
    """
    shape = as_volume_shape(voxels.shape, file, voxels.dtype.itemsize)

    def read(index: int) -> np.ndarray:
        return np.asarray(voxels if voxels.ndim == 2 else voxels[index])

    return Stack(file, Path(file).stem, shape, voxels.dtype.newbyteorder("="), voxels.ndim, read, metadata)


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as text: `3 x 640 x 480` for `(3, 640, 480)`."""
    return " x ".join(str(side) for side in shape) if shape else "(a single value)"


def listed(found: Sequence[str], what: str) -> str:
    """Return a phrase that lists what a file holds, for an error.

    Args:
        found: what it holds, in words.
        what: what it lacks if the list is empty, such as "2-D dataset".
    """
    if not found:
        return f"it holds no {what}"
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return "it holds " + ", ".join(found[:MOST_LISTED]) + more


def same_channels(image_YXC: np.ndarray, path: str) -> np.ndarray:
    """Return a colour image whose channels are equal as grey, [Y, X]. Raise UserError if they differ or are
    transparent.

    Args:
        image_YXC: the image, with its C channels last.
        path: its file, for the error.
    """
    channels = image_YXC.shape[-1]
    colours = image_YXC[..., : {2: 1, 4: 3}.get(channels, channels)]
    if (colours != colours[..., :1]).any():
        raise UserError(f"{path}: a colour image whose channels differ; save it as grey (8 or 16 bit)")
    if channels in (2, 4):
        alpha_YX = image_YXC[..., -1]
        opaque = np.iinfo(alpha_YX.dtype).max if alpha_YX.dtype.kind in "ui" else 1.0
        if alpha_YX.size and not bool((alpha_YX == opaque).all()):
            raise UserError(f"{path}: has transparent pixels; remove the alpha channel and save it as grey")
    return np.ascontiguousarray(image_YXC[..., 0])


_RANGE = re.compile(r"^\s*(\d{0,9})\s*:\s*(\d{0,9})\s*$")


@dataclass(frozen=True)
class Part:
    """The part of every input that the user chose by `--slices` and `--roi`. Ends are exclusive and may be omitted."""

    slices: str = ""  # such as `100:200`; "" for all
    roi: str = ""  # rows and columns as `y0:y1,x0:x1`; "" for all

    def of(self, volume: Stack) -> Stack:
        """Return this part of an input. Raise UserError for malformed words and for a part outside the volume."""
        if not self.slices and not self.roi:
            return volume
        rows, comma, columns = (self.roi or ":,:").partition(",")
        if not comma:
            raise UserError(f"--roi {self.roi!r}: give rows and columns as y0:y1,x0:x1, such as 0:512,128:640")
        words = (("slices", self.slices or ":"), ("roi", rows), ("roi", columns))
        ends = [_ends(option, word, side, volume) for (option, word), side in zip(words, volume.shape, strict=True)]
        (z, z_end), (y, y_end), (x, x_end) = ends
        return volume.cropped(Region((z, y, x), (z_end, y_end, x_end)))


def _ends(option: str, word: str, side: int, volume: Stack) -> tuple[int, int]:
    """Return the start and the end of a range that the user wrote, such as `100:200`.

    Raise UserError if it is malformed or outside the volume.

    Args:
        option: the option's name, for the error.
        word: the range.
        side: length of the axis.
        volume: the input, for the error.
    """
    match = _RANGE.match(word)
    if match is None:
        form = "100:200" if option == "slices" else "y0:y1,x0:x1"
        raise UserError(f"--{option} {word!r}: not a range; give {form}, from the first to before the second")
    start, stop = int(match[1] or 0), int(match[2] or side)
    if not start < stop <= side:
        raise UserError(
            f"--{option} {word}: not within {volume.path}, which has {format_shape(volume.shape)} voxels; give a start "
            f"below the end, and an end of at most {side}"
        )
    return start, stop


def matched(volume: Stack, of: Stack) -> Stack:
    """Return the part of a mask, truth or label image that belongs to an input.

    Only if the input is a region of a volume, and `volume` has the shape of that whole volume or of a slice of it, it
    is the same region. Otherwise `volume` is returned unchanged.

    Args:
        volume: the mask, truth or label image.
        of: the input.
    """
    region, whole = of.region, of.whole
    if region is None or whole is None or volume.shape[1:] != whole[1:]:
        return volume
    if volume.ndim == 2:
        return volume.cropped(Region((0, *region.start[1:]), (1, *region.stop[1:])))
    return volume.cropped(region) if volume.shape == whole else volume


def compare_voxel_sizes(volume: Stack, of: Stack) -> list[str]:
    """Return a line for the user, in a list, if two files' voxel sizes along rows and columns differ by more than 1 %;
    else [].

    Args:
        volume: a mask or a truth.
        of: the input that it is for.
    """
    both = [(one.metadata.voxel_size, one.metadata.unit) for one in (volume, of)]
    sides = [[1e6 * LENGTHS[unit][1] * side for side in size[1:]] for size, unit in both if size and unit in LENGTHS]
    if len(sides) < 2 or all(math.isclose(one, other, rel_tol=0.01) for one, other in zip(*sides, strict=True)):
        return []
    own, other = (f"{rows:.4g} x {columns:.4g}" for rows, columns in sides)
    return [f"{volume.path}: voxels of {own} micrometer, and {of.path} of {other}: it may be of another scan"]


_UNITS = """meter m 1, yottameter Ym 1e24, zettameter Zm 1e21, exameter Em 1e18, petameter Pm 1e15, terameter Tm 1e12,
gigameter Gm 1e9, megameter Mm 1e6, kilometer km 1e3, hectometer hm 1e2, decimeter dm 1e-1, centimeter cm 1e-2,
millimeter mm 1e-3, micrometer µm 1e-6, nanometer nm 1e-9, picometer pm 1e-12, femtometer fm 1e-15, attometer am 1e-18,
zeptometer zm 1e-21, yoctometer ym 1e-24, angstrom Å 1e-10, inch in 0.0254, foot ft 0.3048, yard yd 0.9144"""
# The symbol in OME-XML and the length in meters of each unit, by its name in NGFF.
LENGTHS = {name: (sign, float(size)) for name, sign, size in map(str.split, _UNITS.split(","))}
_SPELLINGS = {
    **{spelling: name for name, (symbol, _) in LENGTHS.items() for spelling in (name, symbol)},
    **{name.replace("meter", "metre"): name for name in LENGTHS},
    **dict.fromkeys(("um", "μm", "\\u00b5m", "micron"), "micrometer"),
    "\u212b": "angstrom",
}
Sides = tuple[tuple[float, float, float] | None, str, list[str]]


def unit_name(text: str) -> str:
    """Return a unit as UDUNITS spells it ("micrometer" for "µm", "um", "microns"); an unknown one unchanged."""
    word = text.strip()
    spellings = (word, word.lower(), word.lower().removesuffix("."), word.lower().removesuffix("s"))
    return next((_SPELLINGS[one] for one in spellings if one in _SPELLINGS), word)


def unit_symbol(name: str) -> str:
    """Return the symbol of a unit in OME-XML for its name in UDUNITS. An unknown unit is returned unchanged."""
    return LENGTHS[name][0] if name in LENGTHS else name


def one_unit(sides: Any, units: Sequence[Any]) -> Sides:
    """Return a voxel's sides along slices, rows and columns in one unit, the name of that unit, and a list for remarks.

    The unit is that of the columns. If no sides are given, the sides are None and the unit is "". They are so too if a
    side is not a positive finite number or has an unknown unit. Only then the list has an entry, which says what was
    given.

    Args:
        sides: the three sides; None or empty if unknown.
        units: the unit of each side; "" for none.
    """
    if not sides:
        return None, "", []
    names = [unit_name(str(unit)) for unit in units]
    try:
        meters = [1.0 if {*names} == {""} else LENGTHS[name][1] for name in names]
        z, y, x = (float(side) * (one / meters[-1]) for side, one in zip(sides, meters, strict=True))
        if all(0 < side < math.inf for side in (z, y, x)):
            return (z, y, x), names[-1], []
    except (TypeError, ValueError, KeyError):
        pass
    return None, "", [f"the voxel size {sides!s:.80} in {units!s:.80}"]

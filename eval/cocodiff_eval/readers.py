"""File formats of slices and masks: PNG, TIFF and HDF5, each opened without reading the voxels.

A reader knows the shape and dtype at once and reads one slice at a time: a stack larger than memory is no special case.
Every failure is a `UserError` that names the file and the remedy.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.errors import UserError
from cocodiff.files import irregular

HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".nxs")
TIFF_SUFFIXES = (".tif", ".tiff")
SUPPORTED = "PNG (.png), TIFF (.tif, .tiff) and HDF5 (.h5, .hdf5, .hdf, .nxs, as file.h5:/dataset)"
# Of each voxel of a slice at work, at least: the slice normalised and filled, in float64.
WORKING_BYTES = 16
PNG_CHANNELS = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}  # by colour type; a palette's images are read as RGBA
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HDF5_PATTERN = re.compile(r"^(?P<file>.+\.(?:h5|hdf5|hdf|nxs))(?::(?P<dataset>.*))?$", re.IGNORECASE)


@dataclass(frozen=True)
class RawVolume:
    """The contents of a file, not read yet: `ndim` 2 or 3, `shape` always [N, Y, X], native-endian `dtype`, and how to
    read a slice."""

    path: str
    stem: str
    shape: tuple[int, int, int]
    dtype: np.dtype
    ndim: int
    reader: Callable[[int], np.ndarray]


# Called with the numbers of slices and what is read: gives the same numbers, and may show how far it is.
Progress = Callable[[range, str], Iterable[int]]


def unwatched(numbers: range, what: str) -> Iterable[int]:
    """The progress of what nobody watches."""
    return numbers


class _Messages(logging.Handler):
    """Keeps what a library logs instead of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(re.sub(r"^<[^>]*> *", "", " ".join(record.getMessage().split())))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[list[str]]:
    """Keep Pillow's and tifffile's own messages off the user's terminal; gives the list of what tifffile logged."""
    logger, messages = logging.getLogger("tifffile"), _Messages()
    propagate = logger.propagate
    logger.addHandler(messages)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield messages.texts
    finally:
        logger.removeHandler(messages)
        logger.propagate = propagate


def one_line(error: BaseException) -> str:
    """A library's message on one line, never empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def split_hdf5(path: str) -> tuple[str, str | None]:
    """Split `file.h5:/dataset` into file and dataset; the dataset is None where the path has none."""
    match = _HDF5_PATTERN.match(path)
    if match is None:
        return path, None
    return match["file"], match["dataset"] or None


def open_volume(path: str, follow_links: bool = False) -> RawVolume:
    """Open a PNG, TIFF or HDF5 file of slices; reads the header only (for PNG, which has no random access, the image).

    follow_links: read other files that an HDF5 file names.
    Raises UserError for a missing, unreadable or unsupported file, for anything that is not 2-D or 3-D grey data, and
    for slices that this machine's memory cannot hold.
    """
    file, dataset = split_hdf5(str(path))
    _check_file(file)
    suffix = Path(file).suffix.lower()
    if suffix == ".png":
        return _open_png(file)
    if suffix in TIFF_SUFFIXES:
        return _open_tiff(file)
    if suffix in HDF5_SUFFIXES:
        from cocodiff_eval.hdf5 import open_hdf5

        volume = open_hdf5(file, dataset, follow_links)
        check_memory(volume.path, volume.shape[1:], volume.dtype.itemsize)
        return volume
    raise UserError(f"{path}: the extension {suffix or '(none)'!r} is not supported; convert to {SUPPORTED}")


def _check_file(file: str) -> None:
    """Raises UserError for what is no regular file: opening a named pipe or a device may never return."""
    try:
        kind = irregular(file)
    except (FileNotFoundError, NotADirectoryError):
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
    """Raises UserError where so many voxels fit in no memory of this machine: a header can claim any number of them.

    itemsize: bytes of a voxel as it is stored; working: bytes of a voxel that work on it takes besides.
    """
    needed = math.prod(shape) * (itemsize + working)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"{path}: claims {format_shape(shape)} voxels of {8 * itemsize} bit, which take {needed / 2**30:,.0f} GiB "
            f"or more to work on, and this machine has {memory / 2**30:,.0f} GiB; if they are that many indeed, save "
            "them as smaller slices"
        )


def as_volume_shape(shape: tuple[int, ...], path: str) -> tuple[int, int, int]:
    """[Y, X] or [N, Y, X] as [N, Y, X]; anything else is a UserError."""
    if len(shape) == 2:
        return (1, shape[0], shape[1])
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    raise UserError(
        f"{path}: {len(shape)} dimensions {format_shape(shape)}; a slice has 2 (rows, columns) and a stack 3 "
        "(slices, rows, columns): save the part to restore in that form"
    )


def format_shape(shape: tuple[int, ...]) -> str:
    """`(3, 640, 480)` as `3 x 640 x 480`."""
    return " x ".join(str(side) for side in shape) if shape else "(a single value)"


def same_channels(image_YXC: np.ndarray, path: str) -> np.ndarray:
    """The one grey image of several equal channels [Y, X]; UserError when the channels differ."""
    first_YX = image_YXC[..., 0]
    colours = image_YXC[..., :3] if image_YXC.shape[-1] >= 3 else image_YXC[..., :1]
    if not np.array_equal(colours, np.repeat(first_YX[..., None], colours.shape[-1], axis=-1)):
        raise UserError(f"{path}: a colour image whose channels differ; save it as grey (8 or 16 bit)")
    if image_YXC.shape[-1] in (2, 4):
        alpha_YX = image_YXC[..., -1]
        opaque = np.iinfo(alpha_YX.dtype).max if alpha_YX.dtype.kind in "ui" else 1.0
        if alpha_YX.size and not bool((alpha_YX == opaque).all()):
            raise UserError(f"{path}: has transparent pixels; remove the alpha channel and save it as grey")
    return np.ascontiguousarray(first_YX)


def _read_png(file: str) -> np.ndarray:
    from PIL import Image

    with quiet_libraries():
        try:
            # Pillow silently reduces 16-bit colour to 8 bits; the header's bit depth tells before that happens.
            with Path(file).open("rb") as stream:
                header = stream.read(26)
            depth = colour = 0
            if header.startswith(PNG_SIGNATURE) and len(header) == 26:
                width, height, depth, colour = struct.unpack(">IIBB", header[16:])
                check_memory(file, (height, width), max(1, depth // 8) * PNG_CHANNELS.get(colour, 1))
            with Image.open(file, formats=["PNG"]) as image:
                if depth == 16 and colour != 0:
                    raise UserError(f"{file}: a 16-bit colour PNG; save it as 16-bit grey")
                if image.mode == "P":
                    return same_channels(np.asarray(image.convert("RGBA")), file)
                if image.mode in ("RGB", "RGBA", "LA"):
                    return same_channels(np.asarray(image), file)
                pixels_YX = np.asarray(image)
        except Image.DecompressionBombError:
            raise UserError(f"{file}: too many pixels for a PNG to be read safely; save it as TIFF or HDF5") from None
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{file}: not a readable PNG ({one_line(error)}); save it again") from error
    # Some Pillow versions hand out 16-bit grey as 32-bit integers.
    return pixels_YX.astype(np.uint16) if pixels_YX.dtype == np.int32 else pixels_YX


def _open_png(file: str) -> RawVolume:
    image_YX = _read_png(file)
    shape = as_volume_shape(image_YX.shape, file)

    def read(index: int) -> np.ndarray:
        return image_YX

    return RawVolume(file, Path(file).stem, shape, image_YX.dtype, 2, read)


def _open_tiff(file: str) -> RawVolume:
    import tifffile

    with quiet_libraries() as messages:
        try:
            with tifffile.TiffFile(file) as tiff:
                series = list(tiff.series)
        except Exception as error:  # tifffile raises many kinds for a damaged file
            raise UserError(f"{file}: not a readable TIFF ({one_line(error)}); save it again") from error
    # tifffile only logs that the chain of pages breaks off, and gives the slices before that.
    broken = [text for text in messages if "invalid" in text or "failed" in text or "corrupt" in text]
    if broken:
        raise UserError(f"{file}: a damaged TIFF, cut short perhaps ({broken[0][:120]}); copy or save it again")
    if not series:
        raise UserError(f"{file}: a TIFF without images; save it again")
    shapes = {(one.shape, one.dtype) for one in series}
    if len(shapes) > 1:
        listed = ", ".join(sorted(format_shape(shape) for shape, _ in shapes)[:4])
        raise UserError(f"{file}: holds images of different shapes or dtypes ({listed}); save each as its own file")
    first = series[0]
    if first.dtype is None:
        raise UserError(f"{file}: the TIFF's sample type is unknown; save it as 8 or 16 bit or as float32")
    reader = _TiffReader(file)
    stem, dtype = Path(file).stem, first.dtype.newbyteorder("=")
    # A stack of 3 or 4 slices, saved without saying so, is marked as the planes of one colour image (SYX); colour
    # images themselves come with their channels interleaved (YXS).
    if "S" in first.axes and (first.axes != "SYX" or len(series) > 1):
        if first.axes != "YXS" or len(series) > 1:
            raise UserError(f"{file}: a stack of colour images {format_shape(first.shape)}; save it as grey")
        check_memory(file, first.shape, dtype.itemsize)
        image_YX = same_channels(reader.whole(), file)
        return RawVolume(file, stem, as_volume_shape(image_YX.shape, file), dtype, 2, lambda index: image_YX)
    shape = tuple(first.shape)
    if len(series) > 1:  # pages appended one by one
        if len(shape) != 2:
            raise UserError(f"{file}: holds {len(series)} stacks; save each as a file of its own")
        shape = (len(series), *shape)
    if len(shape) > 3:  # ImageJ and OME hyperstacks carry axes of length 1
        shape = tuple(side for side in shape if side > 1)
    volume_shape = as_volume_shape(shape, file)
    check_memory(file, volume_shape[1:], dtype.itemsize)
    if first.dataoffset is None and sum(len(one.pages) for one in series) != volume_shape[0]:
        check_memory(file, volume_shape, dtype.itemsize, working=0)  # one compressed volume is read as a whole
    return RawVolume(file, stem, volume_shape, dtype, len(shape), lambda index: reader.read(index, volume_shape))


class _TiffReader:
    """Reads slices: by page where pages are slices, else by memory map, else (one compressed volume) wholly.

    Each process opens the file for itself: ranks forked after the input was checked would otherwise share one file
    position and read each other's bytes.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.process = 0
        self.series: list[Any] = []
        self.pages: list[Any] = []
        self.volume: np.ndarray | None = None

    def _open(self) -> None:
        import tifffile

        if self.process != os.getpid():
            tiff = tifffile.TiffFile(self.file)
            weakref.finalize(self, tiff.close)
            self.series = list(tiff.series)
            self.pages = [page for one in self.series for page in one.pages]
            self.process = os.getpid()

    def whole(self) -> np.ndarray:
        """The first series at once, as a memory map where the file allows it."""
        with self._errors("its image"):
            self._open()
            first = self.series[0]
            return np.asarray(first.asarray(out="memmap" if first.dataoffset is not None else None))

    def read(self, index: int, shape: tuple[int, int, int]) -> np.ndarray:
        """Slice `index` of a volume of `shape`, [Y, X]."""
        with self._errors(f"slice {index}"):
            if self.volume is None:
                self._open()
                if len(self.pages) == shape[0]:
                    return np.asarray(self.pages[index].asarray()).reshape(shape[1:])
                self.volume = self.whole().reshape(shape)
            return np.asarray(self.volume[index])

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Damaged data, an absent codec, a full disk: all end in one line."""
        with quiet_libraries():
            try:
                yield
            except UserError:
                raise
            except Exception as error:
                remedy = "save it uncompressed" if "imagecodecs" in str(error) else "the file may be damaged"
                raise UserError(f"{self.file}: {what} cannot be read ({one_line(error)}); {remedy}") from error

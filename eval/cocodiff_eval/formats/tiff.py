"""TIFF files: one slice or a stack of pages."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.errors import UserError
from cocodiff_eval.formats.tiff_metadata import read_metadata, tiff_options
from cocodiff_eval.formats.volume import (
    Metadata,
    RawVolume,
    RowFile,
    as_volume_shape,
    check_memory,
    format_shape,
    quiet_libraries,
    reading,
    same_channels,
)


def open_tiff(file: str) -> RawVolume:
    import tifffile

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
    # tifffile only logs that the chain of pages breaks off, and gives the slices before that.
    broken = [text for text in messages if "invalid" in text or "failed" in text or "corrupt" in text]
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
    reader = _TiffReader(file)
    # NumPy has two names for integers of 64 bits, of which Zarr's library knows the one.
    stem, dtype = Path(file).stem, np.dtype(first.dtype.newbyteorder("=").str)
    # A stack of 3 or 4 slices, saved without saying so, is marked as the planes of one colour image (SYX); colour
    # images themselves come with their channels interleaved (YXS).
    if "S" in first.axes and (first.axes != "SYX" or len(series) > 1):
        if first.axes != "YXS" or len(series) > 1:
            raise UserError(f"{file}: a stack of colour images {format_shape(first.shape)}; save it as grey")
        check_memory(file, first.shape, dtype.itemsize)
        image_YX = same_channels(reader.whole(), file)
        return RawVolume(file, stem, as_volume_shape(image_YX.shape, file), dtype, 2, lambda index: image_YX, metadata)
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
    return RawVolume(
        file, stem, volume_shape, dtype, len(shape), lambda index: reader.read(index, volume_shape), metadata
    )


def check_samples(file: str, pages: Sequence[Any]) -> None:
    """Raises UserError for samples that are no intensities, and where not all pages' are of one kind."""
    kinds = {int(page.photometric): getattr(page.photometric, "name", "unknown") for page in pages}
    if len(kinds) > 1 or max(kinds) > 2:  # min is white, min is black, RGB
        raise UserError(
            f"{file}: samples of photometric interpretation {', '.join(kinds.values())}, not all intensities of one "
            "kind; save it as grey (8 or 16 bit; in ImageJ after Image > Lookup Tables > Grays)"
        )


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
        with quiet_libraries(), self._errors("its image"):
            self._open()
            first = self.series[0]
            for page in first.pages if first.dataoffset is None else ():
                _check_segments(page)
            return np.asarray(first.asarray(out="memmap" if first.dataoffset is not None else None))

    def read(self, index: int, shape: tuple[int, int, int]) -> np.ndarray:
        """Slice `index` of a volume of `shape`, [Y, X]."""
        with quiet_libraries(), self._errors(f"slice {index}"):
            if self.volume is None:
                self._open()
                if len(self.pages) == shape[0]:
                    _check_segments(self.pages[index])
                    return np.asarray(self.pages[index].asarray()).reshape(shape[1:])
                self.volume = self.whole().reshape(shape)
            return np.asarray(self.volume[index])

    def _errors(self, what: str) -> AbstractContextManager[None]:
        """Damaged data, an absent codec, a full disk."""
        others = {"imagecodecs": "save it uncompressed"}
        return reading(f"{self.file}: {what} cannot be read", "the file may be damaged", others)


def _check_segments(page: Any) -> None:
    """Raises for strips or tiles that a page has not stored, which would be read as 0."""
    if page.is_contiguous:
        return
    count = math.prod(page.chunked)
    there = sum(1 for start, size in zip(page.dataoffsets, page.databytecounts, strict=False) if start and size)
    if there < count:
        raise ValueError(f"{count - there} of {count} strips or tiles of page {page.index} are not there")


class StackFile(RowFile):
    """A TIFF, uncompressed and with all slices in a row, so that any process may write any of them."""

    def _create(self) -> None:
        import tifffile

        shape = self.shape if self.ndim == 3 else self.shape[1:]
        big = self.shape[0] * self._slice_bytes > 2**32 - 2**25
        opening, options = tiff_options(self)
        with quiet_libraries(), tifffile.TiffWriter(self.path, bigtiff=big, **opening) as writer:
            writer.write(shape=shape, dtype=self.dtype, **options)

    def _offset(self, index: int) -> int:
        return self._start + index * self._slice_bytes

    @cached_property
    def _start(self) -> int:
        """Where the voxels begin in the file, in bytes."""
        import tifffile

        with quiet_libraries(), tifffile.TiffFile(self.path) as file:
            return int(file.pages.first.dataoffsets[0])

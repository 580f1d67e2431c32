"""A volume as slices along another axis than its file's, and the voxels that were restored in such slices.

Slices along z are [Y, X], along y [Z, X], along x [Z, Y]. Files give slices along z only. Slices along another axis are
read from a copy, which is made in one pass with a block of slices in memory at a time. Restored values are stored for
masked voxels only, four bytes each, in the order of the slices. From these any slice along z finds its own voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cocodiff.config.files import appearing, flush
from cocodiff_eval.data.volume import Progress, Reader, Triple, unwatched

AXES = "zyx"
BLOCK_BYTES = 2**28  # bytes of slices along z that are in memory while a copy is made


def reoriented_shape(shape: Triple, axis: str) -> Triple:
    """Return the shape of a volume [Z, Y, X] as slices along an axis: their number, their rows and their columns.

    Args:
        axis: "z", "y" or "x".
    """
    first = AXES.index(axis)
    rows, columns = (side for place, side in enumerate(shape) if place != first)
    return shape[first], rows, columns


@dataclass(frozen=True)
class MaskStatistics:
    """Counts of the masked voxels of a mask [Z, Y, X] in each slice along each axis. They take 8 Z (Y + X) bytes."""

    rows_ZY: np.ndarray  # masked voxels in each row of each slice along z, int64
    columns_ZX: np.ndarray  # masked voxels in each column of each slice along z, int64
    through: int  # masked voxels on lines along z that are masked wholly

    @classmethod
    def of(cls, read: Reader, slices: int) -> MaskStatistics:
        """Count the masked voxels of a mask, which is read slice by slice.

        Args:
            read: gives a slice of the mask, boolean [Y, X].
            slices: number of slices.
        """
        rows, columns, through_YX = [], [], np.asarray(True)
        for mask_YX in map(read, range(slices)):
            rows.append(mask_YX.sum(axis=1))
            columns.append(mask_YX.sum(axis=0))
            through_YX = through_YX & mask_YX
        return cls(np.stack(rows), np.stack(columns), int(through_YX.sum()) * slices)

    @property
    def shape(self) -> Triple:
        """The shape of the mask, [Z, Y, X]."""
        return self.rows_ZY.shape[0], self.rows_ZY.shape[1], self.columns_ZX.shape[1]

    @property
    def total(self) -> int:
        """The number of all masked voxels."""
        return int(self.rows_ZY.sum())

    def counts(self, axis: str) -> np.ndarray:
        """Return the number of masked voxels in each slice along an axis, int64 [N]."""
        return {"z": self.rows_ZY.sum(axis=1), "y": self.rows_ZY.sum(axis=0), "x": self.columns_ZX.sum(axis=0)}[axis]

    def full(self, axis: str) -> np.ndarray:
        """Return, for each slice along an axis, True if it is masked wholly; boolean [N]."""
        _, rows, columns = reoriented_shape(self.shape, axis)
        return np.asarray(self.counts(axis) == rows * columns)

    def restorable(self, axis: str) -> list[int]:
        """Return the numbers of the slices along an axis that have both masked and known voxels."""
        return np.flatnonzero((self.counts(axis) > 0) & ~self.full(axis)).tolist()

    @cached_property
    def starts(self) -> dict[str, np.ndarray]:
        """The positions, by axis, of masked voxels that are stored in the order of slices, rows and columns.

        For y and x it is where the voxels of each slice along the axis begin in each slice along z, int64 [N, Z]. For z
        it is where each slice begins, [N, 1].
        """
        counts = {"z": self.counts("z")[:, None], "y": self.rows_ZY.T, "x": self.columns_ZX.T}
        return {axis: (np.cumsum(each) - each.ravel()).reshape(each.shape) for axis, each in counts.items()}


@dataclass(frozen=True)
class Reoriented:
    """A copy of a volume [Z, Y, X] as slices along y or x, uncompressed in a file."""

    path: Path  # the copy's file
    axis: str  # "y" or "x"
    shape: Triple  # [Z, Y, X] of the volume
    dtype: np.dtype  # of the copy's voxels

    @property
    def slices(self) -> np.ndarray:
        """The file as an array: slices along the axis, their rows and columns."""
        return np.memmap(self.path, self.dtype, "r", shape=reoriented_shape(self.shape, self.axis))

    def read(self, index: int) -> np.ndarray:
        """Return slice `index` along the copy's axis, [Z, X] or [Z, Y]."""
        return np.array(self.slices[index])

    def window(self, parts_ZYX: tuple[slice, ...]) -> np.ndarray:
        """Return a part of the volume, [Z, Y, X], from the copy.

        Args:
            parts_ZYX: the ranges of slices, rows and columns of the volume.
        """
        return np.array(np.moveaxis(self.slices, 0, AXES.index(self.axis))[parts_ZYX])

    @property
    def is_whole(self) -> bool:
        """True if the copy exists and is complete. An unfinished one has another name."""
        return self.path.exists() and self.path.stat().st_size == np.prod(self.shape) * self.dtype.itemsize


def turn(read: Reader, copies: Sequence[Reoriented], progress: Progress = unwatched, what: str = "") -> None:
    """Write a volume as slices along further axes, to files, in one pass over its slices. Files that exist are kept.

    Args:
        read: gives a slice along z, [Y, X].
        copies: the files to write, with their axes; all of one volume.
        progress: shows the progress of reading.
        what: the volume's name, for the progress.
    """
    missing = [copy for copy in copies if not copy.is_whole]
    if not missing:
        return
    slices, rows, columns = missing[0].shape
    together = max(1, BLOCK_BYTES // (rows * columns * missing[0].dtype.itemsize))
    with ExitStack() as opened:
        unfinished = [opened.enter_context(appearing(copy.path)) for copy in missing]
        files = [opened.enter_context(path.open("wb")) for path in unfinished]
        for first in progress(range(0, slices, together), f"turning {what}"):
            block_ZYX = np.stack([read(index) for index in range(first, min(first + together, slices))])
            for copy, file in zip(missing, files, strict=True):
                parts = np.moveaxis(block_ZYX.astype(copy.dtype, copy=False), AXES.index(copy.axis), 0)
                row_bytes = parts.shape[2] * copy.dtype.itemsize
                for number, part in enumerate(parts):
                    file.seek((number * slices + first) * row_bytes)
                    file.write(np.ascontiguousarray(part).tobytes())


@dataclass(frozen=True)
class RestoredFile:
    """A file with the restored values of a volume, a float32 for each masked voxel, slice after slice along an axis.

    Any process may write any slice.
    """

    path: Path  # the file
    axis: str  # "z", "y" or "x"
    statistics: MaskStatistics  # the mask's, which give each slice's place in the file

    def create(self) -> None:
        """Make the file if it does not exist. Slices are zero until they are written."""
        with self.path.open("ab") as file:
            file.truncate(4 * self.statistics.total)

    def write(self, index: int, values_P: np.ndarray) -> None:
        """Write the values of the masked voxels of slice `index` along the axis, row by row. Return when they are on
        disk."""
        start = int(self.statistics.starts[self.axis][index, 0])
        with self.path.open("r+b") as file:
            file.seek(4 * start)
            file.write(values_P.astype("<f4").tobytes())
        flush(self.path)

    def read(self, index: int) -> np.ndarray:
        """Return the values of the masked voxels of slice `index` along the axis, row by row, float32 [P] for P
        voxels."""
        count, start = int(self.statistics.counts(self.axis)[index]), int(self.statistics.starts[self.axis][index, 0])
        return np.fromfile(self.path, "<f4", count, offset=4 * start)

    def read_along_z(self, index: int, mask_YX: np.ndarray) -> np.ndarray:
        """Return the values of the masked voxels of slice `index` along z, whatever the file's axis: float32 [P] for P
        voxels.

        They go row by row.

        Args:
            mask_YX: the slice's mask.
        """
        if self.axis == "z":
            return self.read(index)
        counts = (self.statistics.rows_ZY if self.axis == "y" else self.statistics.columns_ZX)[index]
        starts, total = self.statistics.starts[self.axis][:, index], int(counts.sum())
        places = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(total)
        values = np.asarray(np.memmap(self.path, "<f4", "r")[places]) if total else np.zeros(0, np.float32)
        if self.axis == "y":
            return values
        turned_XY = np.zeros(mask_YX.T.shape, np.float32)
        turned_XY[mask_YX.T] = values
        return np.asarray(turned_XY.T[mask_YX])

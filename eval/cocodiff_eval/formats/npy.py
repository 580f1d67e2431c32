"""NumPy's own files, .npy: voxels and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cocodiff.files import flush
from cocodiff_eval.formats.volume import Metadata, RawVolume, RowFile, as_volume_shape, check_memory, reading


def open_npy(file: str) -> RawVolume:
    """Raises UserError for files with objects in them, which would have to be unpickled, and for damaged ones."""
    with reading(f"{file}: not a readable .npy file", "save it again with numpy.save"):
        voxels = np.load(file, mmap_mode="r", allow_pickle=False)
    shape = as_volume_shape(voxels.shape, file)
    check_memory(file, shape[1:], voxels.dtype.itemsize)
    byteorder = ">" if voxels.dtype.newbyteorder("S").isnative and voxels.dtype.itemsize > 1 else "<"

    def read(index: int) -> np.ndarray:
        return np.asarray(voxels if voxels.ndim == 2 else voxels[index])

    metadata = Metadata("npy", byteorder=byteorder)
    return RawVolume(file, Path(file).stem, shape, voxels.dtype.newbyteorder("="), voxels.ndim, read, metadata)


class NpyFile(RowFile):
    """Slices in a .npy file."""

    def _create(self) -> None:
        shape = self.shape if self.ndim == 3 else self.shape[1:]
        file = np.lib.format.open_memmap(self.path, mode="w+", dtype=self._stored, shape=shape)
        file.flush()
        flush(self.path)

    def _offset(self, index: int) -> int:
        with self.path.open("rb") as file:
            first = np.lib.format.read_magic(file) == (1, 0)
            (np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0)(file)
            return file.tell() + index * self._slice_bytes

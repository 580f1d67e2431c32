"""The table of formats: which opener a path goes to."""

from __future__ import annotations

import re
from pathlib import Path

from cocodiff.errors import UserError
from cocodiff_eval.formats.png import open_png
from cocodiff_eval.formats.tiff import open_tiff
from cocodiff_eval.formats.volume import RawVolume, check_file, check_memory

HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".nxs")
TIFF_SUFFIXES = (".tif", ".tiff")
SUPPORTED = "PNG (.png), TIFF (.tif, .tiff) and HDF5 (.h5, .hdf5, .hdf, .nxs, as file.h5:/dataset)"
_HDF5_PATTERN = re.compile(r"^(?P<file>.+\.(?:h5|hdf5|hdf|nxs))(?::(?P<dataset>.*))?$", re.IGNORECASE)


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
    check_file(file)
    suffix = Path(file).suffix.lower()
    if suffix == ".png":
        return open_png(file)
    if suffix in TIFF_SUFFIXES:
        return open_tiff(file)
    if suffix in HDF5_SUFFIXES:
        from cocodiff_eval.formats.hdf5 import open_hdf5

        volume = open_hdf5(file, dataset, follow_links)
        check_memory(volume.path, volume.shape[1:], volume.dtype.itemsize)
        return volume
    raise UserError(f"{path}: the extension {suffix or '(none)'!r} is not supported; convert to {SUPPORTED}")

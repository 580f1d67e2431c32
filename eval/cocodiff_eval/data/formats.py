"""The table of formats: which opener a path goes to, and what writes a result."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError, check_choice
from cocodiff.config.files import flush, is_there
from cocodiff_eval.data import SAME, WRITTEN
from cocodiff_eval.data.hdf5 import open_hdf5, write_hdf5
from cocodiff_eval.data.ome_zarr import is_store, open_zarr, split_store
from cocodiff_eval.data.png_npy import open_npy, open_png, write_npy
from cocodiff_eval.data.tiff import holds_slices, is_pattern, open_sequence, open_tiff, write_sequence, write_tiff
from cocodiff_eval.data.volume import NewVolume, RawVolume, check_file, check_memory, is_folder, writing

SUPPORTED = (
    "PNG (.png), TIFF (.tif, .tiff; a folder of them or a pattern as one stack), HDF5 (.h5, .hdf5, .hdf, .nxs, as "
    "file.h5:/dataset), OME-Zarr (.zarr) and NumPy (.npy)"
)
_HDF5_PATTERN = re.compile(r"^(?P<file>.+\.(?:h5|hdf5|hdf|nxs))(?::(?P<dataset>.*))?$", re.IGNORECASE)


def write_zarr(new: NewVolume) -> None:
    from cocodiff_eval.data.ome_zarr_file import ZarrStore  # Zarr's library, which takes a second

    ZarrStore(new).write()


@dataclass(frozen=True)
class Format:
    """A format of files. suffixes: of files that `opener` reads; writer and suffix: of results, none where it is only
    read."""

    suffixes: tuple[str, ...]
    opener: Callable[[str], RawVolume] | None = None
    writer: Callable[[NewVolume], None] | None = None
    suffix: str = ""


# By the word of --format. Folders, patterns, stores and datasets within files are told apart by `open_volume`.
FORMATS = {
    "png": Format((".png",), open_png),
    "tiff": Format((".tif", ".tiff"), open_tiff, write_tiff, ".tif"),
    "sequence": Format((), open_sequence, write_sequence, ""),
    "zarr": Format((), None, write_zarr, ".ome.zarr"),
    "h5": Format((".h5", ".hdf5", ".hdf", ".nxs"), None, write_hdf5, ".h5"),
    "npy": Format((".npy",), open_npy, write_npy, ".npy"),
}


def result_format(word: str, volume: RawVolume) -> str:
    """The word of FORMATS that a result is written in. word: `same` for that of the input, TIFF where it is PNG.

    Raises UserError for a word that is none.
    """
    if word != SAME:
        check_choice("format", word, (SAME, *WRITTEN))
        return word
    kind = {"hdf5": "h5"}.get(volume.metadata.kind, volume.metadata.kind)
    return kind if kind in WRITTEN else "tiff"


def write_volume(
    word: str,
    folder: Path,
    name: Callable[[str], str],
    like: RawVolume,
    dtype: np.dtype,
    read: Callable[[int], np.ndarray],
    provenance: Mapping[str, Any],
) -> NewVolume:
    """Writes a result of an input's shape in one of FORMATS, in the place of one of that name; returns when it is on
    the disk. name: of the file, from its suffix; read: a slice of the dtype, [Y, X].

    Raises UserError for what the format cannot hold; a full disk stays an OSError.
    """
    one = FORMATS[word]
    assert one.writer is not None, word
    path = folder / name(one.suffix)
    new = NewVolume(path, like.shape, dtype, like.ndim, read, like.metadata, provenance, like.region)
    if path.is_dir():  # of a start that was killed here
        shutil.rmtree(path)
    with writing(path):
        one.writer(new)
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                flush(file)
    return new


def split_hdf5(path: str) -> tuple[str, str | None]:
    """Split `file.h5:/dataset` into file and dataset; the dataset is None where the path has none."""
    match = _HDF5_PATTERN.match(path)
    if match is None or is_there(path):
        return path, None
    return match["file"], match["dataset"] or None


def open_volume(path: str, follow_links: bool = False) -> RawVolume:
    """Open slices; reads no voxels yet (but for PNG, which has no random access).

    path: a PNG, TIFF or NumPy file, a folder of TIFF files or a pattern of their names, HDF5 as `file.h5:/dataset`, or
    Zarr as `store.zarr` or `store.zarr:/image`. follow_links: read other files that an HDF5 file names.
    Raises UserError for a missing, unreadable or unsupported file, for anything that is not 2-D or 3-D grey data, and
    for slices that this machine's memory cannot hold.
    """
    path = str(path)
    if not path:
        raise UserError("'' is no path: name a file or a folder, . for the current one")
    store = split_store(path)
    in_plain_folder = is_there(path) and (Path(path).is_file() or holds_slices(path))  # whose name alone is a store's
    if store and (is_store(store[0]) or not in_plain_folder):
        return open_zarr(*store)
    if is_pattern(path) or is_folder(path):
        return open_sequence(path)
    file, dataset = split_hdf5(path)
    check_file(file)
    suffix = Path(file).suffix.lower()
    if suffix in FORMATS["h5"].suffixes:
        volume = open_hdf5(file, dataset, follow_links)
        check_memory(volume.path, volume.shape[1:], volume.dtype.itemsize)
        return volume
    for one in FORMATS.values():
        if suffix in one.suffixes and one.opener is not None:
            return one.opener(file)
    raise UserError(f"{path}: the extension {suffix or '(none)'!r} is not supported; convert to {SUPPORTED}")

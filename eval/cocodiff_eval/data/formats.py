"""The table of file formats: the function that opens a path, and the one that writes a result."""

from __future__ import annotations

import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import flush, is_folder, is_there
from cocodiff.config.packages import one_line_of_imports
from cocodiff.config.registry import imported
from cocodiff_eval.data import SAME, WRITTEN
from cocodiff_eval.data.mrc import MODES, open_mrc, write_mrc
from cocodiff_eval.data.ome_zarr import ZarrStore, is_store, open_zarr, split_store
from cocodiff_eval.data.tiff import holds_slices, is_pattern, open_sequence, open_tiff, write_sequence, write_tiff
from cocodiff_eval.data.volume import (
    Metadata,
    NewVolume,
    Reader,
    Stack,
    check_file,
    check_memory,
    quiet_libraries,
    reading,
    same_channels,
    stack_of_array,
    writing,
)

PNG_CHANNELS = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}  # number of channels by colour type; palettes are read as RGBA
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def open_png(file: str) -> Stack:
    """Open a grey PNG file, uint8 or uint16, as a volume of one slice. Its pixels are read at once.

    Raise UserError for colour and for damaged files.
    """
    from PIL import Image

    with reading(f"{file}: not a readable PNG", "save it again"), quiet_libraries():
        # Pillow silently reduces 16-bit colour to 8 bits; the header's bit depth tells before that happens.
        with Path(file).open("rb") as stream:
            header = stream.read(26)
        depth = colour = 0
        if header.startswith(PNG_SIGNATURE) and len(header) == 26:
            width, height, depth, colour = struct.unpack(">IIBB", header[16:])
            check_memory(file, (height, width), max(1, depth // 8) * PNG_CHANNELS.get(colour, 1))
        try:
            with Image.open(file, formats=["PNG"]) as image:
                if depth == 16 and colour != 0:
                    raise UserError(f"{file}: a 16-bit colour PNG; save it as 16-bit grey")
                pixels = np.asarray(image.convert("RGBA") if image.mode == "P" else image)
        except Image.DecompressionBombError:
            raise UserError(f"{file}: too many pixels for a PNG to be read safely; save it as TIFF or HDF5") from None
        if pixels.ndim == 3:
            pixels = same_channels(pixels, file)
    # Some Pillow versions hand out 16-bit grey as 32-bit integers.
    pixels = pixels.astype(np.uint16) if pixels.dtype == np.int32 else pixels
    return stack_of_array(file, pixels, Metadata("png"))


def open_npy(file: str) -> Stack:
    """Open a NumPy file as a volume, whose voxels are mapped to memory.

    Raise UserError for a damaged file, and for one with objects in it, which would have to be unpickled.
    """
    with reading(f"{file}: not a readable .npy file", "save it again with numpy.save"):
        voxels = np.load(file, mmap_mode="r", allow_pickle=False)
    byteorder = ">" if voxels.dtype.newbyteorder("S").isnative and voxels.dtype.itemsize > 1 else "<"
    return stack_of_array(file, voxels, Metadata("npy", byteorder=byteorder))


def write_npy(new: NewVolume) -> None:
    """Write a result as a NumPy file, slice by slice."""
    about = {"descr": new.stored.str, "fortran_order": False, "shape": new.stored_shape}
    with new.path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        new.write_raw(file)


SUPPORTED = (
    "PNG (.png), TIFF (.tif, .tiff; a folder of them or a pattern as one stack), HDF5 (.h5, .hdf5, .hdf, .nxs, as "
    "file.h5:/dataset), OME-Zarr (.zarr), MRC (.mrc, .map, .rec, .st) and NumPy (.npy)"
)
HDF5 = "cocodiff_eval.data.hdf5"  # imported when a file is HDF5: on some machines h5py does not import
_HDF5_PATTERN = re.compile(r"^(?P<file>.+\.(?:h5|hdf5|hdf|nxs))(?::+(?P<dataset>.*))?$", re.IGNORECASE)


@dataclass(frozen=True)
class Format:
    """A file format: the functions that read and write it."""

    suffixes: tuple[str, ...]  # suffixes of the files that `opener` reads, in lower case
    opener: Callable[[str], Stack] | None = None  # None if `open_volume` opens this format in another way
    writer: Callable[[NewVolume], None] | None = None  # None for a format that is only read
    suffix: str = ""  # suffix of the files that `writer` makes
    needs: str = ""  # the module that `writer` imports; "" for none


# Formats by the word of --format. `open_volume` recognises folders, patterns, stores and datasets within files.
FORMATS = {
    "png": Format((".png",), open_png),
    "tiff": Format((".tif", ".tiff"), open_tiff, write_tiff, ".tif", "tifffile"),
    "sequence": Format((), None, write_sequence, needs="tifffile"),
    "zarr": Format((), None, lambda new: ZarrStore(new).write(), ".ome.zarr", "zarr"),
    "h5": Format((".h5", ".hdf5", ".hdf", ".nxs"), None, lambda new: imported(f"{HDF5}:write_hdf5")(new), ".h5", HDF5),
    "npy": Format((".npy",), open_npy, write_npy, ".npy"),
    "mrc": Format((".mrc", ".map", ".rec", ".st"), open_mrc, write_mrc, ".mrc"),
}


@one_line_of_imports()
def result_format(word: str, volume: Stack) -> str:
    """Return the key of FORMATS for the format in which the result of an input is written.

    Raise UserError if the library that writes it cannot be imported, so that a run fails at its start and not at its
    end.

    Args:
        word: the user's choice; `same` is the format of `volume`, or TIFF if that is PNG.
        volume: the input.
    """
    kind = volume.metadata.kind.replace("hdf5", "h5") if word == SAME else word
    word = kind if kind in WRITTEN else "tiff"
    if needs := FORMATS[word].needs:
        import_module(needs)
    if word == "mrc" and volume.dtype.name not in {*MODES, "uint8"}:
        raise UserError(f"{volume.path}: MRC files hold no {volume.dtype.name}: choose another --format")
    return word


def write_volume(
    word: str,
    folder: Path,
    name: Callable[[str], str],
    like: Stack,
    dtype: np.dtype,
    read: Reader,
    provenance: Mapping[str, Any],
    sparse: bool = False,
) -> NewVolume:
    """Write a result to disk in one of FORMATS, and return it. An earlier file or folder of that name is replaced.

    Raise UserError if the format cannot hold the result. A full disk stays an OSError.

    Args:
        word: the format, a key of FORMATS.
        folder: the folder that the result is written in.
        name: gives the file's name for a suffix.
        like: the input, whose shape and metadata the result has.
        dtype: the dtype of the result.
        read: gives a slice of the result, [Y, X] of that dtype.
        provenance: how the result was made, for the file's metadata.
        sparse: True for a result of mostly zeros, which takes little of the disk.
    """
    one = FORMATS[word]
    assert one.writer is not None, word
    path = folder / name(one.suffix)
    new = NewVolume(path, like.shape, dtype, like.ndim, read, like.metadata, provenance, like.region, sparse)
    if path.is_dir():  # left by a run that was killed while it wrote
        shutil.rmtree(path)
    with writing(path):
        one.writer(new)
        for file in path.rglob("*") if path.is_dir() else [path]:
            if file.is_file():
                flush(file)
    return new


@one_line_of_imports()
def open_volume(path: str, follow_links: bool = False) -> Stack:
    """Open a slice or a stack. No voxels are read yet, except from PNG, which has no random access.

    Raise UserError for a missing, unreadable or unsupported file, and for data that are not grey and 2-D or 3-D. Raise
    it also for slices that do not fit in this machine's memory.

    Args:
        path: a PNG, TIFF, MRC or NumPy file, or a folder of TIFF files or a pattern of their names. HDF5 is named as
            `file.h5:/dataset`, and Zarr as `store.zarr` or `store.zarr:/image`.
        follow_links: True to read other files that an HDF5 file names.
    """
    path = str(path)
    if not path:
        raise UserError("'' is no path: name a file or a folder, . for the current one")
    if path.partition("://")[0].isalnum() and "://" in path:
        raise UserError(f"{path}: is an address; name a file of this machine by its path, as /data/scan.tif")
    if path.startswith("~") and not is_there(path):
        raise UserError(f"{path}: no shell has replaced the ~; name it as {os.path.expanduser(path)}")  # noqa: PTH111
    store = split_store(path)
    # a file, or a folder of TIFF files, that only has a name like a Zarr store's
    in_plain_folder = is_there(path) and (Path(path).is_file() or holds_slices(path))
    if store and (is_store(store[0]) or not in_plain_folder):
        return open_zarr(*store)
    if is_pattern(path) or is_folder(path):
        return open_sequence(path)
    named = None if is_there(path) else _HDF5_PATTERN.match(path)
    file, dataset = (named["file"], named["dataset"] or None) if named else (path.rstrip("/"), None)
    check_file(file)
    suffix = Path(file).suffix.lower()
    if suffix in FORMATS["h5"].suffixes:
        return imported(f"{HDF5}:open_hdf5")(file, dataset, follow_links)
    for one in FORMATS.values():
        if suffix in one.suffixes and one.opener is not None:
            return one.opener(file)
    if zipfile.is_zipfile(file):
        raise UserError(f"{path}: is an archive; unpack it (unzip {file} -d FOLDER), and name what is in the folder")
    raise UserError(f"{path}: the extension {suffix or '(none)'!r} is not supported; convert to {SUPPORTED}")

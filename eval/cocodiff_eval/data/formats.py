"""The table of formats: which opener a path goes to, and what writes a result."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import flush, is_folder, is_there
from cocodiff_eval.data import SAME, WRITTEN
from cocodiff_eval.data.hdf5 import open_hdf5, write_hdf5
from cocodiff_eval.data.ome_zarr import is_store, open_zarr, split_store
from cocodiff_eval.data.tiff import holds_slices, is_pattern, open_sequence, open_tiff, write_sequence, write_tiff
from cocodiff_eval.data.volume import (
    LENGTHS,
    Metadata,
    NewVolume,
    Reader,
    Stack,
    as_volume_shape,
    check_file,
    check_memory,
    one_unit,
    quiet_libraries,
    reading,
    same_channels,
    writing,
)

PNG_CHANNELS = {0: 1, 2: 3, 3: 4, 4: 2, 6: 4}  # by colour type; a palette's images are read as RGBA
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def _read_png(file: str) -> np.ndarray:
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
            return same_channels(pixels, file)
    # Some Pillow versions hand out 16-bit grey as 32-bit integers.
    return pixels.astype(np.uint16) if pixels.dtype == np.int32 else pixels


def open_png(file: str) -> Stack:
    return _of_array(file, _read_png(file), Metadata("png"))


def _of_array(file: str, voxels: np.ndarray, metadata: Metadata) -> Stack:
    """voxels: [Y, X] or [N, Y, X], mapped to memory perhaps."""
    shape = as_volume_shape(voxels.shape, file, voxels.dtype.itemsize)

    def read(index: int) -> np.ndarray:
        return np.asarray(voxels if voxels.ndim == 2 else voxels[index])

    return Stack(file, Path(file).stem, shape, voxels.dtype.newbyteorder("="), voxels.ndim, read, metadata)


def open_npy(file: str) -> Stack:
    """Raises UserError for files with objects in them, which would have to be unpickled, and for damaged ones."""
    with reading(f"{file}: not a readable .npy file", "save it again with numpy.save"):
        voxels = np.load(file, mmap_mode="r", allow_pickle=False)
    byteorder = ">" if voxels.dtype.newbyteorder("S").isnative and voxels.dtype.itemsize > 1 else "<"
    return _of_array(file, voxels, Metadata("npy", byteorder=byteorder))


def write_npy(new: NewVolume) -> None:
    about = {"descr": new.stored.str, "fortran_order": False, "shape": new.stored_shape}
    with new.path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for image_YX in new.slices():
            file.write(image_YX.astype(new.stored).tobytes())


def _mrcfile() -> Any:
    """The library. Raises UserError where it is not installed."""
    try:
        import mrcfile
    except ImportError as error:
        raise UserError("MRC files need the package mrcfile: pip install cocodiff[mrc]") from error
    return mrcfile


def open_mrc(file: str) -> Stack:
    """Raises UserError for files that are no MRC2014, and for axes in another order than sections, rows, columns."""
    library = _mrcfile()
    with reading(f"{file}: not a readable MRC file", "save it again with mrcfile or IMOD"), quiet_libraries():
        opened = library.mmap(file, "r")
        voxels, header = opened.data, opened.header
    if (int(header.mapc), int(header.mapr), int(header.maps)) not in ((1, 2, 3), (0, 0, 0)):
        raise UserError(f"{file}: its axes are not in the order of sections, rows, columns: save it again so")
    z, y, x = (float(opened.voxel_size[axis]) for axis in "zyx")  # 0 where it is not known
    sides, unit, _ = one_unit((z or y, y, x) if x and y else None, ["angstrom"] * 3)
    labels = "\n".join(label for label in opened.get_labels() if not label.startswith(MADE_BY))
    details = {"ispg": int(header.ispg)}
    return _of_array(file, voxels, Metadata("mrc", voxel_size=sides, unit=unit, description=labels, details=details))


def write_mrc(new: NewVolume) -> None:
    """Of the statistics in the header, which would need another pass, it says that they are not known."""
    library, metadata = _mrcfile(), new.metadata
    mode = -1
    with contextlib.suppress(ValueError):
        mode = library.utils.mode_from_dtype(new.dtype)
    if mode < 0 or library.utils.dtype_from_mode(mode) != new.dtype:
        raise UserError(f"{new.path}: MRC files hold no {new.dtype.name}: choose another --format")
    with library.new_mmap(str(new.path), new.stored_shape, mode, overwrite=True) as file:
        for index, image_YX in enumerate(new.slices()):
            file.data[index if new.ndim == 3 else ...] = image_YX
        file.header.ispg = metadata.details.get("ispg", int(new.ndim == 3)) if metadata.kind == "mrc" else new.ndim - 2
        if metadata.voxel_size is not None and metadata.unit in LENGTHS:
            z, y, x = (side * (LENGTHS[metadata.unit][1] / LENGTHS["angstrom"][1]) for side in metadata.voxel_size)
            file.voxel_size = (x, y, z)
        file.header.label[:], file.header.nlabl = b"", 0  # the library's has the time
        for line in [*metadata.description.splitlines(), *([MADE_BY] if new.provenance else [])][:10]:
            file.add_label(line.encode("ascii", "replace").decode()[:80])
        file.reset_header_stats()


MADE_BY = "restored by cocodiff"
SUPPORTED = (
    "PNG (.png), TIFF (.tif, .tiff; a folder of them or a pattern as one stack), HDF5 (.h5, .hdf5, .hdf, .nxs, as "
    "file.h5:/dataset), OME-Zarr (.zarr), MRC (.mrc, .map, .rec, .st) and NumPy (.npy)"
)
_HDF5_PATTERN = re.compile(r"^(?P<file>.+\.(?:h5|hdf5|hdf|nxs))(?::+(?P<dataset>.*))?$", re.IGNORECASE)


def write_zarr(new: NewVolume) -> None:
    from cocodiff_eval.data.ome_zarr_file import ZarrStore  # Zarr's library, which takes a second

    ZarrStore(new).write()


@dataclass(frozen=True)
class Format:
    """suffixes: of files that `opener` reads; writer and suffix: of results, none where it is only read."""

    suffixes: tuple[str, ...]
    opener: Callable[[str], Stack] | None = None
    writer: Callable[[NewVolume], None] | None = None
    suffix: str = ""


# By the word of --format. Folders, patterns, stores and datasets within files are told apart by `open_volume`.
FORMATS = {
    "png": Format((".png",), open_png),
    "tiff": Format((".tif", ".tiff"), open_tiff, write_tiff, ".tif"),
    "sequence": Format((), None, write_sequence),
    "zarr": Format((), None, write_zarr, ".ome.zarr"),
    "h5": Format((".h5", ".hdf5", ".hdf", ".nxs"), None, write_hdf5, ".h5"),
    "npy": Format((".npy",), open_npy, write_npy, ".npy"),
    "mrc": Format((".mrc", ".map", ".rec", ".st"), open_mrc, write_mrc, ".mrc"),
}


def result_format(word: str, volume: Stack) -> str:
    """The word of FORMATS that a result is written in. word: `same` for that of the input, TIFF where it is PNG."""
    if word != SAME:
        return word
    kind = volume.metadata.kind.replace("hdf5", "h5")
    return kind if kind in WRITTEN else "tiff"


def write_volume(
    word: str,
    folder: Path,
    name: Callable[[str], str],
    like: Stack,
    dtype: np.dtype,
    read: Reader,
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


def open_volume(path: str, follow_links: bool = False) -> Stack:
    """Open slices; reads no voxels yet (but for PNG, which has no random access).

    path: a PNG, TIFF or NumPy file, a folder of TIFF files or a pattern of their names, HDF5 as `file.h5:/dataset`, or
    Zarr as `store.zarr` or `store.zarr:/image`. follow_links: read other files that an HDF5 file names.
    Raises UserError for a missing, unreadable or unsupported file, for anything that is not 2-D or 3-D grey data, and
    for slices that this machine's memory cannot hold.
    """
    path = str(path)
    if not path:
        raise UserError("'' is no path: name a file or a folder, . for the current one")
    if path.partition("://")[0].isalnum() and "://" in path:
        raise UserError(f"{path}: is an address; name a file of this machine by its path, as /data/scan.tif")
    if path.startswith("~") and not is_there(path):
        raise UserError(f"{path}: no shell has replaced the ~; name it as {os.path.expanduser(path)}")  # noqa: PTH111
    store = split_store(path)
    in_plain_folder = is_there(path) and (Path(path).is_file() or holds_slices(path))  # whose name alone is a store's
    if store and (is_store(store[0]) or not in_plain_folder):
        return open_zarr(*store)
    if is_pattern(path) or is_folder(path):
        return open_sequence(path)
    named = None if is_there(path) else _HDF5_PATTERN.match(path)
    file, dataset = (named["file"], named["dataset"] or None) if named else (path.rstrip("/"), None)
    check_file(file)
    suffix = Path(file).suffix.lower()
    if suffix in FORMATS["h5"].suffixes:
        return open_hdf5(file, dataset, follow_links)
    for one in FORMATS.values():
        if suffix in one.suffixes and one.opener is not None:
            return one.opener(file)
    if zipfile.is_zipfile(file):
        raise UserError(f"{path}: is an archive; unpack it (unzip {file} -d FOLDER), and name what is in the folder")
    raise UserError(f"{path}: the extension {suffix or '(none)'!r} is not supported; convert to {SUPPORTED}")

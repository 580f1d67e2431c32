"""MRC files: MRC2014 and IMOD's. A result of an MRC file has its header, moved to the region."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.volume import (
    LENGTHS,
    Metadata,
    NewVolume,
    Stack,
    kept_alone,
    one_unit,
    quiet_libraries,
    reading,
    stack_of_array,
    start_of,
)

MADE_BY = "restored by cocodiff"
IMOD_STAMP = 1146047817
SIGNED_BYTES, STANDARD_ORIGIN, PACKED_BYTES = 1, 4, 16  # flags of IMOD, in files with its stamp
MODES = {"int8": 0, "int16": 1, "float32": 2, "uint16": 6, "float16": 12}
FIRST_VERSION = 20140  # of MRC2014


def _mrcfile() -> Any:
    """Return the library. Raise UserError where it is not installed."""
    try:
        import mrcfile
    except ImportError as error:
        raise UserError("MRC files need the package mrcfile: pip install cocodiff[mrc]") from error
    return mrcfile


def _imod_words(header: np.ndarray) -> np.ndarray:
    """Return IMOD's stamp and flags (bytes 152 to 159) as two integers that can be changed."""
    return header.reshape(1).view(np.uint8)[152:160].view(header["mode"].dtype)


def open_mrc(file: str) -> Stack:
    """Open an MRC file. Raise UserError for what is no MRC2014, and for other axes than sections, rows, columns."""
    library = _mrcfile()
    with reading(f"{file}: not a readable MRC file", "save it again with mrcfile or IMOD"), quiet_libraries():
        opened = library.mmap(file, "r")
        voxels, header, extended = opened.data, np.array(opened.header), opened.extended_header.tobytes()
    if (int(header["mapc"]), int(header["mapr"]), int(header["maps"])) not in ((1, 2, 3), (0, 0, 0)):
        raise UserError(f"{file}: its axes are not in the order of sections, rows, columns: save it again so")
    stamp, flags = _imod_words(header)
    remarks = list[str]()
    if voxels.dtype == np.int8:
        if stamp == IMOD_STAMP and flags & PACKED_BYTES:
            raise UserError(f"{file}: each byte holds two values of 4 bits; save it as 16 bit (IMOD: newstack -mode 6)")
        if not flags & SIGNED_BYTES if stamp == IMOD_STAMP else header["dmin"] >= 0 and header["dmax"] > 127:
            voxels = voxels.view(np.uint8)
            remarks = [f"{file}: bytes without sign, as IMOD has them; MRC results hold the same values as uint16"]
    z, y, x = (float(opened.voxel_size[axis]) for axis in "zyx")  # 0 where it is not known
    sides, unit, _ = one_unit((z or y, y, x) if x and y else None, ["angstrom"] * 3)
    labels = "\n".join(label for label in opened.get_labels() if not label.startswith(MADE_BY))
    origin, start = header["origin"].tolist(), tuple(int(header[f"n{axis}start"]) for axis in "xyz")
    placed = [f"its origin {origin} and start {start}"] if any(origin) or any(start) else []
    remarks += kept_alone(file, ["its extended header"] if extended else [], placed)
    order = "<" if header["mode"].dtype == np.dtype("<i4") else ">"
    details = {"header": header, "extended": extended}
    metadata = Metadata("mrc", "", sides, unit, labels, order, details=details, remarks=remarks)
    return stack_of_array(file, voxels, metadata)


def write_mrc(new: NewVolume) -> None:
    """Write an MRC file. Raise UserError for types that the format has not.

    Its header says that the statistics, which would need another pass, are not known. IMOD guesses by them whether
    bytes have a sign, so it is told. Bytes without sign, which MRC2014 has not, become uint16.
    """
    metadata, of_mrc = new.metadata, new.metadata.kind == "mrc"
    if of_mrc and new.dtype == np.uint8:
        new = replace(new, dtype=np.dtype(np.uint16))
    if new.dtype.name not in MODES:
        raise UserError(f"{new.path}: MRC files hold no {new.dtype.name}: choose another --format")
    header = metadata.details["header"].copy() if of_mrc else _new_header(new)
    _move(header, new)
    extended = metadata.details["extended"] if of_mrc and new.region is None else b""
    header["mode"], header["nsymbt"] = MODES[new.dtype.name], len(extended)
    if new.dtype == np.int8:
        words = _imod_words(header)
        words[:] = IMOD_STAMP, SIGNED_BYTES | (words[1] if words[0] == IMOD_STAMP else 0)
    header["dmin"], header["dmax"], header["dmean"], header["rms"] = 0, -1, -2, -1
    lines = [*metadata.description.splitlines(), *([MADE_BY] if new.provenance else [])][:10]
    header["label"], header["nlabl"] = b"", len(lines)
    header["label"][: len(lines)] = [line.encode("ascii", "replace")[:80] for line in lines]
    with new.path.open("wb") as file:
        file.write(header.tobytes() + extended)
        for image_YX in new.slices():
            file.write(image_YX.astype(new.stored).tobytes())


def _new_header(new: NewVolume) -> np.ndarray:
    """Return the header of a volume that was no MRC file: a stack is a volume, its origin 0."""
    library, size, unit = _mrcfile(), new.metadata.voxel_size or (0, 0, 0), new.metadata.unit
    angstrom = LENGTHS[unit][1] / LENGTHS["angstrom"][1] if unit in LENGTHS else 0
    header = np.zeros((), library.dtypes.HEADER_DTYPE.newbyteorder(new.metadata.byteorder))
    header["map"], header["nversion"], header["ispg"] = b"MAP ", FIRST_VERSION, new.ndim - 2
    header["machst"] = list(library.utils.machine_stamp_from_byte_order(new.metadata.byteorder))
    header["mapc"], header["mapr"], header["maps"], header["cellb"] = 1, 2, 3, (90, 90, 90)
    for axis, count, side in zip("zyx", new.shape, size, strict=True):
        header[f"n{axis}"] = header[f"m{axis}"] = count
        header["cella"][axis] = count * side * angstrom
    return header


def _move(header: np.ndarray, new: NewVolume) -> None:
    """Give the header of a volume the shape and the place of a region of it. A cell larger than the volume stays."""
    stamp, flags = _imod_words(header)
    standard = header["nversion"] >= FIRST_VERSION or stamp != IMOD_STAMP or flags & STANDARD_ORIGIN
    for axis, count, first in zip("zyx", new.shape, start_of(new.region), strict=True):
        cell, before, intervals = header["cella"][axis], int(header[f"n{axis}"]), int(header[f"m{axis}"])
        header["origin"][axis] += (first if standard else -first) * cell / (intervals or 1)
        header[f"n{axis}start"] += first
        header[f"n{axis}"] = count
        if intervals == before:
            header[f"m{axis}"], header["cella"][axis] = count, cell * (count / before)

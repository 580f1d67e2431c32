"""MRC files of MRC2014 and IMOD. A result of an MRC input keeps its header, moved to the region."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff_eval.data.volume import (
    LENGTHS,
    Metadata,
    NewVolume,
    Stack,
    format_only_remarks,
    one_unit,
    quiet_libraries,
    reading,
    stack_of_array,
    start_of,
)

MADE_BY = "restored by cocodiff"
MODES = {"int8": 0, "int16": 1, "float32": 2, "uint16": 6, "float16": 12}  # the format's numbers of dtypes
# The fields of the header that are used, each with its type and first byte. Three numbers are those of x, y, z.
_FIELDS = """n 3i4 0, mode i4 12, start 3i4 16, intervals 3i4 28, cell 3f4 40, angles 3f4 52, axes 3i4 64,
limits 3f4 76, ispg i4 88, extended i4 92, version i4 108, imod 2i4 152, origin 3f4 196, map S4 208, machine S4 212,
rms f4 216, labels i4 220, label 10S80 224"""
_NAMES, _KINDS, _PLACES = zip(*map(str.split, _FIELDS.split(",")), strict=True)
HEADER = np.dtype({"names": _NAMES, "formats": _KINDS, "offsets": [*map(int, _PLACES)]})  # 1024 bytes
IMOD_STAMP = 1146047817  # first number of the field `imod` in IMOD's files; the second number holds flags
SIGNED_BYTES, STANDARD_ORIGIN, PACKED_BYTES = 1, 4, 16  # flags of IMOD
FIRST_VERSION = 20140  # the first version number of MRC2014


def open_mrc(file: str) -> Stack:
    """Open an MRC file as a volume, whose voxels are mapped to memory. The library mrcfile must be installed.

    Raise UserError for a file that is not MRC2014, and for axes in another order than sections, rows, columns.
    """
    import mrcfile

    with reading(f"{file}: not a readable MRC file", "save it again with mrcfile or IMOD"), quiet_libraries():
        opened = mrcfile.mmap(file, "r")
        voxels, head, extended = opened.data, opened.header.tobytes(), opened.extended_header.tobytes()
    order = "<" if opened.header.mode.dtype == np.dtype("<i4") else ">"
    header, remarks = _parse(head, order), list[str]()
    if header["axes"].tolist() not in ([1, 2, 3], [0, 0, 0]):
        raise UserError(f"{file}: its axes are not in the order of sections, rows, columns: save it again so")
    if voxels.dtype == np.int8:
        stamp, flags = header["imod"]
        if stamp == IMOD_STAMP and flags & PACKED_BYTES:
            raise UserError(f"{file}: each byte holds two values of 4 bits; save it as 16 bit (IMOD: newstack -mode 6)")
        low, high, _ = header["limits"]
        if not flags & SIGNED_BYTES if stamp == IMOD_STAMP else low >= 0 and high > 127:
            voxels = voxels.view(np.uint8)
            remarks = [f"{file}: bytes without sign, as IMOD has them; MRC results hold the same values as uint16"]
    z, y, x = (float(opened.voxel_size[axis]) for axis in "zyx")  # 0 if unknown
    sides, unit, _ = one_unit((z or y, y, x) if x and y else None, ["angstrom"] * 3)
    labels = "\n".join(label for label in opened.get_labels() if not label.startswith(MADE_BY))
    origin, start = header["origin"].tolist(), header["start"].tolist()
    placed = [f"its origin {origin} and start {start}"] if any(origin + start) else []
    remarks += format_only_remarks(file, ["its extended header"] if extended else [], placed)
    details = {"header": head, "extended": extended}
    return stack_of_array(file, voxels, Metadata("mrc", "", sides, unit, labels, order, {}, details, remarks))


def _parse(head: bytes, order: str) -> np.ndarray:
    """Return a copy of the bytes of an MRC header as one NumPy record of HEADER's fields.

    Args:
        head: the header's 1024 bytes.
        order: their byte order, "<" or ">".
    """
    return np.frombuffer(bytearray(head), HEADER.newbyteorder(">" if order == ">" else "<")).reshape(())


def write_mrc(new: NewVolume) -> None:
    """Write a result as an MRC file. Raise UserError for dtypes that the format lacks.

    The header says that statistics of the voxels are unknown, as they would need another pass. IMOD guesses from them
    whether bytes are signed, so a flag says it instead. Unsigned bytes, which MRC2014 lacks, become uint16.
    """
    metadata, of_mrc = new.metadata, new.metadata.kind == "mrc"
    if new.dtype == np.uint8:
        new = replace(new, dtype=np.dtype(np.uint16))
    if new.dtype.name not in MODES:
        raise UserError(f"{new.path}: MRC files hold no {new.dtype.name}: choose another --format")
    header = _parse(metadata.details["header"], metadata.byteorder) if of_mrc else _new_header(new)
    _move(header, new)
    extended = metadata.details["extended"] if of_mrc and new.region is None else b""
    header["mode"], header["extended"] = MODES[new.dtype.name], len(extended)
    if new.dtype == np.int8:
        stamp, flags = header["imod"]
        header["imod"] = IMOD_STAMP, SIGNED_BYTES | (flags if stamp == IMOD_STAMP else 0)
    header["limits"], header["rms"] = (0, -1, -2), -1
    lines = [*metadata.description.splitlines(), *([MADE_BY] if new.provenance else [])][:10]
    header["label"], header["labels"] = b"", len(lines)
    header["label"][: len(lines)] = [line.encode("ascii", "replace")[:80] for line in lines]
    with new.path.open("wb") as file:
        file.write(header.tobytes() + extended)
        new.write_raw(file)


def _new_header(new: NewVolume) -> np.ndarray:
    """Return a header for the result of an input that is no MRC file. It describes one voxel at the origin."""
    size, unit, order = new.metadata.voxel_size or (0, 0, 0), new.metadata.unit, new.metadata.byteorder
    angstrom = LENGTHS[unit][1] / LENGTHS["angstrom"][1] if unit in LENGTHS else 0
    header = _parse(bytes(HEADER.itemsize), order)
    header["map"], header["machine"] = b"MAP ", b"\x11\x11" if order == ">" else b"DD"
    header["version"], header["ispg"], header["axes"], header["angles"] = FIRST_VERSION, new.ndim - 2, (1, 2, 3), 90
    header["n"], header["intervals"], header["cell"] = 1, 1, [side * angstrom for side in reversed(size)]
    return header


def _move(header: np.ndarray, new: NewVolume) -> None:
    """Change an MRC header, in place, to the shape of a result and to the position of its region in the input.

    Along an axis where the cell has not as many intervals as the input has voxels, its side and intervals stay.
    """
    (stamp, flags), intervals = header["imod"], header["intervals"].copy()
    standard = header["version"] >= FIRST_VERSION or stamp != IMOD_STAMP or flags & STANDARD_ORIGIN
    first, count = (np.array(numbers[::-1]) for numbers in (start_of(new.region), new.shape))
    whole = intervals == header["n"]
    header["origin"] += (1 if standard else -1) * first * header["cell"] / np.maximum(intervals, 1)
    header["cell"] *= np.where(whole, count / header["n"], 1)
    header["intervals"], header["n"] = np.where(whole, count, intervals), count
    header["start"] += first

"""Makers of images: every kind of `file_kinds`, TIFF in its forms with what it says drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tifffile
from file_kinds import KINDS, write_ome
from inputs_files import JUNK, LENGTHS, TEXTS, UNKNOWN, Draw, Given, Plain, in_meters


def usual(draw: Draw) -> Given:
    """Write one of the kinds of `file_kinds` that hold these voxels, all of which come up."""
    voxels = draw.voxels
    fits = {name: one for name, one in KINDS.items() if voxels.dtype.name in one.dtypes}
    fits = {name: one for name, one in fits.items() if voxels.ndim in map(len, one.shapes)}
    name = [*fits][7 * draw.turn % len(fits)]  # so that the first ones are of many formats
    written, _, inner = fits[name].file(draw.folder, voxels, draw.pick(*"<>")).partition(":/")
    path = draw.path(Path(written).suffix)
    Path(written).rename(path)
    if draw.odd and path.is_dir():
        (path / draw.pick(".hidden.tif", "notes.txt", "Thumbs.db", "other_1.tif")).write_bytes(b"II*\0")
    given = Given(Path(f"{path}:/{inner}") if inner else path, voxels, kind=name)
    if name == "zarr 2 array":  # whose fill value is that of missing voxels
        given.refusals = "missing"
    if fits[name].size is not None:
        given.meters = in_meters(fits[name].size, [fits[name].unit] * 3)
    return given


def tiff(draw: Draw) -> Given:
    """Write a plain TIFF with drawn tags, texts and sides of a voxel."""
    given = Given(draw.path(".tif"), draw.voxels)
    options: Plain = {"byteorder": draw.pick(*"<>"), "photometric": draw.pick("minisblack", "miniswhite")}
    if draw.stored and draw.voxels.size:
        codecs = ("lzw", "packbits") if draw.voxels.dtype.kind in "ui" else ()
        options |= {"compression": draw.pick(None, "zlib", "zstd", "lzma", *codecs), "bigtiff": draw.maybe(0.3)}
        options |= draw.pick({}, {"tile": (16, 16)}, {"rowsperstrip": 5}, {"contiguous": False})
    if draw.maybe(0.6):
        unit = draw.by_turn(1, 2, 3, 4, 5)
        options |= {"resolution": ((4000, 7), (2000, 3)), "resolutionunit": unit}
        side = {1: None, 2: 0.0254, 3: 1e-2, 4: 1e-3, 5: 1e-6}[unit]
        given.meters = (3 / 2000 * side, 3 / 2000 * side, 7 / 4000 * side) if side else None
    if draw.odd:
        given.meters = UNKNOWN
        options |= draw.pick(
            {"metadata": {"axes": "CYX" if draw.voxels.ndim == 3 else "YX"}},
            {"metadata": {"voxel_size": draw.pick(*JUNK), "unit": draw.pick(*JUNK[1:])}},
            {"description": draw.pick("{broken", "ImageJ=", '{"shape": [1]}', "µ".encode(), "<OME/>", "<OME")},
            {"resolution": draw.pick((0, 0), (1e-9, 4e9), (1, 0)), "resolutionunit": draw.pick(1, 2, 3)},
            {"extratags": [(draw.pick(305, 306, 270, 65000, 42112), 2, 0, "odd \u00b5".encode(), True)]},
            {"software": "s" * 5000, "datetime": True},
        )
    else:
        options["metadata"] = draw.pick({}, {"unit": "nm", "voxel_size_um": 3, "note": draw.pick(*TEXTS)})
        if draw.maybe(0.4):
            sides, name = draw.sides(), draw.pick("", *LENGTHS)
            options["metadata"] = {"voxel_size": sides, "unit": name}
            given.plain = not name
            given.meters = in_meters(sides, [name or "m"] * 3)
        options["extratags"] = [(draw.pick(315, 306, 33432, 269), 2, 0, draw.pick(*TEXTS).encode(), True)]
        options |= {"software": draw.pick(*TEXTS).encode(), "description": draw.pick(*TEXTS).encode()}
    tifffile.imwrite(given.path, draw.voxels, **options)
    return given


def imagej(draw: Draw) -> Given:
    """Write ImageJ's TIFF, with a unit for each axis or one for all."""
    flat, x, y = draw.voxels.ndim == 2, 8 / 3, 5 / 7
    sides, units = draw.sides(), draw.units([one for one in LENGTHS if one not in ("pixel", "x" * 300, "Å")])
    about: Plain = {"unit": units[2].replace("µ", "\\u00B5"), "axes": "ZYX"[-draw.voxels.ndim :], "loop": True}
    about |= {f"{axis}unit": one.replace("µm", "um") for axis, one in zip("zy", units, strict=False) if one != units[2]}
    if draw.maybe(0.8) or flat:
        about["spacing"] = sides[0]
    else:
        sides[0], units[0] = y, units[1]
    about |= {"Info": draw.pick(*TEXTS), "Properties": {"a": draw.pick(*TEXTS)}}
    given = Given(draw.path(".tif"), draw.voxels, in_meters([sides[0], y, x], units))
    resolution: Any = ((3, 8), (7, 5))
    if draw.odd:
        given.meters, resolution = UNKNOWN, draw.pick((0, 0), (1, 1))
        about |= draw.pick(
            {"spacing": draw.pick("abc", "-1", "nan", "0", "1e999")},
            {"unit": draw.pick("", "pixel", "furlong", "null", "x" * 300)},
            {"axes": "YX" if flat else draw.pick("CYX", "TYX")},
        )
    options = {"resolution": resolution, "metadata": about, "byteorder": draw.pick(*"<>")}
    tifffile.imwrite(given.path, draw.voxels, imagej=True, **options)
    return given


def ome(draw: Draw) -> Given:
    """Write OME-TIFF: in its XML any units, some of which are not there, or another word."""
    sides, units = draw.sides(), draw.units(("nm", "µm", *LENGTHS))
    said: Plain = {f"PhysicalSize{axis}": side for axis, side in zip("ZYX", sides, strict=True)}
    said |= {f"PhysicalSize{axis}Unit": unit for axis, unit in zip("ZYX", units, strict=True)}
    if draw.maybe(0.2):  # the schema's own unit
        said["PhysicalSizeZUnit"] = units[0] = "µm"
    given = Given(draw.path(".ome.tif"), draw.voxels, in_meters(sides, units))
    Path(write_ome(draw.folder, draw.voxels, draw.pick(*"<>"), **said)).rename(given.path)
    xml = tifffile.tiffcomment(given.path)
    if draw.maybe(0.15):
        xml = xml.replace(' PhysicalSizeZ="', ' Lost="').replace(" PhysicalSizeZUnit=", " LostUnit=")
        given.meters = in_meters([sides[1], *sides[1:]], [units[1], *units[1:]])
    if draw.maybe(0.1):
        xml, given.meters = xml.replace(f'PhysicalSizeX="{sides[2]}"', 'PhysicalSizeX="two"'), None
    if draw.odd:
        given.meters = UNKNOWN
        other = (('SizeX="', 'SizeQ="'), ("<Pixels", "<Pixelz"), ("</", "<<"), ('SizeC="1"', 'SizeC="2"'))
        xml = xml.replace(
            *draw.pick(*other, ('SizeZ="', 'SizeT="1" SizeU="'), ("PhysicalSizeX=", 'PhysicalSizeX="-1" a='))
        )
    tifffile.tiffcomment(given.path, xml.encode())
    return given

"""Makers of HDF5 and Zarr: voxels stored in part, sides, units and texts, and odd attributes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import zarr
from file_kinds import write_zarr
from inputs_files import JUNK, LENGTHS, SHAPE, TEXTS, UNKNOWN, Draw, Given, Plain, in_meters, mutated

PLACES = ("entry/instrument/detector/data", "exchange/data", "data", "scan/tomo/data")


def hdf5(draw: Draw) -> Given:
    """Write one dataset: with its voxel's size, and texts; stored in part; or with junk for attributes."""
    plain = draw.stem != "scan" or draw.voxels.shape != SHAPE or draw.odd or draw.voxels.dtype.kind in "bc"
    file = draw.path(".h5" if plain else draw.pick(".h5", ".nxs", ".hdf5"))
    place = "exchange/data" if plain else draw.pick(*PLACES)
    how = "whole" if plain else draw.by_turn("whole", "none", "chunks")
    given, sides = Given(file, draw.voxels, kind=how), draw.sides()
    with h5py.File(file, "w") as h5:
        if how == "whole":
            options: Plain = {}
            if draw.voxels.size and draw.voxels.ndim and (draw.stored or draw.maybe(0.5)):
                options = {"chunks": tuple(min(side, draw.pick(1, 7, 16)) for side in draw.voxels.shape)}
                options |= {"compression": draw.pick(None, "gzip", "lzf"), "shuffle": draw.maybe(0.5)}
                options |= {"fletcher32": draw.maybe(0.3), "maxshape": (None,) * draw.voxels.ndim}
            stored = draw.voxels.astype(draw.voxels.dtype.newbyteorder(draw.pick(*"<>")))
            data = h5.create_dataset(place, data=stored, **options)
        else:
            chunks = (1, 11, 13) if how == "chunks" else None
            data = h5.create_dataset(place, SHAPE, draw.voxels.dtype, chunks=chunks, fillvalue=7)
            given.voxels = np.full(SHAPE, 7, draw.voxels.dtype)
            if how == "chunks":
                data[1], given.voxels[1] = draw.voxels[1], draw.voxels[1]
        if draw.maybe(0.3):
            data.parent.attrs["pxsize"], given.meters = sides[0], in_meters(sides[:1] * 3, ["mm"] * 3)
        elif draw.maybe(0.7):
            data.attrs["element_size_um"], given.meters = sides, in_meters(sides, ["µm"] * 3)
        data.attrs["description"] = draw.pick(*TEXTS[:-1])
        if draw.odd:
            add_junk(h5, data, draw)
            given.meters = UNKNOWN
    given.path = file if plain else Path(f"{file}:/{place}")
    return given


def add_junk(h5: h5py.File, data: h5py.Dataset, draw: Draw) -> None:
    junk = [[1.0, 2.0], "three", np.array([1, np.nan, 0]), h5py.Empty("f4"), data.ref, b"\xff\xfe", "x" * 40000]
    about, value = draw.pick(h5, data.parent, data), draw.pick(*junk)
    name = draw.pick("element_size_um", "axes", "description", "pxsize", "CLASS", "cocodiff", "ü", ".", "a/b")
    if not (about is data and isinstance(value, str) and len(value) > 8):
        about.attrs.create(name, value)
    h5["link"], h5["other"] = h5py.SoftLink("/nowhere"), h5py.ExternalLink("elsewhere.h5", "/data")
    h5["texts"] = np.array([b"a", b"bc"])


def store(draw: Draw) -> Given:
    """Write a Zarr store with an image of NGFF 0.4 or 0.5, or with an array alone in its root; stored in part."""
    version, image, voxels = draw.pick(2, 3), draw.maybe(0.7), draw.voxels
    given = Given(draw.path(draw.pick(".ome.zarr", ".zarr")), voxels, kind=f"v{version}{' image' * image}")
    lead, ndim, usual = draw.pick(0, 1, 2) * image, voxels.ndim, ("nanometer", "micrometer", "millimeter")
    chunks = (1,) * lead + tuple(max(1, min(side, draw.pick(1, 7, 16, 50))) for side in voxels.shape)
    options: Plain = {"chunks": chunks, "fill_value": draw.pick(0, 1, 3), "config": {"write_empty_chunks": False}}
    if draw.stored:
        options |= draw.pick({"compressors": None}, {}, {"order": "F"} if version == 2 else {})
        if version == 3 and voxels.size:
            options["shards"] = tuple(2 * side for side in chunks)
    if voxels.shape == SHAPE and draw.maybe(0.4):
        given.voxels = np.full(SHAPE, options["fill_value"], voxels.dtype)
        given.voxels[1] = voxels[1]
    sample = draw.pick(*JUNK[:13]) if draw.odd else draw.pick(*TEXTS)
    if not image:
        zarr.create_array(given.path, data=given.voxels, zarr_format=version, **options).attrs["sample"] = sample
        return given
    sides, units = draw.sides(), draw.units(draw.pick(usual, usual, ["", *LENGTHS], [""]))
    corner = [10.0, -20.0, 30.0] if draw.maybe(0.5) else []
    of_axes: Plain = {"sides": dict(zip("zyx", sides, strict=True)), "units": dict(zip("zyx", units, strict=True))}
    of_axes |= {"version": version, "translation": [0.0] * lead + corner[-ndim:] if corner else []}
    names, stored = "tc"[2 - lead :] + "zyx"[-ndim:], voxels if given.voxels is None else given.voxels
    shape = (1,) * lead + voxels.shape
    written = write_zarr(draw.folder, stored.reshape(shape), draw.pick(*"<>"), names, **of_axes, **options)
    Path(written).rename(given.path)
    root, used = zarr.open_group(given.path, mode="a"), {*units[-ndim:]}
    about = root.attrs.asdict() | {"sample": sample}
    about = mutated(about, draw.chance) if draw.odd else about
    root.attrs.put(about if isinstance(about, dict) else {})
    given.plain = used == {""}
    given.meters = None if "" in used and not given.plain else in_meters(sides, [unit or "m" for unit in units])
    if ndim == 2:
        given.meters = UNKNOWN if given.meters is None else given.meters
    given.meters = UNKNOWN if draw.odd else given.meters
    return given

"""Makers of HDF5, netCDF and Zarr: voxels stored in part or elsewhere, what attributes say of values, dimensions and
units."""

from __future__ import annotations

import base64
import struct
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray
import zarr
from file_kinds import VOXEL_SIZE, write_hdf5, write_zarr
from inputs_files import (
    AXES,
    JUNK,
    KINDS,
    LENGTHS,
    SHAPE,
    TEXTS,
    UNKNOWN,
    Declared,
    Draw,
    Given,
    Plain,
    Result,
    declare,
    in_meters,
    mutated,
)

PLACES = ("entry/instrument/detector/data", "exchange/data", "data", "scan/tomo/data")


HOW = ("whole", "none", "chunks", "other file")


def store_voxels(h5: h5py.File, place: str, voxels: np.ndarray, draw: Draw) -> h5py.Dataset:
    options: Plain = {}
    if voxels.size and voxels.ndim and (draw.stored or draw.maybe(0.5)):
        options = {"chunks": tuple(min(side, draw.pick(1, 7, 16)) for side in voxels.shape)}
        options |= {"compression": draw.pick(None, "gzip", "lzf"), "shuffle": draw.maybe(0.5)}
        options |= {"fletcher32": draw.maybe(0.3), "maxshape": (None,) * voxels.ndim}
    return h5.create_dataset(place, data=voxels.astype(voxels.dtype.newbyteorder(draw.pick(*"<>"))), **options)


def hdf5(draw: Draw) -> Given:
    """Write one dataset: with its voxel's size, and texts; stored in part; in another file; or with junk for
    attributes."""
    plain = draw.stem != "scan" or draw.voxels.shape != SHAPE or draw.odd or draw.voxels.dtype.kind in "bc"
    file = draw.path(".h5" if plain else draw.pick(".h5", ".nxs", ".hdf5"))
    place, how = ("exchange/data", "whole") if plain else (draw.pick(*PLACES), draw.by_turn(*HOW))
    given, sides = Given(file, draw.voxels, kind=how), draw.sides()
    with h5py.File(draw.path("-raw.h5") if how == "other file" else file, "w") as h5:
        if how in ("whole", "other file"):
            data = store_voxels(h5, place, draw.voxels, draw)
        else:
            chunks = (1, 11, 13) if how == "chunks" else None
            data = h5.create_dataset(place, SHAPE, draw.voxels.dtype, chunks=chunks, fillvalue=7)
            given.voxels = np.full(SHAPE, 7, draw.voxels.dtype)
            if how == "chunks":
                data[1], given.voxels[1] = draw.voxels[1], draw.voxels[1]
        if draw.maybe(0.3) and how != "other file":
            data.parent.attrs["pxsize"], given.meters = sides[0], in_meters(sides[:1] * 3, ["mm"] * 3)
        elif draw.maybe(0.7):
            data.attrs["element_size_um"], given.meters = sides, in_meters(sides, ["µm"] * 3)
        data.attrs["description"] = draw.pick(*TEXTS[:-1])
        if draw.odd:
            add_junk(h5, data, draw)
            given.meters = UNKNOWN
    if how == "other file":
        with h5py.File(file, "w") as h5:
            h5[place] = h5py.ExternalLink(draw.path("-raw.h5").name, f"/{place}")
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


def decode(path: Path, name: str, **options: Any) -> np.ndarray:
    """Return the decoded values of a variable as xarray reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xarray.open_dataset(path, decode_times=False, **options) as data:
            return np.asarray(data[name].values)


def values(draw: Draw) -> Given:
    """Write HDF5 with the attributes of CF, and with dimensions named by NeXus, an attribute, labels, scales, or as
    xarray names them in netCDF 4."""
    how, file = draw.by_turn("", "nexus", "labels", "scales", "old nexus", "xarray", "xarray"), draw.path(".h5")
    declared, (names, wrong) = declare(draw, KINDS[:-2] if how == "xarray" else KINDS), draw.dimensions()
    if how == "xarray":
        data, encoding = for_xarray(declared, names, "data")
        more = {"unlimited_dims": [names[0]]} if draw.maybe(0.3) else {}
        data.to_netcdf(file, group="exchange", engine="h5netcdf", encoding=encoding, **more)
    else:
        write_hdf5(draw.folder, declared.stored, draw.pick(*"<>"), names, how, declared.attributes)
    given = declared.given(
        Path(f"{file}:/exchange/data"),
        partial(decode, name="data", engine="h5netcdf", group="exchange", phony_dims="sort"),
    )
    given.meters = None if how == "xarray" else in_meters(VOXEL_SIZE, ["µm"] * 3)
    given.kind += f" {how} {names}"
    given.refuse(AXES, wrong and how != "")
    return given


def for_xarray(declared: Declared, names: tuple[str, ...], name: str) -> tuple[xarray.Dataset, dict[str, Any]]:
    """Return what xarray writes of voxels, with attributes as they are and not as it would make them of an encoding."""
    about = dict(declared.attributes)
    encoding = {"_FillValue": about.pop("_FillValue")} if "_FillValue" in about else {}
    data = xarray.Dataset({name: (names, declared.stored)})
    data[name].attrs.update(about)
    return data, {name: encoding}


def zarr_values(draw: Draw) -> Given:
    """Write an array with the attributes of CF and dimensions by name, after one of time perhaps; or as xarray does,
    which has the missing value as fill value in format 2, in format 3 as an attribute, of floats in base64."""
    by_xarray, version, path, (names, wrong) = draw.maybe(0.4), draw.pick(2, 3), draw.path(".zarr"), draw.dimensions()
    declared = declare(draw, ("_FillValue", "scale", "unsigned", "both") if by_xarray else KINDS)
    if by_xarray:
        data, encoding = for_xarray(declared, names, "0")
        data.to_zarr(path, zarr_format=version, consolidated=draw.maybe(0.5), encoding=encoding)
    else:
        lead = 1 if names[0] == "z" and draw.maybe(0.5) else 0
        about, volume = dict(declared.attributes), declared.stored.reshape((1,) * lead + SHAPE)
        for name, value in about.items():
            if isinstance(value, np.floating) and version == 3:
                about[name] = base64.standard_b64encode(struct.pack("<d", float(value))).decode()
        axes, order = ("t",) * lead + names, draw.pick(*"<>")
        write_zarr(draw.folder, volume, order, axes, version, image=False, attributes=about)
    given = declared.given(Path(f"{path}:/0"), partial(decode, name="0", engine="zarr", consolidated=False))
    given.refuse(AXES, wrong)
    return given


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
        array = zarr.create_array(given.path, data=given.voxels, zarr_format=version, **options)
        array.attrs["sample"] = sample
        return given
    sides, units = draw.sides(), draw.units(draw.pick(usual, usual, ["", *LENGTHS], [""]))
    corner = [10.0, -20.0, 30.0] if draw.maybe(0.5) else []
    of_axes: Plain = {"sides": dict(zip("zyx", sides, strict=True)), "units": dict(zip("zyx", units, strict=True))}
    of_axes |= {"version": version, "translation": [0.0] * lead + corner[-ndim:] if corner else []}
    names, stored = "tc"[2 - lead :] + "zyx"[-ndim:], voxels if given.voxels is None else given.voxels
    shape = (1,) * lead + voxels.shape
    written = write_zarr(draw.folder, stored.reshape(shape), draw.pick(*"<>"), names, **of_axes, **options)
    Path(written).rename(given.path)
    root, whole = zarr.open_group(given.path, mode="a"), [2.0, 3.0, 0.5] if draw.maybe(0.3) else [1.0] * 3
    about = root.attrs.asdict() | {"sample": sample}
    if whole[0] != 1:
        of_image = {"type": "scale", "scale": [1.0] * lead + whole[-ndim:]}
        about.get("ome", about)["multiscales"][0]["coordinateTransformations"] = [of_image]
    about = mutated(about, draw.chance) if draw.odd else about
    root.attrs.put(about if isinstance(about, dict) else {})
    sides, used = [one * other for one, other in zip(sides, whole, strict=True)], {*units[-ndim:]}
    given.plain = used == {""}
    given.meters = None if "" in used and not given.plain else in_meters(sides, [unit or "m" for unit in units])
    if ndim == 2:
        given.meters = UNKNOWN if given.meters is None else given.meters
    given.checks.append(partial(check_translation, sides, whole, corner, lead))
    if draw.odd:
        given.meters, given.checks = UNKNOWN, []
    return given


def check_translation(sides: list[float], whole: list[float], corner: list[float], lead: int, result: Result) -> str:
    """Return how the place of a result in Zarr is wrong: of a region its first voxel's."""
    if not result.own:
        return ""
    about = zarr.open_group(result.path, mode="r").attrs.asdict()
    moves = about.get("ome", about)["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    found = next((one["translation"] for one in moves if one["type"] == "translation"), [0.0] * len(moves[0]["scale"]))
    steps = zip(corner or (0, 0, 0), result.start, sides, whole, strict=True)
    wanted = [0.0] * lead + [place + first * side / times for place, first, side, times in steps][lead - len(found) :]
    return "" if np.allclose(found, wanted) else f"translation {found}, where {wanted} is right"

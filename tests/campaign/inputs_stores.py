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
import zarr
from inputs_files import (
    AXES,
    JUNK,
    KINDS,
    LENGTHS,
    SHAPE,
    TEXTS,
    UNKNOWN,
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


def opened_by_xarray(path: Path, name: str, **options: Any) -> np.ndarray:
    """Return the decoded values of a variable as xarray reads them."""
    import xarray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xarray.open_dataset(path, decode_times=False, **options) as data:
            return np.asarray(data[name].values)


def decode_hdf5(path: Path, of_result: bool) -> np.ndarray:
    return opened_by_xarray(path, "vol", engine="h5netcdf", group="entry", phony_dims="sort")


def values(draw: Draw) -> Given:
    """Write HDF5 with the attributes of CF, and with dimensions named by NeXus, an attribute, labels, scales, or as
    xarray names them in netCDF 4."""
    import xarray

    how, file = draw.by_turn("none", "nexus", "labels", "scales", "axes", "xarray", "xarray"), draw.path(".h5")
    declared, (names, wrong) = declare(draw, KINDS[:-2] if how == "xarray" else KINDS), draw.dimensions()
    about = dict(declared.attributes)
    if how == "xarray":  # attributes as they are, not as xarray would make them of an encoding
        data = xarray.Dataset({"vol": (names, declared.stored)})
        encoding = {"vol": {"_FillValue": about.pop("_FillValue", None)}}
        data["vol"].attrs.update(about)
        more = {"unlimited_dims": [names[0]]} if draw.maybe(0.3) else {}
        data.to_netcdf(file, group="entry", engine="h5netcdf", encoding=encoding, **more)
    else:
        with h5py.File(file, "w") as h5:
            dataset, group = store_voxels(h5, "entry/vol", declared.stored, draw), h5["entry"]
            dataset.attrs.update(about | ({"axes": ":".join(names)} if how == "axes" else {}))
            group.attrs.update({"NX_class": "NXdata", "signal": "vol", "axes": [*names]} if how == "nexus" else {})
            for axis, name, side in zip(dataset.dims, names, SHAPE, strict=True):
                if how == "labels":
                    axis.label = name
                elif how == "scales":
                    group[name] = 3 + 0.5 * np.arange(side)
                    group[name].make_scale(name)
                    axis.attach_scale(group[name])
    given = declared.given(Path(f"{file}:/entry/vol"), decode_hdf5)
    given.kind += f" {how} {names}"
    given.refuse(AXES, wrong and how != "none")
    return given


def decode_zarr(path: Path, of_result: bool) -> np.ndarray:
    return opened_by_xarray(path, "0" if of_result else "vol", engine="zarr", consolidated=False)


def zarr_values(draw: Draw) -> Given:
    """Write an array with the attributes of CF and dimensions by name, after one of time perhaps; or as xarray does,
    which has the missing value as fill value in format 2, in format 3 as an attribute, of floats in base64."""
    import xarray

    by_xarray, version, path, (names, wrong) = draw.maybe(0.4), draw.pick(2, 3), draw.path(".zarr"), draw.dimensions()
    declared, named = (
        declare(draw, ("_FillValue", "scale", "unsigned", "both") if by_xarray else KINDS),
        draw.maybe(0.7),
    )
    about = dict(declared.attributes)
    if by_xarray:
        data, fill = xarray.Dataset({"vol": (names, declared.stored)}), about.pop("_FillValue", None)
        data["vol"].attrs.update(about)
        encoding = {"vol": {} if fill is None else {"_FillValue": fill}}
        data.to_zarr(path, zarr_format=version, consolidated=draw.maybe(0.5), encoding=encoding)
    else:
        names = ("time", *names) if named and names[0] == "z" and draw.maybe(0.5) else names
        options: Plain = {"shape": (1,) * (len(names) - 3) + SHAPE, "dtype": declared.stored.dtype}
        options |= {"dimension_names": names} if named and version == 3 else {}
        array = zarr.create_group(path, zarr_format=version).create_array(
            "vol", chunks=(*[1] * (len(names) - 2), 22, 13), **options
        )
        array[:] = declared.stored.reshape(options["shape"])
        about = {name: as_json(value, version) for name, value in about.items()}
        array.attrs.update(about | ({"_ARRAY_DIMENSIONS": [*names]} if named and version == 2 else {}))
    given = declared.given(Path(f"{path}:/vol"), decode_zarr if by_xarray or named else None)
    given.refuse(AXES, wrong and (by_xarray or named))
    return given


def as_json(value: Any, version: int) -> Any:
    """Return an attribute as JSON has it: missing values of floats in Zarr 3 as xarray writes them."""
    if isinstance(value, np.floating) and version == 3:
        return base64.standard_b64encode(struct.pack("<d", float(value))).decode()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def store(draw: Draw) -> Given:
    """Write a Zarr store with an image of NGFF 0.4 or 0.5, or with an array alone in its root; stored in part."""
    version, image, voxels = draw.pick(2, 3), draw.maybe(0.7), draw.voxels
    given = Given(draw.path(draw.pick(".ome.zarr", ".zarr")), voxels, kind=f"v{version}{' image' * image}")
    lead, ndim, usual = draw.pick(0, 1, 2) * image, voxels.ndim, ("nanometer", "micrometer", "millimeter")
    sides, units = draw.sides(), draw.units(["", *LENGTHS] if draw.maybe(0.3) else usual)
    axes: list[Plain] = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}][2 - lead :]
    for name, unit in [*zip("zyx", units, strict=True)][-ndim:]:
        axes.append({"name": name, "type": "space"} | ({"unit": unit} if unit else {}))
    moves: list[Plain] = [{"type": "scale", "scale": [1.0] * lead + sides[-ndim:]}]
    corner = [10.0, -20.0, 30.0] if draw.maybe(0.5) else []
    moves += [{"type": "translation", "translation": [0.0] * lead + corner[-ndim:]}] if corner else []
    about: Plain = {"name": "tooth", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": moves}]}
    whole = [2.0, 3.0, 0.5] if draw.maybe(0.3) else [1.0] * 3
    if whole[0] != 1:
        about["coordinateTransformations"] = [{"type": "scale", "scale": [1.0] * lead + whole[-ndim:]}]
    about = {"version": "0.4", **about} if version == 2 else {"version": "0.5", "multiscales": [about]}
    about = {"multiscales": [about]} if version == 2 else {"ome": about}
    about = mutated(about, draw.chance) if draw.odd else about
    sample, shape = draw.pick(*JUNK[:13]) if draw.odd else draw.pick(*TEXTS), (1,) * lead + voxels.shape
    dtype = voxels.dtype.newbyteorder(draw.pick(*"<>")) if version == 2 else voxels.dtype
    chunks = (1,) * lead + tuple(max(1, min(side, draw.pick(1, 7, 16, 50))) for side in voxels.shape)
    options: Plain = {"chunks": chunks, "fill_value": draw.pick(0, 1, 3), "config": {"write_empty_chunks": False}}
    if draw.stored:
        options |= draw.pick({"compressors": None}, {}, {"order": "F"} if version == 2 else {})
        if version == 3 and voxels.size:
            options["shards"] = tuple(2 * side for side in chunks)
    if image:
        root = zarr.create_group(given.path, zarr_format=version, attributes=about if isinstance(about, dict) else {})
        root.attrs["sample"] = sample
        array = root.create_array("0", shape=shape, dtype=dtype, **options)
    else:
        array = zarr.create_array(given.path, shape=shape, dtype=dtype, zarr_format=version, **options)
        array.attrs["sample"] = sample
    if voxels.shape == SHAPE and draw.maybe(0.4):
        given.voxels = np.full(SHAPE, options["fill_value"], voxels.dtype)
        given.voxels[1] = voxels[1]
    if voxels.size:
        array[(0,) * lead] = given.voxels
    if not image:
        return given
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

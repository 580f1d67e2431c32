"""Files that say what their values mean, for round trips: missing values, valid ranges, scale and offset, unsigned
numbers in signed ones, dimensions by name; in HDF5, netCDF, Zarr and TIFF."""

from __future__ import annotations

import base64
import random
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tifffile
import zarr
from metadata_cases import Given, Result

# The names by which a line may tell of a declared value.
WORDS = "_FillValue|missing|fill.?value|valid_|_Unsigned|no.?data"
AXES = "axes|axis|dimension|time|channel"
# Names of the dimensions of a stack, and whether slices, rows and columns are among them in this order.
ORDERS = {"zyx": ("z", "y", "x"), "depth": ("depth", "lat", "lon"), "ZYX": ("Z", "Y", "X")}
ORDERS |= {"slice": ("slice", "row", "column")}
NO_DEPTH = {"time": ("time", "y", "x"), "t": ("t", "y", "x"), "channel": ("channel", "y", "x"), "c": ("c", "y", "x")}
NO_DEPTH |= {"xyz": ("x", "y", "z"), "Time": ("Time", "Y", "X")}


@dataclass
class Declared:
    """Voxels, and what the attributes say of them."""

    stored: np.ndarray
    attributes: dict[str, Any]
    missing: np.ndarray  # True where a voxel is declared to be missing
    meant: np.ndarray  # as the file means them, unscaled
    kind: str

    @property
    def refusals(self) -> str:
        return WORDS if self.missing.any() or "_Unsigned" in self.attributes else ""

    def given(self, path: Path, **more: Any) -> Given:
        found = Given(path, self.stored, kind=self.kind, meant=self.meant, missing=self.missing)
        found.refusals, found.more = self.refusals, {"attributes": {**self.attributes}}
        for name, value in more.items():
            setattr(found, name, value)
        return found


KINDS = ("_FillValue", "missing_value", "several", "valid_range", "valid_max", "scale", "unsigned", "both", "middle")


def declare(voxels: np.ndarray, chance: random.Random, kinds: tuple[str, ...] = KINDS) -> Declared:
    """Make a file's voxels and attributes. Real voxels have 20 to 120, or 1000 to 3000 in types of 16 bits and more."""
    kind = chance.choice(kinds)
    dtype = np.dtype(chance.choice(["i1", "i2"] if kind == "unsigned" else ["u1", "u2", "i2", "i4", "f4", "f8", "i8"]))
    spread = voxels.astype("f8") / 250
    stored = np.rint(20 + 100 * spread if dtype.itemsize == 1 else 1000 + 2000 * spread).astype(dtype)
    where = chance.choice(
        ["inside", "nowhere"] if kind == "middle" else ["outside"] * 2 + ["inside", "nowhere", "both"]
    )
    place = np.zeros(voxels.shape, bool)
    if where in ("outside", "both"):
        place[:, :, :6] = True
    if where in ("inside", "both"):
        place[1:3, 9:12, 10:13] = True
    top: Any = np.iinfo(dtype).max if dtype.kind in "ui" else -9999.0
    bottom: Any = top if dtype.kind == "u" else np.iinfo(dtype).min if dtype.kind == "i" else 1e20
    number, attributes = dtype.type, dict[str, Any]()
    if kind == "scale":
        place[:] = False
    elif kind == "missing_value":
        stored[place] = top
        attributes = {kind: chance.choice([number(top), np.array([top], dtype), float(top)])}
    elif kind == "several":
        stored[place], stored[place & (np.arange(voxels.shape[-1]) % 2 == 0)] = top, 7
        attributes = {"missing_value": np.array([top, 7], dtype)}
    elif kind in ("valid_range", "valid_max"):
        high = 130 if dtype.itemsize == 1 else 3100
        high = 125 if dtype == "i1" else high
        stored[place] = number(high + 2)
        attributes = {kind: np.array([10, high], dtype) if kind == "valid_range" else number(high)}
    elif kind == "both":
        stored[place], stored[place & (np.arange(voxels.shape[-1]) % 2 == 0)] = top, bottom
        attributes = {"_FillValue": number(top), "missing_value": number(bottom)}
    elif kind == "middle":  # among the real ones, so that a restored voxel could come to be it
        value = number(70 if dtype.itemsize == 1 else 2000)
        stored[(stored == value) & ~place] += number(1)
        stored[place] = value
        attributes = {"_FillValue": value}
    else:
        stored[place] = number(-1) if kind == "unsigned" else top
        attributes = {"_FillValue": stored[place].flat[0] if place.any() else number(-1 if kind == "unsigned" else top)}
    meant = stored
    if kind == "unsigned":
        high = np.random.default_rng(7).random(voxels.shape) < 0.5
        more = np.where(high, 127 if dtype.itemsize == 1 else 40000, 0)
        stored = np.where(place, stored, (stored.view(f"u{dtype.itemsize}") + more).astype(dtype))
        attributes["_Unsigned"], meant = "true", stored.view(f"u{dtype.itemsize}")
        place = meant == meant.dtype.type(-1 % 256**dtype.itemsize)
    if (dtype.itemsize < 8 and dtype.kind in "ui" and chance.random() < 0.5) or kind == "scale":
        attributes["scale_factor"] = chance.choice([0.5, 0.001, -2.0])
        if chance.random() < 0.7:
            attributes["add_offset"] = chance.choice([-100.0, 273.15])
    return Declared(stored, attributes, place, meant, f"{kind} {where} {dtype}")


def opened_by_xarray(path: Path, name: str, **options: Any) -> np.ndarray:
    """Return the decoded values of a variable as xarray reads them."""
    import xarray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with xarray.open_dataset(path, **options) as data:
            return np.asarray(data[name].values)


def hdf5_by_xarray(group: str, name: str) -> Callable[[Path, bool], np.ndarray]:
    def decode(path: Path, of_result: bool) -> np.ndarray:
        return opened_by_xarray(path, name, engine="h5netcdf", group=group, phony_dims="sort", decode_times=False)

    return decode


def attributes(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write plain HDF5 with the attributes of CF."""
    declared, file = declare(voxels, chance), folder / "scan.h5"
    if chance.random() < 0.15 and "_FillValue" in declared.attributes:
        declared.attributes["_FillValue"] = np.array([declared.attributes["_FillValue"]])
    with h5py.File(file, "w") as h5:
        h5.create_dataset("entry/vol", data=declared.stored, **chance.choice([{}, {"chunks": (1, 22, 26)}]))
        h5["entry/vol"].attrs.update(declared.attributes)
    return declared.given(Path(f"{file}:/entry/vol"), decode=hdf5_by_xarray("entry", "vol"))


def netcdf(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write netCDF 4 by xarray, with dimension scales."""
    import xarray

    declared, file = declare(voxels, chance, KINDS[:-2]), folder / "scan.h5"
    key = chance.choice([*ORDERS] * 3 + [*NO_DEPTH])
    names = (ORDERS | NO_DEPTH)[key]
    coordinates = {name: 3 + 0.5 * np.arange(side) for name, side in zip(names, voxels.shape, strict=True)}
    attributes = dict(declared.attributes)
    # Attributes as they are, not as xarray would make them of an encoding.
    data = xarray.Dataset({"vol": (names, declared.stored)}, coords=coordinates if chance.random() < 0.7 else {})
    fill = attributes.pop("_FillValue", None)
    data["vol"].attrs.update(attributes)
    options = {"unlimited_dims": [names[0]]} if chance.random() < 0.3 else {}
    encoding = {"vol": {"_FillValue": fill}} | {name: {"_FillValue": None} for name in data.coords}
    data.to_netcdf(file, engine="h5netcdf", encoding=encoding, **options)
    given = declared.given(Path(f"{file}:/vol"), decode=hdf5_by_xarray("/", "vol"))
    given.check = check_dimensions("/", "vol", names, {name: data[name].values for name in data.coords})
    if key in NO_DEPTH:
        given.voxels, given.refusals = None, AXES
    given.kind += f" {key}"
    return given


def check_dimensions(
    group: str, variable: str, names: tuple[str, ...], coordinates: dict[str, np.ndarray]
) -> Callable[[Result], str]:
    def check(result: Result) -> str:
        """Return what xarray reads otherwise than in the input: names of dimensions, coordinates."""
        import xarray

        if result.format != "h5" or not result.own:
            return ""
        with h5py.File(result.path) as h5:  # xarray takes scales by their length where none is attached
            attached = [[Path(one.name).name for one in axis.values()] for axis in h5[group][variable].dims]
        if attached != [[name] for name in names]:
            return "" if result.told("coordinate|dimension|scales ") else f"the axes have the scales {attached}"
        try:
            with xarray.open_dataset(result.path, engine="h5netcdf", group=group, decode_cf=False) as found:
                if found[variable].dims != names:
                    return f"dimensions {found[variable].dims} of {names}"
                for name, part in zip(names, result.region, strict=True):
                    if name in coordinates and not np.array_equal(found[name].values, coordinates[name][part]):
                        return f"coordinates of {name} are others"
        except (ValueError, KeyError) as error:
            return "" if result.told("coordinate|dimension|scales ") else f"xarray cannot read it: {str(error)[:90]}"
        return ""

    return check


def zarr_by_xarray(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write a Zarr store as xarray does: in format 2 the missing value is the array's fill value, in format 3 an
    attribute, of floats in base64."""
    import xarray

    declared, store = declare(voxels, chance, ("_FillValue", "scale", "unsigned", "both")), folder / "scan.zarr"
    key, version = chance.choice([*ORDERS] * 3 + [*NO_DEPTH]), chance.choice([2, 3])
    names = (ORDERS | NO_DEPTH)[key]
    data = xarray.Dataset({"vol": (names, declared.stored)})
    attributes = dict(declared.attributes)
    fill = attributes.pop("_FillValue", None)
    data["vol"].attrs.update(attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data.to_zarr(store, zarr_format=version, consolidated=chance.random() < 0.5, encoding=encoded(fill))
    given = declared.given(Path(f"{store}:/vol"), decode=zarr_decoder("vol"))
    if key in NO_DEPTH:
        given.voxels, given.refusals = None, AXES
    given.kind += f" {key} v{version}"
    return given


def encoded(fill: Any) -> dict[str, Any]:
    return {"vol": {} if fill is None else {"_FillValue": fill}}


def zarr_decoder(name: str) -> Callable[[Path, bool], np.ndarray]:
    def decode(path: Path, of_result: bool) -> np.ndarray:
        options = {"engine": "zarr", "consolidated": False, "decode_times": False}
        return opened_by_xarray(path, "0" if of_result else name, **options)

    return decode


def zarr_by_hand(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write an array, or an image of OME-Zarr, with the attributes of CF and dimensions by name."""
    declared, store = declare(voxels, chance), folder / "scan.zarr"
    version, image = chance.choice([2, 3]), chance.random() < 0.4
    key = chance.choice(["zyx", "none"] if image else [*ORDERS] * 2 + [*NO_DEPTH] + ["none"] * 2)
    names = (ORDERS | NO_DEPTH).get(key)
    lead = chance.choice([0, 0, 1]) if key == "zyx" and not image else 0
    attributes = {name: as_json(value, version) for name, value in declared.attributes.items()}
    options: dict[str, Any] = {"shape": (1,) * lead + voxels.shape, "dtype": declared.stored.dtype}
    options["chunks"] = (1,) * lead + (1, 22, 13)
    if names is not None:
        named = ("time",) * lead + names
        attributes |= {"_ARRAY_DIMENSIONS": list(named)} if version == 2 else {}
        options |= {"dimension_names": named} if version == 3 else {}
    about: dict[str, Any] = {}
    if image:
        axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
        scale = [{"type": "scale", "scale": [2.0, 1.0, 1.0]}]
        of_image = {"axes": axes, "datasets": [{"path": "vol", "coordinateTransformations": scale}]}
        ome = {"version": "0.5", "multiscales": [of_image]}
        about = {"ome": ome} if version == 3 else {"multiscales": [{"version": "0.4", **of_image}]}
    array = zarr.create_group(store, zarr_format=version, attributes=about).create_array("vol", **options)
    array[:] = declared.stored.reshape(options["shape"])
    array.attrs.update(attributes)
    given = declared.given(store if image else Path(f"{store}:/vol"), decode=zarr_decoder("vol") if names else None)
    if key in NO_DEPTH:
        given.voxels, given.refusals = None, AXES
    given.kind += f" {key} v{version}{' image' * image}{' lead' * lead}"
    return given


def as_json(value: Any, version: int) -> Any:
    """Return an attribute as JSON has it: missing values of floats in Zarr 3 as xarray writes them."""
    if isinstance(value, np.floating) and version == 3:
        return base64.standard_b64encode(struct.pack("<d", float(value))).decode()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def wide(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write integers above 2^53, whose steps a float64 cannot tell."""
    name, kind = chance.choice(["u8", "i8"]), chance.choice(["h5", "npy", "zarr"])
    base = chance.choice([2**53, 2**60, 2**62])
    stored = (voxels.astype(name) * 40 + base).astype(name)
    path = folder / {"h5": "scan.h5", "npy": "scan.npy", "zarr": "scan.zarr"}[kind]
    if kind == "h5":
        with h5py.File(path, "w") as h5:
            h5["exchange/data"] = stored
    elif kind == "npy":
        np.save(path, stored)
    else:
        zarr.create_array(path, shape=stored.shape, dtype=stored.dtype, zarr_format=2)[...] = stored

    def check(result: Result) -> str:
        inside = result.restored[result.restored != stored[result.region]]
        coarse = inside.size and not (inside % np.array(np.spacing(float(base)), inside.dtype)).any()
        return "restored in steps without a word" if coarse and not result.told("53|exact|round|steps|precis") else ""

    return Given(path, stored, kind=f"{kind} {name} {base}", refusals="53|exact|too wide|integers", check=check)


def nodata(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write a GeoTIFF's tag for voxels without data."""
    declared = declare(voxels, chance, ("_FillValue",))
    while declared.stored.dtype.itemsize > 4:
        declared = declare(voxels, chance, ("_FillValue",))
    fill = declared.attributes["_FillValue"]
    value = f"{fill:.9g}" if fill.dtype.kind == "f" else str(fill)
    tags = [(42113, 2, 0, value.encode(), False)]
    tifffile.imwrite(folder / "scan.tif", declared.stored, extratags=tags, photometric="minisblack", metadata=None)
    return declared.given(folder / "scan.tif", kind=f"GDAL_NODATA {declared.kind}")


def hdf5_axes(folder: Path, voxels: np.ndarray, chance: random.Random) -> Given:
    """Write HDF5 whose dimensions are named by NeXus, by labels or by scales."""
    file, kind = folder / "scan.h5", chance.choice(["nexus", "labels", "scales", "axes"])
    key = chance.choice([*ORDERS, *NO_DEPTH])
    names = (ORDERS | NO_DEPTH)[key]
    with h5py.File(file, "w") as h5:
        data = h5.create_dataset("entry/data/data", data=voxels)
        if kind == "nexus":
            h5["entry/data"].attrs.update({"NX_class": "NXdata", "signal": "data", "axes": [*names]})
        elif kind == "axes":
            data.attrs["axes"] = ":".join(names)
        for place, name in enumerate(names):
            if kind == "labels":
                data.dims[place].label = name
            elif kind == "scales":
                h5[f"entry/data/{name}"] = np.arange(float(voxels.shape[place]))
                h5[f"entry/data/{name}"].make_scale(name)
                data.dims[place].attach_scale(h5[f"entry/data/{name}"])
    given = Given(Path(f"{file}:/entry/data/data"), voxels, kind=f"{kind} {key}")
    if kind == "scales":
        coordinates = {name: np.arange(float(side)) for name, side in zip(names, voxels.shape, strict=True)}
        given.check = check_dimensions("entry/data", "data", names, coordinates)
    if key in NO_DEPTH:
        given.voxels, given.refusals = None, AXES
    return given

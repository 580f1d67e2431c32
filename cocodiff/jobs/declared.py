"""The attributes that say something of the values of an array, as netCDF, CF and xarray have them: of HDF5 and Zarr
files, and of arrays that a program gives."""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError

MISSING = ("_FillValue", "missing_value", "valid_range", "valid_min", "valid_max")
SCALES = {"scale_factor": [1], "add_offset": [0]}  # and the numbers that change nothing
OF_VOXELS = (*MISSING, "add_offset", "_Unsigned")  # which a mask or a deviation of the voxels must not have
Declared = Mapping[str, list[float]]  # numbers by the name of the attribute, as voxels are stored


def read_declared(attributes: Mapping[str, Any], dtype: np.dtype, path: str) -> Declared:
    """Return the numbers of the attributes that say something of the values, by name: of each those before
    the first that is no number, and none of an attribute that has only NaN. "true" is 1. Raises UserError for integers
    of a type that are to be read with a sign, or without one, unlike it."""
    found = {name: _numbers(attributes[name]) for name in (*SCALES, *OF_VOXELS) if name in attributes}
    if [found.get("_Unsigned"), dtype.kind] in ([[1], "i"], [[0], "u"]):
        raise UserError(f"{path}: values of type {dtype} and the attribute _Unsigned; save them as this says")
    return {name: numbers for name, numbers in found.items() if any(one == one for one in numbers)}


def _numbers(value: Any) -> list[float]:
    found = list[float]()
    with suppress(ValueError, TypeError, struct.error):
        for one in np.ravel(value).tolist():
            text = one.decode() if isinstance(one, bytes) else str(one)
            if text.endswith("="):  # as xarray writes floats in Zarr v3
                one = struct.unpack("<d", base64.b64decode(text))[0]
            one = {"true": 1, "false": 0}.get(text.lower(), one)
            found.append(one if isinstance(one, int) else float(one))
    return found


def find_limits(declared: Declared, dtype: np.dtype) -> tuple[float, float]:
    """Return the least and the largest number of a type, integers or floats, that are in the valid range."""
    whole, least, most = (declared.get(name, []) for name in MISSING[2:])
    info = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return max([info.min, *whole[:1], *least]), min([info.max, *whole[1:2], *most])


def find_missing(declared: Declared, voxels: np.ndarray) -> np.ndarray:
    """Return where voxels are missing: equal to a fill value or beyond the valid range. Boolean, of the same shape."""
    missing = np.zeros(voxels.shape, bool)
    if declared:
        low, high = find_limits(declared, voxels.dtype)
        missing |= (voxels < low) | (voxels > high)
    for one in fill_values(declared):
        missing |= voxels == one
    return missing


def fill_values(declared: Declared) -> set[float]:
    return {one for name in MISSING[:2] for one in declared.get(name, []) if one == one}


def move_off_missing(declared: Declared, voxels: np.ndarray, known: float) -> None:
    """Replace voxels that equal a fill value by the next number that is none, towards `known`, which is none."""
    for one in sorted(fill_values(declared), key=lambda one: -abs(one - known)):
        if (equal := voxels == one).any():
            step = 1 if one < known else -1
            end = voxels.dtype.type(step * np.inf) if voxels.dtype.kind == "f" else 0
            voxels[equal] = np.nextafter(voxels[equal], end) if end else one + step


def describe(declared: Declared, names: Collection[str] = MISSING) -> list[str]:
    """Return those of some attributes that change anything, in words, such as "_FillValue 65535"."""
    given = {name: declared[name] for name in names if name in declared and declared[name] != SCALES.get(name)}
    return [f"{name} {', '.join(f'{one:.12g}' for one in numbers)}" for name, numbers in given.items()]

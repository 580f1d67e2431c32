"""The attributes that tell how to read an array's values, such as `_FillValue`: netCDF's, CF's and xarray's.

They come from HDF5 and Zarr files, and from arrays that a program gives to `restore`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError

MISSING = ("_FillValue", "missing_value", "valid_range", "valid_min", "valid_max")  # they tell which voxels are missing
SCALES = {"scale_factor": [1], "add_offset": [0]}  # attributes that scale values, with the numbers that change nothing
OF_VOXELS = (*MISSING, "add_offset", "_Unsigned")  # true of the voxels, but not of a mask or a deviation made from them
Declared = Mapping[str, list[float]]  # attribute's name to its numbers, in units of the stored values


def read_declared(attributes: Mapping[str, Any], dtype: np.dtype, path: str) -> Declared:
    """Return an array's attributes on missing, valid and scaled values, such as `_FillValue`: lists of numbers by name.

    The list of an attribute ends before its first value that is not a number. "true" is read as 1. Other attributes,
    and those without a number or with only NaN, are left out. Raise UserError if `_Unsigned` contradicts the dtype's
    sign.

    Args:
        attributes: all attributes of the array, by name
        dtype: type of the stored values
        path: name of the array, for errors
    """
    found = {name: _numbers(attributes[name]) for name in (*SCALES, *OF_VOXELS) if name in attributes}
    if [found.get("_Unsigned"), dtype.kind] in ([[1], "i"], [[0], "u"]):
        raise UserError(f"{path}: values of type {dtype} and the attribute _Unsigned; save them as this says")
    return {name: numbers for name, numbers in found.items() if any(one == one for one in numbers)}


def _numbers(value: Any) -> list[float]:
    """Return the values of one attribute of an array, up to the first that is not a number, as int or float.

    value: a number, a text or bytes, or a list or array of these; "true" and "false" become 1 and 0
    """
    found = list[float]()
    with suppress(ValueError, TypeError, struct.error):
        for one in np.ravel(value).tolist():
            text = one.decode() if isinstance(one, bytes) else str(one)
            if text.endswith("="):  # base64, as xarray writes floats in Zarr v3
                one = struct.unpack("<d", base64.b64decode(text))[0]
            one = {"true": 1, "false": 0}.get(text.lower(), one)
            found.append(one if isinstance(one, int) else float(one))
    return found


def find_limits(declared: Declared, dtype: np.dtype) -> tuple[float, float]:
    """Return the smallest and the largest value of an integer or float dtype that an array's attributes call valid.

    declared: result of `read_declared`, of which `valid_range`, `valid_min` and `valid_max` are used
    """
    whole, least, most = (declared.get(name, []) for name in MISSING[2:])
    info = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return max([info.min, *whole[:1], *least]), min([info.max, *whole[1:2], *most])


def find_missing(declared: Declared, voxels: np.ndarray) -> np.ndarray:
    """Return a boolean array of the voxels' shape: True where a voxel is a fill value or outside the valid range.

    declared: the array's attributes, result of `read_declared`
    """
    missing = np.zeros(voxels.shape, bool)
    if declared:
        low, high = find_limits(declared, voxels.dtype)
        missing |= (voxels < low) | (voxels > high)
    for one in fill_values(declared):
        missing |= voxels == one
    return missing


def fill_values(declared: Declared) -> set[float]:
    """Return the values, without NaN, that an array's `_FillValue` and `missing_value` declare to mark missing voxels.

    declared: result of `read_declared`
    """
    return {one for name in MISSING[:2] for one in declared.get(name, []) if one == one}


def move_off_missing(declared: Declared, voxels: np.ndarray, known: float) -> None:
    """Replace voxels that equal a fill value, in place, by the nearest other value in the direction of `known`.

    A restored voxel must not be read as missing.

    Args:
        declared: the array's attributes, result of `read_declared`
        voxels: the array to change
        known: a value that is not a fill value
    """
    for one in sorted(fill_values(declared), key=lambda one: -abs(one - known)):
        if (equal := voxels == one).any():
            step = 1 if one < known else -1
            end = voxels.dtype.type(step * np.inf) if voxels.dtype.kind == "f" else 0
            voxels[equal] = np.nextafter(voxels[equal], end) if end else one + step


def describe(declared: Declared, names: Collection[str] = MISSING) -> list[str]:
    """Return an array's attributes as texts, such as "_FillValue 65535", except those that change nothing.

    Args:
        declared: the attributes, result of `read_declared`
        names: the attributes to include, if they are declared
    """
    given = {name: declared[name] for name in names if name in declared and declared[name] != SCALES.get(name)}
    return [f"{name} {', '.join(f'{one:.12g}' for one in numbers)}" for name, numbers in given.items()]

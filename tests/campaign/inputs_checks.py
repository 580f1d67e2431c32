"""What is right of a result: what other libraries find in it against its input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mrcfile
import numpy as np
import zarr
from cocodiff_eval.data.formats import open_volume
from cocodiff_eval.data.volume import LENGTHS, start_of
from file_kinds import read_plainly
from inputs_files import UNKNOWN, Given, Result

from cocodiff.jobs.declared import find_missing

MOST_EQUAL = 0.3  # of restored voxels that may have come out as they were
# Attributes that name cocodiff, the region, a frame or other objects.
OTHERS = {"Info", "Labels", "date", "cocodiff", "ome", "xorigin", "yorigin", "zorigin"}
OTHERS |= {"DIMENSION_LIST", "REFERENCE_LIST"}


def check_result(given: Given, result: Result) -> str:
    """Return what is wrong with a result; "" where nothing is."""
    whole, wrong = result.stack.whole or result.stack.shape, list[str]()
    read = voxels_of(result.stack)
    stored = read if given.voxels is None else as_cut(given.voxels, whole, result)
    mask, known = result.mask, ~result.mask
    if not np.array_equal(read[known], stored[known], equal_nan=True):
        return "read as other values than the file has"
    absent = find_missing(result.stack.metadata.declared, stored) | ~np.isfinite(stored.astype("f8"))
    ranged, scale = stored[~absent if result.made else known], result.scale
    low, high = ranged.min(), ranged.max()
    if (scale.extremes or (scale.low, scale.high)) != (low, high):
        wrong.append(f"the range is {scale.low:g} to {scale.high:g}, of real voxels {low:g} to {high:g}")
    found = read_plainly(result.path, result.stack)
    if found.size != mask.size:
        return f"{found.shape} voxels of {result.stack.shape}"
    found = found.reshape(result.stack.shape)
    if found.dtype.newbyteorder("=") != read.dtype and (result.format, read.dtype.name) != ("mrc", "uint8"):
        wrong.append(f"{found.dtype} voxels of {read.dtype}")
    if not same_bits(found, result.restored):
        wrong.append("other libraries read other voxels than were restored")
    if not same_bits(found[known], stored[known]):
        wrong.append(f"{int((found != stored)[known].sum())} voxels outside the mask differ")
    varied = mask.any() and np.ptp(stored[known].astype("f8")) > 0
    if varied and (found[mask] == stored[mask]).mean() > MOST_EQUAL:
        wrong.append("old voxels under the mask")
    wrong += ["" if np.isfinite(found[mask].astype("f8")).all() else "voxels were restored that are not finite"]
    wrong.append(check_said(given, result))
    if result.format == "mrc":
        with mrcfile.open(result.path) as file:  # statistics that are not known are no mistake
            wrong.append("" if file.header.rms < 0 or mrcfile.validate(result.path) else "no valid MRC file")
    return "; ".join(filter(None, wrong))


def as_cut(array: np.ndarray, whole: tuple[int, ...], result: Result) -> np.ndarray:
    """Return the part of an array of the input that a result holds."""
    sides = zip(start_of(result.stack.region), result.stack.shape, strict=True)
    return np.ascontiguousarray(array.reshape(whole)[tuple(slice(first, first + side) for first, side in sides)])


def bits(voxels: np.ndarray) -> bytes:
    return voxels.astype(voxels.dtype.newbyteorder("=")).tobytes()


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True where voxels have the same bits, or in MRC, which has not all types, the same values."""
    alike = one.dtype.newbyteorder("=") == other.dtype.newbyteorder("=")
    return bits(one) == bits(other) if alike else np.array_equal(one, other, equal_nan=True)


def voxels_of(volume: Any) -> np.ndarray:
    return np.stack([volume.read(index) for index in range(len(volume))])


def check_said(given: Given, result: Result) -> str:
    """Return what is wrong with the sides of a voxel, dimensions, byte order and attributes of a result."""
    old, found = result.stack.metadata, opened(result)
    new, first = found.metadata, 1 if result.stack.ndim == 2 else 0
    if result.stack.ndim != found.ndim and result.format != "sequence" and len(found) > 1:
        return f"{found.ndim} dimensions of {result.stack.ndim}"
    wrong = list[str]()
    if given.meters != UNKNOWN:
        wrong.append(other_sides(given.meters, given.plain, old, first))
    loses = result.format == "npy" or (result.format == "mrc" and old.unit not in LENGTHS)
    if old.voxel_size and not loses:
        known = given.meters if given.meters not in (None, UNKNOWN) else in_meters(old)
        wrong.append(other_sides(known, not old.unit, new, first))
    wrong = [f"{one} in the {where}" for one, where in zip(wrong, ("input", "result"), strict=False) if one]
    if result.own and old.kind != "png":
        orders = [about.byteorder for about in (old, new)]
        wrong.append("byte order {}, of {}".format(*orders) if len({*orders}) > 1 < found.dtype.itemsize else "")
        kept = {name: one for name, one in old.attributes.items() if "reference>" not in str(one)}
        changed = {name for name, one in kept.items() if new.attributes.get(name) != one} - OTHERS
        wrong.append(f"attributes lost or changed: {sorted(changed)}" if changed else "")
        of_slice = old.kind == "sequence" and start_of(result.stack.region)[0] > 0  # which has its own
        if old.description not in new.description and not of_slice:
            wrong.append(f"description {new.description:.60}, of {old.description:.60}")
        photometric = [about.details.get("photometric") for about in (old, new)]
        wrong.append(f"photometric {photometric}" if photometric[0] != photometric[1] else "")
    if result.format == "zarr" and not result.own:
        axes = zarr.open_group(result.path, mode="r").attrs.asdict()["multiscales"][0]["axes"]
        wrong += [f"no unit of NGFF: {axes}" for one in axes if one.get("unit", "meter") not in LENGTHS]
    return "; ".join(filter(None, wrong))


def opened(result: Result, path: Path | None = None) -> Any:
    """Open a result, or another file like it, as cocodiff does, at the place of its voxels."""
    details, path = result.stack.metadata.details, path or result.path
    return open_volume(f"{path}:{details['object']}" if result.own and "object" in details else str(path))


def other_sides(meters: Any, plain: bool, about: Any, first: int) -> str:
    """Return how sides of a voxel are not those that are known, in meters."""
    if meters is None or about.voxel_size is None:
        right = about.voxel_size is None and meters is None
    else:
        right = plain == (not about.unit) and np.allclose(in_meters(about)[first:], meters[first:], rtol=1e-6, atol=0)
    return "" if right else f"voxels of {about.voxel_size} {about.unit}, where {meters} m are right"


def in_meters(about: Any) -> tuple[float, ...]:
    return tuple((LENGTHS[about.unit][1] if about.unit in LENGTHS else 1) * side for side in about.voxel_size)


def file_of(path: Path) -> Path:
    """Return the file or store of `file.h5:/dataset`."""
    return Path(str(path).partition(":/")[0])

"""Whether a result is right: what the campaign of inputs asks of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from cocodiff_eval.data.formats import FORMATS, open_volume, result_format
from cocodiff_eval.data.volume import Stack
from inputs_files import read_plainly

MICROMETERS = {"nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3, "centimeter": 1e4, "meter": 1e6}


def check_result(case: Any) -> str:
    """What is wrong with the results of a case that ended well; "" where nothing is."""
    given = open_volume(str(case.path))
    word = result_format(case.format, given)
    images = case.folder / "out" / "images"
    hidden = [one.name for one in images.parent.rglob(".*") if one.name not in (".cocodiff-files.json", *ZARR_MARKS)]
    results = [one for one in images.iterdir() if one.name.endswith(f"_tapa{FORMATS[word].suffix}")]
    results = [one for one in results if one.suffix != ".png"]
    if len(results) != 1 or hidden or any(images.parent.rglob("*.partial")):
        return f"in the folder of results: {[one.name for one in results]}, hidden {hidden}"
    result, cut = open_volume(str(results[0])), case.part
    if case.voxels_NYX is not None:
        original = case.voxels_NYX
    else:
        original = as_read(case.path).reshape(given.shape)
    original = np.ascontiguousarray(original[cut])
    restored = voxels_of(result)
    plain = np.ascontiguousarray(read_result(results[0], given))
    if (restored.shape, restored.dtype) != (original.shape, original.dtype.newbyteorder("=")):
        return f"{restored.shape} {restored.dtype}, of {original.shape} {original.dtype}"
    if plain.size != restored.size or bits(plain.astype(restored.dtype)) != bits(restored):
        return f"other libraries read other voxels in {results[0].name}"
    return (
        check_voxels(case, original.astype(restored.dtype), restored)
        or check_metadata(case, given, result, word)
        or check_others(case, images, word, restored.shape)
    )


ZARR_MARKS = (".zarray", ".zattrs", ".zgroup")


def check_voxels(case: Any, original: np.ndarray, restored: np.ndarray) -> str:
    mask = case.mask_NYX
    if mask is not None and (mask[:1] == mask).all():  # damage may have left another number of slices
        mask = np.broadcast_to(mask[:1], original.shape)
    if mask is None:  # of a mask that was damaged: as it was read
        changed = [word.split("=", 1)[1] for word in case.words if word.startswith("--mask=")]
        found = open_volume(changed[0])
        whole = voxels_of(found) != 0
        whole = whole if found.shape[1:] == original.shape[1:] else whole[:, case.part[1], case.part[2]]
        whole = whole if len(whole) in (1, len(original)) else whole[case.part[0]]
        mask = np.broadcast_to(whole & ~whole.all((1, 2))[:, None, None], original.shape)
    if bits(original[~mask]) != bits(restored[~mask]):
        return f"{int((original[~mask] != restored[~mask]).sum())} voxels outside the mask differ"
    inside = restored[mask].astype(np.float64)
    if not np.isfinite(inside).all():
        return "voxels were restored that are not finite"
    if case.limits is not None and inside.size:
        low, high = case.limits
        room = 1e-3 * max(abs(low), abs(high)) + (restored.dtype.kind in "ui")
        if inside.min() < low - room or inside.max() > high + room:
            return f"restored from {inside.min()} to {inside.max()}, beyond {low} to {high}"
    return ""


def check_metadata(case: Any, given: Stack, result: Stack, word: str) -> str:
    old, new = given.metadata, result.metadata
    if result.ndim != given.ndim and not (word == "sequence" or result.shape[0] == 1):
        return f"{result.ndim} dimensions of {given.ndim}"
    for wanted in [old.voxel_size and in_micrometers(old)] + [case.size_um] * (case.voxels_NYX is not None):
        if wanted is None:
            continue
        found = in_micrometers(new) if new.voxel_size else None
        first = 0 if given.ndim == 3 else 1
        if found is None or not np.allclose(found[first:], wanted[first:], rtol=1e-4, atol=0):
            return f"voxels of {new.voxel_size} {new.unit}, and {wanted} micrometers in the input"
    same = case.format == "same" or old.kind == new.kind
    if same and old.kind != "png":
        if new.byteorder != old.byteorder and result.dtype.itemsize > 1:
            return f"byte order {new.byteorder}, of {old.byteorder}"
        lost = {name for name in old.attributes if name not in new.attributes} - {"Labels"}
        changed = {name for name in old.attributes if new.attributes.get(name) != old.attributes[name]}
        if lost or changed - {"Info", "Labels", "cocodiff", "ome"}:
            return f"attributes lost or changed: {sorted(lost | changed)}"
    return ""


def check_others(case: Any, images: Path, word: str, shape: tuple[int, ...]) -> str:
    """The standard deviation of samples, and the mask that was made."""
    if case.samples > 1:
        (spread,) = images.glob(f"*_tapa_std{FORMATS[word].suffix}")
        values = voxels_of(open_volume(str(spread)))
        outside = values[~case.mask_NYX] if case.mask_NYX is not None else values[:0]
        if values.shape != shape or not np.isfinite(values).all() or (values < 0).any() or outside.any():
            return "the standard deviation is none"
    made = [one.split("=")[1] for one in case.words if one in ("--mask=block", "--mask=center")]
    if made:
        paths = [*images.glob(f"*_mask{FORMATS[word].suffix}")]
        if word == "zarr":
            paths = [one / "labels" / made[0] for one in images.glob("*_tapa.ome.zarr")]
        found = voxels_of(open_volume(str(paths[0]))) != 0
        if not np.array_equal(found, case.mask_NYX):
            return "the mask that was made is not the one that is saved"
    return ""


def as_read(path: Path) -> np.ndarray:
    """A damaged file that was restored, as its library reads it, or, where that refuses, as we do."""
    try:
        return read_plainly(path)
    except Exception:
        return voxels_of(open_volume(str(path)))


def read_result(path: Path, given: Stack) -> np.ndarray:
    """By the format's own library."""
    if path.suffix == ".h5" and "object" in given.metadata.details:
        with h5py.File(path) as file:
            place = file[given.metadata.details["object"]]
            if isinstance(place, h5py.Dataset):
                return np.asarray(place[()])
            frames = [name for name in given.metadata.details["frames"] if name in place]
            return np.stack([np.asarray(place[name][()]) for name in frames])
    return read_plainly(path)


def voxels_of(volume: Stack) -> np.ndarray:
    return np.stack([np.asarray(volume.reader(index)) for index in range(volume.shape[0])]).astype(volume.dtype)


def in_micrometers(metadata: Any) -> tuple[float, ...]:
    return tuple(MICROMETERS.get(metadata.unit, 1.0) * side for side in metadata.voxel_size)


def bits(voxels: np.ndarray) -> bytes:
    return np.ascontiguousarray(voxels).tobytes()

"""OME-Zarr stores (NGFF 0.4 on Zarr v2, 0.5 on Zarr v3), of which level 0 is read, and single Zarr arrays. What NGFF's
metadata say of an image is checked once when it is opened: everyone else takes it as it is."""

from __future__ import annotations

import contextlib
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import irregular, is_folder
from cocodiff.jobs.declared import SCALES, Declared, describe, read_declared
from cocodiff_eval.data.volume import (
    Metadata,
    Stack,
    as_volume_shape,
    by_slabs,
    check_memory,
    filled,
    format_shape,
    kept_alone,
    listed,
    one_line,
    one_unit,
    plain,
    reading,
)

MARKS = ("zarr.json", ".zgroup", ".zarray")
_STORE = re.compile(r"^(?P<store>.+?\.zarr):*(?:/(?P<inner>.*))?$", re.IGNORECASE)


def split_store(path: str) -> tuple[str, str] | None:
    """`store.zarr:/path` or `store.zarr/path` as store and path inside; None where a path names no store."""
    match = _STORE.match(path.rstrip("/"))
    if match is not None and is_folder(match["store"]):
        return match["store"], (match["inner"] or "").strip("/")
    if is_folder(path) and is_store(path):
        return path.rstrip("/"), ""
    return None


def is_store(folder: str) -> bool:
    """Whether a folder says of itself that it is Zarr."""
    return any((Path(folder) / mark).is_file() for mark in MARKS)


def inside(*parts: str) -> str:
    """A path in a store, of parts that may be empty."""
    return "/".join(filter(None, parts))


def open_node(store: str, *parts: str) -> Any:
    """A group or an array of a store on disk, for reading. Raises UserError where there is none."""
    import zarr

    inner = inside(*parts)
    for mark in (*MARKS, ".zattrs", ".zmetadata"):
        _check_regular(store, Path(store) / inner / mark)
    try:
        return zarr.open(Path(store), path=inner, mode="r")
    except Exception as error:  # zarr raises many kinds
        what = f"{inner} is not there or no Zarr" if inner else f"not a readable Zarr store ({one_line(error)})"
        raise UserError(f"{store}: {what}; {_list_arrays(store)}") from error


def open_zarr(store: str, inner: str) -> Stack:
    """An array, or level 0 of a multiscale image, none of whose voxels are read yet. Axes before slices, rows and
    columns (time, channel) must have length 1.

    Raises UserError for what is neither, for axes in another order, for malformed metadata of an image, and for chunks
    that this machine's memory cannot hold.
    """
    import zarr

    node, path = open_node(store, inner), f"{store}:/{inner}" if inner else store
    if isinstance(node, zarr.Group) and "bioformats2raw.layout" in of_ngff(node.attrs.asdict()) and "0" in node:
        inner = inside(inner, "0")  # a collection of images: the first
        node = open_node(store, inner)
    image, array = dict[str, Any](), node
    if isinstance(node, zarr.Group):
        image = multiscale(node.attrs.asdict(), path)
        if not image:
            name = f"{store}:/path"
            raise UserError(f"{path}: is a group without a multiscale image; name it as {name}; {_list_arrays(store)}")
        try:
            array = open_node(store, inner, image["datasets"][0]["path"])
        except UserError as error:
            raise UserError(f"{path}: level 0 of its multiscale image: {error}") from error
    if not isinstance(array, zarr.Array):
        raise UserError(f"{path}: level 0 of its multiscale image is no array; {_list_arrays(store)}")
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    if image:
        check_transforms(image, len(shape), path)
    lead = leading(axes_of(image) or _dimensions(array), shape, path)
    volume_shape = as_volume_shape(shape[lead:], path, dtype.itemsize)
    check_memory(path, array.chunks[lead:], dtype.itemsize, working=0)
    if dtype.kind not in "buifc":
        raise UserError(f"{path}: values of type {dtype}; save them as 8 or 16 bit integers or as float32")
    ndim = len(shape) - lead

    def read(first: int, end: int) -> np.ndarray:
        _check_chunks(store, array, range(first, end), lead, ndim)
        found = np.asarray(array[(0,) * lead + (slice(first, end) if ndim == 3 else slice(None),)])
        return found if ndim == 3 else found[None]

    def checked(index: int) -> np.ndarray:
        with reading(f"{path}: slice {index} cannot be read", "copy or save it again"):
            return kept(index)

    kept = by_slabs(read, volume_shape, dtype.itemsize, array.chunks[lead] if ndim == 3 else 1)
    metadata = _metadata(path, store, inner, node, array, image, lead)
    labels = "labels" in inner.split("/")[:-1] or "image-label" in of_ngff(node.attrs.asdict())
    return Stack(path, _stem(store, inner), volume_shape, dtype.newbyteorder("="), ndim, checked, metadata, labels)


def _check_chunks(store: str, array: Any, slices: range, lead: int, ndim: int) -> None:
    """Raises for a chunk of some slices that is no regular file, or that Blosc's library would read beyond its end: of
    one that is cut short it takes what lies behind in memory."""
    sides = array.shards or array.chunks
    cells = [range(-(-side // chunk)) for side, chunk in zip(array.shape, sides, strict=True)]
    if ndim == 3:
        cells[lead] = range(slices.start // sides[lead], (slices.stop - 1) // sides[lead] + 1)
    blosc = array.shards is None and array.compressors and "blosc" in repr(array.compressors[-1]).lower()
    for cell in product(*cells):
        key = array.metadata.encode_chunk_key(cell)
        path = Path(store) / array.path / key
        if not path.exists():  # a chunk of the fill value alone
            continue
        _check_regular(store, path)
        if blosc:
            with path.open("rb") as file:
                header = file.read(16)
            if len(header) < 16 or path.stat().st_size < int.from_bytes(header[12:], "little"):
                raise ValueError(f"chunk {key} is cut short: it has {path.stat().st_size} bytes")


def _check_regular(store: str, path: Path) -> None:
    """Raises UserError for a named pipe or a device in a store, which reading would wait for."""
    if path.exists() and (kind := irregular(path)):
        raise UserError(f"{store}: {path.relative_to(store)} is {kind}; copy or save the store again")


def _metadata(
    path: str, store: str, inner: str, node: Any, array: Any, image: Mapping[str, Any], lead: int
) -> Metadata:
    axes, count = axes_of(image), len(array.shape)
    sides, units = list[float](), list[str]()
    scale = transform_of(image["datasets"][0], "scale") if image else None
    if scale is not None and axes:
        of_all = transform_of(image, "scale") or [1.0] * count
        sides = [a * b for a, b in zip(scale, of_all, strict=True)][lead:]
        units = [str(axis.get("unit") or "") for axis in axes[lead:]]
        if not any(units) and all(side == 1 for side in sides):
            sides = []
    size, unit, alone = one_unit([*sides[-2:-1], *sides][-3:], [*units[-2:-1], *units][-3:])
    attributes = node.attrs.asdict()
    kept = {name: value for name, value in attributes.items() if name != "multiscales"}
    if isinstance(kept.get("ome"), Mapping):
        kept["ome"] = {name: value for name, value in kept["ome"].items() if name not in ("multiscales", "version")}
    voxels, stored = f"{store}:/{array.path}", array.shards or array.chunks
    files = (name for *_, names in os.walk(Path(store) / array.path) for name in names)
    there = sum(1 for name in files if name != "zarr.json" and not name.startswith("."))
    details = {"path": path, "store": store, "inner": inner, "image": image, "lead": lead}
    details |= {"levels": _level_shapes(node, image), "level": image["datasets"][0]["path"] if image else ""}
    declared = _declared(array, path, bool(image))
    alone += describe(declared, SCALES)
    remarks = kept_alone(voxels, alone) + filled(voxels, there, array.shape, stored, array.fill_value)
    names, text = "".join(axis["name"] for axis in axes), str(attributes.get("description", ""))
    return Metadata("zarr", names, size, unit, text, _byteorder(array), plain(kept), details, remarks, declared)


def _declared(array: Any, path: str, of_image: bool) -> Declared:
    """Read what an array's attributes say of its values. xarray, which names dimensions in an attribute of Zarr v2, has
    its fill value in the array's own; OME-Zarr has none."""
    own, attributes = array.metadata.fill_value, array.attrs.asdict()
    if "_ARRAY_DIMENSIONS" in attributes and array.metadata.zarr_format == 2 and not of_image and own is not None:
        attributes = {"_FillValue": own, **attributes}
    return read_declared(attributes, np.dtype(array.dtype), path)


def _dimensions(array: Any) -> list[dict[str, str]]:
    """The names of the dimensions, as axes; Zarr v3 knows them without an image, and none where one has no name."""
    names = getattr(array.metadata, "dimension_names", None) or ()
    return [{"name": name} for name in names] if all(isinstance(name, str) for name in names) else []


def _level_shapes(node: Any, image: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of all levels that are there."""
    found = []
    with contextlib.suppress(Exception):
        for dataset in image.get("datasets", ()):
            found.append(tuple(node[dataset["path"]].shape))
    return found


def _byteorder(array: Any) -> str:
    if array.metadata.zarr_format == 2:
        return ">" if np.dtype(array.metadata.dtype.to_native_dtype()).byteorder == ">" else "<"
    endian = getattr(array.serializer, "endian", None)
    return ">" if getattr(endian, "value", endian) == "big" else "<"


def _stem(store: str, inner: str) -> str:
    parts = inner.split("/")
    if len(parts) > 1 and parts[-2] == "labels":
        return parts[-1]
    name = re.sub(r"(\.ome)?\.zarr$", "", Path(store).name, flags=re.IGNORECASE)
    return "_".join(filter(None, [name, *parts]))


def _list_arrays(store: str) -> str:
    """The images and arrays of a store, for an error."""
    import zarr

    found: list[str] = []
    with contextlib.suppress(Exception):
        for name, node in sorted(zarr.open_group(Path(store), mode="r").members(max_depth=3)):
            if isinstance(node, zarr.Array) and len(node.shape) >= 2:
                found.append(f"/{name} ({format_shape(node.shape)} {node.dtype})")
    return listed(found, "array of 2 dimensions or more")


NO_SPACE = ("t", "time", "c", "channel")  # names of axes whose type is not told


def of_ngff(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """NGFF's part of attributes: below `ome` from 0.5 on."""
    ome = attributes.get("ome")
    return ome if isinstance(ome, Mapping) else attributes


def multiscale(attributes: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The first multiscale image that a group's attributes describe; empty where there is none. Its `axes` are names or
    mappings with a name, its `datasets` mappings with a path, and each path is there once.

    Raises UserError for other axes and datasets. Transformations are checked by `check_transforms`.
    """
    listed = of_ngff(attributes).get("multiscales")
    first = listed[0] if isinstance(listed, list | tuple) and listed else None
    if not isinstance(first, Mapping) or not first.get("datasets"):
        return {}
    datasets, axes = first["datasets"], first.get("axes") or []
    if not isinstance(datasets, list) or not all(isinstance(one, Mapping) and "path" in one for one in datasets):
        raise _malformed(path, "datasets", datasets, "a list of objects with a path")
    if not isinstance(axes, list) or not all(isinstance(one.get("name"), str) for one in axes_of(first)):
        raise _malformed(path, "axes", axes, "a list of objects with a name")
    once = {_path_of(one): {**one, "path": _path_of(one)} for one in reversed(datasets)}
    return dict(plain({**first, "datasets": [*reversed(once.values())]}))


def axes_of(image: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The axes of a multiscale image, each with its `name`; up to NGFF 0.3 they are names alone."""
    return [dict(one) if isinstance(one, Mapping) else {"name": one} for one in image.get("axes") or ()]


def check_transforms(image: Mapping[str, Any], count: int, path: str) -> None:
    """Raises UserError for transformations of level 0 or of the whole image that are no list, and for scales and
    translations that are not `count` finite numbers."""
    for owner in (image, image["datasets"][0]):
        given = owner.get("coordinateTransformations") or []
        if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
            raise _malformed(path, "coordinateTransformations", given, "a list of objects")
        for one in given:
            kind = one.get("type")
            value = one.get(kind, []) if kind in ("scale", "translation") else []
            if kind in one and not (isinstance(value, list) and len(value) == count and all(map(_is_number, value))):
                raise _malformed(path, str(kind), value, f"{count} numbers, one for each axis")


def transform_of(owner: Mapping[str, Any], kind: str) -> list[float] | None:
    """Along each axis the product of all scales, or the sum of all translations; None where there are none."""
    given = owner.get("coordinateTransformations") or ()
    found = [[float(value) for value in one[kind]] for one in given if one.get("type") == kind and kind in one]
    along = zip(*found, strict=True)
    return [math.prod(values) if kind == "scale" else math.fsum(values) for values in along] if found else None


def leading(axes: Sequence[Mapping[str, Any]], shape: Sequence[int], path: str) -> int:
    """How many axes stand before slices, rows and columns: time and channel, or where axes are not told all but three.
    Raises UserError where one of them is longer than 1, and for slices, rows and columns in another order."""
    if axes and len(axes) != len(shape):
        raise UserError(
            f"{path}: has {len(axes)} axes ({_listed(axes)}), and its array {len(shape)} dimensions "
            f"{format_shape(tuple(shape))}; mend the axes in its metadata"
        )
    outside = [_is_outside(axis) for axis in axes]
    lead = max(sum(outside), len(shape) - 3)
    of_space = [str(axis["name"]).lower() for axis in axes if not _is_outside(axis)]
    letters = [name for name in of_space if name in ("z", "y", "x")]
    if not all(outside[: sum(outside)]) or letters != sorted(letters, reverse=True):
        raise UserError(
            f"{path}: its axes are {_listed(axes)}; slices, rows and columns must be the last, in the order z, y, x: "
            "save it transposed"
        )
    if any(side != 1 for side in shape[:lead]):
        named = f" ({_listed(axes)})" if axes else ""
        raise UserError(
            f"{path}: {len(shape)} dimensions {format_shape(tuple(shape))}{named}; of those before slices, rows and "
            "columns (time, channel) only one each can be restored: save that as a store of its own"
        )
    return lead


def _path_of(dataset: Mapping[str, Any]) -> str:
    return "/".join(part for part in str(dataset["path"]).replace("\\", "/").split("/") if part)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _is_outside(axis: Mapping[str, Any]) -> bool:
    """Whether an axis is none of space."""
    kind = axis.get("type")
    return kind != "space" if isinstance(kind, str) else str(axis["name"]).lower() in NO_SPACE


def _listed(axes: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(axis["name"]) for axis in axes)


def _malformed(path: str, what: str, given: Any, wanted: str) -> UserError:
    return UserError(
        f"{path}: {what} of its multiscale image: {reprlib.repr(given)} instead of {wanted}; mend its metadata, or "
        "name the array of its level 0 itself"
    )

"""OME-Zarr stores (NGFF 0.4 on Zarr v2, 0.5 on Zarr v3), of which level 0 is read, and single Zarr arrays.

The NGFF metadata of an image are checked when it is opened. Other functions rely on that.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import irregular, is_folder
from cocodiff.jobs.declared import SCALES, Declared, describe, read_declared
from cocodiff_eval.data.axes import axes_of, count_leading
from cocodiff_eval.data.tiff_metadata import NOTES
from cocodiff_eval.data.volume import (
    Metadata,
    NewVolume,
    Stack,
    Triple,
    as_volume_shape,
    by_slabs,
    check_memory,
    filled,
    format_only_remarks,
    format_shape,
    listed,
    one_line,
    one_unit,
    plain,
    reading,
    start_of,
)

MARKS = ("zarr.json", ".zgroup", ".zarray")  # files that a Zarr store or group has in its folder
_STORE = re.compile(r"^(?P<store>.+?\.zarr):*(?:/(?P<inner>.*))?$", re.IGNORECASE)


def split_store(path: str) -> tuple[str, str] | None:
    """Return the folder of a Zarr store and the path inside it, for `store.zarr:/path` or `store.zarr/path`.

    Return None for other paths.
    """
    match = _STORE.match(path.rstrip("/"))
    if match is not None and is_folder(match["store"]):
        return match["store"], (match["inner"] or "").strip("/")
    if is_folder(path) and is_store(path):
        return path.rstrip("/"), ""
    return None


def is_store(folder: str) -> bool:
    """Return True if a folder has a file of metadata that marks it as Zarr."""
    return any((Path(folder) / mark).is_file() for mark in MARKS)


def inside(*parts: str) -> str:
    """Return a path inside a Zarr store, joined from parts of which some may be empty."""
    return "/".join(filter(None, parts))


def open_node(store: str, *parts: str) -> Any:
    """Open a group or an array of a Zarr store on disk for reading. Raise UserError if there is none at that path.

    Args:
        store: the store's folder.
        parts: parts of the path inside it, which may be empty.
    """
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
    """Open an array of a Zarr store, or level 0 of a multiscale image, as a volume. No voxels are read yet.

    Axes before slices, rows and columns (time, channel) must have length 1. Raise UserError for axes in another order,
    for malformed metadata, and for a node that is neither an array nor an image. Raise it also for chunks that do not
    fit in this machine's memory.

    Args:
        store: the store's folder.
        inner: path inside the store; "" for its root.
    """
    import zarr

    node, path = open_node(store, inner), f"{store}:/{inner}" if inner else store
    if isinstance(node, zarr.Group) and "bioformats2raw.layout" in of_ngff(node.attrs.asdict()) and "0" in node:
        inner = inside(inner, "0")  # the first image of a collection
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
    lead = count_leading(axes_of(image.get("axes")) or _dimensions(array), shape, path, "store")
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
        """Return a slice, or raise a UserError that names it."""
        with reading(f"{path}: slice {index} cannot be read", "copy or save it again"):
            return kept(index)

    kept = by_slabs(read, volume_shape, dtype.itemsize, array.chunks[lead] if ndim == 3 else 1)
    metadata = _metadata(path, store, inner, node, array, image, lead)
    labels = "labels" in inner.split("/")[:-1] or "image-label" in of_ngff(node.attrs.asdict())
    return Stack(path, _stem(store, inner), volume_shape, dtype.newbyteorder("="), ndim, checked, metadata, labels)


def _check_chunks(store: str, array: Any, slices: range, lead: int, ndim: int) -> None:
    """Raise an error if a chunk of a Zarr array is cut short or is no regular file. It is called before slices are
    read.

    The library of Blosc reads beyond the end of a chunk that is cut short.

    Args:
        store: the store's folder.
        array: the array.
        slices: numbers of the slices, whose chunks are checked.
        lead: number of axes before slices, rows and columns.
        ndim: 3 if the array has slices, 2 if it is a single one.
    """
    sides = array.shards or array.chunks
    cells = [range(-(-side // chunk)) for side, chunk in zip(array.shape, sides, strict=True)]
    if ndim == 3:
        cells[lead] = range(slices.start // sides[lead], (slices.stop - 1) // sides[lead] + 1)
    blosc = array.shards is None and array.compressors and "blosc" in repr(array.compressors[-1]).lower()
    for cell in product(*cells):
        key = array.metadata.encode_chunk_key(cell)
        path = Path(store) / array.path / key
        if not path.exists():  # a chunk that holds nothing but the fill value is not stored
            continue
        _check_regular(store, path)
        if blosc:
            with path.open("rb") as file:
                header = file.read(16)
            if len(header) < 16 or path.stat().st_size < int.from_bytes(header[12:], "little"):
                raise ValueError(f"chunk {key} is cut short: it has {path.stat().st_size} bytes")


def _check_regular(store: str, path: Path) -> None:
    """Raise UserError if a path in a store is a named pipe or a device, since reading it may never return."""
    if path.exists() and (kind := irregular(path)):
        raise UserError(f"{store}: {path.relative_to(store)} is {kind}; copy or save the store again")


def _metadata(
    path: str, store: str, inner: str, node: Any, array: Any, image: Mapping[str, Any], lead: int
) -> Metadata:
    """Return the metadata of an open Zarr image or array, with remarks for the user on what results do not keep.

    Args:
        path: as the user named it.
        store: the store's folder.
        inner: path inside the store.
        node: the group of the image, or the array.
        array: the array of voxels.
        image: the metadata of the multiscale image; empty for an array.
        lead: number of axes before slices, rows and columns.
    """
    axes, count = axes_of(image.get("axes")), len(array.shape)
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
    moved = transform_of(image["datasets"][0], "translation") if image else None
    placed = [f"its translation {moved}"] if any(moved or ()) else []
    remarks = format_only_remarks(voxels, [], alone + describe(declared, SCALES) + placed) + filled(
        voxels, there, array.shape, stored, array.fill_value
    )
    beside = [name for name in _dimensions(array) if not image and (Path(store, array.path).parent / name).is_dir()]
    remarks += [f"{voxels}: results keep no coordinates ({', '.join(beside)})"] if beside else []
    names, text = "".join(axis["name"] for axis in axes), str(attributes.get("description", ""))
    return Metadata("zarr", names, size, unit, text, _byteorder(array), plain(kept), details, remarks, declared)


def _declared(array: Any, path: str, of_image: bool) -> Declared:
    """Return what a Zarr array's attributes declare of its values, such as the one that means "missing".

    In Zarr v2, xarray stores the missing value as the array's own fill value. OME-Zarr does not.

    Args:
        path: its path, for errors.
        of_image: True if it is a level of a multiscale image.
    """
    own, attributes = array.metadata.fill_value, array.attrs.asdict()
    if "_ARRAY_DIMENSIONS" in attributes and array.metadata.zarr_format == 2 and not of_image and own is not None:
        attributes = {"_FillValue": own, **attributes}
    return read_declared(attributes, np.dtype(array.dtype), path)


def _dimensions(array: Any) -> list[str]:
    """Return the names of a Zarr array's dimensions, as Zarr v3 or xarray stores them; empty if one has no name."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    return [*names] if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else []


def _level_shapes(node: Any, image: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays of a multiscale image's levels, up to the first one that is missing.

    Args:
        node: the image's group.
        image: its metadata.
    """
    found = []
    with contextlib.suppress(Exception):
        for dataset in image.get("datasets", ()):
            found.append(tuple(node[dataset["path"]].shape))
    return found


def _byteorder(array: Any) -> str:
    """Return the byte order of a Zarr array's stored values, "<" or ">"."""
    if array.metadata.zarr_format == 2:
        return ">" if np.dtype(array.metadata.dtype.to_native_dtype()).byteorder == ">" else "<"
    endian = getattr(array.serializer, "endian", None)
    return ">" if getattr(endian, "value", endian) == "big" else "<"


def _stem(store: str, inner: str) -> str:
    """Return a name for an image in a Zarr store, by which results are called.

    It is a label image's own name, else the store's name and the path inside it.
    """
    parts = inner.split("/")
    if len(parts) > 1 and parts[-2] == "labels":
        return parts[-1]
    name = re.sub(r"(\.ome)?\.zarr$", "", Path(store).name, flags=re.IGNORECASE)
    return "_".join(filter(None, [name, *parts]))


def _list_arrays(store: str) -> str:
    """Return a phrase that lists the arrays of a Zarr store, for errors."""
    import zarr

    found: list[str] = []
    with contextlib.suppress(Exception):
        for name, node in sorted(zarr.open_group(Path(store), mode="r").members(max_depth=3)):
            if isinstance(node, zarr.Array) and len(node.shape) >= 2:
                found.append(f"/{name} ({format_shape(node.shape)} {node.dtype})")
    return listed(found, "array of 2 dimensions or more")


def of_ngff(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a group's attributes that belongs to NGFF (OME-Zarr). From 0.5 on it stands below `ome`."""
    ome = attributes.get("ome")
    return ome if isinstance(ome, Mapping) else attributes


def multiscale(attributes: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the metadata of the first multiscale image in a group's attributes; empty if there is none.

    Its `axes` are names or mappings with a name. Its `datasets` are mappings with a path, and no path occurs twice.
    Raise UserError for other axes and datasets. Transformations are checked by `check_transforms`.

    Args:
        attributes: the group's.
        path: its path, for the error.
    """
    listed = of_ngff(attributes).get("multiscales")
    first = listed[0] if isinstance(listed, list | tuple) and listed else None
    if not isinstance(first, Mapping) or not first.get("datasets"):
        return {}
    datasets, axes = first["datasets"], first.get("axes") or []
    if not isinstance(datasets, list) or not all(isinstance(one, Mapping) and "path" in one for one in datasets):
        raise _malformed(path, "datasets", datasets, "a list of objects with a path")
    if not isinstance(axes, list) or not all(isinstance(one.get("name"), str) for one in axes_of(axes)):
        raise _malformed(path, "axes", axes, "a list of objects with a name")
    once = {_path_of(one): {**one, "path": _path_of(one)} for one in reversed(datasets)}
    return dict(plain({**first, "datasets": [*reversed(once.values())]}))


def check_transforms(image: Mapping[str, Any], count: int, path: str) -> None:
    """Raise UserError for malformed transformations of a multiscale image or of its level 0.

    They must be lists, and scales and translations must be `count` finite numbers.

    Args:
        image: the image's metadata.
        count: number of axes.
        path: its path, for the error.
    """
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
    """Return, for each axis, the product of all scales or the sum of all translations in metadata; None if there are
    none.

    Args:
        owner: the metadata of an image or of a level.
        kind: "scale" or "translation".
    """
    given = owner.get("coordinateTransformations") or ()
    found = [[float(value) for value in one[kind]] for one in given if one.get("type") == kind and kind in one]
    along = zip(*found, strict=True)
    return [math.prod(values) if kind == "scale" else math.fsum(values) for values in along] if found else None


def _path_of(dataset: Mapping[str, Any]) -> str:
    """Return the path of a level's array in its group, with "/" between its parts.

    Args:
        dataset: the level's entry in the image's metadata.
    """
    return "/".join(part for part in str(dataset["path"]).replace("\\", "/").split("/") if part)


def _is_number(value: Any) -> bool:
    """Return True for a finite number of Python's, False for booleans and all else."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _malformed(path: str, what: str, given: Any, wanted: str) -> UserError:
    """Return the error for a malformed entry of a multiscale image's metadata.

    Args:
        path: the image's.
        what: the entry's name.
        given: its value.
        wanted: what it should be, in words.
    """
    return UserError(
        f"{path}: {what} of its multiscale image: {reprlib.repr(given)} instead of {wanted}; mend its metadata, or "
        "name the array of its level 0 itself"
    )


# Results --------------------------------------------------------------------------------------------------------------

SMALLEST_LEVEL = 256  # voxels on the longer side of the last level
CHUNK_SIDE = 1024  # voxels; side of chunks for an input that is not chunked


class ZarrStore:
    """A Zarr store with one multiscale image in its root, that is to be written as a result.

    The result of a Zarr input keeps its version, axes, compression and attributes. Others are written as NGFF 0.4,
    which most tools read. A chunk holds voxels of one slice only.
    """

    def __init__(self, new: NewVolume) -> None:
        """Plan the levels of the store of a result. Nothing is written yet."""
        self.new, self.path = new, new.path
        # The number of axes before slices, rows and columns, and the array of a Zarr input's level 0.
        self.lead, self.source = 0, None
        self.image: Mapping[str, Any] = {}  # the input's metadata of its multiscale image; empty if it has none
        levels: Sequence[tuple[int, ...]] = ()  # shapes of the input's levels
        if new.metadata.kind == "zarr":
            details = new.metadata.details
            self.lead, self.image, levels = details["lead"], details["image"], details["levels"]
            self.source = open_node(details["store"], details["inner"], details["level"])
        self.version: Literal[2, 3] = 3 if self.source is not None and self.source.metadata.zarr_format == 3 else 2
        slices = [level[-3] for level in levels[:2] if len(level) > 2]
        whole = len(slices) == 2 and slices[0] == slices[1] > 1  # the input's levels all have the same slices
        # The number of slices, rows and columns that become one in the next level.
        self.step = (1, 2, 2) if whole or new.ndim == 2 else (2, 2, 2)
        self.shapes = self._level_shapes(len(levels))

    def write(self) -> None:
        """Write the store: its group and its levels, each computed from the level before."""
        import zarr

        zarr.create_group(self.path, zarr_format=self.version, attributes=self.attributes())
        above = None
        for level, (slices, *_) in enumerate(self.shapes):
            array = self._make_level(level)
            for index in range(slices):
                image_YX = self.new.read(index) if above is None else self.smaller(above, self.shapes[level - 1], index)
                array[self._place(index)] = image_YX
            above = array

    def smaller(self, above: Any, shape: Triple, index: int) -> np.ndarray:
        """Return a slice of a smaller level of the image, [Y, X]: means of up to 2 x 2 x 2 voxels of the level before.

        Args:
            above: the array of the level before.
            shape: [N, Y, X] of the level before.
            index: the slice in the smaller level.
        """
        step, dtype = self.step[0], self.new.dtype
        together = range(step * index, min(step * (index + 1), shape[0]))
        images = [halve(self.get(above, one).astype(np.float64)) for one in together]
        mean_YX = sum(images[1:], images[0]) / len(images)
        return (np.rint(mean_YX) if dtype.kind in "ui" else mean_YX).astype(dtype)

    def get(self, array: Any, index: int) -> np.ndarray:
        """Return slice `index` of a level's array, [Y, X] in the result's dtype."""
        return np.asarray(array[self._place(index)]).astype(self.new.dtype)

    def _place(self, index: int) -> Any:
        """Return the index that selects slice `index` in a level's array, which may have axes before its slices."""
        return (*(0,) * self.lead, *((index,) if self.new.ndim == 3 else ()), ...)

    def _level_shapes(self, given: int) -> list[Triple]:
        """Return the shapes [N, Y, X] of all levels of the result, the first one full size.

        There are as many as the input has, or until the longer side is at most SMALLEST_LEVEL.

        Args:
            given: number of the input's levels; 0 or 1 if it has none.
        """
        shapes = [self.new.shape]
        while len(shapes) < given if given > 1 else max(shapes[-1][1:]) > SMALLEST_LEVEL:
            n, y, x = (-(-side // step) for side, step in zip(shapes[-1], self.step, strict=True))
            if (n, y, x) == shapes[-1]:
                break
            shapes.append((n, y, x))
        return shapes

    def _make_level(self, level: int) -> Any:
        """Create the Zarr array of a level, with the input's chunks, codecs and attributes. Return it.

        Args:
            level: its number, 0 for full size.
        """
        import zarr
        from zarr.codecs import BytesCodec

        source, dtype = self.source, self.new.dtype
        shape = (1,) * self.lead + self.shapes[level][-self.new.ndim :]
        options: dict[str, Any] = {}
        chunks: tuple[int, ...] = (CHUNK_SIDE, CHUNK_SIDE)
        if source is not None:
            chunks = source.chunks[-2:]
            options = kept_codecs(source, dtype)
            kept = source.attrs if level == 0 else SCALES
            without = self.new.metadata.details.get("without", ())
            given = {name: one for name, one in source.attrs.items() if name in kept and name not in without}
            options["attributes"] = plain(given)
        if self.version == 3 and source is not None:
            endian = "big" if self.new.metadata.byteorder == ">" else "little"
            options["dimension_names"] = source.metadata.dimension_names
            options["serializer"] = BytesCodec(endian=None if dtype.itemsize == 1 else endian)
        else:
            options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
        fitting = tuple(min(chunk, side) for chunk, side in zip(chunks, shape[-2:], strict=True))
        options |= {"dtype": dtype if self.version == 3 else self.new.stored, "zarr_format": self.version}
        chunks = (1,) * (len(shape) - 2) + fitting
        # Chunks whose voxels all equal the fill value are written too: -0.0 and NaN may equal it in other bits. Zeros
        # of a sparse volume are no voxels of the input: it is compressed by Zarr's own codec, also in place of none.
        options["config"] = {"write_empty_chunks": not self.new.sparse}
        if self.new.sparse:
            options |= {"compressors": "auto", "fill_value": 0}
        return zarr.create_array(self.path, name=str(level), shape=shape, chunks=chunks, **options)

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the store's root group: the input's, with the levels of the result."""
        kept = dict(self.new.metadata.attributes)
        image = {name: value for name, value in self.image.items() if name != "datasets"}
        if not image:
            image = {"name": self.path.name.split(".")[0], "axes": self._new_axes(), "type": "mean"}
        image["datasets"] = [
            {"path": str(level), "coordinateTransformations": self._transforms(level)}
            for level in range(len(self.shapes))
        ]
        if self.new.metadata.kind != "zarr":
            kept = {"attributes": kept} if kept else {}
            if self.new.metadata.description:
                kept["description"] = self.new.metadata.description
        if self.new.provenance:
            kept[NOTES] = self.new.notes()
        if self.version == 3:
            return {**kept, "ome": {"version": "0.5", **kept.get("ome", {}), "multiscales": [image]}}
        return {**kept, "multiscales": [{"version": "0.4", **image}]}

    def _new_axes(self) -> list[dict[str, str]]:
        """Return NGFF's metadata of axes for the result of an input that has none."""
        unit = {"unit": self.new.metadata.unit} if self.new.metadata.unit else {}
        lead = [{"name": "t", "type": "time"}, {"name": "c", "type": "channel"}][-self.lead :] if self.lead else []
        return [*lead, *({"name": name, "type": "space", **unit} for name in "zyx"[-self.new.ndim :])]

    def _transforms(self, level: int) -> list[dict[str, Any]]:
        """Return NGFF's transformations of a level: its scale and, if there is one, its translation.

        The scale is the input's times the number of its voxels that become one along each axis. The translation is the
        middle of the level's first voxel: the input's, plus the start of the restored region, plus half of what the
        voxel has grown.

        Args:
            level: number of the level; 0 has the input's resolution.
        """
        lead, ndim = self.lead, self.new.ndim
        given: Mapping[str, Any] = (self.image.get("datasets") or [{}])[0]
        size = None if self.image else self.new.metadata.voxel_size
        scale = transform_of(given, "scale") or [1.0] * lead + [*(size or (1.0, 1.0, 1.0))][-ndim:]
        translation = transform_of(given, "translation")
        shift = translation or [0.0] * (lead + ndim)
        start = [0] * lead + [*start_of(self.new.region)][-ndim:]
        factor = [1] * lead + [step**level for step in self.step[-ndim:]]
        moved = [t + s * (o + (f - 1) / 2) for t, s, o, f in zip(shift, scale, start, factor, strict=True)]
        scaled = [s * f for s, f in zip(scale, factor, strict=True)]
        transforms: list[dict[str, Any]] = [{"type": "scale", "scale": scaled}]
        if any(moved) or translation is not None:
            transforms.append({"type": "translation", "translation": moved})
        return transforms


# codecs that keep every bit
LOSSLESS = ("blosc", "zlib", "gzip", "gz", "zstd", "lz4", "bz2", "lzma", "shuffle", "delta")


def kept_codecs(source: Any, dtype: np.dtype) -> dict[str, Any]:
    """Return the input's compression as arguments of `zarr.create_array`, for an array of `dtype`.

    They leave Zarr's own compression if one of the input's codecs could change a bit.

    Args:
        source: the input's array.
        dtype: of the result.
    """
    same = np.dtype(source.dtype).newbyteorder("=") == dtype
    filters = tuple(source.filters or ())
    names = [_codec_name(codec) for codec in (*filters, *source.compressors)]
    if any(name not in LOSSLESS for name in names) or ("delta" in names and not (same and dtype.kind in "ui")):
        return {"fill_value": source.fill_value} if same else {}
    return {"compressors": source.compressors} | ({"filters": filters, "fill_value": source.fill_value} if same else {})


def _codec_name(codec: Any) -> str:
    """Return the name of a Zarr codec, as in LOSSLESS."""
    return str(getattr(codec, "codec_id", None) or type(codec).__name__.lower().removesuffix("codec"))


def halve(image_YX: np.ndarray) -> np.ndarray:
    """Return an image at half the resolution: means of 2 x 2 voxels, or of fewer at the ends of odd sides. float64 [Y,
    X]."""
    rows, columns = (np.arange(0, side, 2) for side in image_YX.shape)
    sums_YX = np.add.reduceat(np.add.reduceat(image_YX, rows, axis=0), columns, axis=1)
    counts = [np.minimum(2, side - starts) for side, starts in zip(image_YX.shape, (rows, columns), strict=True)]
    return np.asarray(sums_YX / np.outer(*counts))

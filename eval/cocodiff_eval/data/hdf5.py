"""HDF5 datasets as volumes and as results. A result is stored contiguously, with the input's metadata and small
datasets.

An HDF5 file may name other files, as links, external storage or sources of virtual datasets. These are read only if the
user allows it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import h5py
import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.config.files import irregular, is_there
from cocodiff.jobs.declared import SCALES, describe, read_declared
from cocodiff_eval.data.axes import count_leading, name_axes, plain_attributes
from cocodiff_eval.data.tiff_metadata import NOTES
from cocodiff_eval.data.volume import (
    LENGTHS,
    Metadata,
    NewVolume,
    Region,
    Stack,
    as_volume_shape,
    by_slabs,
    filled,
    format_only_remarks,
    format_shape,
    listed,
    one_unit,
    reading,
    start_of,
)

log = logging.getLogger("cocodiff.eval")
MOST_LINKS = 64  # links that are followed in a row; more are taken for a circle
DATA_EXCHANGE = "/exchange/data"
FRAME = re.compile(r"^(?P<stem>.*?)(?P<numbers>(?:_?\d+)+)(?:\.tiff?)?$", re.IGNORECASE | re.DOTALL)
MOST_VISITED = 1000  # objects of a file that are looked at to list its datasets
Placed = dict[Any, str | None]  # path of each object in the result, by its key in the input; None if it is not there
OPEN_ELSEWHERE = "it is open elsewhere for writing: close it there, or read a copy (after a crash: h5clear -s)"


def open_hdf5(file: str, dataset: str | None, follow_links: bool) -> Stack:
    """Open a dataset of an HDF5 file, or a group of frames (ALS beamline 8.3.2), as a volume. No voxels are read yet.

    Raise UserError for a file that is not HDF5, for a missing dataset, and for other files that are not allowed.

    Args:
        file: the HDF5 file.
        dataset: path in the file; None for Data Exchange's `/exchange/data`, else the only group of frames.
        follow_links: True to read other files that this one names.
    """
    with _errors(f"{file}: not a readable HDF5 file"), h5py.File(file, "r") as h5:
        if dataset is None:
            dataset = _default(h5, follow_links)
        if dataset is None:
            raise UserError(f"{file}: name the dataset as {file}:/path; {_list_datasets(h5)}")
        node, place = _find(h5, dataset, follow_links)
        if isinstance(node, h5py.Group) and (frames := find_frames(node)):
            return _open_frames(file, node, place, frames, follow_links)
        if not isinstance(node, h5py.Dataset):
            what = "is a group" if isinstance(node, h5py.Group) else "is not there"
            raise UserError(f"{file}: {dataset} {what}; {_list_datasets(h5)}")
        if node.shape is None:
            raise UserError(f"{file}:{dataset}: an empty dataspace, without any voxels; {_list_datasets(h5)}")
        _check_storage(node, follow_links)
        shape, dtype = tuple(node.shape), node.dtype
        depth = node.chunks[0] if node.chunks and len(shape) == 3 else 1
        count_leading(name_axes(node), shape, f"{file}:{dataset}")
        metadata = read_metadata(node, file, place, follow_links)
    volume_shape = as_volume_shape(shape, f"{file}:{dataset}", dtype.itemsize)

    def read(first: int, end: int) -> np.ndarray:
        # Opened for each slice: no handle outlives the call, so ranks forked later share no file position.
        with _errors(f"{file}:{dataset}: slice {first} cannot be read"), h5py.File(file, "r") as h5:
            node = h5[dataset]
            return np.asarray(node[first:end] if len(shape) == 3 else node[()][None])

    name, native = f"{Path(file).stem}_{dataset.strip('/')}", dtype.newbyteorder("=")
    reader = by_slabs(read, volume_shape, dtype.itemsize, depth)
    return Stack(f"{file}:{dataset}", name, volume_shape, native, len(shape), reader, metadata)


def _default(h5: Any, follow_links: bool) -> str | None:
    """Return the path in an HDF5 file that is opened if the user names none.

    It is Data Exchange's `/exchange/data`, else the only group of frames (datasets of one slice each). Return None for
    all other files, also for one whose single dataset has another path.

    Args:
        h5: the open file.
        follow_links: True to read other files that this one names.
    """
    if h5.get(DATA_EXCHANGE.strip("/"), getlink=True) is not None:
        return DATA_EXCHANGE if _find(h5, DATA_EXCHANGE, follow_links)[0] is not None else None
    group = h5
    for _ in range(MOST_LINKS):  # files of ALS 8.3.2: one group, perhaps within others
        if find_frames(group):
            return str(group.name)
        inner = [name for name in group if isinstance(group.get(name, getlink=True), h5py.HardLink)]
        groups = [group[name] for name in inner if isinstance(group[name], h5py.Group)]
        if len(groups) != 1:
            return None
        group = groups[0]
    return None


def find_frames(group: Any) -> list[str]:
    """Return the names of the frames (datasets of one slice each) in an HDF5 group, in the order of their numbers.

    Return [] if it has none. Frames are datasets [Y, X] or [1, Y, X] whose names end in a number, except bright (`bak`)
    and dark (`drk`) ones. A single frame counts only in a result that cocodiff has written.
    """
    found: list[tuple[list[int], str]] = []
    for name in group:
        match = FRAME.match(name)
        if match is None or "bak" in match["stem"] or "drk" in match["stem"]:
            continue
        node = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        if isinstance(node, h5py.Dataset) and node.ndim in (2, 3) and node.shape[:-2] in ((), (1,)):
            found.append(([int(number) for number in re.findall(r"\d+", match["numbers"])], name))
    return [name for _, name in sorted(found)] if len(found) > 1 or NOTES in group.attrs else []


def _open_frames(file: str, group: Any, place: str, frames: list[str], follow_links: bool) -> Stack:
    """Return an HDF5 group of frames (datasets of one slice each) as a volume, a frame for each slice.

    Raise UserError with the name of the first frame whose shape or dtype differs from the first one's.

    Args:
        file: the HDF5 file.
        group: the open group.
        place: path of the group in the file.
        frames: names of the frames, in order.
        follow_links: True to read other files that this one names.
    """
    first = group[frames[0]]
    for name, frame in zip(frames, map(group.get, frames), strict=True):
        _check_storage(frame, follow_links)
        if (frame.shape[-2:], frame.dtype) != (first.shape[-2:], first.dtype):
            raise UserError(
                f"{file}: {group.name}/{name} holds {format_shape(frame.shape)} voxels of {frame.dtype}, "
                f"and {frames[0]} {format_shape(first.shape)} of {first.dtype}; the frames of a stack are alike"
            )
    dtype = first.dtype
    shape = as_volume_shape((len(frames), *first.shape[-2:]), f"{file}:{place}", dtype.itemsize)
    metadata = read_metadata(first, file, place, follow_links)
    metadata = replace(metadata, details={**metadata.details, "frames": frames})

    def read(index: int) -> np.ndarray:
        with _errors(f"{file}:{place}: {frames[index]} cannot be read"), h5py.File(file, "r") as h5:
            return np.asarray(h5[place][frames[index]][()]).reshape(shape[1:])

    name = "_".join(filter(None, [Path(file).stem, place.strip("/")]))
    return Stack(f"{file}:{place}", name, shape, dtype.newbyteorder("="), 3, read, metadata)


def read_metadata(dataset: Any, file: str, place: str, follow_links: bool) -> Metadata:
    """Return the metadata of an HDF5 dataset, from its own attributes and its group's.

    The voxel size is read as Fiji writes it (`element_size_um`), as cocodiff's results have it, or as ALS 8.3.2 writes
    it (`pxsize`, in mm).

    Args:
        dataset: the open dataset; the first of a group of frames.
        file: the HDF5 file.
        place: path in the file of the dataset, or of its group of frames.
        follow_links: True if other files that this one names may be read.
    """
    attributes, of_group = plain_attributes(dataset), plain_attributes(dataset.parent)
    sides, unit = attributes.get("element_size_um"), "micrometer"
    if sides is None and "unit" in attributes:  # written by `_describe` where the unit is unknown
        sides, unit = attributes.get("voxel_size"), attributes["unit"]
    elif sides is None and "pxsize" in of_group:
        sides, unit = 3 * (of_group["pxsize"] if isinstance(of_group["pxsize"], list) else [of_group["pxsize"]]), "mm"
    size, unit, alone = one_unit(sides, [unit] * 3)
    declared = read_declared(attributes, dataset.dtype, f"{file}:{place}")
    remarks = format_only_remarks(f"{file}:{place}", [], alone + describe(declared, SCALES))
    if dataset.size and not dataset.is_virtual:
        there = dataset.id.get_num_chunks() if dataset.chunks else min(1, dataset.id.get_storage_size())
        shape = dataset.shape
        remarks += filled(f"{file}:{place}", there, shape, dataset.chunks or shape, dataset.fillvalue)
    axes, text = str(attributes.get("axes", "")), attributes.get("description")
    text, order = text if isinstance(text, str) else "", ">" if dataset.dtype.byteorder == ">" else "<"
    details = {"file": file, "object": place, "ndim": dataset.ndim, "follow_links": follow_links}
    return Metadata("hdf5", axes, size, unit, text, order, {**of_group, **attributes}, details, remarks, declared)


def _errors(what: str) -> AbstractContextManager[None]:
    """Return a context that turns every error of h5py, such as a damaged header, into a UserError.

    Args:
        what: the file and what is wrong with it.
    """
    return reading(what, "check it with h5ls", {"unable to lock": OPEN_ELSEWHERE, "open for write": OPEN_ELSEWHERE})


def _list_datasets(h5: Any) -> str:
    """Return a phrase that lists an HDF5 file's 2-D and 3-D datasets, for errors.

    Args:
        h5: the open file.
    """
    found: list[str] = []
    visited = count(1)

    def visit(name: str, node: Any) -> bool | None:
        if isinstance(node, h5py.Dataset) and node.shape is not None and node.ndim in (2, 3):
            found.append(f"/{name} ({format_shape(node.shape)} {node.dtype})")
        return True if next(visited) >= MOST_VISITED else None

    h5.visititems(visit)
    return listed(found, "2-D or 3-D dataset")


def _find(h5: Any, path: str, follow_links: bool) -> tuple[Any, str]:
    """Find the object at a path in an HDF5 file. Return it, and its path without soft links.

    The object is None if there is none. Behind a link to another file, the path stays as it is. Raise UserError for
    such a link unless `follow_links`.

    Args:
        h5: the open file or a group.
        path: the path.
        follow_links: True if other files that this one names may be read.
    """
    node, names, led_on, passed, place = h5, path.split("/"), 0, list[str](), ""
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        link = node.get(name, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            return None, path
        if isinstance(link, h5py.HardLink):
            node = node[name]
            passed.append(name)
            continue
        led_on += 1
        if led_on > MOST_LINKS:
            raise UserError(f"{node.file.filename}: {path} leads through more than {MOST_LINKS} links, in a circle?")
        if isinstance(link, h5py.SoftLink):
            if link.path.startswith("/"):
                node, passed = node.file, []
            names = link.path.split("/") + names
            continue
        _check_other(node.file.filename, f"{path} is a link to {link.path} in", link.filename, follow_links)
        place = place or "/" + "/".join(filter(None, [*passed, name, *names]))
        node = node.get(name)
    return node, place or "/" + "/".join(passed)


def _check_storage(dataset: Any, follow_links: bool, depth: int = 0) -> None:
    """Raise UserError if the voxels of an HDF5 dataset cannot or may not be read.

    That is the case for a filter that this HDF5 lacks, and for voxels in other files unless `follow_links`. It is so
    too for voxels of external files or virtual sources that are missing, which HDF5 would read as fill values.

    Args:
        dataset: the open dataset.
        follow_links: True if other files that this one names may be read.
        depth: number of virtual datasets that led to this one.
    """
    file, name = dataset.file.filename, dataset.name
    if depth > MOST_LINKS:
        raise UserError(f"{file}: {name} is made of more than {MOST_LINKS} virtual datasets in a row, in a circle?")
    layout = dataset.id.get_create_plist()
    for code, _, _, called in map(layout.get_filter, range(layout.get_nfilters())):
        if not h5py.h5z.filter_avail(code):
            raise UserError(
                f"{file}: {name} is compressed by filter {code} ({called.decode(errors='replace') or 'of no name'}), "
                "which this HDF5 has not; install hdf5plugin and set HDF5_PLUGIN_PATH to its plugins "
                "(hdf5plugin.PLUGIN_PATH), or save the dataset with gzip (h5repack -f GZIP=4)"
            )
    left = dataset.nbytes
    for other, start, size in dataset.external or ():
        place = _check_other(file, f"{name} has its voxels in", other, follow_links, [Path(other)])
        taken = min(size, left)
        if place.stat().st_size < start + taken:
            raise UserError(f"{file}: {name} has {taken} bytes of voxels in {other}, which is shorter; copy it again")
        left -= taken
    for other, path, shape in _sources(dataset):
        opened: AbstractContextManager[Any] = contextlib.nullcontext(dataset.file)
        if other != ".":
            place = _check_other(file, f"{name} is a virtual dataset of voxels in", other, follow_links)
            opened = h5py.File(place, "r")
        with opened as source:
            found, _ = _find(source, path, follow_links)
            there = getattr(found, "shape", None)
            if there is None or any(side < least for side, least in zip(there, shape, strict=False)):
                raise UserError(
                    f"{file}: {name} is a virtual dataset of {path} in {other}, which has "
                    f"{'none' if there is None else format_shape(there) + ' voxels, too few'}; copy it again"
                )
            _check_storage(found, follow_links, depth + 1)


def _sources(dataset: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield each source of a virtual HDF5 dataset: its file, its dataset, and the least shape that it must have.

    Numbered sources (`part%b.h5`) are given up to the last one that exists. Nothing is yielded for other datasets.
    """
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        shape: tuple[int, ...] = ()
        with contextlib.suppress(RuntimeError, ValueError):  # a selection of everything, or without an end
            shape = tuple(end + 1 for end in source.src_space.get_select_bounds()[1])
        own, last = source.file_name == ".", 0
        if "%b" in (source.dset_name if own else source.file_name).replace("%%", ""):
            for number in range(MOST_VISITED):
                places = _places(dataset.file.filename, numbered(source.file_name, number))
                if numbered(source.dset_name, number) in dataset.file if own else any(map(is_there, places)):
                    last = number
        for number in range(last + 1):
            yield numbered(source.file_name, number), numbered(source.dset_name, number), shape


def numbered(name: str, number: int) -> str:
    """Return the name of a virtual HDF5 dataset's source with its number in the place of `%b`, as HDF5 spells it."""
    return re.sub("%([%b])", lambda sign: "%" if sign[1] == "%" else str(number), name)


def _places(file: str, other: str) -> list[Path]:
    """Return the paths at which HDF5 looks for a file that another one names, in its order.

    Args:
        file: the file that names it.
        other: the name.
    """
    names = (other, Path(other).name)[: 1 + Path(other).is_absolute()]
    return [folder / name for name in names for folder in (Path(file).parent, Path(), Path(file).resolve().parent)]


def _check_other(file: str, what: str, other: str, follow_links: bool, places: Sequence[Path] | None = None) -> Path:
    """Return the path of a file that an HDF5 file names.

    Raise UserError unless `follow_links`, except if the other file is this file. Raise it also if the other file is
    missing, or if it is a pipe or a device.

    Args:
        file: the file that names the other one.
        what: what is stored there, for errors.
        other: the other file's name.
        follow_links: True if the user allows other files.
        places: paths at which it may be; None for those of HDF5.
    """
    place = next(filter(is_there, places or _places(file, other)), None)
    if not follow_links and not (place and place.samefile(file)):
        raise UserError(
            f"{file}: {what} another file, {other}; if you trust this file to choose what is read, allow it with "
            "--follow-links"
        )
    if place is None:
        raise UserError(f"{file}: {what} {other}, which is not there; put it where this file names it")
    if kind := irregular(place):
        raise UserError(f"{file}: {what} {other}, which is {kind}; name a regular file")
    return place


MOST_COPIED = 2**20  # bytes; larger datasets beside the voxels are not copied (angles, positions and names are small)
LONGEST_ATTRIBUTE = 2**15  # bytes; HDF5 holds 64 KiB, including the attribute's header


def write_hdf5(new: NewVolume) -> None:
    """Write a result as an HDF5 file.

    If the input is HDF5, its names, attributes and small datasets are kept, and each frame stays a dataset. Otherwise
    the result is Data Exchange's `/exchange/data`.
    """
    details, of_hdf5 = new.metadata.details, new.metadata.kind == "hdf5"
    place = str(details["object"]) if of_hdf5 else DATA_EXCHANGE
    frames = details.get("frames", ()) if of_hdf5 else ()
    first, *_ = start_of(new.region)
    names = [f"{place.rstrip('/')}/{name}" for name in frames] or [f"/{place.strip('/')}"]
    own = names[first : first + new.shape[0]] if frames else names
    with _HdfStream(new.path, "w+") as stream, h5py.File(stream, "w") as file:
        _write_voxels(file, own, new)
        if of_hdf5:
            with h5py.File(details["file"], "r") as old:
                # Nodes stay open: they may lie in another file, and a file that is opened again has other keys.
                nodes = {name: old[name] for name in names}
                for name in own:
                    _copy_attributes(nodes[name], file[name], details.get("without", ()))
                placed = _copy_around(old, file, nodes, set(own), new)  # frames outside the region are left out
                for path in filter(None, placed.values()):
                    _attach_scales(nodes.get(path) or old[path], file, path, placed)
        else:
            file["implements"] = "exchange"
            _describe(file[place], new)
        if new.provenance:
            _say(file[place], NOTES, json.dumps(new.notes()))


class _HdfStream(io.FileIO):
    """The file that HDF5 writes to. It hides errors of writing from HDF5 and raises the first one when it is closed.

    HDF5 prints tracebacks and may crash if a write fails while it closes.
    """

    fault: OSError | None = None  # the first error of a write; nothing is written after it

    def write(self, data: Any) -> int:
        """Write bytes, unless a write has failed before. Return their number in any case."""
        left = memoryview(data)
        try:
            while left and self.fault is None:
                left = left[super().write(left) :]
        except OSError as error:
            self.fault = OSError(error.errno, error.strerror, self.name)
        return len(data)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if self.fault is not None:
            raise self.fault


def _write_voxels(file: h5py.File, names: Sequence[str], new: NewVolume) -> None:
    """Write the voxels of a result to an HDF5 file, as one dataset or as a dataset for each slice (frame).

    Args:
        file: the open file.
        names: path of the dataset, or of each frame.
        new: the result.
    """
    if "frames" not in new.metadata.details:
        chunks = (1, *new.shape[1:])[-new.ndim :]
        packed = {"chunks": chunks, "compression": "gzip"} if new.sparse else {}
        dataset = file.create_dataset(names[0], new.stored_shape, new.stored, **packed)
        for index, image_YX in enumerate(new.slices()):
            if not new.sparse or image_YX.any():  # HDF5 stores no chunk that nothing is written to, and reads zeros
                dataset[index if new.ndim == 3 else ...] = image_YX.astype(new.stored)
        return
    for name, image_YX in zip(names, new.slices(), strict=True):
        frame = image_YX.astype(new.stored).reshape((1,) * (new.metadata.details["ndim"] - 2) + image_YX.shape)
        file.create_dataset(name, data=frame, compression="gzip" if new.sparse else None)


def _describe(dataset: h5py.Dataset, new: NewVolume) -> None:
    """Write the metadata of an input that is not HDF5 as attributes of the result's dataset."""
    kept = new.metadata
    if kept.voxel_size and kept.unit:
        dataset.attrs["element_size_um"] = np.array(kept.voxel_size) * (LENGTHS[kept.unit][1] / 1e-6)
    elif kept.voxel_size:
        dataset.attrs["voxel_size"], dataset.attrs["unit"] = kept.voxel_size, kept.unit
    if kept.description:
        _say(dataset, "description", kept.description)
    if new.ndim == 3:
        dataset.attrs["axes"] = "z:y:x"
    if kept.attributes:
        _say(dataset, "attributes", json.dumps(kept.attributes))


def _say(node: Any, name: str, text: str) -> None:
    """Write a text as an attribute of an HDF5 object, or as a dataset under /process if it is too long for an
    attribute."""
    if len(text.encode()) < LONGEST_ATTRIBUTE:
        node.attrs[name] = text
    else:
        node.file[f"/process/{NOTES}/{name}"] = text


def _copy_around(old: Any, new: Any, nodes: Mapping[str, Any], own: Collection[str], result: NewVolume) -> Placed:
    """Copy what lies beside the voxels of an HDF5 input to its result: names, groups' attributes, and small datasets.

    Return the path of each object in the result, by its `_key` in the input; None for one that was not copied.

    Nothing that lies in other files is copied, and neither are sources of a virtual dataset, which hold the input's
    voxels. An object that has several names keeps all of them. Scales are cut to the result's region. A file with very
    many objects is copied in part, with a warning.

    Args:
        old: the input's open file.
        new: the result's open file.
        nodes: the input's dataset or its frames, by path.
        own: paths of `nodes` that are in the result.
        result: the result that is written.
    """
    restored = {_key(node): name if name in own else None for name, node in nodes.items()}
    place, dataset = next(iter(nodes.items()))
    above = [str(path) for path in reversed(PurePosixPath(place).parents)]
    placed: Placed = {_key(source): None for node in nodes.values() for source in _own_sources(node)}
    placed |= {_key(old[path]): path for path in reversed(above)} | restored
    parts = _cut_scales(dataset, result.region) if result.region is not None and len(nodes) == 1 else {}
    todo, visited, most = [(old[path], new[path]) for path in above], count(1), MOST_VISITED + len(nodes)
    for group, copy in todo:  # the loop appends to the list
        _copy_attributes(group, copy)
        for name in group:
            if next(visited) > most:
                log.warning("%s: has more than %d objects; of those behind them nothing is kept", old.filename, most)
                return placed
            if name in copy:
                continue
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.SoftLink) and group.file == old:
                copy[name] = h5py.SoftLink(link.path)
                continue
            if (node := _try(group, name, result.metadata.details["follow_links"])) is None:
                continue
            key = _key(node)
            if path := placed.get(key):
                copy[name] = new[path]
            elif key not in placed and isinstance(node, h5py.Group):
                todo.append((node, copy.create_group(name)))
            elif key not in placed and _is_kept(node, old, restored if result.region is None else ()):
                if key in parts:
                    copy[name] = node[parts[key]]
                else:
                    old.copy(node, copy, name, without_attrs=True)
                _copy_attributes(node, copy[name])
            placed.setdefault(key, copy[name].name if name in copy else None)
    return placed


def _try(h5: Any, path: str, follow_links: bool) -> Any:
    """Return the object at a path of an HDF5 file; None if it is missing, damaged, or in a file that may not be read.

    Args:
        h5: the open file or a group.
        path: the path.
        follow_links: True if other files that this one names may be read.
    """
    with contextlib.suppress(UserError, KeyError, OSError, RuntimeError):
        return _find(h5, path, follow_links)[0]
    return None


def _key(node: Any) -> tuple[int, int]:
    """Return a key of an HDF5 object that is equal for all its names, as long as its file is open: two numbers."""
    about = h5py.h5o.get_info(node.id)
    return about.fileno, about.addr


def _cut_scales(dataset: Any, region: Region) -> dict[Any, slice]:
    """Return, for each dimension scale of an HDF5 dataset, the part that belongs to a region, by the scale's `_key`.

    Scales are those attached to the dataset's axes, and datasets beside it that have the name of an axis.
    """
    ends, found = [*map(slice, region.start, region.stop)][-dataset.ndim :], {}
    names = name_axes(dataset) or [""] * dataset.ndim
    for axis, name, side, part in zip(dataset.dims, names, dataset.shape, ends, strict=True):
        for scale in (*_find_scales(axis), _try(dataset.parent, name, False)):
            if isinstance(scale, h5py.Dataset) and scale.shape == (side,):
                found[_key(scale)] = part
    return found


def _attach_scales(old: Any, new: Any, path: str, placed: Placed) -> None:
    """Attach the input's scales to the axes of a dataset of the result, if they were copied and have the axis' length.

    Args:
        old: the dataset in the input.
        new: the result's open file.
        path: path of the dataset in the result.
        placed: as `_copy_around` returns it.
    """
    for number, axis in enumerate(old.dims if "DIMENSION_LIST" in old.attrs else ()):
        for scale in _find_scales(axis):
            own = new.get(placed.get(_key(scale)) or "")
            if own is not None and own.shape == new[path].shape[number : number + 1]:
                new[path].dims[number].attach_scale(own)


def _find_scales(axis: Any) -> list[Any]:
    """Return the dimension scales that are attached to an axis of an HDF5 dataset; empty if they cannot be read."""
    with contextlib.suppress(Exception):  # the file may name scales that it does not hold
        return list(axis.values())
    return []


def _own_sources(dataset: Any) -> Iterator[Any]:
    """Yield the datasets of the same file that a virtual HDF5 dataset is made of; nothing for other datasets.

    They hold the input's voxels, so they are not copied to a result. A source that is virtual itself is yielded too,
    followed by its own sources.
    """
    for other, path, _ in _sources(dataset):
        if other == "." and (source := _try(dataset.file, path, True)) is not None:
            yield from (source, *_own_sources(source))


def _is_kept(node: Any, old: Any, restored: Collection[Any]) -> bool:
    """Return True if a dataset beside the voxels is copied to the result: it is small, and its voxels lie in the
    input's file.

    A virtual dataset is kept if all its sources are `restored` datasets.

    Args:
        node: the dataset, or another object.
        old: the input's open file.
        restored: keys (`_key`) of the input's datasets that were restored as a whole; empty for a region.
    """
    if not isinstance(node, h5py.Dataset) or node.file != old or node.external:
        return False
    if node.is_virtual:
        sources = [_try(old, path, False) if other == "." else None for other, path, _ in _sources(node)]
        return all(source is not None and _key(source) in restored for source in sources)
    return node.shape is None or node.size * node.dtype.itemsize <= MOST_COPIED


def _copy_attributes(old: Any, new: Any, without: Collection[str] = ()) -> None:
    """Copy the attributes of an HDF5 object to another one.

    References to objects are left out, as they are invalid in another file.

    Args:
        without: names of attributes to leave out.
    """
    for name in [name for name in old.attrs if name not in without]:
        with contextlib.suppress(TypeError, ValueError, OSError):  # types that h5py lacks
            stored = old.attrs.get_id(name).get_type().copy()
            if not stored.detect_class(h5py.h5t.REFERENCE):
                new.attrs.create(name, old.attrs[name], dtype=h5py.Datatype(stored))

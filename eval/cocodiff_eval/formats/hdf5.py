"""HDF5 datasets as volumes. A file may name other files, as links, external storage or sources of virtual datasets;
what they hold is read only where the user allows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cocodiff.errors import UserError
from cocodiff.files import irregular
from cocodiff_eval.formats.volume import RawVolume, as_volume_shape, format_shape, one_line

MOST_LINKS = 64  # that lead on to another; more are a circle
MOST_LISTED = 8
MOST_VISITED = 1000  # objects of a file that are looked at to list its datasets


def open_hdf5(file: str, dataset: str | None, follow_links: bool) -> RawVolume:
    """A dataset, none of whose voxels are read yet. follow_links: read other files that this one names.

    Raises UserError for a file that is no HDF5, a dataset that is not there, and other files unless they are allowed.
    """
    with _errors(f"{file}: not a readable HDF5 file"), h5py.File(file, "r") as h5:
        if dataset is None:
            raise UserError(f"{file}: name the dataset as {file}:/path; {_list_datasets(h5)}")
        node = _find(h5, dataset, follow_links)
        if not isinstance(node, h5py.Dataset):
            what = "is a group" if isinstance(node, h5py.Group) else "is not there"
            raise UserError(f"{file}: {dataset} {what}; {_list_datasets(h5)}")
        _check_storage(node, follow_links)
        if node.shape is None:
            raise UserError(f"{file}:{dataset}: an empty dataspace, without any voxels; {_list_datasets(h5)}")
        shape, dtype = tuple(node.shape), node.dtype
    volume_shape = as_volume_shape(shape, f"{file}:{dataset}")

    def read(index: int) -> np.ndarray:
        # Opened for each slice: no handle outlives the call, so ranks forked later share no file position.
        with _errors(f"{file}:{dataset}: slice {index} cannot be read"), h5py.File(file, "r") as h5:
            node = h5[dataset]
            return np.asarray(node[index] if len(shape) == 3 else node[()])

    name = f"{Path(file).stem}_{dataset.strip('/')}"
    return RawVolume(f"{file}:{dataset}", name, volume_shape, dtype.newbyteorder("="), len(shape), read)


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Damaged headers, types that numpy has not, absent filters: h5py raises many kinds, all end in one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} ({one_line(error)}); check it with h5ls") from error


def _list_datasets(h5: Any) -> str:
    found: list[str] = []
    visited = 0

    def visit(name: str, node: Any) -> bool | None:
        nonlocal visited
        visited += 1
        if isinstance(node, h5py.Dataset) and node.shape is not None and node.ndim in (2, 3):
            found.append(f"/{name} ({format_shape(node.shape)} {node.dtype})")
        return True if visited >= MOST_VISITED else None

    h5.visititems(visit)
    if not found:
        return "it holds no 2-D or 3-D dataset"
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return "it holds " + ", ".join(found[:MOST_LISTED]) + more


def _find(h5: Any, path: str, follow_links: bool) -> Any:
    """The object of a path, link by link; None where there is none. Soft links lead on within a file; another file is a
    UserError unless `follow_links`."""
    node, names, led_on = h5, path.split("/"), 0
    while names:
        name = names.pop(0)
        if name in ("", "."):
            continue
        link = node.get(name, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            return None
        if isinstance(link, h5py.HardLink):
            node = node[name]
            continue
        led_on += 1
        if led_on > MOST_LINKS:
            raise UserError(f"{node.file.filename}: {path} leads through more than {MOST_LINKS} links, in a circle?")
        if isinstance(link, h5py.SoftLink):
            node = node.file if link.path.startswith("/") else node
            names = link.path.split("/") + names
            continue
        _check_other(node.file.filename, f"{path} is a link to {link.path} in", link.filename, follow_links)
        node = node[name]
    return node


def _check_storage(dataset: Any, follow_links: bool, depth: int = 0) -> None:
    """Raises UserError for voxels in other files, directly or through virtual datasets, unless `follow_links`."""
    file, name = dataset.file.filename, dataset.name
    if depth > MOST_LINKS:
        raise UserError(f"{file}: {name} is made of more than {MOST_LINKS} virtual datasets in a row, in a circle?")
    for other, *_ in dataset.external or ():
        _check_other(file, f"{name} has its voxels in", other, follow_links)
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if source.file_name != ".":
            _check_other(file, f"{name} is a virtual dataset of voxels in", source.file_name, follow_links)
            continue
        inner = _find(dataset.file, source.dset_name, follow_links)
        if isinstance(inner, h5py.Dataset):
            _check_storage(inner, follow_links, depth + 1)


def _check_other(file: str, what: str, other: str, follow_links: bool) -> None:
    """Raises UserError for another file that a file names, unless `follow_links`, and for pipes and devices always."""
    if not follow_links:
        raise UserError(
            f"{file}: {what} another file, {other}; if you trust this file to choose what is read, allow it with "
            "--follow-links"
        )
    for place in (Path(other), Path(file).parent / other):
        with contextlib.suppress(OSError):
            if kind := irregular(place):
                raise UserError(f"{file}: {what} {other}, which is {kind}; name a regular file")

"""HDF5 files of results: contiguous datasets that are there from the start, so that any process writes any slice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from cocodiff_eval.formats.hdf5 import DATA_EXCHANGE, MOST_VISITED
from cocodiff_eval.formats.tiff_metadata import NOTES
from cocodiff_eval.formats.units import LENGTHS
from cocodiff_eval.formats.volume import RowFile

MOST_COPIED = 2**20  # bytes of a dataset beside the voxels that is copied: angles, positions, names
LONGEST_ATTRIBUTE = 2**15  # bytes; HDF5 takes 64 KiB with all that goes with it


class Hdf5File(RowFile):
    """An HDF5 file. Of an HDF5 input its names, attributes and small datasets are kept, and a frame stays a dataset;
    else it is Data Exchange's `/exchange/data`.

    Voxels are written into the file's bytes: HDF5's own library lets one process write at a time.
    """

    def _create(self) -> None:
        with h5py.File(self.path, "w") as new:
            if self.metadata.kind == "hdf5":
                with h5py.File(self.metadata.details["file"], "r") as old:
                    # the datasets that the new ones stand for, those outside a region too
                    stood_for = self._within(self.metadata.details.get("frames", ()))
                    _copy_around(old, new, [name.strip("/") for name in stood_for])
                    self._make(new)
                    for name in self._names:
                        _copy_attributes(old[name], new[name])
            else:
                new["implements"] = "exchange"
                self._make(new)
            place = new[self._object] if self._frames else new[self._names[0]]
            if self.metadata.kind != "hdf5":
                self._describe(place)
            if self.provenance:
                _say(place, NOTES, json.dumps(self.notes()))

    def _make(self, new: Any) -> None:
        shape: tuple[int, ...] = self.shape[-self.ndim :]
        if self._frames:
            shape = self.shape[1:] if self.metadata.details["ndim"] == 2 else (1, *self.shape[1:])
        for name in self._names:
            layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            new.create_dataset(name, shape, self._stored, dcpl=layout)

    def _describe(self, dataset: Any) -> None:
        kept = self.metadata
        if kept.voxel_size and kept.unit:
            dataset.attrs["element_size_um"] = np.array(kept.voxel_size) * (LENGTHS[kept.unit][1] / 1e-6)
        elif kept.voxel_size:
            dataset.attrs["voxel_size"], dataset.attrs["unit"] = kept.voxel_size, kept.unit
        if kept.description:
            _say(dataset, "description", kept.description)
        if self.ndim == 3:
            dataset.attrs["axes"] = "z:y:x"
        if kept.attributes:
            _say(dataset, "attributes", json.dumps(kept.attributes))

    @property
    def _object(self) -> str:
        """The path of the dataset, or of the group of frames."""
        return str(self.metadata.details["object"]) if self.metadata.kind == "hdf5" else DATA_EXCHANGE

    @property
    def _frames(self) -> Sequence[str]:
        """The names of frames in the group; none where all slices are one dataset."""
        names = self.metadata.details.get("frames", ()) if self.metadata.kind == "hdf5" else ()
        first = self.region.start[0] if self.region is not None else 0
        return names[first : first + self.shape[0]]

    @property
    def _names(self) -> list[str]:
        """The new datasets."""
        return self._within(self._frames)

    def _within(self, frames: Sequence[str]) -> list[str]:
        """The paths of frames; of the one dataset where there are none."""
        return [f"{self._object.rstrip('/')}/{name}" for name in frames] or [f"/{self._object.strip('/')}"]

    def _offset(self, index: int) -> int:
        return self._offsets[index] if self._frames else self._offsets[0] + index * self._slice_bytes

    @cached_property
    def _offsets(self) -> list[int]:
        """Where the voxels of the datasets begin in the file, in bytes."""
        with h5py.File(self.path, "r") as file:
            return [int(file[name].id.get_offset()) for name in self._names]


def _say(node: Any, name: str, text: str) -> None:
    """A text as an attribute; one that is too long for an attribute as a dataset of its own."""
    if len(text.encode()) < LONGEST_ATTRIBUTE:
        node.attrs[name] = text
    else:
        node.file[f"/process/{NOTES}/{name}"] = text


def _copy_around(old: Any, new: Any, voxels: Sequence[str]) -> None:
    """Attributes of all groups, and the small datasets beside the voxels; nothing that lies in other files."""
    skipped = set(voxels)
    _copy_attributes(old, new)
    left = MOST_VISITED + len(skipped)

    def visit(name: str, node: Any) -> bool | None:
        nonlocal left
        left -= 1
        if isinstance(node, h5py.Group):
            _copy_attributes(node, new.require_group(name))
        elif name not in skipped and _is_small(node):
            old.copy(node, new.require_group(str(Path(name).parent)), Path(name).name)
        return True if left <= 0 else None

    old.visititems(visit)


def _is_small(dataset: Any) -> bool:
    if not isinstance(dataset, h5py.Dataset) or dataset.external or dataset.is_virtual:
        return False
    return dataset.shape is None or dataset.size * dataset.dtype.itemsize <= MOST_COPIED


def _copy_attributes(old: Any, new: Any) -> None:
    """All but references to objects, which mean nothing in another file."""
    for name in old.attrs:
        try:
            value = old.attrs[name]
            if h5py.check_ref_dtype(getattr(value, "dtype", np.dtype("u1"))) is None and not _holds_references(value):
                new.attrs.create(name, value, dtype=old.attrs.get_id(name).dtype)
        except (TypeError, ValueError, OSError):  # types that h5py has not
            continue


def _holds_references(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "OV" and not h5py.check_string_dtype(value.dtype)

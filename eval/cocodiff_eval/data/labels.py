"""Label images in a Zarr store of results: those of the input's own store, and the generated mask."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from cocodiff.config.errors import UserError
from cocodiff_eval.data.ome_zarr import ZarrStore, inside, of_ngff, open_node, open_zarr
from cocodiff_eval.data.slices import unique_names
from cocodiff_eval.data.volume import NewVolume, Reader, Stack, Triple, format_shape, matched, writing

LABELS = "labels"  # the group of label images beside the levels


class LabelStore(ZarrStore):
    """A label image (segmentation) that is written into a Zarr store of results.

    Its smaller levels take every second voxel, as labels have no mean.
    """

    def smaller(self, above: Any, shape: Triple, index: int) -> np.ndarray:
        return self.get(above, self.step[0] * index)[::2, ::2]

    def attributes(self) -> dict[str, Any]:
        found = super().attributes()
        version = {"version": "0.4"} if self.version == 2 else {}
        about = found if self.version == 2 else found["ome"]
        for image in about["multiscales"]:
            if "type" in image:
                image["type"] = "nearest"
        about.setdefault("image-label", {**version, "source": {"image": "../../"}})
        return found


def write_labels(result: NewVolume, volume: Stack, mask: Reader | None, provenance: Mapping[str, Any]) -> list[str]:
    """Write label images into a Zarr store of results: those of the input's own store, and the generated mask.

    Return a line for each label image of the input that could not be kept. Label images of the input are cut to the
    result's region. The mask is written as label 1.

    Args:
        result: the result, whose store exists.
        volume: the input.
        mask: gives the generated mask of a slice, boolean [Y, X]; None to write no mask.
        provenance: how the mask was made; its name is under `mask`.
    """
    kept, lost = list[str](), list[str]()
    for name in list_labels(volume):
        try:
            label = _label_of(volume, name)
            parts = label.shape, label.dtype, label.ndim, label.reader, label.metadata
            _write_label(result.path, name, NewVolume(result.path, *parts, region=label.region))
            kept.append(name)
        except UserError as error:
            shutil.rmtree(result.path / LABELS / name, ignore_errors=True)
            lost.append(f"{LABELS}/{name} of {volume.metadata.details['path']} is not in {result.path.name}: {error}")
    if mask is not None:
        *_, name = unique_names([*kept, str(provenance["mask"])])
        details = _called(volume.as_map().metadata.details, name)
        about = replace(result.metadata, attributes={}, description="", details=details)
        made = replace(result, dtype=np.dtype("u1"), metadata=about, provenance=provenance)
        _write_label(result.path, name, replace(made, read=lambda index: mask(index).astype("u1")))
        kept.append(name)
    if kept:
        with writing(result.path):
            labels = zarr.open_group(result.path / LABELS, mode="r+")
            listed: dict[str, Any] = {"labels": kept}
            labels.attrs.put(listed if labels.metadata.zarr_format == 2 else {"ome": {"version": "0.5", **listed}})
    return lost


def _write_label(store: Path, name: str, label: NewVolume) -> None:
    """Write one label image into the group of label images of a store.

    Args:
        store: the store's folder.
        name: name of the label image, which may be a path.
        label: the label image.
    """
    with writing(store):
        group = zarr.open_group(store, mode="r+")
        for part in (LABELS, *name.split("/")[:-1]):  # a name may be a path through further groups
            group = group.require_group(part)
        LabelStore(replace(label, path=store / LABELS / name)).write()


def _label_of(volume: Stack, name: str) -> Stack:
    """Return the label image of this name in a Zarr input's own store, cut to the input's region.

    Raise UserError if it cannot be cut.
    """
    details = volume.metadata.details
    label = matched(open_zarr(details["store"], inside(details["inner"], LABELS, name)), volume)
    if volume.region is not None and label.region is None:
        raise UserError(
            f"it has {format_shape(label.shape)} voxels and the image {format_shape(volume.whole or ())}, so it cannot "
            "be cut to the region"
        )
    own = label.metadata.details
    alike = (label.shape, label.ndim, own["lead"]) == (volume.shape, volume.ndim, details["lead"])
    if own["image"] or not alike:
        return label
    of_image = {key: _called(details, name)[key] for key in ("image", "levels")}  # a bare array has no metadata
    return replace(label, metadata=replace(label.metadata, details={**own, **of_image}))


def _called(details: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a Zarr input's details for a label image beside it: a copy in which the image has that name."""
    return {**details, "image": {**details["image"], "name": name}} if details.get("image") else dict(details)


def list_labels(volume: Stack) -> list[str]:
    """Return the names of the label images in a Zarr input's own store; empty for other formats."""
    if volume.metadata.kind != "zarr":
        return []
    details, group = volume.metadata.details, None
    with contextlib.suppress(UserError):
        group = open_node(details["store"], details["inner"], LABELS)
    if not isinstance(group, zarr.Group):
        return []
    listed = of_ngff(group.attrs.asdict()).get("labels")
    names = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
    names = [one for one in names if not {"", ".", ".."} & {*one.split("/")}]
    more = [one for one in sorted(group.keys()) if not any(f"{name}/".startswith(f"{one}/") for name in names)]
    return list(dict.fromkeys([*names, *more]))

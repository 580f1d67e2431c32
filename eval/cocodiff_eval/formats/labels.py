"""Label images in a Zarr store of results: those of the input's own store, and the mask that was made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import zarr

from cocodiff.errors import UserError
from cocodiff_eval.formats.ngff import of_ngff
from cocodiff_eval.formats.ome_zarr import open_node, open_zarr
from cocodiff_eval.formats.ome_zarr_file import LABELS, ZarrFile
from cocodiff_eval.formats.region import matched
from cocodiff_eval.formats.volume import RawVolume, format_shape
from cocodiff_eval.slices import unique_names


class LabelFile(ZarrFile):
    """A label image in a store of results. Its smaller levels hold every second voxel: a mean of labels is no label."""

    def _mean(self, larger: Any, slices: int, index: int) -> np.ndarray:
        return self._get(larger, self._step[0] * index)[::2, ::2]

    def _attributes(self, levels: int) -> dict[str, Any]:
        found = super()._attributes(levels)
        version = {"version": "0.4"} if self.zarr_format == 2 else {}
        about = found if self.zarr_format == 2 else found["ome"]
        for image in about["multiscales"]:
            if "type" in image:
                image["type"] = "nearest"
        about.setdefault("image-label", {**version, "source": {"image": "../../"}})
        return found


def write_labels(
    result: ZarrFile, volume: RawVolume, mask: Callable[[int], np.ndarray] | None, provenance: Mapping[str, Any]
) -> list[str]:
    """Writes the labels of a store of results anew: those of the input's own store, cut to the region, and the mask
    that was made, boolean [Y, X] of a slice, as the label 1.

    volume: the input; provenance: how the mask was made, with its name as `mask`. Returns a line for each label of the
    input's that could not be kept.
    """
    shutil.rmtree(result.path / LABELS, ignore_errors=True)
    kept: list[str] = []
    lost: list[str] = []
    for name in list_labels(volume):
        try:
            _copy(result, volume, name)
            kept.append(name)
        except UserError as error:
            shutil.rmtree(result.path / LABELS / name, ignore_errors=True)
            lost.append(f"{LABELS}/{name} of {volume.path} is not in {result.path.name}: {error}")
    if mask is not None:
        *_, name = unique_names([*kept, str(provenance["mask"])])
        about = replace(result.metadata, attributes={}, description="", details=_called(result.metadata.details, name))
        made = LabelFile(
            result.path / LABELS / name, result.shape, np.dtype("u1"), result.ndim, about, provenance, result.region
        )
        _write(made, result, mask)
        kept.append(name)
    if kept:
        listed: dict[str, Any] = {"labels": kept}
        labels = zarr.open_group(result.path, path=LABELS, mode="r+")
        labels.attrs.put(listed if result.zarr_format == 2 else {"ome": {"version": "0.5", **listed}})
    return lost


def _copy(result: ZarrFile, volume: RawVolume, name: str) -> None:
    """Writes a label of the input's store into that of results, cut to the region. Raises UserError."""
    details = volume.metadata.details
    found = matched(open_zarr(details["store"], "/".join(filter(None, [details["inner"], LABELS, name]))), volume)
    if volume.region is not None and found.region is None:
        raise UserError(
            f"it has {format_shape(found.shape)} voxels and the image {format_shape(volume.whole or ())}, so it cannot "
            "be cut to the region"
        )
    kept, path = found.metadata, result.path / LABELS / name
    alike = (found.shape, found.ndim, kept.details["lead"]) == (volume.shape, volume.ndim, details["lead"])
    if alike and not kept.details["image"]:
        of_image = {key: _called(details, name)[key] for key in ("image", "levels")}
        kept = replace(kept, details={**kept.details, **of_image})  # an array alone lies where the image lies
    _write(LabelFile(path, found.shape, found.dtype, found.ndim, kept, {}, found.region), result, found.reader)


def _write(label: LabelFile, result: ZarrFile, read: Callable[[int], np.ndarray]) -> None:
    above = label.path.parent.relative_to(result.path).parts
    for depth in range(len(above)):  # the group of labels, and further ones that a name leads through
        zarr.open_group(result.path, mode="r+").require_group("/".join(above[: depth + 1]))
    label.create()
    for index in range(label.shape[0]):
        label.write(index, np.asarray(read(index)).astype(label.dtype))
    label.finish()


def _called(details: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Details of an image for a label beside it."""
    return {**details, "image": {**details["image"], "name": name}} if details.get("image") else dict(details)


def list_labels(volume: RawVolume) -> list[str]:
    """The names of the label images of a Zarr input's own store."""
    details = volume.metadata.details
    if volume.metadata.kind != "zarr":
        return []
    try:
        group = open_node(details["store"], "/".join(filter(None, [details["inner"], LABELS])))
    except UserError:
        return []
    if not isinstance(group, zarr.Group):
        return []
    listed = of_ngff(group.attrs.asdict()).get("labels")
    names = [one for one in listed if _is_name(one)] if isinstance(listed, list) else []
    more = [one for one in sorted(group.keys()) if not any(f"{name}/".startswith(f"{one}/") for name in names)]
    return list(dict.fromkeys([*names, *more]))


def _is_name(one: Any) -> bool:
    return isinstance(one, str) and not any(part in ("", ".", "..") for part in one.split("/"))

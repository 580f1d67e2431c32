"""The axes of a volume as its file names them. Slices, rows and columns must come last, in this order."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff.config.errors import UserError
from cocodiff_eval.data.volume import format_shape, plain

# Names of axes that are not spatial, for files that give no type of an axis.
NO_SPACE = {"t", "time", "times", "timepoint", "timepoints", "c", "channel", "channels", "wavelength", "energy"}


def axes_of(given: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return a file's axes as dictionaries that have a `name`, from their names or from mappings.

    Args:
        given: the axes in the file: names, or the mappings of NGFF from 0.4 on; None if there are none.
    """
    return [dict(one) if isinstance(one, Mapping) else {"name": one} for one in given or ()]


def count_leading(given: Sequence[Any], shape: Sequence[int], path: str, what: str = "file") -> int:
    """Return the number of axes before slices, rows and columns, such as time and channel.

    If no axis is named, it is the number of all axes but three. Raise UserError if such an axis is longer than 1, or if
    slices, rows and columns are in another order.

    Args:
        given: the axes in the file; empty if it names none.
        shape: the lengths of the array's axes.
        path: the volume's path, for errors.
        what: what a part can be saved as in this format, for errors ("file", "store").
    """
    axes, sizes = axes_of(given), format_shape(tuple(shape))
    names = ", ".join(str(axis["name"]) for axis in axes)
    if axes and len(axes) != len(shape):
        raise UserError(
            f"{path}: has {len(axes)} axes ({names}), and its array {len(shape)} dimensions {sizes}; mend the axes in "
            "its metadata"
        )
    outside = [_is_outside(axis) for axis in axes]
    lead = max(sum(outside), len(shape) - 3)
    letters = [name for name in (str(axis["name"]).lower() for axis in axes) if name in ("z", "y", "x")]
    ordered = all(outside[: sum(outside)]) and letters == sorted(letters, reverse=True)
    named = any(other and side != 1 for side, other in zip(shape, outside, strict=False))
    if named or (ordered and any(side != 1 for side in shape[:lead])):
        told, more = f" ({names})" * bool(axes), ", or name the axis z if it is depth" * named
        raise UserError(
            f"{path}: {len(shape)} dimensions {sizes}{told}; of those before slices, rows and columns (time, channel) "
            f"only one each can be restored: save that as a {what} of its own{more}"
        )
    if not ordered:
        raise UserError(
            f"{path}: its axes are {names}; slices, rows and columns must be the last, in the order z, y, x: save it "
            "transposed"
        )
    return lead


def _is_outside(axis: Mapping[str, Any]) -> bool:
    """Return True if an axis is none of space, but for instance time or channel.

    Args:
        axis: its metadata, with a `name` and perhaps a `type`.
    """
    kind = axis.get("type")
    return kind != "space" if isinstance(kind, str) else str(axis["name"]).lower() in NO_SPACE


def plain_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of an HDF5 object (file, group or dataset) as plain data, by name.

    The value is None if h5py cannot read it.
    """
    found = dict.fromkeys(node.attrs)
    for name in found:
        with contextlib.suppress(Exception):
            found[name] = plain(node.attrs[name])
    return found


def name_axes(dataset: Any) -> list[str]:
    """Return the names of an HDF5 dataset's axes; empty if there are none, or not one for each axis.

    They are taken from dimension scales or labels, else from NeXus' attribute `axes`, else from ilastik's `axistags`.
    """
    found, about, of_group = list[Any](), plain_attributes(dataset), plain_attributes(dataset.parent)
    with contextlib.suppress(Exception):  # the file may name scales that it does not hold
        found.append([axis.label or Path(axis[0].name if len(axis) else "").name for axis in dataset.dims])
    given = (of_group if of_group.get("signal") == Path(dataset.name).name else about).get("axes")
    found.append(re.split("[:, ]+", given.strip("[] ")) if isinstance(given, str) else given)
    with contextlib.suppress(TypeError, ValueError, LookupError):
        found.append([axis["key"] for axis in json.loads(about["axistags"])["axes"]])
    named = (one for one in found if isinstance(one, list) and all(isinstance(name, str) for name in one))
    return next((names for names in named if len(names) == dataset.ndim and any(names)), [])

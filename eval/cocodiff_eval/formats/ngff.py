"""What NGFF's metadata say of a multiscale image, checked once when it is opened: everyone else takes it as it is."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from cocodiff.errors import UserError
from cocodiff_eval.formats.volume import format_shape, plain

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
    if not isinstance(axes, list) or not all(isinstance(one, str) or _has_name(one) for one in axes):
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
    """Along each axis the product of all scales of an image or a dataset, or the sum of all translations; None where
    there are none."""
    given = owner.get("coordinateTransformations") or ()
    found = [[float(value) for value in one[kind]] for one in given if one.get("type") == kind and kind in one]
    along = zip(*found, strict=True)
    return [math.prod(values) if kind == "scale" else math.fsum(values) for values in along] if found else None


def leading(axes: Sequence[Mapping[str, Any]], shape: Sequence[int], path: str) -> int:
    """How many axes stand before slices, rows and columns: time and channel, or where axes are not told all before the
    last three. Raises UserError where one of them is longer than 1, and where slices, rows and columns are not the last
    in this order."""
    if axes and len(axes) != len(shape):
        raise UserError(
            f"{path}: has {len(axes)} axes ({_listed(axes)}), and its array {len(shape)} dimensions "
            f"{format_shape(tuple(shape))}; mend the axes in its metadata"
        )
    outside = [_is_outside(axis) for axis in axes]
    lead = max(sum(outside), len(shape) - 3)
    if not axes:
        lead = max(0, lead)
    elif not all(outside[: sum(outside)]) or _letters(axes) != sorted(_letters(axes), reverse=True):
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


def level_names(datasets: Sequence[Mapping[str, Any]], count: int, taken: Sequence[str] = ()) -> list[str]:
    """Paths for the levels of an image, none of them within another: those that its datasets have, else the level's
    number or the next that is free. taken: further names that none may have."""
    names: list[str] = []
    for level in range(count):
        given = [str(datasets[level]["path"])] if level < len(datasets) else []
        reserved = [*taken, *names, *(str(one["path"]) for one in datasets[level + 1 : count])]
        numbers = (str(number) for number in range(level, level + len(reserved) + count + 1))
        names.append(next(name for name in (*given, *numbers) if not any(_collide(name, one) for one in reserved)))
    return names


def _collide(name: str, other: str) -> bool:
    return f"{name}/".startswith(f"{other}/") or f"{other}/".startswith(f"{name}/")


def _path_of(dataset: Mapping[str, Any]) -> str:
    return "/".join(part for part in str(dataset["path"]).replace("\\", "/").split("/") if part)


def _has_name(axis: Any) -> bool:
    return isinstance(axis, Mapping) and isinstance(axis.get("name"), str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def _is_outside(axis: Mapping[str, Any]) -> bool:
    """Whether an axis is none of space."""
    kind = axis.get("type")
    return kind != "space" if isinstance(kind, str) else str(axis["name"]).lower() in NO_SPACE


def _letters(axes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for axis in axes if (name := str(axis["name"]).lower()) in ("z", "y", "x") and not _is_outside(axis)]


def _listed(axes: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(axis["name"]) for axis in axes)


def _malformed(path: str, what: str, given: Any, wanted: str) -> UserError:
    return UserError(
        f"{path}: {what} of its multiscale image: {reprlib.repr(given)} instead of {wanted}; mend its metadata, or "
        "name the array of its level 0 itself"
    )

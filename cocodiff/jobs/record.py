"""The record of everything that the results of a run depend on, kept as plain data beside the results.

Runs with equal records give equal results. This module also writes run.yaml, which repeats a run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff.config.config import Config

# Options that results depend on, besides presets, ranks and inputs. Time limits and paths of inputs are not among them.
REMEMBERED = (
    *("strength", "seed", "prompt", "guidance", "guidance_2", "frames", "fps", "range", "model", "dtype", "batch"),
    *("tile", "fresh_noise", "height", "width", "machine", "vae", "transport", "device"),
)


def lasting(config: Config) -> dict[str, Any]:
    """Return the engine's settings that results depend on, by name.

    Time limits are left out, or None. Settings of how messages are checked and posted have fixed values.
    """
    settings = {name: value for name, value in vars(config).items() if not name.endswith("timeout_s")}
    return settings | {"timeout_s": None, "check_messages": False, "messages": "batch"}


def described_inputs(tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the record of each task's inputs: hashes of all voxels, and the metadata of the file that results keep.

    Each input is read once, as a whole.

    Args:
        tasks: `tasks.Task` objects
    """
    used = {id(one): one for task in tasks for one in (task.stack, task.mask, task.truth) if one is not None}
    hashes = {key: digest(one) for key, one in used.items()}
    return [
        {
            "name": task.stack.name,
            "mask": task.mask.name,
            **_described(task.stack),
            "voxels": hashes[id(task.stack)],
            "hidden": hashes[id(task.mask)],
            "truth": hashes.get(id(task.truth)),
        }
        for task in tasks
    ]


def _described(stack: Any) -> dict[str, Any]:
    """Return what a stack's results keep of its metadata. The file's path is not included."""
    kept, region = stack.metadata, stack.region
    others = [kept.kind, kept.axes, kept.description, kept.byteorder, kept.attributes]
    return {
        "dtype": str(stack.dtype),
        "voxel size": kept.voxel_size,
        "unit": kept.unit,
        "region": None if region is None else [region.start, region.stop],
        "metadata": hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:16],
    }


def digest(slices: Any) -> str:
    """Return a hash of 16 hexadecimal digits over shape, dtype and all voxels of a stack or mask."""
    found = hashlib.sha256(str(slices.shape).encode())
    for index in range(slices.shape[0]):
        image_YX = slices.read(index)
        found.update(image_YX.dtype.str.encode() + image_YX.tobytes())
    return found.hexdigest()[:16]


def first_difference(there: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first setting that differs between two records; None if they are equal.

    The result is its name, its value in `there` and its value in `now`, both as short texts for an error.

    Args:
        there: record that was read from a file
        now: record as it would be written
    """
    now = json.loads(json.dumps(now))
    for name in dict.fromkeys([*now, *there]):
        old, new = there.get(name), now.get(name)
        if old != new:
            shown = (f"{' '.join(str(one).split()):.60}" for one in _unequal_parts(old, new))
            return name, next(shown), next(shown)
    return None


def _unequal_parts(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the first parts that differ in two unequal values: (old, new), with the keys that lead to them."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next(_unequal_parts(a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        key = next(key for key in old if old[key] != new[key])
        inner = _unequal_parts(old[key], new[key])
        return f"{key} {inner[0]}", f"{key} {inner[1]}"
    return old, new


MARK = "run.yaml"  # file of the options that repeat a run
# Key in run.yaml: how a bound on quality was kept. A run that repeats this one ignores the key and searches again.
FOUND = "quality_found"


def write_document(folder: Path, name: str, document: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write `document` as JSON to the file `name` in a folder, and run.yaml with the options' `values` beside it."""
    (folder / name).write_text(json.dumps(document, indent=1))
    write_settings(folder, values)


def write_settings(folder: Path, values: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
    """Write run.yaml, which repeats the run, with remarks as comments. `overwrite` and `resume` are left out."""
    import yaml

    once = ("overwrite", "resume")
    settings = {name: value for name, value in values.items() if value is not None and name not in once}
    told = "".join(f"# {remark}\n" for remark in remarks)
    (folder / MARK).write_text(told + yaml.safe_dump(settings, sort_keys=False))


def beside_the_record(values: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a settings file's values, with a new `out` if the file is in the folder that it names as `out`.

    A run from its own run.yaml writes to the next free folder beside the old one, such as out-2, and overwrites
    nothing. The values of all other files are returned unchanged.

    Args:
        values: content of the file
        path: path of the file
    """
    out = values.get("out")
    if not isinstance(out, str) or Path(out).resolve() != Path(path).resolve().parent:
        return values
    folder = Path(out) if Path(out).name not in ("", "..") else Path(out).resolve()
    number = 2
    while os.path.lexists(beside := folder.with_name(f"{folder.name}-{number}")):
        number += 1
    return {**values, "out": str(beside), "overwrite": False}

"""What the results of a run depend on, as plain data that is kept beside them: the same data, the same results."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cocodiff.config.config import Config

# What a result depends on, beside presets, ranks and inputs. How a run is watched and where inputs lie is not in it.
REMEMBERED = (
    *("strength", "seed", "prompt", "guidance", "guidance_2", "frames", "fps", "range", "model", "dtype", "batch"),
    *("tile", "fresh_noise", "height", "width", "machine", "vae", "transport", "device"),
)


def lasting(config: Config) -> dict[str, Any]:
    """The settings that results depend on: none of how long to wait, and how messages are checked and posted."""
    settings = {name: value for name, value in vars(config).items() if not name.endswith("timeout_s")}
    return settings | {"timeout_s": None, "check_messages": False, "messages": "batch"}


def described_inputs(tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """The voxels of every `tasks.Task`, and what files say of them that results keep; reads all, once each."""
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
    """What a stack's results say of its voxels; not where the file lies."""
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
    """A short hash of all voxels of a stack or a mask, and of their type."""
    found = hashlib.sha256(str(slices.shape).encode())
    for index in range(slices.shape[0]):
        image_YX = slices.read(index)
        found.update(image_YX.dtype.str.encode() + image_YX.tobytes())
    return found.hexdigest()[:16]


def first_difference(there: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The first setting that differs between two runs: its name, and both values as an error shows them.

    there: as it was written and read; now: as it is to be written
    """
    now = json.loads(json.dumps(now))
    for name in dict.fromkeys([*now, *there]):
        old, new = there.get(name), now.get(name)
        if old != new:
            shown = (f"{' '.join(str(one).split()):.60}" for one in _unequal_parts(old, new))
            return name, next(shown), next(shown)
    return None


def _unequal_parts(old: Any, new: Any) -> tuple[Any, Any]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next(_unequal_parts(a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        key = next(key for key in old if old[key] != new[key])
        inner = _unequal_parts(old[key], new[key])
        return f"{key} {inner[0]}", f"{key} {inner[1]}"
    return old, new


MARK = "run.yaml"
FOUND = "quality_found"  # its key for how a bound on quality was kept; a run that repeats it finds that by itself


def write_document(folder: Path, name: str, document: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes results as JSON, and run.yaml beside them."""
    (folder / name).write_text(json.dumps(document, indent=1))
    write_settings(folder, values)


def write_settings(folder: Path, values: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
    """Writes run.yaml, which repeats the run, with remarks as comments; not that it replaced an older one."""
    import yaml

    once = ("overwrite", "resume")
    settings = {name: value for name, value in values.items() if value is not None and name not in once}
    told = "".join(f"# {remark}\n" for remark in remarks)
    (folder / MARK).write_text(told + yaml.safe_dump(settings, sort_keys=False))


def beside_the_record(values: dict[str, Any], path: str) -> dict[str, Any]:
    """A settings file's values for repeating the run that wrote it: of a run.yaml in the folder that it names as `out`,
    `out` becomes the next free folder beside, and nothing is overwritten. Other files' values stay as they are."""
    out = values.get("out")
    if not isinstance(out, str) or Path(out).resolve() != Path(path).resolve().parent:
        return values
    folder = Path(out) if Path(out).name not in ("", "..") else Path(out).resolve()
    number = 2
    while os.path.lexists(beside := folder.with_name(f"{folder.name}-{number}")):
        number += 1
    return {**values, "out": str(beside), "overwrite": False}

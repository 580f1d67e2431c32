"""The record of everything that the results of a run depend on, kept as plain data beside the results.

Runs with equal records give equal results. This module also writes run.yaml, which repeats a run.
"""

from __future__ import annotations

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
    """Return the engine's settings that results depend on, by name, for the record of a run.

    Time limits are left out, or None. Settings that only change how messages are checked and posted have fixed values.
    """
    settings = {name: value for name, value in vars(config).items() if not name.endswith("timeout_s")}
    return settings | {"timeout_s": None, "check_messages": False, "messages": "batch"}


def first_difference(there: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first setting that differs between the records of two runs; None if they are equal.

    The result is the setting's name, its value in `there` and its value in `now`, both as short texts for an error.

    Args:
        there: record of the earlier run, read from its file: values by name
        now: record of this run, before it is written
    """
    now = json.loads(json.dumps(now))
    for name in dict.fromkeys([*now, *there]):
        old, new = there.get(name), now.get(name)
        if old != new:
            shown = (f"{' '.join(str(one).split()):.60}" for one in _unequal_parts(old, new))
            return name, next(shown), next(shown)
    return None


def _unequal_parts(old: Any, new: Any) -> tuple[Any, Any]:
    """Return the first entries that differ in two unequal values of a run's record: (old, new).

    Lists of one length and dicts of the same keys are searched; the keys that lead to a difference precede it as text.
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return next(_unequal_parts(a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        key = next(key for key in old if old[key] != new[key])
        inner = _unequal_parts(old[key], new[key])
        return f"{key} {inner[0]}", f"{key} {inner[1]}"
    if isinstance(old, list) and isinstance(new, list):
        return f"{len(old)} of them", f"{len(new)} of them"
    return old, new


MARK = "run.yaml"  # file of the options that repeat a run
# Key in run.yaml: how a bound on quality was kept. A run that repeats this one ignores the key and searches again.
FOUND = "quality_found"


def write_document(folder: Path, name: str, document: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the JSON file of a run's results, such as metrics.json, and run.yaml, which repeats the run, beside it.

    Args:
        folder: the folder of both files
        name: name of the JSON file
        document: its content
        values: values of the command's options, by name, for run.yaml
    """
    (folder / name).write_text(json.dumps(document, indent=1))
    write_settings(folder, values)


def write_settings(folder: Path, values: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
    """Write run.yaml, a file of options that repeats the run if it is given as --config.

    Options that are None, and `overwrite` and `resume`, are left out.

    Args:
        folder: the folder of the file
        values: values of the command's options, by name
        remarks: lines that precede them as comments
    """
    import yaml

    once = ("overwrite", "resume")
    settings = {name: value for name, value in values.items() if value is not None and name not in once}
    told = "".join(f"# {remark}\n" for remark in remarks)
    (folder / MARK).write_text(told + yaml.safe_dump(settings, sort_keys=False))


def beside_the_record(values: dict[str, Any], path: str, resume: bool = False) -> dict[str, Any]:
    """Return the options of a settings file, with a new `out` if the file is in the folder that it names as `out`.

    A run from its own run.yaml writes to the next free folder beside the old one, such as out-2, and overwrites
    nothing. The values of all other files are returned unchanged.

    Args:
        values: values of options in the file, by name
        path: path of the file
        resume: True to continue the last such run, in the last folder that is not free, or the old one
    """
    out = values.get("out")
    if not isinstance(out, str) or Path(out).resolve() != Path(path).resolve().parent:
        return values
    folder = Path(out) if Path(out).name not in ("", "..") else Path(out).resolve()
    number, last = 2, folder
    while os.path.lexists(beside := folder.with_name(f"{folder.name}-{number}")):
        number, last = number + 1, beside
    return {**values, "out": str(last if resume else beside), "overwrite": False}

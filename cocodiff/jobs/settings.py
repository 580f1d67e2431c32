"""run.yaml, the settings beside results that repeat the run, and results as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "run.yaml"
FOUND = "quality_found"  # its key for how a bound on quality was kept; a run that repeats it finds that by itself


def write_document(folder: Path, name: str, document: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Writes results as JSON, and run.yaml beside them."""
    (folder / name).write_text(json.dumps(document, indent=1))
    write_settings(folder, values)


def write_settings(folder: Path, values: Mapping[str, Any], remarks: Sequence[str] = ()) -> None:
    """Writes run.yaml, which repeats the run. That it replaced an older one, or went on, is not for repeating.
    remarks: lines of what the run chose by itself, as comments."""
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

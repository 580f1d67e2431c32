"""What runs have made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def results(out: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The images, and the rows of metrics.json without times."""
    rows = json.loads((out / "metrics.json").read_text())["images"]
    for row in rows:
        row["seconds"] = row["rank_seconds"] = 0
        row.pop("replica_seconds", None)
        if "baseline" in row:
            row["baseline"]["seconds"] = 0
    images = out / "images"
    return {str(path.relative_to(images)): path.read_bytes() for path in images.rglob("*") if path.is_file()}, rows

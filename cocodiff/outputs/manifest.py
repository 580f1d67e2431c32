"""The record of the files that cocodiff wrote into a folder of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from cocodiff.files import replace_text

MANIFEST = ".cocodiff-files.json"
UNFINISHED = f"{MANIFEST}.partial"


class Manifest(NamedTuple):
    """The files that cocodiff wrote into a folder. run: of which run; ready: whether that run has written all it
    will; settings: what the results depend on, if it kept journals."""

    run: str
    ready: bool
    files: list[str]
    settings: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """None where there is none, or no whole one."""
        if not (folder / MANIFEST).is_file():
            return None
        try:
            found = json.loads((folder / MANIFEST).read_text())
            files = [str(name) for name in found["files"]]
            below = [name for name in files if _is_below(name)]
            return cls(str(found["run"]), found["ready"] is True, below, dict(found.get("settings") or {}))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        about = "what cocodiff wrote here: --overwrite removes these files and no others"
        replace_text(folder / MANIFEST, json.dumps({"about": about, **self._asdict()}, indent=1))


def _is_below(name: str) -> bool:
    return bool(name) and not Path(name).is_absolute() and ".." not in Path(name).parts

"""A folder of results that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from cocodiff.errors import UserError

MARK = "run.yaml"  # a folder that holds it was written by us and may be replaced by --overwrite


class OutputFolder:
    """Results are written to `partial`, beside the final folder, and renamed into place by `publish`.

    All ranks make the same object; only rank 0 writes. Whoever outlives a failed run calls `discard`.
    """

    def __init__(self, out: str, overwrite: bool) -> None:
        """Checks that results may go to `out`. Raises UserError where something else is there already."""
        self.final = Path(out).absolute()
        self.overwrite = overwrite
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        if self.final.is_file():
            raise UserError(f"--out {out} is a file: name a folder")
        if self.final.exists() and any(self.final.iterdir()):
            if not overwrite:
                raise UserError(f"--out {out} exists already: choose another folder, or replace it with --overwrite")
            if not (self.final / MARK).exists():
                raise UserError(f"--out {out} holds no {MARK}, so it is not ours to overwrite: choose another folder")
        above = next(path for path in self.final.parents if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"--out {out}: no permission to write in {above}: choose another folder")

    def open(self) -> Path:
        """An empty `partial`; what a killed run left behind goes first."""
        self.discard()
        self.partial.mkdir(parents=True)
        return self.partial

    def publish(self) -> None:
        """Puts the results in place. An older result disappears only when the new one stands ready."""
        old = self.final.with_name(f".{self.final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.final.exists():
            self.final.rename(old)
        self.partial.rename(self.final)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)

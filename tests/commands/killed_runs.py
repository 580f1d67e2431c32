"""Runs that are killed on the way, and what runs have made."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
from warm import Started

from cocodiff.jobs.journal import PARTIAL, Journals


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


class Killed:
    """A run on four ranks in two replicas, from its start until it has finished more batches than there were."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.log, self.journals = folder / "log", Journals(folder / "out" / PARTIAL)
        before = len(self.journals.finished())
        self.process = Started(words, self.log)
        deadline = time.monotonic() + 180
        while len(self.journals.finished()) <= before:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)
        self.ranks = sorted(psutil.Process(self.process.pid).children(), key=lambda rank: rank.pid)

    def end(self) -> int:
        code = self.process.wait(60)
        psutil.wait_procs(self.ranks, timeout=10)
        return code

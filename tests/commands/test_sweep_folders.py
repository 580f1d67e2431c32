"""Results of sweeps that are damaged: one line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cocodiff.cli.main import main

JUDGED = {"psnr_db": 20.0, "ssim": 0.5, "mse": 0.01, "seconds": 1.0, "bytes": {"plane": 8}}
LINE = {"point": "a", "steps": 3, "mask": "block", "slice": "scan", **JUDGED, "psnr_vs_exact_db": None, "exact": JUDGED}
WRONG: dict[str, tuple[Any, ...]] = {
    "psnr_db": (float("inf"),),
    "seconds": ("fast", 0),
    "bytes": ([8],),
    "exact": ([1], JUDGED | {"mse": "small"}),
    "point": (["a"],),
}
DAMAGED = [
    *({key: value for key, value in LINE.items() if key != lacking} for lacking in LINE if lacking != "slice"),
    *(LINE | {key: value} for key, values in WRONG.items() for value in values),
    *(b"[1]", b"[" * 100_000, b"1" * 6000, b"", b"\x80\xff\0"),
]


def test_a_folder_is_reported_unless_a_line_is_damaged_which_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, words = tmp_path / "results.jsonl", ["sweep", "--report-only", "--out", str(tmp_path)]

    def refused(said: str) -> None:
        assert main(words) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert said in line and captured.out == ""

    refused("holds no results.jsonl: give the --out of a sweep that has ended")
    for damaged in DAMAGED:
        line = damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode()
        data = json.dumps(LINE | {"slice": "first"}).encode() + b"\n" + line + b"\n"
        lines.write_bytes(data)
        refused("results.jsonl, line 2 is damaged: mend it, or start afresh with --overwrite")
        assert lines.read_bytes() == data
    lines.write_text(json.dumps(LINE) + "\n")
    assert main(words) == 0
    assert "identical" in capsys.readouterr().out and (tmp_path / "pareto.png").is_file()

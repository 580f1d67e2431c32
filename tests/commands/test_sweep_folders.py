"""Results of sweeps that are damaged, and grids that nobody can mean: one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cocodiff_eval.harness.grid import MOST_RUNS, read_grid

from cocodiff.cli.main import main
from cocodiff.config.errors import UserError

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


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"grid": {"ratio": [n / 1e3 for n in range(1000)], "warmup": list(range(1000))}}, 1_000_000),
        ({"grid": {"preset": ["flat"], "steps": list(range(1, 100_001))}}, 100_000),
        ({"points": [{"preset": "flat"}] * 20_000}, 20_000),
        ({"grid": {"warmup": list(range(101))}, "steps": list(range(1, 101))}, 10_100),
        ({"base": {"steps": [3]}}, r"steps \["),
        ({"grid": {"steps": [[3]]}}, r"steps \["),
        ({"grid": {"mask": [["a"]]}}, r"mask \["),
    ],
)
def test_a_grid_of_absurd_size_or_with_a_list_for_a_value_is_refused(sections: dict[str, Any], said: int | str) -> None:
    names = ("base", "grid", "points", "steps", "mask")
    of_machine = {"machine": "local", "transport": "auto", "device": "auto", "kernels": "auto", "timeout_s": 300.0}
    if isinstance(said, int):
        sections, said = {"base": {"selection": "v_major"}, **sections}, rf"has {said} runs .*at most {MOST_RUNS} "
    with pytest.raises(UserError, match=said):
        read_grid(dict.fromkeys(names) | of_machine | sections)

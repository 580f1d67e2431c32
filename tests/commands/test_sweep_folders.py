"""Results of sweeps that are damaged, and grids that nobody can mean: one line each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cocodiff_eval.harness.grid import MOST_RUNS, read_grid

from cocodiff.cli.main import main
from cocodiff.config.errors import UserError

JUDGED = {"psnr_db": 20.0, "ssim": 0.5, "mse": 0.01, "seconds": 1.0, "bytes": {"plane": 8}}
LINE = {"point": "a", "steps": 3, "mask": "block", "slice": "scan", **JUDGED, "psnr_vs_exact_db": None, "exact": JUDGED}


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The one line of error of `sweep --report-only`."""

    def run() -> str:
        assert main(["sweep", "--report-only", "--out", str(tmp_path)]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == ""
        return line

    return run


def write(folder: Path, lines: str | bytes) -> None:
    (folder / "results.jsonl").write_bytes(lines.encode() if isinstance(lines, str) else lines)


def test_a_sound_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, json.dumps(LINE) + "\n")
    assert main(["sweep", "--report-only", "--out", str(tmp_path)]) == 0
    assert "identical" in capsys.readouterr().out and (tmp_path / "pareto.png").is_file()


@pytest.mark.parametrize(
    "line",
    [
        *(
            json.dumps({name: value for name, value in LINE.items() if name != lacking})
            for lacking in LINE
            if lacking != "slice"
        ),
        json.dumps(LINE | {"psnr_db": float("inf")}),
        json.dumps(LINE | {"seconds": "fast"}),
        json.dumps(LINE | {"seconds": 0}),
        json.dumps(LINE | {"bytes": [8]}),
        json.dumps(LINE | {"exact": [1]}),
        json.dumps(LINE | {"exact": JUDGED | {"mse": "small"}}),
        json.dumps(LINE | {"point": ["a"]}),
        "[1]",
        "[" * 100_000,
        "1" * 6000,
        "",
        b"\x80\xff\0",
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, report: Callable[[], str], line: str | bytes) -> None:
    whole = json.dumps(LINE | {"slice": "first"}).encode() + b"\n"
    data = whole + (line.encode() if isinstance(line, str) else line) + b"\n"
    write(tmp_path, data)
    assert "results.jsonl, line 2 is damaged: mend it, or start afresh with --overwrite" in report()
    assert (tmp_path / "results.jsonl").read_bytes() == data


def test_a_folder_without_results_is_named(tmp_path: Path, report: Callable[[], str]) -> None:
    assert "holds no results.jsonl: give the --out of a sweep that has ended" in report()


def grid(**sections: Any) -> Any:
    of_machine = {"machine": "local", "transport": "auto", "device": "auto", "kernels": "auto", "timeout_s": 300.0}
    return read_grid({"base": None, "grid": None, "points": None, "steps": None, "mask": None} | of_machine | sections)


@pytest.mark.parametrize(
    ("sections", "count"),
    [
        ({"grid": {"ratio": [n / 1e3 for n in range(1000)], "warmup": list(range(1000))}}, 1_000_000),
        ({"grid": {"preset": ["flat"], "steps": list(range(1, 100_001))}}, 100_000),
        ({"points": [{"preset": "flat"}] * 20_000}, 20_000),
        ({"grid": {"warmup": list(range(101))}, "steps": list(range(1, 101))}, 10_100),
    ],
)
def test_a_grid_of_absurd_size_is_refused_before_it_is_built(sections: dict[str, Any], count: int) -> None:
    with pytest.raises(UserError, match=rf"has {count} runs of each slice .*at most {MOST_RUNS} are taken: name fewer"):
        grid(base={"selection": "v_major"}, **sections)


@pytest.mark.parametrize(
    "sections", [{"base": {"steps": [3]}}, {"grid": {"steps": [[3]]}}, {"grid": {"mask": [["a"]]}}]
)
def test_lists_where_a_value_belongs(sections: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"(steps|mask) \["):
        grid(**sections)

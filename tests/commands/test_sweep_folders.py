"""Folders of sweeps that are damaged or cannot be, full disks, and grids that nobody can mean: one line each."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cocodiff.cli.main import main
from cocodiff.errors import OwnRankError, UserError
from cocodiff.jobs.sweep.lines import LineWriter, check_folder, read_results
from cocodiff.jobs.sweep.points import MOST_RUNS, read_grid

SETTINGS = {
    "model": "embedded",
    "ranks": 2,
    "machine": "local",
    "seed": 0,
    "strength": 1.0,
    "cocodiff": "0",
    "lines": 2,
}
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


def write(folder: Path, lines: str | bytes, settings: Any = SETTINGS) -> None:
    (folder / "sweep.yaml").write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
    (folder / "results.jsonl").write_bytes(lines.encode() if isinstance(lines, str) else lines)


def test_a_sound_folder_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, json.dumps(LINE) + "\n")
    assert main(["sweep", "--report-only", "--out", str(tmp_path)]) == 0
    assert "1 of 2 runs are not done yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        *(json.dumps({name: value for name, value in LINE.items() if name != lacking}) for lacking in LINE),
        json.dumps(LINE | {"psnr_db": float("inf")}),
        json.dumps(LINE | {"seconds": "fast"}),
        json.dumps(LINE | {"seconds": 0}),
        json.dumps(LINE | {"bytes": [8]}),
        json.dumps(LINE | {"exact": [1]}),
        json.dumps(LINE | {"exact": JUDGED | {"mse": "small"}}),
        json.dumps(LINE | {"point": ["a"]}),
        json.dumps(LINE | {"steps": True}),
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "holds no key: value pairs"),
        ("[1]", "holds no key: value pairs"),
        ("a: [", "is not valid YAML"),
        ("lines: many", "is no record of a sweep"),
        ({"lines": 3}, "sweep.yaml lacks model, ranks"),
    ],
)
def test_damaged_settings_are_named(tmp_path: Path, report: Callable[[], str], settings: Any, said: str) -> None:
    write(tmp_path, json.dumps(LINE) + "\n", settings)
    assert said in report()


@pytest.mark.parametrize("name", ["sweep.yaml", "results.jsonl"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_not_opened(
    tmp_path: Path, report: Callable[[], str], name: str, make: Callable[[Path], None]
) -> None:
    write(tmp_path, "")
    (tmp_path / name).unlink()
    make(tmp_path / name)
    assert "give the --out of a sweep" in report()
    for overwrite in (False, True):
        with pytest.raises(UserError, match=f"its {name} is no file"):
            check_folder(str(tmp_path), SETTINGS, overwrite)


def test_a_damaged_folder_is_found_before_ranks_start(tmp_path: Path) -> None:
    write(tmp_path, "nonsense\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        check_folder(str(tmp_path), SETTINGS, overwrite=False)
    check_folder(str(tmp_path), SETTINGS, overwrite=True)


@pytest.mark.parametrize("out", ["/", "/dev/null", "/proc/x", "a/..", "n" * 300, "loop", "a\0b"])
def test_impossible_targets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError) as caught:
        check_folder(out, SETTINGS, overwrite=True)
    assert "\n" not in str(caught.value) and "folder" in str(caught.value)


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for overwrite in (False, True):
        writer = LineWriter(str(tmp_path / "out"), SETTINGS, overwrite)
        writer.add(LINE)
        writer._file.close()
    assert (tmp_path / "out").is_symlink() and len(read_results(tmp_path / "disk").lines) == 1


def test_a_full_disk_keeps_finished_lines(tmp_path: Path) -> None:
    writer = LineWriter(str(tmp_path / "out"), SETTINGS, overwrite=False)
    writer.add(LINE)
    size = (tmp_path / "out" / "results.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (size + 40, hard)
    )  # Python ignores SIGXFSZ: writing fails, as on a full disk
    try:
        with pytest.raises(OwnRankError, match=r"results\.jsonl could not be written: .*choose another --out"):
            writer.add(LINE | {"slice": "second"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer._file.close()
    assert (tmp_path / "out" / "results.jsonl").stat().st_size == size + 40
    assert [one["slice"] for one in read_results(tmp_path / "out").lines] == ["scan"]
    again = LineWriter(str(tmp_path / "out"), SETTINGS, overwrite=False)
    again.add(LINE | {"slice": "second"})
    again._file.close()
    assert [one["slice"] for one in read_results(tmp_path / "out").lines] == ["scan", "second"]


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

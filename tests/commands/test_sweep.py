"""`cocodiff sweep` on two ranks: every line once; what may not go on; its reports; bad grids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tifffile
import yaml
from cocodiff_eval.harness.grid import MOST_RUNS, read_grid
from cocodiff_eval.harness.quality import read_ladder
from cocodiff_eval.report.sweeps import better_than, beyond, note, summarise, tables
from launching import assert_succeeded
from warm import forked

from cocodiff.cli.main import main
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError

SWEEP = Path(__file__).with_name("sweep.yaml")
POINTS = ["schedule fixed, reference sent", "flat", "coded", "round"]
FILES = {"results.jsonl", "pareto.png", "report.html", "metrics.json", "run.yaml", "trace.json"}


class Key(NamedTuple):
    """The run that a line is the result of; no two lines have the same."""

    point: str
    steps: int
    mask: str
    slice: str


MASKS = ["block", "center"]
KEYS = {Key(point, 3, mask, f"scan[{n}]") for point in POINTS for mask in MASKS for n in range(2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slices."""
    folder = tmp_path_factory.mktemp("sweep")
    volume = np.random.default_rng(0).integers(0, 60000, (2, 96, 96), dtype=np.uint16)
    tifffile.imwrite(folder / "scan.tif", volume, photometric="minisblack")
    return folder


def words(folder: Path, out: Path, *more: str, ranks: int = 2, config: Path = SWEEP) -> list[str]:
    of_input = ["--config", str(config), "--input", str(folder / "scan.tif"), "--quiet"]
    return ["sweep", *of_input, "--ranks", str(ranks), "--out", str(out), *more]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The results of a sweep that nobody disturbed."""
    done = forked(*words(folder, folder / "whole"), folder=folder)
    assert_succeeded(done)
    assert all(said in done.stdout for said in ("coded, center, scan[1]: ", "d PSNR dB (2)", "report.html"))
    return folder / "whole"


def by_key(out: Path) -> dict[Key, dict[str, Any]]:
    """All lines, without the times."""
    lines = [json.loads(text) for text in (out / "results.jsonl").read_text().splitlines()]
    timeless = [{**line, "seconds": 0, "exact": {**line["exact"], "seconds": 0}} for line in lines]
    found = {Key(*(line[name] for name in Key._fields)): line for line in timeless}
    assert len(found) == len(lines)
    return found


def test_every_run_has_one_line_that_says_what_it_was(whole: Path) -> None:
    found = by_key(whole)
    assert found.keys() == KEYS and {path.name for path in whole.glob("[!.]*")} == FILES
    for key, line in found.items():
        sent, exact = (sum(one["bytes"].values()) for one in (line, line["exact"]))
        steps = [row["step"] for row in line["drift"]]
        if key.point == "flat":
            assert line["psnr_vs_exact_db"] is None and sent == exact and not steps
            assert line["psnr_db"] == line["exact"]["psnr_db"]
        elif key.point == "round":
            assert line["psnr_vs_exact_db"] > 80 and not steps
            assert line["settings"] == {"preset": "flat", "ring": 2, "placement": "usp", "chunks": 2}
        elif key.point == "coded":  # of a head's 64 bytes a code and a scale: of 4 bits, which nobody waits for, then 8
            assert line["coding"] == "int4" and line["psnr_vs_exact_db"] > 15
            assert [row["coded_fraction"] for row in line["drift"]] == [0, 1, 1]
            assert [row["displaced_sets"] for row in line["drift"]] == [{"": 1}, {"qkvo": 1}, {"": 1}]
            step = sum(line["bytes_whole"].values()) / 3
            assert (sent, sum(line["bytes_late"].values())) == (step * (1 + 9 / 64 + 17 / 64), step * 9 / 64)
        else:
            assert line["coding"] == "v_major" and line["settings"]["reference"] == "sent"
            assert 0 < sent < sum(line["bytes_whole"].values()) == exact and line["psnr_vs_exact_db"] > 15
            assert steps == [0, 1, 2] and line["drift"][2]["change"] > 0
            assert line["drift"][2]["stable_fraction"] > 0.4


def test_metrics_and_page_are_those_of_inpaint(whole: Path) -> None:
    rows = json.loads((whole / "metrics.json").read_text())["images"]
    assert {(row["mode"], row["mask"], row["name"]) for row in rows} == {(k.point, k.mask, k.slice) for k in KEYS}
    assert all(row["exact_compared"] for row in rows)
    page = (whole / "report.html").read_text()
    assert all(part in page for part in ("data:image/png;base64,", "coded", "biharmonic", "beaten by"))
    assert 'src="http' not in page


def test_a_sweep_of_several_numbers_of_steps(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"grid": {"preset": ["tapa"], "steps": [1, 2], "mask": MASKS}}))
    assert main(words(folder, tmp_path / "out", "--slices", "0:1", ranks=1, config=tmp_path / "two.yaml")) == 0
    assert by_key(tmp_path / "out").keys() == {Key("tapa", n, mask, "scan[0]") for n in (1, 2) for mask in MASKS}
    rows = json.loads((tmp_path / "out" / "metrics.json").read_text())["images"]
    modes = [f"{run}, {n} steps" for n in (1, 2) for run in ("exact run", "tapa")]
    assert [row["mode"] for row in rows if row["mask"] == "center"] == modes
    inputs = json.loads((tmp_path / "out" / "metrics.json").read_text())["inputs"]
    assert [one["mask"] for one in inputs] == MASKS
    repeated = ["sweep", "--config", str(tmp_path / "out" / "run.yaml")]
    assert main([*repeated, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert by_key(tmp_path / "again") == by_key(tmp_path / "out")


def line_of(point: str, sent: int, distance_db: float | None, mask: str = "block", **more: Any) -> dict[str, Any]:
    """A line of a sweep's results: an exact run of 100 bytes in 3 s, and one of so many bytes in 1 s."""
    judged = {"psnr_db": 20.0, "ssim": 0.9, "mse": 0.1}
    exact = {**judged, "bytes": {"plane": 100}, "seconds": 3.0}
    run = {**judged, "point": point, "mask": mask, "steps": 3, "bytes": {"plane": sent}, "seconds": 1.0}
    return {**run, "psnr_vs_exact_db": distance_db, "exact": exact, **more}


LINE = line_of("a", 8, None, slice="scan")
WRONG: dict[str, tuple[Any, ...]] = {
    "psnr_db": (float("inf"),),
    "seconds": ("fast", 0),
    "bytes": ([8],),
    "exact": ([1], LINE["exact"] | {"mse": "small"}),
    "point": (["a"],),
}
DAMAGED = [
    *({key: value for key, value in LINE.items() if key != lacking} for lacking in LINE if lacking != "slice"),
    *(LINE | {key: value} for key, values in WRONG.items() for value in values),
    *(b"[1]", b"[" * 100_000, b"1" * 6000, b"", b"\x80\xff\0"),
]


def test_a_folder_is_reported_unless_a_line_is_damaged_which_is_named(tmp_path: Path, capsys: Any) -> None:
    def mistake(*arguments: str) -> str:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.splitlines()) == 1
        return captured.err

    lines, given = tmp_path / "results.jsonl", ["sweep", "--report-only", "--out", str(tmp_path)]
    assert "holds no results.jsonl" in mistake(*given)
    for damaged in DAMAGED:
        line = damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode()
        data = json.dumps(LINE | {"slice": "first"}).encode() + b"\n" + line + b"\n"
        lines.write_bytes(data)
        assert "results.jsonl, line 2 is damaged: " in mistake(*given)
        assert lines.read_bytes() == data
    lines.write_text(json.dumps(LINE) + "\n")
    assert main(given) == 0
    assert "identical" in capsys.readouterr().out and (tmp_path / "pareto.png").is_file()


def test_a_point_is_beaten_by_one_that_sends_no_more_and_is_closer() -> None:
    points = [line_of("flat", 100, None), line_of("a", 50, 40.0), line_of("b", 30, 41.0), line_of("c", 30, 42.0)]
    rows = summarise(points)
    assert [better_than(row, rows) for row in rows] == ["", "c", "c", ""]
    for another in (line_of("d", 10, 60.0, "center"), line_of("d", 10, 60.0, steps=4)):
        assert better_than(rows[1], summarise([another])) == ""
    late = summarise([line_of("late", 30, 41.0, bytes_late={"plane": 10})])
    assert better_than(late[0], rows) == ""  # of which attention waits for less


def test_a_row_of_a_sweep_has_the_means_of_its_slices_and_their_standard_errors() -> None:
    """In bytes over the exact run's 100, and over those of all tokens as they are; in seconds, and in changes."""
    late = {"bytes_late": {"plane": 30, "node": 10}, "bytes_whole": {"plane": 400}}
    more: list[Any] = [(50, 40.0, {"psnr_db": 19.0}), (70, None, {"psnr_db": 21.0, "seconds": 2.0})]
    more += [(60, 44.0, {"psnr_db": None})]
    (row,) = summarise([line_of("a", sent, db, **late, **of_row) for sent, db, of_row in more])
    told = {name: of and of.text(3) for name, of in row.cost.items()}
    third = "0.600 +- 0.058"  # the deviation of .5, .6 and .7 is .1, by the square root of 3
    assert told == {
        "volume": third,
        "exposed": third.replace("0.600", "0.200"),
        "of whole": "0.150 +- 0.014",
        "speed-up to flat": "2.500 +- 0.500",
        "seconds": "1.333 +- 0.333",
    }
    assert (row.n, row.identical, row.displaced) == (3, 1, True)
    assert row.vs_exact is not None and row.vs_exact.text(1) == "42.0 +- 2.0"
    assert row.difference["psnr_db"] is not None and row.difference["psnr_db"].text(1) == "0.0 +- 1.0"
    limits = [summarise([line_of("a", 50, 40.0, psnr_db=20.0 + more)])[0] for more in (-9.0, 9.0, 0.0)]
    assert [beyond(one) for one in limits] == [True, True, False]


def test_speed_ups_of_short_runs_say_that_and_how_they_scatter() -> None:
    """Of one run, that nothing is known of it; of runs of many seconds nothing is said."""
    for seconds, more in ((0.5, False), (50.0, True)):
        once, twice = (summarise([line_of("a", 50, 40.0, seconds=seconds)] * count)[0] for count in (1, 2))
        cells = [tables([row])["Bytes and speed"]["speed-up to flat"][0] for row in (once, twice)]
        assert cells[0].endswith("+- ?") and cells[1].endswith("+- 0.00")
        assert (note([once]) == note([])) is more and (more or "0.5 s" in note([once]))


LOSSY = {"base": {"selection": "v_major"}}
NONE_GIVEN = dict.fromkeys(("base", "grid", "points", "steps", "mask", "vae"))
RUN = dict.fromkeys(("transport", "device", "kernels"), "auto") | {"machine": "local", "timeout_s": 300.0}


def grid(**sections: Any) -> Any:
    return read_grid(NONE_GIVEN | RUN | sections)


def test_a_grid_is_every_combination_and_then_the_points() -> None:
    found = grid(
        base={"selection": "v_major", "schedule": "fixed"},
        grid={"ratio": [0.5, 0.75], "reference": ["prev", "sent"], "steps": [20, 50]},
        points=[{"name": "mine", "preset": "cocodiff+", "threshold": 0.9}],
    )
    names = [f"ratio {ratio}, reference {reference}" for ratio in (0.5, 0.75) for reference in ("prev", "sent")]
    assert [point.name for point in found.points] == [*names, "mine"]
    assert found.points[0].config == Config(selection="v_major", schedule="fixed", ratio=0.5, reference="prev")
    assert found.points[-1].config == Config.preset("cocodiff+", threshold=0.9)
    assert (found.steps, found.masks) == ([20, 50], ["block"])
    assert grid(grid={"preset": ["flat"], "steps": [20]}, steps=[7], mask=["center"]).steps == [7]
    assert next(iter(grid(grid={"preset": ["tapa"]}, timeout_s=7.0).presets.values())).timeout_s == 7.0  # the exact run
    most = grid(**LOSSY, grid={"warmup": [*range(100)], "steps": [*range(1, MOST_RUNS // 100 + 1)]})
    assert len(most.points) * len(most.steps) == MOST_RUNS


MISTAKEN = yaml.safe_load(Path(__file__).with_name("grids.yaml").read_text())
LARGE = [
    (LOSSY | {"grid": {"sync_interval": [*range(1000)], "warmup": [*range(1000)]}}, "has 1000000 runs "),
    ({"grid": {"preset": ["flat"], "steps": [*range(1, 100_001)]}}, "has 100000 runs "),
    ({"points": [{"preset": "flat"}] * 20_000}, "has 20000 runs "),
    (LOSSY | {"grid": {"warmup": [*range(101)]}, "steps": [*range(1, 101)]}, "has 10100 runs "),
]


@pytest.mark.parametrize(("sections", "message"), [*MISTAKEN, *LARGE])
def test_mistakes_in_a_grid(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        grid(**sections)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_shipped_sweeps_are_well_formed() -> None:
    folder = Path(__file__).parents[2] / "configs" / "sweeps"
    files = (folder / f"{name}.yaml" for name in ("quality", "codec", "ladder"))
    quality, codec, ladder = (grid(**yaml.safe_load(file.read_text())) for file in files)
    assert len(quality.points) == 13 and quality.masks == MASKS and quality.steps == [20]
    assert sum(point.lossy for point in quality.points) == 11
    assert sum(point.config.codec != "none" for point in codec.points) == 6
    assert {point.config.exchange for point in codec.points} == {"flat"}  # so that bytes compare
    fixed = {"exchange": "split", "order": "v_first"}
    candidates = {name: Config(**fixed, **settings) for name, settings in read_ladder().items()}
    assert {point.name: point.config for point in ladder.points} | {"exact": candidates["exact"]} == candidates

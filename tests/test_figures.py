"""`cocodiff papers`: what the papers' files ask for is there, and a page's numbers are those that commands wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cocodiff_studies import figures
from cocodiff_studies.figures import UNITS, Paper, Run, filled, repeated, value_of

from cocodiff.cli.main import COMMANDS, main
from cocodiff.config.config import shipped_names

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(shipped_names("papers"))


def commands_of(paper: Paper) -> dict[str, list[str]]:
    return {one: words for name, run in paper.commands.items() for one, words in run.named(name)}


def places(paper: Paper) -> list[dict[str, Any]]:
    """All that a paper's rows and curves say of where a number is."""
    points = [
        point[axis]
        for curve in paper.curves
        for line in curve["lines"].values()
        for point in repeated(line)
        for axis in ("x", "y")
    ]
    rows = [*(one for row in paper.rows for one in repeated(row)), *points]
    return [row["of"] | row.get(also, {}) for row in rows for also in ("", "over", "minus")]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_asks_for_is_there(name: str) -> None:
    paper = Paper.load(name)
    commands = commands_of(paper)
    assert all(words[0] in COMMANDS and "{" not in " ".join(words) for words in commands.values())
    of_campaign = [place["run"] for place in places(paper) if place["run"].startswith("campaign")]
    assert all(re.match(r"campaign (step|alltoall)-[\d\[]", one) for one in of_campaign)
    made = [place["run"] for place in places(paper) if place["run"] not in of_campaign]
    assert all(any(re.fullmatch(run, one) for one in commands) for run in made)
    rows = [one for row in paper.rows for one in repeated(row)]
    assert {what for row in rows for what in row.get("said", ())} <= {row["what"] for row in rows}
    assert {row.get("unit", "") for row in rows} <= UNITS.keys()
    assert not any(re.search(r"\{\w+\}", str(row)) for row in rows)


def test_the_page_has_the_rows_of_the_files() -> None:
    """Its figures are of the day on which it was made."""
    page = (ROOT / "docs" / "papers.md").read_text()
    rows = [one for name in NAMES for row in Paper.load(name).rows for one in repeated(row)]
    missing = [
        row["what"]
        for row in rows
        if not row["of"]["run"].startswith("campaign")
        and f"| {row['figure']} | {row['what']} | {row.get('paper', '')} |" not in page
    ]
    assert missing == []
    assert not any(re.search(r"\| - \|", line) for line in page.splitlines()), "a row without a number"


def test_a_value_is_a_mean_of_numbers_ratios_or_differences() -> None:
    document = {"rows": [{"a": "x", "n": 1, "s": 6.0}, {"a": "x", "n": 2, "s": 8.0}, {"a": "y", "n": 1, "s": 2.0}]}
    results = {"one 1": document, "one 2": {"time": {"step_s": 5.0}}}
    of = {"run": "one 1", "rows": {"a": "x"}, "take": "s"}
    assert value_of(results, {"of": of}) == 7.0
    assert value_of(results, {"of": of | {"rows": {"a": "x", "n": 2}}, "over": {"rows": {"a": "y"}}}) == 4.0
    assert value_of(results, {"of": of | {"rows": {"a": "x", "n": 2}}, "minus": {"rows": {"a": "y"}}}) == 6.0
    assert value_of(results, {"of": of, "over": {"rows": {"a": "y"}}}) is None, "two numbers over one"
    assert value_of(results, {"of": {"run": "one .", "take": "time.step_s"}}) == 5.0
    assert value_of(results, {"of": {"run": "none", "take": "s"}}) is None
    assert value_of(results, {"of": of | {"take": "a"}}) is None, "a word"


def test_rows_and_commands_are_repeated() -> None:
    row = {"each": {"n": [1, 2], "way": ["a"]}, "what": "{way} of {n}", "of": {"rows": {"n": "{n}"}}}
    assert [(one["what"], one["of"]["rows"]["n"]) for one in repeated(row)] == [("a of 1", 1), ("a of 2", 2)]
    own = {"each": {"of": [{"n": 1, "paper": "7.1"}, {"n": 2, "paper": "8.4"}]}, "what": "{n} nodes"}
    assert [*repeated(own)] == [{"what": "1 nodes", "paper": "7.1"}, {"what": "2 nodes", "paper": "8.4"}]
    assert filled({"tokens": "{tokens}"}, {"tokens": 3}) == {"tokens": 3}
    run = Run("planned", "plan --nodes {n} {way}", {"n": {"2": "2", "3": "3"}, "way": {"torus": "--chunks {n}"}})
    assert [*run.named("{way} {n}")] == [
        ("torus 2", ["plan", "--nodes", "2", "--chunks", "2"]),
        ("torus 3", ["plan", "--nodes", "3", "--chunks", "3"]),
    ]


PAPER = {
    "title": "Toy",
    "source": "nobody",
    "setting": "Two plans.",
    "runs": {
        "step of {size}": {"made": "planned", "command": "plan --model sd3.5 --size {size}", "each": {"size": {}}}
    },
    "rows": [
        {"figure": "1", "what": "a step", "unit": "ms", "of": {"run": "step of 512", "take": "time.step_s"}},
        {"figure": "2", "what": "more", "paper": "4", "of": {"run": "step of 1024", "take": "time.step_s"}},
    ],
    "curves": [
        {
            "title": "Steps",
            "x_label": "x",
            "y_label": "y",
            "lines": {
                "all": {
                    "x": {"of": {"run": "step.*", "take": "time.step_s"}},
                    "y": {"of": {"run": "step.*", "take": "time.step_s"}},
                }
            },
        }
    ],
    "notes": "That is all.",
}


def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **sizes: str) -> None:
    runs = {"step of {size}": PAPER["runs"]["step of {size}"] | {"each": {"size": sizes}}}  # type: ignore[index]
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(PAPER | {"runs": runs}))
    monkeypatch.setattr(figures, "find_shipped", lambda what, folder, name: tmp_path / f"{name}.yaml")


@pytest.mark.full
def test_a_page_is_made_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    toy(tmp_path, monkeypatch, **{"512": "512", "1024": "1023"})
    monkeypatch.setattr(figures, "shipped_names", lambda folder: ["toy"])
    assert main(["papers", "--out", str(tmp_path / "out")]) == 1
    said = capfd.readouterr().out
    assert "size 1023" in said and "not made: step of 1024" in said
    step = json.loads((tmp_path / "out" / "toy" / "step of 512" / "out" / "plan.json").read_text())["time"]["step_s"]
    page = (tmp_path / "out" / "papers.md").read_text()
    assert f"| 1 | a step |  | {step * 1e3:.4g} ms | planned, `step of 512` |" in page
    assert "| 2 | more | 4 | - |" in page and "![Steps](toy-1.png)" in page and "That is all." in page
    assert (tmp_path / "out" / "toy-1.png").stat().st_size > 1000

    toy(tmp_path, monkeypatch, **{"512": "512", "1024": "1024"})
    written = tmp_path / "out" / "toy" / "step of 512" / "out" / "plan.json"
    before = written.stat().st_mtime_ns
    assert main(["papers", "--out", str(tmp_path / "out")]) == 0
    assert written.stat().st_mtime_ns == before, "made again"
    assert "| - |" not in (tmp_path / "out" / "papers.md").read_text()


def campaign_in(folder: Path) -> None:
    """An all-to-all on a node, a step of two variants and the baseline, and one that a tile does not hold."""
    sizes = {"case": "48MB", "nodes": 1}
    seconds = {"library": 25.5, "flat": 12.0, "tapa": 6.5, "bound": 3.2}
    case = {"case": "", "model": "sd3.5", "size": 1536, "nodes": 1, "peak_bytes": 2**34, "communication_share": 0.5}
    steps = {"library": 0.6, "flat": 0.4, "tapa": 0.3, "tapa v_first": 0.25, "cocodiff": 0.1}
    cases = (("alltoall-1", sizes, seconds), ("step-1-sd3.5-1536-0", case, steps), ("step-1-flux.1-768-1", case, steps))
    for name, about, times in cases:
        (folder / name).mkdir(parents=True)
        rows = [about | {"variant": variant, "median_s": time} for variant, time in times.items()]
        (folder / name / "bench.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    (folder / "step-large").mkdir()
    (folder / "step-large" / "refused").write_text("bench step")


@pytest.mark.full
def test_what_a_campaign_has_measured_stands_beside_the_paper_and_the_plan(tmp_path: Path) -> None:
    campaign_in(tmp_path / "campaign")
    words = ["papers", "--paper", "cocodiff", "--runs", "plan", "--measured", str(tmp_path / "campaign")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "papers.md").read_text()
    of_run = "measured, `campaign step-1-sd3.5-1536-0`"
    for row in (
        "| 7 | cocodiff over library, one node, mean of what was measured | 2.5 | 6.00 |",
        "| 7 | cocodiff over flat, one node, mean of what was measured |  | 4.00 |",
        "Did not fit into a tile's memory: step-large.",
        "| 11 | all-to-all, library, 48 MB, 1 node(s) | 25.5 ms | 2.55e+04 ms | measured, `campaign alltoall-1` |",
        f"| 7 | tapa over library, sd3.5 1536, 1 node(s), batch 0 |  | 2.00 | {of_run} |",
        f"| 1 | share of all-to-all, library, sd3.5 1536, 1 node(s), batch 0 |  | 50 % | {of_run} |",
        "| 8 | what V-Major adds, SD3.5 1536, 1 node(s), largest batch | 2.9, on one node negligible | 2.50 |",
        "| 11 | library over tapa, 48 MB, 1 node(s) | 3.9 | 3.92 | measured, `campaign alltoall-1` |",
        f"| memory | fullest tile, cocodiff, sd3.5 1536, 1 node(s), batch 0 |  | 16.0 GiB | {of_run} |",
        "| 7 | CoCoDiff over flat_serial, sd3.5-paper, 4 nodes | 8.4 |",
        "![All-to-all on one node, measured (figure 11)](cocodiff-2.png)",
    ):
        assert row in page
    assert "| - |" not in page and "Table II" in page and "table II |" not in page, "what was not asked for"


@pytest.mark.parametrize("left", ["", "{}", '{"rows": [', '{"rows": [{"variant": "flat"}]}'])
def test_a_folder_without_measurements_is_named(left: str, tmp_path: Path, capsys: Any) -> None:
    if left:
        (tmp_path / "step").mkdir()
        (tmp_path / "step/bench.json").write_text(left)
    assert main(["papers", "--measured", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ("step/bench.json" if left else "launch/campaign.pbs") in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"), [(("--paper", "tokenrings"), "tokenring"), (("--runs", "nothing"), "no command's name")]
)
def test_mistakes_are_one_line(words: tuple[str, ...], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["papers", "--out", str(tmp_path / "out"), *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("")
    assert main(["papers", "--out", str(tmp_path / "file" / "out")]) == 2
    captured = capsys.readouterr()
    assert "choose another folder" in captured.err and len(captured.err.splitlines()) == 1

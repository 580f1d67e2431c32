"""`cocodiff papers`: what the papers' files ask for, the numbers of a page, and constants from a figure alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from cocodiff_studies import figures
from cocodiff_studies.figures import UNITS, Paper, filled, repeated, value_of
from cocodiff_studies.papers import Fit, PaperCase, Planned, figure_11, fit_figure_11, run_paper
from value_tables import beside

from cocodiff.cli import plan
from cocodiff.cli.main import COMMANDS, main
from cocodiff.config.config import load_machine, shipped_names
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.options import parse, with_settings
from cocodiff.planner.case import ModelShape

PAGE = Path(__file__).resolve().parent.parent / "docs" / "papers.md"
PAPER = Path(__file__).with_suffix(".yaml").read_text()
NAMES = sorted(shipped_names("papers"))


def rows_of(paper: Paper) -> list[dict[str, Any]]:
    return [one for row in paper.rows for one in repeated(row)]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_asks_for_is_there(name: str) -> None:
    """Every number that a row or a point of a curve is made of is of a command, or of the campaign."""
    paper = Paper.load(name)
    commands = {one: words for template, run in paper.commands.items() for one, words in run.named(template)}
    assert all(words[0] in COMMANDS and "{" not in " ".join(words) for words in commands.values())
    rows = rows_of(paper)
    points = [point for curve in paper.curves for line in curve["lines"].values() for point in repeated(line)]
    numbers = [*rows, *(point[axis] for point in points for axis in ("x", "y"))]
    for run in {(row["of"] | row.get(also, {}))["run"] for row in numbers for also in ("", "over", "minus")}:
        of_campaign = re.match(r"campaign (step|alltoall)-[\d\[]", run)
        assert of_campaign or any(re.fullmatch(run, one) for one in commands), run
    assert {what for row in rows for what in row.get("said", ())} <= {row["what"] for row in rows}
    assert {row.get("unit", "") for row in rows} <= UNITS.keys()
    assert not any(re.search(r"\{\w+\}", str(row)) for row in rows)


def test_the_page_has_the_rows_of_the_files() -> None:
    """Its figures are of the day on which it was made."""
    page = PAGE.read_text()
    rows = [row for name in NAMES for row in rows_of(Paper.load(name)) if not row["of"]["run"].startswith("campaign")]
    assert all(f"| {row['figure']} | {row['what']} | {row.get('paper', '')} |" in page for row in rows)
    assert not re.search(r"\| -[ ,]", page), "a row without a number"


@cache
def planned(*words: str) -> dict[str, Any]:
    """The content of plan.json of a command, without a folder."""
    values = parse("plan", "", with_settings(plan.OPTIONS, lambda one: one.given == "sweep"), words[1:])
    found: dict[str, Any] = {}
    if values["paper"]:
        return run_paper(values)
    plan.run_plan(values, found, None)
    return found


def rows_by_plan() -> Iterator[Any]:
    """The rows of the page that plans make, with the commands of each. Those of many commands take long."""
    for name in NAMES:
        paper = Paper.load(name)
        runs = [(key, run) for key, run in paper.commands.items() if run.made == "planned"]
        made = {one: words for key, run in runs for one, words in run.named(key)}
        for row in rows_of(paper):
            needed = [row["of"]["run"], row.get("over", {}).get("run", row["of"]["run"])]
            commands = {one: words for one, words in made.items() if any(re.fullmatch(run, one) for run in needed)}
            if commands:
                long = len(commands) > 6 or "--paper" in chain(*commands.values())
                marks = [pytest.mark.full] if long else []
                yield pytest.param(row, commands, id=f"{name} {row['figure']} {row['what']}", marks=marks)


@pytest.mark.parametrize(("row", "commands"), [*rows_by_plan()])
def test_what_a_plan_says_today_is_on_the_page(row: dict[str, Any], commands: dict[str, list[str]]) -> None:
    """So that a page that is older than the planner is noticed."""
    value = value_of({name: planned(*words) for name, words in commands.items()}, row)
    cells = [row["figure"], row["what"], row.get("paper", ""), figures.shown(value, row.get("unit", ""))]
    usual, named = (f"| {' | '.join(cells)}{end}" for end in (" |", f", `{row['of']['run']}` |"))
    page = PAGE.read_text()
    assert usual in page or named in page


DOCUMENT = {
    "deals": [{"a": "x", "s": 9.0}],
    "rows": [{"a": "x", "n": 1, "s": 6.0}, {"a": "x", "n": 2, "s": 8.0}, {"a": "y", "n": 1, "s": 2.0}],
}


@pytest.mark.parametrize(("of", "more", "value"), beside(__file__, ".values.yaml"))
def test_a_value_is_a_mean_of_numbers_ratios_or_differences(of: Any, more: Any, value: float | None) -> None:
    results = {"one 1": DOCUMENT, "one 2": {"time": {"step_s": 5.0}}}
    assert value_of(results, {"of": {"run": "one 1", "take": "s"} | of, **more}) == value


def test_what_other_words_have_made_is_made_again(tmp_path: Path) -> None:
    command = figures.Command("step", "toy", ["plan", "--size", "512"], tmp_path)
    (tmp_path / figures.WRITTEN).write_text(command.shown)
    assert command.is_made and not command._replace(words=["plan", "--size", "768"]).is_made


def test_rows_and_commands_are_repeated() -> None:
    row = {"each": {"n": [1, 2], "way": ["a"]}, "what": "{way} of {n}", "of": {"rows": {"n": "{n}"}}}
    assert [(one["what"], one["of"]["rows"]["n"]) for one in repeated(row)] == [("a of 1", 1), ("a of 2", 2)]
    own = {"each": {"of": [{"n": 1, "paper": "7.1"}, {"n": 2, "paper": "8.4"}]}, "what": "{n} nodes"}
    assert [*repeated(own)] == [{"what": "1 nodes", "paper": "7.1"}, {"what": "2 nodes", "paper": "8.4"}]
    assert filled({"tokens": "{tokens}"}, {"tokens": 3}) == {"tokens": 3}
    each = {"n": {"2": "2", "3": "3"}, "way": {"torus": "--chunks {n}"}}
    run = figures.Run("planned", "plan --nodes {n} {way}", each)
    assert dict(run.named("{way} {n}")) == {f"torus {n}": ["plan", "--nodes", n, "--chunks", n] for n in ("2", "3")}


@pytest.mark.full
def test_a_page_is_made_and_goes_on_where_it_was(tmp_path, monkeypatch, capfd, snapshot):
    """First one of its commands fails. What was made is not made again, unless the file has other words for it."""
    monkeypatch.setattr(figures, "find_shipped", lambda what, folder, name: tmp_path / f"{name}.yaml")
    monkeypatch.setattr(figures, "shipped_names", lambda folder: ["toy"])
    out, times = tmp_path / "out", []
    for side, code in (("1023", 1), ("1024", 0), ("768", 0)):
        (tmp_path / "toy.yaml").write_text(PAPER.replace("SIDE", f'"{side}"'))
        assert main(["papers", "--out", str(out)]) == code
        if side != "768":
            snapshot((out / "papers.md").read_text().partition("\n\n")[2])
        times.append((out / "toy" / "step of 512" / "out" / "plan.json").stat().st_mtime_ns)
        said = capfd.readouterr().out
        assert ("size 1023" in said and "not made: step of 1024" in said) is (code == 1)
        made = out / "toy" / "step of 1024" / "out" / "plan.json"
        assert made.exists() is (code == 0) and (code or json.loads(made.read_text())["case"]["size"] == int(side))
    assert len({*times}) == 1, "made again"
    step_s = json.loads((out / "toy" / "step of 512" / "out" / "plan.json").read_text())["time"]["step_s"]
    assert f"| 1 | a step |  | {step_s * 1e3:.4g} ms, `step of 512` |" in (out / "papers.md").read_text()
    assert (out / "toy-1.png").stat().st_size > 1000


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
def test_what_a_campaign_has_measured_stands_beside_the_paper_and_the_plan(tmp_path, snapshot):
    """All rows that have a number; what was not asked for is left out."""
    campaign_in(tmp_path / "campaign")
    words = ["papers", "--paper", "cocodiff", "--runs", "plan", "--measured", str(tmp_path / "campaign")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "papers.md").read_text()
    assert "Did not fit into a tile's memory: step-large." in " ".join(page.split())  # lines are wrapped
    assert "| 7 | cocodiff over library, one node, mean of what was measured | 2.5 | 6.00, `campaign" in page
    assert "![All-to-all on one node, measured (figure 11)](cocodiff-2.png)" in page
    snapshot("\n".join(line for line in page.splitlines() if line.startswith(("|", "!"))))


# Constants of the CoCoDiff paper --------------------------------------------------------------------------------------


AURORA = load_machine("aurora")


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_figure_11(AURORA)


def test_figure_11_is_fitted_with_constants_that_are_possible(fit):
    assert 0 < fit.constants.plane == fit.constants.nic < fit.constants.sibling < 1
    assert 50 < fit.constants.latency_us < 500
    page = " ".join(PAGE.read_text().split())
    for baseline, found in (("flat_serial", fit), ("flat", fit_figure_11(AURORA, "flat"))):
        points = zip(figure_11(baseline).values(), found.predicted, strict=True)
        *others, last = (f"{100 * (seconds / one.value - 1):.0f}" for one, seconds in points)
        assert f"{', '.join(others)} and {last} %" in page, baseline
        assert f"{found.rms:.0%}".replace("%", " %") in page


def test_cases_are_planned_with_the_calibrated_machine(fit):
    toy = ModelShape("toy", heads=24, head_dim=128, joint_layers=2, parameters=10**6, text_tokens=24)
    planned = Planned(fit.constants.machine(AURORA), lambda name: toy)
    rows = {row["variant"]: row for row in planned.rows("toys", PaperCase("toy", 512, 1))}
    times = {name: row["step_s"] for name, row in rows.items()}
    assert times["flat_serial"] / times["tapa"] > 2 > times["flat"] / times["tapa"] > 0.5
    assert rows["flat_serial"]["communication_share"] > rows["flat"]["communication_share"]
    assert {row["batch"] for row in planned.rows("toys", PaperCase("toy", 512, 1, None))} == {32}
    assert [*planned.rows("toys", PaperCase("toy", 512, 1, 10**6))] == [], "more than a tile holds"


def test_the_papers_sd35_keeps_the_models_width():
    of_paper, real = load_shape("sd3.5-paper"), load_shape("sd3.5")
    assert of_paper.heads == 48 and of_paper.parameters == real.parameters
    assert of_paper.width == pytest.approx(real.width, rel=0.01)

"""The paper's figures beside the plan's: constants from Figure 11 alone, and cases predicted with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cocodiff_studies.papers import Planned, Run, figure_11, fit_figure_11, speed_up

from cocodiff.cli.main import main
from cocodiff.config.config import load_machine
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.planner.calibrate import Fit
from cocodiff.planner.memory import ModelShape

AURORA = load_machine("aurora")


@pytest.fixture(scope="module")
def fit() -> Fit:
    return fit_figure_11(AURORA)


def test_figure_11_is_fitted_with_constants_that_are_possible(fit):
    assert fit.fitted == ("latency_us", "sibling", "plane")
    assert 0 < fit.constants.plane == fit.constants.nic < fit.constants.sibling < 1
    assert 50 < fit.constants.latency_us < 500
    for one, seconds in [*zip(figure_11("flat_serial").values(), fit.predicted, strict=True)][:4]:
        assert seconds == pytest.approx(one.value, rel=0.25)


def test_cases_are_planned_with_the_calibrated_machine(fit):
    toy = ModelShape("toy", heads=24, head_dim=128, joint_layers=2, parameters=10**6, text_tokens=24)
    serial = Planned(fit.constants.machine(AURORA), lambda name: toy, "flat_serial")
    together = serial.read_as("flat", "all at once")
    run = Run("toy", 512, 1)
    assert serial.fits(run)
    assert serial.batch(Run("toy", 512, 1, None)) == 32
    assert speed_up(run, "tapa", serial) > 2 > speed_up(run, "tapa", together) > 0.5
    assert serial.share(run) > together.share(run)


def test_the_papers_sd35_keeps_the_models_width():
    of_paper, real = load_shape("sd3.5-paper"), load_shape("sd3.5")
    assert of_paper.heads == 48 and of_paper.parameters == real.parameters
    assert of_paper.width == pytest.approx(real.width, rel=0.01)


def bench(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "bench.json").write_text(json.dumps({"schema": 1, "rows": rows}))


def measured_in(folder: Path) -> None:
    """An all-to-all on an emulated node, and a step of two variants and the baseline."""
    sizes = {"case": "48MB", "nodes": 1}
    seconds = {"library": 25.5, "flat": 12.0, "tapa": 6.5, "bound": 3.2 * 23 / 11.5}
    bench(folder, "alltoall-1", [sizes | {"variant": name, "median_s": value} for name, value in seconds.items()])
    case = {"case": "", "model": "sd3.5", "size": 1536, "nodes": 1, "batch": 4, "peak_bytes": 2**34}
    steps = {"library": 0.6, "flat": 0.4, "tapa": 0.3, "tapa v_first": 0.25, "cocodiff": 0.1}
    more = {"communication_share": 0.5}
    bench(folder, "step", [case | more | {"variant": name, "median_s": value} for name, value in steps.items()])
    (folder / "step-large").mkdir()
    (folder / "step-large" / "refused").write_text("bench step")


@pytest.mark.full
def test_what_was_measured_stands_beside_the_paper_and_the_plan(tmp_path, capsys):
    measured_in(tmp_path / "campaign")
    words = ["--measured", str(tmp_path / "campaign"), "--out", str(tmp_path / "page")]
    assert main(["plan", "--paper", *words]) == 0
    rows = {row["what"]: row for row in json.loads((tmp_path / "page/plan.json").read_text())["rows"]}
    over_library, over_flat = "measured, over the library", "measured, over our flat"
    assert rows["flat over tapa, 48 MB, 1 node(s)"][over_library] == pytest.approx(25.5 / 6.5)
    speeds = rows["cocodiff over flat, sd3.5 1536, 1 node, batch 4"]
    assert (speeds[over_library], speeds[over_flat]) == (pytest.approx(6), pytest.approx(4))
    added = rows["what v_major adds, sd3.5-paper 1536, 1 node(s)"]
    assert added[over_library] == added[over_flat] == pytest.approx(2.5) and added["plan, machine file"] > 1
    assert rows["fullest tile, flat, sd3.5 1536, 1 node, batch 4"][over_flat] == 16
    page = (tmp_path / "page/paper.html").read_text()
    assert "What each part adds (figure 8)" in page and "25.5 ms" in page and "step-large" in page
    assert "http" not in page


@pytest.mark.parametrize("left", ["nothing", "half"])
def test_a_folder_without_measurements_is_named(left, tmp_path, capsys):
    if left == "half":
        (tmp_path / "step").mkdir()
        (tmp_path / "step/bench.json").write_text("{}")
    assert main(["plan", "--paper", "--measured", str(tmp_path)]) == 2
    assert "launch/campaign.pbs" in capsys.readouterr().err

"""The CoCoDiff paper's cases: constants from Figure 11 alone, and what is planned with them."""

from __future__ import annotations

import pytest
from cocodiff_studies.papers import Planned, Run, figure_11, fit_figure_11

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
    planned = Planned(fit.constants.machine(AURORA), lambda name: toy)
    rows = {row["variant"]: row for row in planned.rows("toys", Run("toy", 512, 1))}
    times = {name: row["step_s"] for name, row in rows.items()}
    assert times["flat_serial"] / times["tapa"] > 2 > times["flat"] / times["tapa"] > 0.5
    assert rows["flat_serial"]["communication_share"] > rows["flat"]["communication_share"]
    assert {row["batch"] for row in planned.rows("toys", Run("toy", 512, 1, None))} == {32}
    assert [*planned.rows("toys", Run("toy", 512, 1, 10**6))] == [], "more than a tile holds"


def test_the_papers_sd35_keeps_the_models_width():
    of_paper, real = load_shape("sd3.5-paper"), load_shape("sd3.5")
    assert of_paper.heads == 48 and of_paper.parameters == real.parameters
    assert of_paper.width == pytest.approx(real.width, rel=0.01)

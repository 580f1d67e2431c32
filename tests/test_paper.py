"""The paper's figures beside the plan's: constants from Figure 11 alone, and cases predicted with them."""

from __future__ import annotations

import pytest
from cocodiff_studies.papers import Paper, Run, figure_11, fit_figure_11

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
    paper = Paper(fit.constants.machine(AURORA), lambda name: toy)
    run = Run("toy", 512, 1)
    assert paper.fits(run)
    assert paper.batch(Run("toy", 512, 1, None)) == 32
    assert paper.speed_up(run, "tapa", "flat_serial") > 2 > paper.speed_up(run, "tapa", "flat") > 0.5
    assert paper.plan(run, "flat_serial").communication_share > paper.plan(run, "flat").communication_share


def test_the_papers_sd35_keeps_the_models_width():
    of_paper, real = load_shape("sd3.5-paper"), load_shape("sd3.5")
    assert of_paper.heads == 48 and of_paper.parameters == real.parameters
    assert of_paper.width == pytest.approx(real.width, rel=0.01)

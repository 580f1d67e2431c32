"""Generated inputs and settings end right: with a result that keeps what it must, or with one line and nothing written.
A sample that has every format and every kind of damage; with --all the whole campaign."""

from __future__ import annotations

import pytest
from inputs import run_case

pytestmark = pytest.mark.processes

SAMPLE, ALL = 44, 1000


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "number", [*range(SAMPLE), *(pytest.param(one, marks=pytest.mark.full) for one in range(SAMPLE, ALL))]
)
def test_a_generated_input_ends_right(number: int) -> None:
    found = run_case(0, None, number)
    assert not found["wrong"], f"{found['wrong']}\n{found['words']}\n{found['error']}"

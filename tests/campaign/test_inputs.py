"""Generated inputs and settings end right: with a result that keeps what it must, or with one line and nothing written.
A sample that has every format and every kind of damage; `inputs.py` runs all."""

from __future__ import annotations

import pytest
from inputs import run_case

pytestmark = pytest.mark.processes


@pytest.mark.sample(12)
@pytest.mark.parametrize("number", range(44))
def test_a_generated_input_ends_right(number: int) -> None:
    found = run_case(0, None, number)
    assert not found["wrong"], f"{found['wrong']}\n{found['words']}\n{found['error']}"

"""Generated inputs and settings end right: with results that keep what they must in every format, or with one line and
nothing written. A sample that has every maker of files, with --full every kind of damage; `inputs.py` runs all."""

from __future__ import annotations

import pytest
from inputs import MAKERS, run_case


def judge(number: int) -> None:
    found = run_case(0, None, number)
    again = f"python tests/campaign/inputs.py --seed 0 --first {number} --cases 1 --keep case"
    assert not found.wrong, "\n".join(
        [f"{found.kind}, {found.twist}", again, *found.wrong, str(found.words), found.error]
    )


@pytest.mark.sample(2 * len(MAKERS))
@pytest.mark.parametrize("turn", range(300))
def test_results_of_a_generated_input_are_right_in_every_format(turn: int) -> None:
    judge(2 * turn)


@pytest.mark.processes
@pytest.mark.sample(9)
@pytest.mark.parametrize("turn", range(44))
def test_a_command_with_a_generated_input_ends_right(turn: int) -> None:
    judge(2 * turn + 1)

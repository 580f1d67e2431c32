"""Faults at random moments. Some of them, of each kind and of each command; `faults.py` runs all, in an hour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import run_all
from faulty_calls import Case, run

# Each kind of fault, command and moment once or more.
SAMPLE = (7, 10, 11, 15, 21, 22, 23, 31, 55, 62, 65, 68, 72, 92, 162, 165, 325)
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.full
def test_the_rank_that_received_a_wrong_message_says_so_itself(folder: Path) -> None:
    case = Case("flat", "flipped", "middle", "torchrun", "sd3", ranks=2, victim=1, number=5, delay_ms=0, checked=True)
    case.folder = str(folder)
    _, codes, said = run(case)
    lines = [line for line in said.splitlines() if line.startswith("cocodiff: [rank 0] ")]
    assert json.loads(codes) == {"0": 1, "1": 1}
    assert len(lines) == 1 and "received other bytes than rank 1 sent to it" in lines[0]


@pytest.mark.full
def test_runs_that_are_struck_end_rightly_and_go_on(folder: Path) -> None:
    wrong = [case.line() for case in run_all(SAMPLE, 0, folder, workers=4) if case.wrong]
    assert not wrong, "\n".join(wrong)

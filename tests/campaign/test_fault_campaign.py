"""Faults at moments of calls and jobs. Some of them, of each kind and of each command; `faults.py` runs all, in an
hour."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from campaign.faults import run_all
from campaign.struck_calls import Case, judge, run
from campaign.struck_jobs import Jobs

# Each kind of fault, command and moment once or more.
SAMPLE = (0, 1, 2, 5, 12, 13, 18, 22, 28, 38, 45, 52, 70, 73, 104, 112, 122, 135, 164, 166, 172, 238, 242)
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("campaign")


@pytest.mark.parametrize(
    "case",
    [
        Case("tapa", "KILL", "start", "forked"),
        Case("cocodiff", "KILL", "middle", "forked", victim=0),
        Case("flat", "KILL job", "again", "forked"),
        Case("split", "KILL", "middle", "torchrun", victim=2),
        Case("tapa", "HUP all", "middle", "forked"),
        Case("tapa", "QUIT all", "met", "forked"),
        *(Case("tapa", f"{name} all", "middle", "forked", ignored=True) for name in ("HUP", "INT", "QUIT")),
        Case("tapa", "TERM job", "again", "forked", ignored=True),
        pytest.param(Case("tapa", "STOP", "middle", "forked"), marks=pytest.mark.full),
        pytest.param(Case("tapa", "STOP ranks", "start", "forked"), marks=pytest.mark.full),
    ],
    ids=lambda case: f"{case.fault} {case.moment} {case.launcher}{' ignored' * case.ignored}",
)
def test_attention_calls_that_are_struck_end_rightly(tmp_path: Path, folder: Path, case: Case) -> None:
    case.folder = str(tmp_path)
    wrong = judge(case, folder)
    assert not wrong, "\n".join(wrong)


def test_one_rank_alone_goes_on_where_a_terminals_signals_are_ignored(folder: Path) -> None:
    job = Jobs(folder).job("ignored", "inpaint, one rank")
    for name in ("HUP", "INT", "QUIT"):
        given = {**job.strike(name, "attend", random.Random(0)), "number": 3}
        done = job.run("--overwrite", given=given, ignored=(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT))
        assert done.code == 0 and (job.folder / "struck").exists(), done.said
        (job.folder / "struck").unlink()
    job.compare()
    assert not job.wrong


@pytest.mark.full
def test_the_rank_that_received_a_wrong_message_says_so_itself(tmp_path: Path) -> None:
    case = Case("flat", "flipped", "middle", "torchrun", str(tmp_path), ranks=2, number=5, checked=True)
    codes, said = run(case)
    lines = [line for line in said.splitlines() if line.startswith("cocodiff: [rank 0] ")]
    assert codes == [1, 1]
    assert len(lines) == 1 and "received other bytes than rank 1 sent to it" in lines[0]


@pytest.mark.full
def test_runs_that_are_struck_end_rightly_and_go_on(folder: Path) -> None:
    wrong = [case.line() for case in run_all(SAMPLE, 0, folder, workers=4) if case.wrong]
    assert not wrong, "\n".join(wrong)

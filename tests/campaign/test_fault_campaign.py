"""Faults at moments of jobs: what happens to ranks, and whether all end rightly, and go on. Settings and commands,
faults and the moments at which they strike are chosen so that each two that make sense meet; all else is
drawn, by the case's number."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections import defaultdict
from typing import Any

import pytest
from campaign.struck_jobs import COMMANDS, Jobs, choose_all

SEED, CASES = map(int, os.environ.get("FAULTS", "0 31").split())  # of another seed, or more of them


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize(
    ("fault", "moment", "number"),
    [
        ("KILL", "start", 0),
        ("KILL", "attend", 9),
        ("KILL job", "attend", 30),
        ("HUP all", "attend", 9),
        ("QUIT all", "load", 0),
        pytest.param("STOP", "attend", 9, marks=pytest.mark.full),
        pytest.param("STOP ranks", "attend", 9, marks=pytest.mark.full),
    ],
)
def test_a_job_that_is_struck_ends_rightly(jobs: Jobs, fault: str, moment: str, number: int) -> None:
    job = jobs.job(f"{fault} {moment}", "inpaint")
    given = {**job.strike(fault, moment, random.Random(0)), "number": number}
    done = job.run(given=given, fault=fault)
    job.judge(given["strike"], job.struck(), done)
    assert job.struck() is not None and not job.wrong, job.wrong


@pytest.mark.parametrize(
    ("command", "names"), [("inpaint, one rank", ("INT", "QUIT")), ("inpaint, displaced", ("HUP",))]
)
def test_a_job_goes_on_where_a_terminals_signals_are_ignored(jobs: Jobs, command: str, names: tuple[str, ...]) -> None:
    """As nohup ignores SIGHUP, and a script's `&` SIGINT and SIGQUIT."""
    job = jobs.job(f"ignored {command}", command)
    for name in names:
        given = {**job.strike(f"{name} all", "attend", random.Random(0)), "number": 3}
        done = job.run("--overwrite", given=given, ignored=(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT))
        assert done.code == 0 and job.struck() is not None, done.said
        job.mark.unlink()
    job.compare()
    assert not job.wrong, job.wrong


@pytest.mark.full
@pytest.mark.parametrize("number", range(CASES))
def test_a_job_to_which_something_happens_ends_rightly_and_goes_on(jobs: Jobs, number: int) -> None:
    """Each fault comes first."""
    chosen, turns = choose_all(COMMANDS), defaultdict[Any, Any](itertools.count)
    chosen.sort(key=lambda one: next(turns[one[1]]))
    chance = random.Random(f"{SEED} {number}")
    told, job = jobs.struck(number, chance, chosen[number % len(chosen)])
    job.go_on(chance.choice((1, job.kind.replicas)))
    assert not job.wrong, (told, job.wrong)

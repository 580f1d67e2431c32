"""Ranks that go different ways: within seconds each is told, in a line with a rank and both calls."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import replace

import pytest
from disagreements import CASES, run_processes
from tiny_pipelines import flux_pipeline

from cocodiff.comm.loopback import run_ranks

WORLDS = [
    (2, 1, {}),
    (3, 0, {"exchange": "split", "chunks": 2}),
    (4, 3, {"guidance_parallel": 2}),
]  # ranks, the odd one
CALLS = r"(the transformer's call|attention|the gather of|leaving the|engine\.bytes\(\)|a barrier|the other guidance)"
LINE = rf"PeerLost: rank \d (calls|waits in|sent) {CALLS}.* and (rank \d (in )?)?{CALLS}.*: ranks make different calls"
# The comparison of what ranks call with comes first where they differ in that.
REFUSAL = r"UserError: 1 of \d ranks \(\d\) call the transformer with another step and branch.*"


@pytest.mark.usefixtures("one_thread_a_rank")
@pytest.mark.sample(9)
@pytest.mark.parametrize(("size", "odd", "settings"), WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_make_different_calls_are_told_which(name, size, odd, settings):
    case = replace(CASES[name], ranks=size, odd=odd, settings={"preset": "tapa", **settings})
    pipes, began = [copy.deepcopy(flux_pipeline()) for _ in range(size)], time.monotonic()
    ends = run_ranks(size, lambda t: case.end_of(pipes[t.rank], t.rank, transport=t), timeout_s=60.0)
    assert all(re.fullmatch(rf"{LINE}|{REFUSAL}", line) for line in ends), ends
    assert time.monotonic() - began < 30.0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "transport"),
    [("interrupted", "gloo"), ("barrier", "gloo"), ("caught in a call", "mpi"), ("caught between calls", "mpi-rma")],
)
def test_processes_that_make_different_calls_are_told_which(name: str, transport: str) -> None:
    """Messages of different calls do not meet: no library ends a process for one that is too long."""
    settings = {"preset": "tapa", "transport": transport}
    ends, said = run_processes(replace(CASES[name], ranks=3, settings=settings), timeout_s=100.0)
    ended = re.findall(r"cocodiff: \[rank \d\] (.*); this rank was waiting for it and ends", said)
    lines = [one["error"] for one in ends.values()] + [f"PeerLost: {line}" for line in ended]
    assert len(lines) == 3 and all(re.fullmatch(LINE, line) for line in lines), (lines, said)

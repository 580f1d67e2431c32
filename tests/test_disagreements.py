"""Ranks that go different ways: within seconds each is told, in a line with a rank and both calls."""

from __future__ import annotations

import copy
import re
import time
from pathlib import Path
from typing import Any

import pytest
from disagreements import PROGRAMS, told
from tiny_pipelines import flux_pipeline
from warm_ranks import warm_mpiexec

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config

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
@pytest.mark.parametrize(("size", "odd", "settings"), WORLDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_that_make_different_calls_are_told_which(
    name: str, size: int, odd: int, settings: dict[str, Any]
) -> None:
    pipes = [copy.deepcopy(flux_pipeline()) for _ in range(size)]
    config, began = Config.preset("tapa", **settings), time.monotonic()
    of_ranks = run_ranks(size, lambda t: told(pipes[t.rank], name, odd, config, t), timeout_s=60.0)
    assert all(re.fullmatch(rf"{LINE}|{REFUSAL}", line) for line in of_ranks), of_ranks
    assert time.monotonic() - began < 30.0


@pytest.mark.processes
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "transport"),
    [("interrupted", "gloo"), ("barrier", "gloo"), ("caught_in_a_call", "mpi"), ("caught_between_calls", "mpi-rma")],
)
def test_processes_that_make_different_calls_are_told_which(name: str, transport: str) -> None:
    """Messages of different calls do not meet: no library ends a process for one that is too long."""
    done = warm_mpiexec(3, Path(__file__).with_name("disagreements.py"), name, transport, timeout_s=100.0)
    said = re.sub(r"cocodiff: \[rank \d\] (.*); this rank was waiting for it and ends", r"PeerLost: \1", done.stderr)
    lines = [line for line in said.splitlines() if "Error: " in line or "PeerLost: " in line]
    assert len(lines) == 3 and all(re.fullmatch(LINE, line) for line in lines), done.stderr

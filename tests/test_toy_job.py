"""A job of the tests' own has what ours have: replicas, a store, going on, and a bound on quality whose trials are
results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cocodiff_eval.harness.job import JobResult, Trials, run_batches
from cocodiff_eval.harness.quality import Bound, Quality
from cocodiff_eval.harness.replicas import Replica
from toys.job import ERRORS, Squares

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.jobs.folder import OutputFolder

CANDIDATES = {"changes": {name: {} for name in ERRORS}, "candidates": {name: Config() for name in ERRORS}}
BOUND = Quality(bound=Bound.parse("50dB"), slices=2, every=3, preset="toy", settings={}, **CANDIDATES)


class Counted(Squares):
    """Notes what is made, and fails when so many items have been."""

    def __init__(self, leads: bool, made: list[tuple[str, int]], most: int) -> None:
        super().__init__(leads)
        self.made, self.most, self.lock = made, most, threading.Lock()

    def make(self, settings: Sequence[str], batch: Any) -> Any:
        if self.leads:
            with self.lock:
                if len(self.made) >= self.most:
                    raise RuntimeError("the machine fails")
                self.made.extend((setting, batch.indices[0]) for setting in settings)
        return super().make(settings, batch)


def run(out: Path, ranks: int = 4, replicas: int = 2, most: int = 99) -> tuple[JobResult, list[tuple[str, int]]]:
    """What rank 0 found, and the settings and numbers that were made."""
    output, made = OutputFolder(str(out), overwrite=False, resume=True), []
    output.open()

    def work(transport: Any) -> JobResult:
        replica = Replica(transport, "local", replicas)
        job = Counted(replica.leads, made, most)
        return run_batches(job, Trials(job, BOUND, output.store), replica, output, dict)

    return run_ranks(ranks, work, timeout_s=60.0)[0], made


def results(done: JobResult) -> list[dict[str, float]]:
    names = {index: [row["mode"] for _, at, row in done.rows if at == index] for index in range(8)}
    return [{name: float(done.read(0, index, name)) for name in of} for index, of in names.items()]


def test_a_bound_on_quality_chooses_its_setting(tmp_path: Path) -> None:
    done, made = run(tmp_path / "out")
    assert done.bounds[0]["setting"] == "fine"
    assert results(done) == [{"toy": n**2 + 1e-3} for n in range(8)]
    assert len(made) == len({*made})  # trials are results
    assert [row["mode"] for *_, row in done.rows] == ["toy"] * 8
    again, made = run(tmp_path / "out", ranks=1, replicas=1)
    assert made == [] and (again.rows, results(again)) == (done.rows, results(done))
    with pytest.raises(RuntimeError, match="the machine fails"):
        run(tmp_path / "other", most=5)
    other, _ = run(tmp_path / "other")
    assert (other.rows, results(other)) == (done.rows, results(done))

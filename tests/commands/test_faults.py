"""Ranks that die, hang, fail or differ: every survivor ends, the rank is named, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import tifffile
from warm import Started, forked

from cocodiff.config.errors import PeerLost
from cocodiff.jobs.ranks import End, _child_end, _end_of, _Notes, _report, read_loss

pytestmark = pytest.mark.processes

RANKS = 3
TIMEOUT_S = 5.0
HANGS_S = 40.0  # a run that has not ended by then hangs
ENDLESS = 100_000  # steps that no test waits for


@pytest.fixture(scope="module")
def slice_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "slice.tif"
    tifffile.imwrite(path, np.random.default_rng(0).integers(0, 60000, (96, 96), dtype=np.uint16))
    return path


class Run:
    """A `cocodiff inpaint` that would go on for hours, with its output in a file."""

    def __init__(
        self, slice_file: Path, folder: Path, *extra: str, steps: int = ENDLESS, ignored: Sequence[int] = ()
    ) -> None:
        self.out, self.log = folder / "out", folder / "log"
        options = {"input": slice_file, "out": self.out, "steps": steps, "timeout-s": TIMEOUT_S}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self.log.touch()
        self.process = Started(["inpaint", *words, "--quiet", *extra], self.log, ignored=ignored)

    def text(self) -> str:
        return self.log.read_text()

    def ready(self, word: str = "ready after", limit_s: float = 180.0) -> Run:
        deadline = time.monotonic() + limit_s
        while word not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, f"not ready after {limit_s} s: {self.text()}"
            time.sleep(0.1)
        return self

    def ranks(self, count: int = RANKS, limit_s: float = 120.0) -> list[psutil.Process]:
        """The forked ranks, in rank order."""
        deadline = time.monotonic() + limit_s
        while len(found := psutil.Process(self.process.pid).children()) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text()
            time.sleep(0.02)
        return sorted(found, key=lambda process: process.pid)

    def end(self, limit_s: float) -> int:
        try:
            return self.process.wait(limit_s)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def assert_nothing_left(self, ranks: list[psutil.Process]) -> None:
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        assert not self.out.exists()
        assert [path.name for path in self.out.parent.iterdir()] == ["log"]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_run_and_is_named(slice_file: Path, tmp_path: Path, victim: int) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS)).ready()
    ranks = run.ranks()
    ranks[victim].send_signal(signal.SIGKILL)
    assert run.end(HANGS_S) == 1
    assert f"rank {victim} was killed by SIGKILL; {RANKS - 1} of {RANKS - 1} other ranks noticed" in run.text()
    run.assert_nothing_left(ranks)


def test_a_rank_killed_before_the_ranks_have_met_ends_the_run(slice_file: Path, tmp_path: Path) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS))
    ranks = run.ranks()
    ranks[1].send_signal(signal.SIGKILL)
    assert run.end(HANGS_S) == 1
    assert "rank 1 was killed by SIGKILL" in run.text()
    run.assert_nothing_left(ranks)


@pytest.mark.full
def test_a_rank_that_hangs_is_given_up_after_the_timeout(slice_file: Path, tmp_path: Path) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS)).ready()
    ranks = run.ranks()
    ranks[1].send_signal(signal.SIGSTOP)
    assert run.end(HANGS_S) == 1
    assert f"rank 1 has been silent for {TIMEOUT_S:g} s" in run.text()
    run.assert_nothing_left(ranks)


@pytest.mark.full
@pytest.mark.parametrize("victims", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_ranks_that_are_stopped_right_after_the_fork_end_the_run(
    slice_file: Path, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS))
    ranks = run.ranks()
    for victim in victims:
        ranks[victim].send_signal(signal.SIGSTOP)
    assert run.end(HANGS_S) == 1
    said = run.text()  # on a slow machine they may have met by then
    assert re.search(rf"rank \d (was stopped for more than|has been silent for) {TIMEOUT_S:g} s", said), said
    run.assert_nothing_left(ranks)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_closed_terminal_stops_all_ranks(slice_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS)).ready()
    ranks = run.ranks()
    os.killpg(run.process.pid, number)
    assert run.end(HANGS_S) == 130
    assert "interrupted; nothing was written" in run.text()
    run.assert_nothing_left(ranks)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ignored_signals_stay_ignored_in_all_ranks(slice_file: Path, tmp_path: Path, ranks: str) -> None:
    """As nohup ignores SIGHUP, and a script's `&` SIGINT and SIGQUIT; SIGTERM ends the run all the same."""
    ignored = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT
    run = Run(slice_file, tmp_path, "--ranks", ranks, "--no-exact", steps=60, ignored=ignored).ready()
    for number in ignored:
        os.killpg(run.process.pid, number)
    assert run.end(180) == 0 and (run.out / "report.html").exists(), run.text()
    (tmp_path / "again").mkdir()
    run = Run(slice_file, tmp_path / "again", "--ranks", ranks, ignored=ignored).ready()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end(HANGS_S) == 130 and "interrupted" in run.text() and not run.out.exists()


def test_no_rank_outlives_its_launcher(slice_file: Path, tmp_path: Path) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS)).ready()
    ranks = run.ranks()
    run.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    assert [*run.out.glob("[!.]*")] == []


def test_an_interrupt_stops_all_ranks_and_writes_nothing(slice_file: Path, tmp_path: Path) -> None:
    run = Run(slice_file, tmp_path, "--ranks", str(RANKS)).ready()
    ranks = run.ranks()
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
    assert run.end(HANGS_S) == 130
    assert "interrupted; nothing was written" in run.text()
    run.assert_nothing_left(ranks)


def test_the_end_of_a_rank_that_two_threads_tell_is_read_whole() -> None:
    """The watch's thread tells of a lost peer while the main one ends by itself."""
    ends = [End("lost", "rank 1 died" * 2000), End("interrupted", "interrupted")]
    with closing(_Notes(2)) as notes, ThreadPoolExecutor(2) as threads:
        notes.note_end(0, ends[0])
        noting = [threads.submit(lambda end: [notes.note_end(0, end) for _ in range(300)], end) for end in ends]
        while not all(one.done() for one in noting):
            assert _child_end(0, 0, notes) in ends
        assert all(one.exception() is None for one in noting)
        assert _child_end(1, 256, notes) == End("failed", "rank 1 left with code 1")


def test_a_rank_that_fails_after_another_was_lost_is_not_the_cause(tmp_path: Path) -> None:
    done = forked("interrupted", "gloo", "forked", folder=tmp_path, module="faulty_rank")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "rank 1 interrupted: interrupted; 2 of 2 other ranks noticed" in line


def test_a_connection_that_fails_because_a_rank_ended_is_not_the_cause(tmp_path: Path) -> None:
    done = forked("unmet", "gloo", "forked", folder=tmp_path, module="faulty_rank")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "rank 1 interrupted: interrupted; 2 of 2 other ranks noticed" in done.stderr


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("last", "rank 1 did not stop; ", id="a library does not let it go"),
        pytest.param("lingers", "rank 1 has not gone on from broadcast_object for ", id="it never says goodbye"),
    ],
)
def test_a_rank_that_does_not_end_after_the_others_is_given_up(tmp_path: Path, fault: str, said: str) -> None:
    done = forked(fault, "gloo", "forked", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert done.returncode == 1 and done.stderr.startswith(f"cocodiff: {said}") and done.stderr.count("\n") == 1


def test_rank_0_is_not_blamed_where_it_may_have_waited_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves last: a rank that hangs keeps both from ending."""
    stuck = {rank: End("stuck", f"rank {rank} did not stop") for rank in (0, 2)}
    assert _report({1: End("done"), **stuck}, 3, "nothing was written") == 1
    assert capsys.readouterr().err.startswith("cocodiff: rank 2 did not stop; ")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (End("killed", "rank 1 was killed by SIGKILL", "a library's line\n"), "was killed by SIGKILL"),
        (End("stopped", "rank 1 was stopped for more than 5 s"), "was stopped for more than 5 s"),
        (_end_of(PeerLost(1, "has been silent for 5 s")), "has been silent for 5 s"),
        (_end_of(PeerLost(1, "died: its connection closed")), "died: its connection closed"),
        (_end_of(OSError("one;\n2 of 3")), "failed: OSError: one;\n2 of 3"),
        (End("stuck", "rank 1 did not stop"), "did not stop"),
    ],
    ids=lambda value: value.kind if isinstance(value, End) else "",
)
def test_the_line_of_a_loss_is_read_as_it_was_meant(capsys: pytest.CaptureFixture[str], end: End, reason: str) -> None:
    assert _report({0: End("done"), 1: end}, 2, "0 of 4 slices are kept: go on with --resume") == 1
    lost = read_loss(capsys.readouterr().err + "cocodiff: a later line\n")
    assert lost is not None and (lost.rank, lost.reason) == (1, reason)


def test_a_rank_that_has_ended_is_not_interrupted(tmp_path: Path) -> None:
    done = forked("late", "gloo", "forked", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("level", "shown"), [("ERROR", False), ("INFO", True)])
def test_lines_of_libraries_are_shown_to_who_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, shown: bool
) -> None:
    """Gloo writes its own on stderr where a connection comes to nothing, whatever it is told."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", level)
    done = forked("noisy", "gloo", "forked", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert done.returncode == 0 and ("a library's line" in done.stderr) == shown, done.stderr
    assert "a line of ours" in done.stderr


def test_a_rank_that_a_library_aborts_shows_what_it_said(tmp_path: Path) -> None:
    done = forked("aborts", "gloo", "forked", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert done.returncode == 1, done.stderr
    assert "rank 0 was killed by SIGABRT; " in done.stderr and "a library's line" in done.stderr


@pytest.mark.full
def test_a_launchers_rank_that_never_finds_rank_0_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **place}.items():
        monkeypatch.setenv(name, value)
    done = forked("alone", "gloo", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert done.returncode == 1
    assert len([line for line in done.stderr.splitlines() if line.startswith("cocodiff: [rank 1] rank 0 ")]) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ending", "exchange", "said"),
    [
        ("leaves", "tapa", "left with messages in flight"),
        ("raises", "split", "rank 1 failed: RuntimeError: the disk is on fire"),
        ("killed", "tapa", "rank 1 was killed by SIGKILL; 2 of 2 other ranks noticed"),
    ],
)
def test_messages_that_nobody_waits_for_hold_up_no_end(tmp_path: Path, ending: str, exchange: str, said: str) -> None:
    """Nor do they reach the next image; and the trace knows them all."""
    done = forked(ending, exchange, folder=tmp_path, module="displaced_rank")
    assert said in done.stdout + done.stderr
    assert done.returncode == (0 if ending == "leaves" else 1)

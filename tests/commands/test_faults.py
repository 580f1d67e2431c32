"""Ranks that die, hang, fail or differ: every survivor ends, and one line names the rank. `test_fault_campaign.py` has
what is done to runs from outside."""

from __future__ import annotations

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import seams
from warm import forked

from cocodiff.comm.launch import Launch
from cocodiff.config.errors import OwnRankError, PeerLost, UserError
from cocodiff.jobs.ranks import RankEnd, note_cause, read_cause

HANGS_S = 40.0  # a run that has not ended by then hangs
NOTICED = "rank 1 interrupted: interrupted; 2 of 2 other ranks noticed"


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        pytest.param("interrupted", 1, NOTICED, id="a rank that fails after another was lost is not the cause"),
        pytest.param("unmet", 1, NOTICED, id="nor is a connection that fails because a rank ended"),
        pytest.param("last", 1, "rank 1 did not stop; ", id="a library lets no rank go", marks=pytest.mark.full),
        pytest.param("lingers", 1, "rank 1 has not gone on from broadcast_value for ", id="it never says goodbye"),
        pytest.param("pauses", 0, "", id="a rank that somebody stops for a moment goes on"),
        pytest.param("late", 0, "", id="a rank that has ended is not interrupted"),
        pytest.param("aborts", 1, "rank 0 was killed by SIGABRT; ", id="a library aborts, and shows what it said"),
    ],
)
def test_how_ranks_end_is_told_in_one_line(tmp_path: Path, fault: str, code: int, said: str) -> None:
    done = forked(fault, "gloo", "forked", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    own = [line for line in done.stderr.splitlines() if not line.startswith("a li")]
    assert done.returncode == code and len(own) == bool(said), done.stderr
    assert all(line.startswith(f"cocodiff: {said}") for line in own)
    assert ("a library's line" in done.stderr) == (fault == "aborts")


@pytest.mark.parametrize(("level", "shown"), [("ERROR", False), ("INFO", True)])
def test_lines_of_libraries_are_shown_to_who_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, shown: bool
) -> None:
    """Gloo writes its own on stderr where a connection comes to nothing, whatever it is told."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", level)
    done = forked("noisy", "gloo", "forked", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert done.returncode == 0 and ("a library's line" in done.stderr) == shown, done.stderr
    assert "a line of ours" in done.stderr


@pytest.mark.full
def test_a_launchers_rank_that_never_finds_rank_0_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **place}.items():
        monkeypatch.setenv(name, value)
    done = forked("alone", "gloo", folder=tmp_path, module="faulty_rank", timeout_s=HANGS_S)
    assert done.returncode == 1
    assert len(re.findall(r"^cocodiff: \[rank 1\] rank 0 ", done.stderr, re.MULTILINE)) == 1


def test_the_end_of_a_rank_that_two_threads_tell_is_read_whole() -> None:
    """The watch's thread tells of a lost peer while the main one ends by itself."""
    ends = [RankEnd("lost", "rank 1 died" * 2000), RankEnd("interrupted", "interrupted")]
    with closing(seams.notes_of_ranks(2)) as notes, ThreadPoolExecutor(2) as threads:
        notes.note_end(0, ends[0])
        noting = [threads.submit(lambda end: [notes.note_end(0, end) for _ in range(300)], end) for end in ends]
        while not all(one.done() for one in noting):
            assert seams.end_of_child(0, 0, notes) in ends
        assert all(one.exception() is None for one in noting)
        assert seams.end_of_child(1, 256, notes) == RankEnd("failed", "rank 1 left with code 1")


def test_rank_0_is_not_blamed_where_it_may_have_waited_for_another(capsys: pytest.CaptureFixture[str]) -> None:
    """It leaves last: a rank that hangs keeps both from ending."""
    stuck = {rank: RankEnd("stuck", "did not stop", lost=rank) for rank in (0, 2)}
    assert seams.report_ends(Launch(), {1: RankEnd("done"), **stuck}, "nothing was written") == 1
    assert capsys.readouterr().err.startswith("cocodiff: rank 2 did not stop; ")


def test_the_cause_of_a_bad_end_is_noted_for_who_started_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    for end, rank, reason in (
        (RankEnd("killed", "was killed by SIGKILL", "a library's line\n", lost=1), 1, "was killed by SIGKILL"),
        (RankEnd("stopped", "was stopped for more than 5 s", lost=1), 1, "was stopped for more than 5 s"),
        (seams.end_of_error(PeerLost(0, "has been silent for 5 s")), 0, "has been silent for 5 s"),
        (seams.end_of_error(OSError("one;\n2 of 3")), 1, "failed: OSError: one;\n2 of 3"),
        (seams.end_of_error(OwnRankError("no tile")), 1, "failed: no tile"),
        (RankEnd("stuck", "did not stop", lost=1), 1, "did not stop"),
        (seams.end_of_error(UserError("no weights")), None, "no weights"),
    ):
        with os.fdopen(os.memfd_create("cause")) as file:
            assert read_cause(file.fileno()) is None
            code = seams.report_ends(Launch(cause=file.fileno()), {0: RankEnd("done"), 1: end}, "nothing was written")
            error, line = read_cause(file.fileno()), capsys.readouterr().err
        wanted = UserError(reason) if rank is None else PeerLost(rank, reason)
        assert (type(error), error.args) == (type(wanted), wanted.args)
        assert code == (2 if rank is None else 1) and f"cocodiff: {error}" in line


def test_the_last_cause_counts_and_an_end_without_failure_is_none() -> None:
    with os.fdopen(os.memfd_create("cause")) as file:
        launch = Launch(cause=file.fileno())
        for end in (RankEnd("done"), RankEnd("interrupted", "interrupted")):
            note_cause(launch, 0, end)
            assert read_cause(file.fileno()) is None
        for end in (RankEnd("failed", "in many words", "a traceback\n" * 9), RankEnd("mistake", "short")):
            note_cause(launch, 0, end)
        assert str(read_cause(file.fileno())) == "short"

"""Threads of a rank: the cores that its launcher has bound it to are its own, those that it shares are divided."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest
from value_tables import beside

from cocodiff.comm.launch import Launch
from cocodiff.jobs.ranks import settle
from cocodiff.jobs.terminal import THREADS, limit_threads, threads

ME, LAUNCHER = 0, os.getppid()


class Kernel:
    """Which cores Linux gives processes: those that they ask for, as far as they have been granted."""

    def __init__(self, monkeypatch: Any, own: Iterable[int], granted: int, launcher: Iterable[int]) -> None:
        """own, launcher: the cores that this process and its launcher are on. granted: those of this process's
        container, or the machine, from 0 on."""
        self.masks = {ME: {*own}, LAUNCHER: {*launcher}}
        self.granted = {*range(granted)}
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(os, "sysconf", lambda _: 208)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*self.masks[process]})
        monkeypatch.setattr(os, "sched_setaffinity", self.set)

    def set(self, process: int, wanted: Iterable[int]) -> None:
        self.masks[process] = {*wanted} & self.granted


NODE, WORLDS = range(208), beside(__file__)


@pytest.mark.parametrize(("own", "granted", "launcher", "ranks", "launched", "share"), WORLDS.values(), ids=WORLDS)
def test_only_cores_that_ranks_share_are_divided(monkeypatch, own, granted, launcher, ranks, launched, share):
    own, launcher = range(*own), range(*launcher)
    kernel = Kernel(monkeypatch, own, granted, launcher)
    limit_threads(ranks, launched)
    assert threads() == dict.fromkeys(THREADS, str(share)) | {"OPENBLAS_NUM_THREADS": "1"}
    assert kernel.masks == {ME: {*own}, LAUNCHER: {*launcher}}
    assert int(os.environ["GOMP_SPINCOUNT"]) < 10**5  # threads that wait leave their cores to others


@pytest.mark.parametrize(
    ("launch", "share"), [(Launch("mpi", 13, 24, 1, 12), 4), (Launch("torchrun", 13, 24, 1, 12), 4), (Launch(), 2)]
)
def test_commands_know_who_has_started_their_ranks(monkeypatch, launch, share):
    Kernel(monkeypatch, range(4, 8), 208, NODE)
    monkeypatch.setattr("gc.disable", lambda: None)
    settle({"log_level": "info", "ranks": 2}, launch)
    assert threads() == dict.fromkeys(THREADS, str(share)) | {"OPENBLAS_NUM_THREADS": "1"}


def test_where_the_machine_does_not_answer_cores_are_divided(monkeypatch):
    Kernel(monkeypatch, range(4, 8), 208, NODE)
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=PermissionError))
    limit_threads(2, launched=True)
    assert threads() == dict.fromkeys(THREADS, "2") | {"OPENBLAS_NUM_THREADS": "1"}


def test_what_the_user_has_set_stays(monkeypatch):
    Kernel(monkeypatch, range(4, 8), 208, NODE)
    os.environ["OMP_NUM_THREADS"] = "3"
    limit_threads(12, launched=True)
    assert threads() == dict.fromkeys(THREADS, "3") | {"OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core alone cannot be divided")
@pytest.mark.parametrize("bound", [True, False])
def test_linux_answers_as_it_is_asked(bound):
    """A process that is bound to one of two cores, or to neither, learns of both, and is where it was afterwards."""
    two = sorted(os.sched_getaffinity(0))[:2]
    own = two[:1] if bound else two
    rank = "import os; from cocodiff.jobs.terminal import limit_threads; limit_threads(2, launched=True); "
    rank += "print(os.environ['OMP_NUM_THREADS'], sorted(os.sched_getaffinity(0)))"
    start = f"import os, subprocess, sys; os.sched_setaffinity(0, {two}); "
    start += f"subprocess.run([sys.executable, '-c', {rank!r}], "
    start += f"check=True, preexec_fn=lambda: os.sched_setaffinity(0, {own}))"
    told = {name: value for name, value in os.environ.items() if name not in THREADS}
    done = subprocess.run([sys.executable, "-c", start], env=told, capture_output=True, text=True)
    assert done.stdout == f"1 {own}\n", done.stderr

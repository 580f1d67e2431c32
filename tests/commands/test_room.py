"""More ranks than a host has room for, or than any machine has tiles: refused before anything is forked or built."""

from __future__ import annotations

import resource

import pytest

from cocodiff.cli.main import main
from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import MOST_RANKS, Topology
from cocodiff.jobs import children

MANY = "999999999999"


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--ranks", MANY),
        ("inpaint", "--input", "scan.tif", "--mask", "block", "--ranks", MANY),
        ("generate", "--model", "models/some", "--prompt", "a tooth", "--ranks", MANY),
        ("sweep", "--input", "scan.tif", "--ranks", MANY),
        ("plan", "--model", "sd3.5", "--machine", "local", "--ranks", MANY),
        ("plan", "--model", "sd3.5", "--nodes", MANY),
        ("emulate", "--machine", "local", "--ranks", MANY, "--", "true"),
        ("emulate", "--nodes", MANY, "--", "true"),
    ],
)
def test_too_many_ranks_are_refused_in_a_line(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fork", lambda: pytest.fail("forked"))
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    reasons = ("MiB are available: start up to", "ranks: up to 131072 can be placed", "000 are possible")
    assert any(reason in said.err for reason in reasons), said.err
    assert list(tmp_path.iterdir()) == []


def test_limits_are_those_of_memory_processes_and_files(monkeypatch):
    monkeypatch.setattr(children, "_available_memory", lambda: 100 << 20)
    children.check_room(3)
    with pytest.raises(UserError, match=r"--ranks 4: each takes 26 MiB .* 100 MiB are available: start up to 3 here"):
        children.check_room(4)
    monkeypatch.setattr(children, "_available_memory", lambda: None)
    limits = {resource.RLIMIT_NPROC: (50, 50), resource.RLIMIT_NOFILE: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    children.check_room(49)
    with pytest.raises(UserError, match="--ranks 50: this host lets you have 50 processes"):
        children.check_room(50)
    limits[resource.RLIMIT_NOFILE] = (64, 1024)
    children.check_room(12)
    with pytest.raises(UserError, match=r"--ranks 13: .* 68 files open, .* may have 64: allow more with ulimit -n 136"):
        children.check_room(13)
    limits[resource.RLIMIT_NOFILE] = (8, 8)
    children.check_room(1)


def test_the_largest_topology_is_larger_than_any_machine():
    assert MOST_RANKS > 10_624 * 12  # Aurora's tiles
    with pytest.raises(UserError, match="up to 131072 can be placed"):
        Topology.build(load_machine("local"), MOST_RANKS + 1)

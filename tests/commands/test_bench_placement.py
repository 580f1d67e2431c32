"""`cocodiff bench placement` on four ranks: what it writes and says, and what it refuses. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cocodiff_bench.placement import BENCHMARK, check_alike, named_cases
from launching import with_options
from warm import forked

from cocodiff.assemble import AttentionWork
from cocodiff.cli.main import main
from cocodiff.config import load_machine
from cocodiff.models.tokens import image_and_text
from cocodiff.planning.placement import by_degree
from cocodiff.topology.machine import Topology

pytestmark = pytest.mark.processes
WORDS = [
    "bench",
    "placement",
    "--image-tokens",
    "40",
    "--text-tokens",
    "4",
    "--heads",
    "3",
    "--head-dim",
    "8",
    "--repeats",
    "2",
    "--quiet",
]


def test_every_mesh_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    words = ["--ranks", "4", "--attention-s", "0", "0.01", "--chunks", "1", "2", "--out", str(out)]
    done = forked(*WORDS, *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((out / "bench.json").read_text())["rows"]
    topology = Topology.build(load_machine("local"), 4)
    defaults = [
        of_degree[0] for of_degree in by_degree(topology, AttentionWork(3, 8, image_and_text(40, 4), itemsize=4))
    ]
    of_case = [row for row in rows if row["case"].endswith("attention 0.01 s")]
    assert len(rows) == 2 * len(of_case) and len(defaults) == 2
    by_name = {row["variant"]: row for row in of_case}
    for one in defaults:
        name = f"ulysses {one.mesh.ulysses} ring {one.mesh.ring}"
        name = name if one.mesh.ulysses == 1 else f"{name} {one.mesh.placement}"
        for row in (by_name[name], by_name[f"{name} 2 chunks"]):
            assert row["ratio_vs_default"] == 1 and row["bytes"] == one.bytes and row["default"]
        assert by_name[name]["ratio_vs_whole"] == 1 and by_name[f"{name} 2 chunks"]["ratio_vs_whole"] > 0
    assert all(row["n"] == 2 and row["variant"] in done.stdout for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "6", "--ring", "4"), "ring 4: 6 ranks and 3 attention heads allow ring 2, 3, 6"),
        (("--ranks", "6", "--attention-s", "-1"), "--attention_s [-1.0]: give 0 or more seconds"),
        (("--ranks", "6", "--text-tokens", "-1"), "--text_tokens -1: give 0 or more"),
        (("--ranks", "6", "--placement", "usp"), "unknown option --placement"),
        (("--ranks", "6", "--chunks", "0"), "chunks is 0: give a whole number of at least 1 (1: off) or auto"),
        (("--ranks", "6", "--chunks", "1", "auto"), "chunks auto: machine local on 1 node(s) was not measured"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*with_options(WORDS, *words), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and len(captured.err.splitlines()) == 1


def test_the_default_goes_by_the_wait_where_placements_send_as_much() -> None:
    """12 x 2 on two nodes of aurora: with nothing to hide behind, Ulysses goes across nodes; else the ring does."""
    options = {option.name: option.default for option in BENCHMARK.options}
    values = {**options, "heads": 12, "ring": [2], "machine": "aurora"}
    topology = Topology.build(load_machine("aurora"), 24)
    taken = []
    for wait in (0.0, 1.0):
        cases = named_cases(values, topology, wait)
        assert set(cases) == {"ulysses 12 ring 2 topology", "ulysses 12 ring 2 usp"}
        taken += [case.mesh.placement for case in cases.values() if case.default]
    assert taken == ["topology", "usp"]


def test_meshes_that_disagree_are_an_error() -> None:
    one = {"a": torch.ones(3), "b": torch.ones(3) + 1e-7}
    check_alike(one, 0)
    with pytest.raises(RuntimeError, match="rank 2: b differs from a by 1"):
        check_alike({"a": torch.ones(3), "b": torch.zeros(3)}, 2)

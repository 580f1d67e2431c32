"""`cocodiff bench attention`: every way computes the same attention. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cocodiff.cli.main import main


def rows_of(tmp_path: Path, *words: str) -> dict[str, dict[str, Any]]:
    out = tmp_path / "bench"
    assert main(["bench", "attention", *words, "--repeats", "1", "--quiet", "--out", str(out), "--overwrite"]) == 0
    return {row["variant"]: row for row in json.loads((out / "bench.json").read_text())["rows"]}


@pytest.mark.parametrize("more", [(), ("--one_query",), ("--heads", "3", "--dtype", "bf16")])
def test_one_process_by_every_way(more: tuple[str, ...], tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--tokens", "300", "--threads", "1", "2", "--block", "64", "128", *more)
    ways = ("naive", "blocks of 64", "blocks of 128", "torch", "triad")
    assert list(rows) == [f"{way} {threads}" for way in ways for threads in ("1 thread", "2 threads")]
    limit = 2e-2 if "bf16" in more else 1e-5
    for name, row in rows.items():
        assert row["tokens"] == 300 and row["bytes"] is None
        assert row["gb_s"] > 0 if name.startswith("triad") else row["difference"] <= limit


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_it_by_every_way(ranks: int, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--tokens", str(60 * ranks), "--heads", "6", "--ranks", str(ranks))
    assert list(rows) == ["flat", "tapa", "split", "keys", "token", "streaming", "torch_ring"]
    assert all(row["difference"] < 1e-5 for row in rows.values())
    sent = {name: sum(row["bytes"].values()) for name, row in rows.items()}
    assert sent["token"] > sent["keys"] > 0 == sent["torch_ring"]
    one = rows_of(tmp_path, "--tokens", str(61 * ranks), "--ranks", str(ranks), "--one_query")
    assert list(one) == ["merged"] and sum(one["merged"]["bytes"].values()) == ranks * (ranks - 1) * 129 * 4

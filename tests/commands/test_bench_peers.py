"""`cocodiff bench peers` where no other library is installed: our variants alone, and mistakes in one line."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cocodiff_bench import peers as bench_peers
from cocodiff_bench.peers import with_codecs
from launching import assert_succeeded
from warm import forked

from cocodiff.config.errors import UserError
from cocodiff.jobs.options import parse, with_settings

pytestmark = pytest.mark.processes

BOTH = ("--only", "ours", "diffusers")


def refusal(ranks: int, *words: str) -> str:
    """What the check of a command's words says; nothing where it lets them pass."""
    try:
        bench_peers.check(parse("bench peers", "", with_settings(bench_peers.OPTIONS), words), ranks)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_a_missing_peer_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    assert "pip install cache-dit einops" in refusal(2)
    assert refusal(2).endswith("--only ours diffusers")
    assert refusal(2, "--only", "cache_dit").endswith("--only ours")
    assert refusal(2, *BOTH) == ""


@pytest.mark.parametrize(
    ("ranks", "words", "told", "by_ours"),
    [
        (1, (), "at least 2", False),
        (2, ("--side", "0"), "--side 0", False),
        (3, (), "1024 image tokens on 3 ranks: diffusers split evenly only; choose a multiple of 3", True),
        (2, ("--text", "7"), "7 text tokens on 2 ranks: diffusers split evenly only; choose a multiple of 2", True),
        (2, ("--heads", "5"), "5 heads on 2 ranks: diffusers split evenly only; choose a multiple of 2", True),
        (3, ("--side", "3", "--frames", "2", "--text", "6"), "", True),
        (4, ("--side", "3", "--frames", "2", "--text", "4"), "18 image tokens on 4 ranks", True),
        (2, ("--model", "wan", "--text", "7"), "", True),  # whose text is attended to by each token alone
        (2, ("--model", "wan", "--heads", "7"), "7 heads on 2 ranks", True),
    ],
)
def test_peers_split_evenly_and_ours_do_not_care(ranks, words, told, by_ours):
    assert told in refusal(ranks, *BOTH, *words)
    assert (refusal(ranks, "--only", "ours", *words) == "") is by_ours


def rows_of(folder: Path, *words: Any) -> tuple[list[dict[str, Any]], str]:
    """The rows of bench.json of two ranks on a small model, and what was printed."""
    sizes = ("--heads", "4", "--double", "1", "--single", "1", "--repeats", "2")
    done = forked("bench", "peers", "--ranks", "2", *sizes, *words, "--out", folder / "bench", folder=folder)
    assert_succeeded(done)
    return json.loads((folder / "bench" / "bench.json").read_text())["rows"], done.stdout


def test_our_variants_alone_on_two_ranks(tmp_path):
    """And a preset with the codec, which sends codes once it is settled; and one that displaces, if there is anything
    that changes so little."""
    words = ("--only", "ours", "--preset", "coded-", "ahead", "--side", "6", "--text", "5")
    (*rows, coded, ahead), said = rows_of(tmp_path, *words)
    assert coded["variant"] == "coded-" and 1e-5 < coded["relative_error"] < 0.2 and coded["first_s"] > 0
    assert sum(coded["bytes"].values()) * 32 * 4 == sum(rows[0]["bytes"].values()) * 9  # 2 bits a channel, and a scale
    assert ahead["codec"] == "none" and 0 <= ahead["late_part"] <= 1 and "late_part" not in coded
    assert "ahead: codec auto: none, as the machine file does not tell rates" in said
    assert f"codec none, late {ahead['late_part']:.0%}" in said
    assert [row["variant"] for row in rows] == [f"{x}{y}" for x in ("flat", "tapa", "split") for y in ("", " v_first")]
    assert all(row["n"] == 2 and row["median_s"] > 0 and 0 < row["max_abs_error"] < 1e-5 for row in rows)
    assert len({sum(row["bytes"].values()) for row in rows}) == 1  # two ranks on one card: one route


@pytest.mark.full
@pytest.mark.parametrize(("model", "text"), [("wan", 7), ("qwen-image", 6)])
def test_other_models_beside_diffusers_own(tmp_path, model, text):
    rows, said = rows_of(tmp_path, "--model", model, *BOTH, "--side", "4", "--frames", "2", "--text", str(text))
    assert {"flat", "tapa v_first", "diffusers ulysses"} <= {row["variant"] for row in rows}
    assert max(row["relative_error"] for row in rows) < 1e-5
    assert "2 blocks, 4 heads of 32, 2x4x4 image" in said


@pytest.mark.full
@pytest.mark.parametrize(("scale", "codec"), [(None, "none"), (1, "none"), (1e9, "int2")])
def test_codec_auto_goes_by_the_emulated_links(monkeypatch, capsys, scale, codec):
    """Where links are slow beside a host's arithmetic codes pay; at the machine file's rates they do not."""
    if scale is not None:
        monkeypatch.setenv("COCODIFF_EMULATED", json.dumps({"machine": "aurora", "nodes": 1, "scale": scale}))
    words = ("--only", "ours", "--preset", "ahead", "split", "--machine", "aurora")
    values = parse("bench peers", "", with_settings(bench_peers.OPTIONS), words)
    alone = SimpleNamespace(rank=0, size=12, broadcast_value=lambda value: value)
    assert [config.codec for config in with_codecs(values, alone).values() if config.arrival != "now"] == [codec]
    assert capsys.readouterr().out.startswith(f"ahead: codec auto: {codec}; predicted ms a layer: none ")


def test_a_wrong_output_is_an_error():
    expected = torch.linspace(-1, 1, 100)
    for plain, off in ((expected, 1e-3), (expected.bfloat16(), 2e-2)):
        allowed = bench_peers.allowed_error(plain, expected)
        bench_peers.check_output("fine", plain, expected, allowed, rank=1)
        with pytest.raises(RuntimeError, match="broken is wrong"):
            bench_peers.check_output("broken", expected + off, expected, allowed, rank=1)


@pytest.mark.skipif(importlib.util.find_spec("cache_dit") is not None, reason="a peer is installed here")
def test_without_peers_the_command_ends_with_code_2(tmp_path):
    done = forked("bench", "peers", "--ranks", "2", "--out", tmp_path / "bench", folder=tmp_path)
    assert done.returncode == 2 and "pip install" in done.stderr
    assert not (tmp_path / "bench").exists()

"""`cocodiff bench peers` where no other library is installed: our variants alone, and mistakes in one line."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from cocodiff_bench import peers as bench_peers
from cocodiff_bench.peers import with_codecs
from launching import assert_succeeded
from warm import forked

from cocodiff.config.errors import UserError
from cocodiff.jobs.options import parse, with_settings

pytestmark = pytest.mark.processes

TINY = ("--side", "6", "--text", "5", "--heads", "4", "--double", "1", "--single", "1", "--repeats", "2")


def mistake(ranks: int, *words: str) -> str:
    values = parse("bench peers", "", with_settings(bench_peers.OPTIONS), words)
    with pytest.raises(UserError) as caught:
        bench_peers.check(values, ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_peer_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(bench_peers, "find_spec", lambda name: None)
    assert "pip install cache-dit einops" in mistake(2)
    assert mistake(2).endswith("--only ours diffusers")
    assert mistake(2, "--only", "cache_dit").endswith("--only ours")


@pytest.mark.parametrize(
    ("ranks", "words", "told"),
    [
        (1, (), "at least 2"),
        (3, (), "1024 image tokens on 3 ranks"),
        (2, ("--text", "7"), "7 text tokens on 2 ranks"),
        (2, ("--heads", "5"), "--only ours"),
        (2, ("--side", "0"), "--side 0"),
    ],
)
def test_sizes_that_peers_cannot_split(ranks, words, told):
    assert told in mistake(ranks, "--only", "ours", "diffusers", *words)


def test_uneven_sizes_are_fine_for_ours():
    words = ("--only", "ours", "--text", "7")
    bench_peers.check(parse("bench peers", "", with_settings(bench_peers.OPTIONS), words), 3)


def test_our_variants_alone_on_two_ranks(tmp_path):
    """And a preset with the codec, which sends codes once it is settled; and one that displaces, if there is anything
    that changes so little."""
    words = ("--only", "ours", "--preset", "coded-", "ahead", *TINY, "--out", tmp_path / "bench")
    done = forked("bench", "peers", "--ranks", "2", *words, folder=tmp_path)
    assert_succeeded(done)
    *rows, coded, ahead = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert coded["variant"] == "coded-" and 1e-5 < coded["relative_error"] < 0.2 and coded["first_s"] > 0
    assert sum(coded["bytes"].values()) * 32 * 4 == sum(rows[0]["bytes"].values()) * 9  # 2 bits a channel, and a scale
    assert ahead["codec"] == "none" and 0 <= ahead["late_part"] <= 1 and "late_part" not in coded
    assert "ahead: codec auto: none, as the machine file does not tell rates" in done.stdout
    assert f"codec none, late {ahead['late_part']:.0%}" in done.stdout
    assert [row["variant"] for row in rows] == [f"{x}{y}" for x in ("flat", "tapa", "split") for y in ("", " v_first")]
    assert all(row["n"] == 2 and row["median_s"] > 0 and 0 < row["max_abs_error"] < 1e-5 for row in rows)
    assert len({sum(row["bytes"].values()) for row in rows}) == 1  # two ranks on one card: one route


@pytest.mark.full
@pytest.mark.parametrize(("model", "text"), [("wan", 7), ("qwen-image", 6)])
def test_other_models_beside_diffusers_own(tmp_path, model, text):
    """Wan's text is attended to by each token alone, so its tokens need not be split."""
    sizes = ("--side", "4", "--frames", "2", "--text", str(text), "--heads", "4", "--double", "1", "--single", "1")
    words = ("--model", model, "--only", "ours", "diffusers", *sizes, "--repeats", "2", "--out", tmp_path / "bench")
    done = forked("bench", "peers", "--ranks", "2", *words, folder=tmp_path)
    assert_succeeded(done)
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert {"flat", "tapa v_first", "diffusers ulysses"} <= {row["variant"] for row in rows}
    assert max(row["relative_error"] for row in rows) < 1e-5
    assert "2 blocks, 4 heads of 32, 2x4x4 image" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(("scale", "codecs"), [(None, ["none"]), (1, ["none"]), (1e9, ["int2"])])
def test_codec_auto_goes_by_the_emulated_links(monkeypatch, capsys, scale, codecs):
    """Where links are slow beside a host's arithmetic codes pay; at the machine file's rates they do not."""
    if scale is not None:
        monkeypatch.setenv("COCODIFF_EMULATED", json.dumps({"machine": "aurora", "nodes": 1, "scale": scale}))
    words = ("--only", "ours", "--preset", "ahead", "split", "--machine", "aurora")
    values = parse("bench peers", "", with_settings(bench_peers.OPTIONS), words)
    alone = SimpleNamespace(rank=0, size=12, broadcast_object=lambda value: value)
    assert [config.codec for config in with_codecs(values, alone).values() if config.arrival != "now"] == codecs
    assert capsys.readouterr().out.startswith(f"ahead: codec auto: {codecs[0]}; predicted ms a layer: none ")


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

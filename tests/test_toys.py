"""A strategy and codecs of the tests' own go wherever ours do: every exchange, chunks, ring, plan, command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tifffile
import torch
import yaml
from worlds import topology_of

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.cli.main import main
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config
from cocodiff.config.registry import ORDERS, RECORDS, SELECTIONS
from cocodiff.engine.assemble import AttentionWork, build_strategy, mesh_of
from cocodiff.exchange.codec import StepInfo
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout

SIZE, SEGMENTS, HEADS, D = 6, image_and_text(31, 5), 7, 8
WAYS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "toy", "toys.order:one_by_one")
    monkeypatch.setitem(SELECTIONS, "half", "toys.codec:Half")
    monkeypatch.setitem(SELECTIONS, "change", "toys.codec:Change")


def tensors() -> list[torch.Tensor]:
    """q, k and v [B, S, H, D] of all tokens, rank by rank."""
    random = torch.Generator().manual_seed(3)
    return [torch.randn(2, 36, HEADS, D, generator=random) for _ in range(3)]


def attend(**settings: object) -> list[tuple[torch.Tensor, dict[str, int]]]:
    """Every rank's output and bytes of a second call, with rows as they are divided among all ranks."""
    config, topology = Config(steps=3, **settings), topology_of("local", SIZE, 3)
    rows = Layout.build(topology, SEGMENTS, HEADS).row_slices
    mesh = mesh_of(config, topology, AttentionWork(HEADS))

    def work(transport):
        trace, own = Trace(transport.rank), [x[:, rows[transport.rank]] for x in tensors()]
        strategy = build_strategy(config, mesh, RankContext(transport, topology, trace, Kernels("torch")))
        q, k, v = (lambda x=x: x for x in own)
        for step in range(2):
            trace.clear()
            strategy.codec.begin_step(StepInfo(0, step, 3))
            out_BLHD = strategy.attend(LazyQKV(q, k, v, SEGMENTS, HEADS), LayerKey("layer"))
        return out_BLHD, trace.bytes()

    return run_ranks(SIZE, work, timeout_s=60.0)


V_MAJOR = {"selection": "v_major", "warmup": 1, "schedule": "fixed", "exchange": "split"}


@pytest.mark.parametrize("way", [*WAYS, "V-Major"])
def test_a_strategy_gives_and_sends_what_ours_does(way: str) -> None:
    settings = V_MAJOR if way == "V-Major" else WAYS[way]
    for (toy, sent), (ours, theirs) in zip(attend(order="toy", **settings), attend(**settings), strict=True):
        assert torch.equal(toy, ours) and sent == theirs


def q_first(qkv, transfer, trace):
    return [transfer.send(q=qkv.q(), k=qkv.k()), transfer.send(v=qkv.v())]


@pytest.mark.parametrize("scoring", ["source", "card"])
def test_an_order_that_v_major_cannot_follow_is_refused(scoring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "toy", f"{__name__}:q_first")
    with pytest.raises(RuntimeError, match="V-Major chooses tokens by v"):
        attend(order="toy", selection="v_major", scoring=scoring, exchange="tapa")


@pytest.mark.sample(12)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["joint", "v_first", "toy"])
def test_a_coding_travels_everywhere_at_half_the_bytes(way: str, order: str) -> None:
    settings = {"order": order, **WAYS[way]}
    q, k, v = (x.half().float().transpose(1, 2) for x in tensors())
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    coded, ours = attend(selection="half", **settings), attend(**settings)
    torch.testing.assert_close(torch.cat([toy for toy, _ in coded], 1), whole, rtol=2e-3, atol=2e-4)
    for (toy, sent), (_, theirs) in zip(coded, ours, strict=True):
        assert toy.dtype == torch.float32 and torch.equal(toy, toy.half().float())
        assert sum(sent.values()) < sum(theirs.values())
        # A ring's messages are keys and values as they are.
        assert "ring" in way or {link: 2 * count for link, count in sent.items()} == theirs


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
def test_a_codec_sends_what_it_has_not_sent_before(way: str) -> None:
    """At half the bytes too: the second call brings what rounding left of the same tensors in the first."""
    coded, ours = attend(selection="change", **WAYS[way]), attend(**WAYS[way])
    for (toy, sent), (exact, theirs) in zip(coded, ours, strict=True):
        torch.testing.assert_close(toy, exact, rtol=1e-6, atol=1e-6)
        assert "ring" in way or {link: 2 * count for link, count in sent.items()} == theirs


def test_both_are_planned(tmp_path: Path) -> None:
    """In fp32, of which the codec sends half."""

    def planned(*words: str) -> dict:
        out = tmp_path / "-".join(words or ("plain",)).replace("--", "")
        sizes = ["--model", "flux.1", "--size", "512", "--machine", "aurora", "--dtype", "fp32"]
        assert main(["plan", *sizes, "--preset", "split", *words, "--out", str(out)]) == 0
        return json.loads((out / "plan.json").read_text())["time"]

    plain, half, toy = planned(), planned("--selection", "half"), planned("--order", "toy")
    assert half["bytes_per_step"] == {link: count / 2 for link, count in plain["bytes_per_step"].items()}
    assert toy["bytes_per_step"] == plain["bytes_per_step"] and toy["step_s"] != plain["step_s"]


def test_both_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On forked ranks, which have the table as it is here; with a setting of the tests' own, which is on record."""
    monkeypatch.setitem(RECORDS, "engine", "toys.setting:ToyConfig")
    tifffile.imwrite(tmp_path / "scan.tif", torch.arange(48 * 48).reshape(48, 48).to(torch.uint8).numpy())
    words = ["--input", str(tmp_path / "scan.tif"), "--steps", "1", "--quiet", "--out", str(tmp_path / "out")]
    assert main(["inpaint", *words, "--ranks", "2", "--selection", "half", "--order", "toy", "--zeal", "3"]) == 0
    assert yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())["zeal"] == 3
    (image,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["images"]
    assert image["exact_compared"] and 60 < image["psnr_vs_exact_db"] < 200  # half precision, not the same bits

"""`cocodiff bench attention` on two ranks: what it writes and says, and what it refuses. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cocodiff_bench.attention import check_close, check_same_bits
from cocodiff_bench.common import interleave, of_slowest_rank, rows
from launching import with_options
from warm import forked
from warm_ranks import warm_mpiexec

from cocodiff.cli.main import main
from cocodiff.config.config import load_machine
from cocodiff.config.machine import Topology
from cocodiff.config.registry import ORDERS
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.layout import Layout

pytestmark = pytest.mark.processes

TINY = {"image-tokens": 9, "text-tokens": 4, "heads": 3, "head-dim": 8, "repeats": 2}
WORDS = ["bench", "attention", *(str(word) for name, value in TINY.items() for word in (f"--{name}", value)), "--quiet"]


def bench(out: Path, *words: str) -> str:
    given = with_options([*WORDS, "--ranks", "2"], *words)
    done = forked(*given, "--out", out, folder=out.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def written(out: Path) -> list[dict]:
    document = json.loads((out / "bench.json").read_text())
    assert document["schema"] == 1
    return document["rows"]


def test_a_call_takes_what_it_takes_the_slowest_rank():
    of_ranks = [{"flat": [1.0, 4.0]}, {"flat": [3.0, 2.0]}]
    transport = SimpleNamespace(gather_object=lambda own: of_ranks)
    assert of_slowest_rank(of_ranks[0], transport) == {"flat": [3.0, 4.0]}


def test_every_exchange_is_measured_in_every_order(tmp_path: Path) -> None:
    said = bench(tmp_path / "bench")
    found = {row["variant"]: row for row in written(tmp_path / "bench")}
    assert list(found) == [f"{exchange} {order}" for exchange in ("flat", "tapa", "split") for order in ORDERS]
    for name, row in found.items():
        assert row["n"] == 2 and 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["ratio_vs_flat"] > 0 and row["ratio_vs_joint"] > 0 and name in said
        assert list(row["layers"]) == ["joint", "image"]
        for times in row["layers"].values():
            assert times["calls"] == 2 * 2  # repeats and ranks
            assert (times["v_phase1_s"] is None) == name.endswith("joint")
            assert times["communication_s"] == pytest.approx(times["exposed_s"] + times["hidden_s"])
    assert found["flat joint"]["ratio_vs_flat"] == found["tapa joint"]["ratio_vs_joint"] == 1
    assert said.count(" ms of messages, ") == 2 * len(found)
    assert (tmp_path / "bench" / "trace.json").is_file()


def test_bytes_are_those_of_a_mean_call(tmp_path: Path) -> None:
    bench(tmp_path / "bench", "--exchange", "flat", "--order", "v_first", "--local", "real")
    (row,) = written(tmp_path / "bench")
    topology = Topology.build(load_machine("local"), 2)
    both = 0
    for text in (TINY["text-tokens"], 0):
        layout = Layout.build(topology, image_and_text(TINY["image-tokens"], text), TINY["heads"])
        crossing = sum(layout.rows[i] * layout.heads[1 - i] for i in (0, 1))
        both += 4 * crossing * TINY["head-dim"] * 4  # q, k, v and o in fp32
    assert row["bytes"] == {"sibling": both // 2, "plane": 0, "cross_plane": 0, "node": 0}
    assert (row["ratio_vs_flat"], row["ratio_vs_joint"]) == (None, None)


def test_chunks_beside_none(tmp_path: Path) -> None:
    """Three ranks are two cards; results are compared with those without chunks before and after. Of one repetition
    the ratio is that of the medians, each order's to its own call without chunks; hidden_of_whole is
    (plain - ours) / (plain - compute), and computing takes as long in both orders."""
    words = ("--ranks", "3", "--exchange", "tapa", "--chunks", "1", "3", "--text-tokens", "0", "--balance", "1")
    words += ("--repeats", "1")
    said = bench(tmp_path / "bench", *words)
    found = {row["variant"]: row for row in written(tmp_path / "bench")}
    assert list(found) == [f"tapa {order}{chunks}" for order in ORDERS for chunks in ("", " 3 chunks")]
    compute_s = []
    for order in ORDERS:
        ours, plain = found[f"tapa {order} 3 chunks"], found[f"tapa {order}"]
        assert ours["bytes"] == plain["bytes"] and plain["ratio_vs_whole"] == 1
        assert ours["ratio_vs_whole"] == pytest.approx(ours["median_s"] / plain["median_s"])
        compute_s.append(plain["median_s"] - (plain["median_s"] - ours["median_s"]) / ours["hidden_of_whole"])
        assert plain["hidden_of_whole"] == 0 and f"tapa {order} 3 chunks: hides" in said
        assert list(ours["layers"]) == ["image"] and ours["layers"]["image"]["calls"] == 3
    assert compute_s[0] == pytest.approx(compute_s[1]) and compute_s[0] > 0


def test_numbers_that_rounding_does_not_explain_are_an_error() -> None:
    expected = torch.tensor([4.0, 1.0])
    check_close("rank 0: x 2 chunks", "image", expected, torch.tensor([4.000001, 1.0]))
    with pytest.raises(RuntimeError, match=r"rank 0: x 2 chunks differs by 1\.00e-04 in layer image"):
        check_close("rank 0: x 2 chunks", "image", expected, torch.tensor([4.0001, 1.0]))


def test_under_mpiexec(tmp_path: Path) -> None:
    done = warm_mpiexec(2, "-m", "cocodiff", *WORDS, "--exchange", "tapa", "--out", str(tmp_path / "bench"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["variant"] for row in written(tmp_path / "bench")] == ["tapa joint", "tapa v_first"]
    assert done.stdout.count("results:") == 1


def test_other_bits_are_an_error() -> None:
    expected = torch.ones(3)
    check_same_bits("rank 1: tapa v_first", "image", expected, expected.clone())
    with pytest.raises(RuntimeError, match=r"rank 1: tapa v_first differs .* in 1 of 3 numbers of layer image"):
        check_same_bits("rank 1: tapa v_first", "image", expected, torch.tensor([1.0, 1.0, 1.0000001]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "start 2 or more"),
        (("--ranks", "4"), "4 ranks for 3 attention heads"),
        (("--ranks", "2", "--repeats", "0"), "at least 1"),
        (("--ranks", "2", "--text-tokens", "-1"), "0 or more"),
        (("--ranks", "2", "--ratio", "-1"), "--ratio -1.0"),
        (("--ranks", "2", "--ratio", "nan"), "--ratio nan"),
        (("--ranks", "2", "--balance", "-1"), "--balance -1.0"),
        (("--ranks", "2", "--chunks", "0"), "chunks is 0: give a whole number"),
        (("--ranks", "2", "--exchange", "tappa"), "did you mean tapa?"),
        (("--ranks", "2", "--order", "vfirst"), "did you mean v_first?"),
        (("--ranks", "2", "--machine", "aurora"), "start 12 ranks"),
        (("--ranks", "2", "--preset", "tapa"), "unknown option --preset"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*with_options(WORDS, *words), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and len(captured.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_benchmarks_come_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "atention"]) == 2
    assert "did you mean attention?" in capsys.readouterr().err


def test_variants_take_turns_in_orders_that_all_ranks_share() -> None:
    order: list[str] = []
    variants = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleave(variants, rounds=12, units=2, meet=lambda: None, tick=lambda: None)
    rounds = {"".join(order[start : start + 3]) for start in range(0, 36, 3)}
    assert len(rounds) > 3 and all(sorted(one) == list("abc") for one in rounds)
    assert {name: len(values) for name, values in seconds.items()} == dict.fromkeys("abc", 12)
    first = order.copy()
    order.clear()
    interleave(variants, rounds=12, units=2, meet=lambda: None, tick=lambda: None)
    assert order == first


def test_ratios_are_medians_of_pairs() -> None:
    seconds = {"flat": [1.0, 2.0, 4.0], "tapa": [2.0, 2.0, 2.0]}
    flat, tapa = rows("case", seconds, {}, {name: {"flat": "flat", "other": "absent"} for name in seconds})
    assert (tapa["median_s"], tapa["ratio_vs_flat"], tapa["ratio_vs_other"], tapa["bytes"]) == (2.0, 1.0, None, None)
    assert flat["ratio_vs_flat"] == 1

"""`cocodiff bench step` with a random model, `bench attention` and `bench peers`: the rows that they write. No test
asserts a time."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cocodiff_bench import model_step, step
from cocodiff_bench import peers as bench_peers
from cocodiff_bench.alltoall import check_results, random_blocks
from cocodiff_bench.common import of_benchmarks, of_slowest_rank, rows
from cocodiff_bench.peers import with_codecs
from launching import assert_succeeded
from tiny_models import sd3_inpaint_pipeline
from warm import forked
from worlds import topology_of

from cocodiff.cli.main import main
from cocodiff.comm import loopback
from cocodiff.config.errors import UserError
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.options import parse, with_settings


def rows_of(tmp_path: Path, words: str, model: str = "") -> dict[str, dict[str, Any]]:
    """The rows of a benchmark by variant. model: one in this folder."""
    given = [*words.split(), *(["--model", str(tmp_path / model)] if model else [])]
    assert main(["bench", *given, "--out", str(tmp_path / "bench"), "--quiet", "--overwrite"]) == 0
    return {row["variant"]: row for row in json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]}


def test_one_rank_is_compared_with_plain_diffusers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sd3_inpaint_pipeline().save_pretrained(tmp_path / "model")
    plain, flat = rows_of(tmp_path, "step --steps 1 --repeats 2 --preset flat", "model").values()
    assert (plain["variant"], plain["n"], plain["bytes"], plain["ratio_vs_diffusers"]) == ("diffusers", 2, None, 1)
    assert flat["variant"] == "flat" and set(flat["bytes"].values()) == {0}
    assert flat["ratio_vs_diffusers"] > 0 and flat["ratio_vs_flat"] == 1
    assert "ms a step" in capsys.readouterr().out


def test_a_call_of_a_pipeline_has_the_batch_and_the_steps_that_were_asked_for() -> None:
    told: list[dict[str, Any]] = []
    pipe = SimpleNamespace(pipe=lambda **given: told.append(given), arguments=lambda batch: {"prompts": batch})
    step.restore_once(pipe, 3, 32, 7)
    (given,) = told
    assert given["image"].shape == (3, 3, 32, 32) and given["mask_image"].shape == (3, 1, 32, 32)
    assert (given["num_inference_steps"], given["prompts"]) == (7, 3)


SHAPE = Path(__file__).with_name("toy_step.yaml").read_text()


def test_a_batch_that_just_fits_is_measured() -> None:
    shape, values = load_shape("sd3.5"), {"variants": ["flat"], "size": [1024], "batch": 0, "steps": 2}
    values |= {one.name: one.default for one in model_step.OPTIONS if one.name not in values}
    topology = topology_of("aurora", 12)
    topology = replace(topology, machine=topology.machine.with_value("memory_gib", 18.0))
    batch, _ = model_step.fitting(values, shape, topology)
    assert 1 < batch < model_step.LARGEST_BATCH
    assert [*model_step.fitting(values | {"batch": batch}, shape, topology)[1]] == ["flat"]
    with pytest.raises(UserError, match=f"batch {batch + 1}"):
        model_step.fitting(values | {"batch": batch + 1}, shape, topology)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_tile_does_not_hold_stands_in_a_file_until_it_is_measured(tmp_path: Path, ranks: int) -> None:
    """For launch/campaign.pbs, which cannot tell it by the exit code of a launcher. A mistake in the words is none."""
    (tmp_path / "toy.yaml").write_text(SHAPE.format(family="FLUX.1", parallel=0))
    machine = "{{name: m, tiles: 1, planes: [0], device: {{memory_gib: {}, memory_gb_s: 1, bf16_tflop_s: 1}}}}"
    refused = tmp_path / "bench" / "refused"
    words = f"step --size 64 --steps 2 --repeats 1 --ranks {ranks} --variants flat --machine {tmp_path / 'm.yaml'}"
    given = ["bench", *words.split(), "--model", str(tmp_path / "toy.yaml"), "--out", str(tmp_path / "bench")]
    (tmp_path / "m.yaml").write_text(machine.format(0.001))
    assert main([*given, "--size", "63"]) == 2 and not refused.exists()
    for more in ([], ["--batch", "0"]):  # as large as it can be
        assert main([*given, *more]) == 2
        assert refused.read_text().startswith("toy 64, batch 1: ")
        assert [path.name for path in (tmp_path / "bench").rglob("*")] == ["refused"]
    (tmp_path / "m.yaml").write_text(machine.format(1))
    assert main(given) == 0, "nothing is in the way of it"
    assert (tmp_path / "bench" / "bench.json").exists() and not refused.exists()


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("FLUX.1", 1),
        pytest.param("FLUX.2", 1, marks=pytest.mark.full),
        ("SD3 / SD3.5", 0),
        pytest.param("Qwen-Image", 0, marks=pytest.mark.full),
    ],
)
def test_random_weights_of_a_models_shape(family: str, parallel: int, tmp_path: Path) -> None:
    """Whole runs, and one whose messages are left out: what is left is computing."""
    (tmp_path / "toy.yaml").write_text(SHAPE.format(family=family, parallel=parallel))
    words = "step --size 64 --steps 6 --repeats 1 --ranks 2 --variants library flat flat_serial tapa_v_first cocodiff"
    rows = rows_of(tmp_path, words, "toy.yaml")
    assert [*rows] == ["library", "flat", "flat_serial", "tapa v_first", "cocodiff", "no messages"]
    assert all((row["size"], row["nodes"], row["batch"]) == (64, 1, 1) for row in rows.values())
    sent = {name: sum(row["bytes"].values()) for name, row in rows.items()}
    assert sent["library"] == sent["flat"] == sent["flat_serial"] > sent["cocodiff"] > 0
    rows_of_a_call = 2 if family.startswith("SD3") else 1
    # of both ranks in a mean step: q, k, v and the output of 11 tokens with 2 heads of 32 numbers of 4 bytes
    assert sent["flat"] == 2 * 4 * 11 * 2 * 32 * 4 * (1 + parallel) * rows_of_a_call * (2 if "Qwen" in family else 1)
    assert rows["no messages"]["communication_share"] == 0


def test_the_librarys_own_all_to_all_is_not_what_the_command_line_leaves_to_batches() -> None:
    """Whatever `--messages` says of the others."""
    values = parse("bench", "", with_settings(model_step.OPTIONS, of_benchmarks), ["--model", "qwen-image"])
    how = {name: model_step.config_of(name, values).messages for name in ("flat", "library")}
    assert how == {"flat": "auto", "library": "alltoall"}


def test_the_librarys_all_to_all_of_equal_blocks_is_told_no_sizes(tmp_path: Path, monkeypatch: Any) -> None:
    """For a library may have a faster way for these. That it brings what was sent is looked at before it is timed."""
    plain = dist.all_to_all_single

    def noted(received: torch.Tensor, sent: torch.Tensor, *more: Any, **named: Any) -> Any:
        with (tmp_path / f"calls-{os.getpid()}").open("a") as file:
            file.write(json.dumps([[*received.shape], [*sent.shape], [*more], [*named]]) + "\n")
        return plain(received, sent, *more, **named)

    monkeypatch.setattr(dist, "all_to_all_single", noted)
    words = "alltoall --ranks 3 --sizes_mb 0.03 --repeats 2 --variants library flat tapa --messages batch"
    rows = rows_of(tmp_path, words)
    assert [*rows] == ["library", "flat", "tapa"] and rows["library"]["n"] == 2
    of_ranks = [file.read_text().splitlines() for file in tmp_path.glob("calls-*")]
    blocks = [3, 20, 128]  # of each rank 20 rows of 512 bytes
    assert [[json.loads(call) for call in calls] for calls in of_ranks] == [[[blocks, blocks, [], []]] * 4] * 3


def test_what_an_earlier_exchange_brought_does_not_stand_for_a_later_one() -> None:
    (blocks,) = loopback.run_ranks(1, lambda transport: random_blocks(0.01, transport))
    with pytest.raises(RuntimeError, match="no brought"):
        check_results(blocks, {"all": lambda: blocks.received.copy_(blocks.packed), "no": lambda: blocks.received}, 0)


def test_a_call_takes_as_long_as_on_the_slowest_rank() -> None:
    own = [{"flat": [1.0, 5.0]}, {"flat": [3.0, 2.0]}]
    found = loopback.run_ranks(2, lambda transport: of_slowest_rank(own[transport.rank], transport))
    assert found[0] == {"flat": [3.0, 5.0]}


def test_a_row_tells_the_median_and_the_first_and_last_tenth() -> None:
    (row,) = rows("a case", {"flat": [float(number) for number in (*range(5, 11), *range(5))]}, {}, {})
    assert [row[name] for name in ("median_s", "p10_s", "p90_s", "n")] == [5, 1, 9, 11]


# bench attention ------------------------------------------------------------------------------------------------------


ALONE = "attention --repeats 1"


@pytest.mark.parametrize("more", ["", "--one_query", "--heads 3 --dtype bf16"])
def test_one_process_by_every_way(more: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, f"{ALONE} --tokens 300 --threads 1 2 --block 64 128 {more}")
    ways = ("naive", "blocks of 64", "blocks of 128", "torch", "triad")
    assert list(rows) == [f"{way} {threads}" for way in ways for threads in ("1 thread", "2 threads")]
    limit = 2e-2 if "bf16" in more else 1e-5
    for name, row in rows.items():
        assert row["tokens"] == 300 and row["bytes"] is None
        assert row["gb_s"] > 0 if name.startswith("triad") else row["difference"] <= limit


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_it_by_every_way(ranks: int, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, f"{ALONE} --tokens {60 * ranks} --heads 6 --ranks {ranks}")
    assert list(rows) == ["flat", "tapa", "split", "keys", "token", "streaming", "torch_ring"]
    assert all(row["difference"] < 1e-5 for row in rows.values())
    assert rows.pop("torch_ring")["bytes"] is None  # torch does not tell what it sends
    sent = {name: sum(row["bytes"].values()) for name, row in rows.items()}
    assert sent["token"] > sent["keys"] > 0
    one = rows_of(tmp_path, f"{ALONE} --tokens {61 * ranks} --ranks {ranks} --one_query")
    assert list(one) == ["merged"] and sum(one["merged"]["bytes"].values()) == ranks * (ranks - 1) * 129 * 4


# bench peers, where no other library is installed ---------------------------------------------------------------------


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
    ("ranks", "words"),
    [
        (3, (*BOTH, "--side", "3", "--frames", "2", "--text", "6")),
        (2, (*BOTH, "--model", "wan", "--text", "7")),  # whose text is attended to by each token alone
        (5, ("--only", "ours", "--side", "3", "--text", "7", "--heads", "3")),
    ],
)
def test_peers_split_evenly_and_ours_do_not_care(ranks, words):
    """What they do not split evenly is refused: see `mistakes.txt`."""
    assert refusal(ranks, *words) == ""


def peers_of(folder: Path, *words: Any) -> tuple[list[dict[str, Any]], str]:
    """The rows of bench.json of two ranks on a small model, and what was printed."""
    sizes = ("--heads", "4", "--double", "1", "--single", "1", "--repeats", "2")
    done = forked("bench", "peers", "--ranks", "2", *sizes, *words, "--out", folder / "bench", folder=folder)
    assert_succeeded(done)
    return json.loads((folder / "bench" / "bench.json").read_text())["rows"], done.stdout


def test_our_variants_alone_on_two_ranks(tmp_path):
    """And a preset with the codec, which sends codes once it is settled; and one that displaces, if there is anything
    that changes so little."""
    words = ("--only", "ours", "--preset", "coded-", "ahead", "--side", "6", "--text", "5")
    (*rows, coded, ahead), said = peers_of(tmp_path, *words)
    assert coded["variant"] == "coded-" and 1e-5 < coded["relative_error"] < 0.2 and coded["first_s"] > 0
    assert sum(coded["bytes"].values()) * 32 * 4 == sum(rows[0]["bytes"].values()) * 9  # 2 bits a channel, and a scale
    assert ahead["codec"] == "none" and 0 <= ahead["late_part"] <= 1 and "late_part" not in coded
    assert "ahead: codec auto: none" in said
    assert f"codec none, late {ahead['late_part']:.0%}" in said
    assert [row["variant"] for row in rows] == [f"{x}{y}" for x in ("flat", "tapa", "split") for y in ("", " v_first")]
    assert all(row["n"] == 2 and row["median_s"] > 0 and 0 < row["max_abs_error"] < 1e-5 for row in rows)
    # Two ranks on one card, one route: half of q, k, v and the output of two layers, in float32.
    assert {sum(row["bytes"].values()) for row in rows} == {2 * 4 * (36 + 5) * 4 * 32 * 4 // 2}


@pytest.mark.full
@pytest.mark.parametrize(("model", "text"), [("wan", 7), ("qwen-image", 6)])
def test_other_models_beside_diffusers_own(tmp_path, model, text):
    rows, said = peers_of(tmp_path, "--model", model, *BOTH, "--side", "4", "--frames", "2", "--text", str(text))
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

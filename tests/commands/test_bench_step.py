"""`cocodiff bench step` with a random model: the rows it writes. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cocodiff_bench import alltoall, model_step
from cocodiff_bench.common import of_benchmarks, of_slowest_rank
from tiny_models import sd3_inpaint_pipeline

from cocodiff.cli.main import main
from cocodiff.comm import loopback
from cocodiff.jobs.options import parse, with_settings


def test_one_rank_is_compared_with_plain_diffusers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sd3_inpaint_pipeline().save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--steps", "1", "--repeats", "2", "--preset", "flat", "--quiet"]
    assert main(["bench", "step", *words, "--out", str(tmp_path / "bench")]) == 0
    plain, flat = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert (plain["variant"], plain["n"], plain["bytes"], plain["ratio_vs_diffusers"]) == ("diffusers", 2, None, 1)
    assert flat["variant"] == "flat" and set(flat["bytes"].values()) == {0}
    assert flat["ratio_vs_diffusers"] > 0 and flat["ratio_vs_flat"] == 1
    assert "ms a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"), [(("--steps", "0"), "at least 1"), (("--preset", "tappa"), "did you mean tapa?")]
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", "--out", str(tmp_path / "out"), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and len(captured.err.splitlines()) == 1


SHAPE = """
name: toy
family: {family}
heads: 4
head_dim: 32
joint_layers: 1
parallel_layers: {parallel}
mlp_ratio: 4
parameters: 1000000
text_tokens: 6
pixels_per_token: 16
"""


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
    words = ["--model", str(tmp_path / "toy.yaml"), "--size", "64", "--steps", "6", "--repeats", "1", "--ranks", "2"]
    variants = ["library", "flat", "flat_serial", "tapa_v_first", "cocodiff"]
    out = ["--out", str(tmp_path / "bench"), "--quiet"]
    assert main(["bench", "step", *words, "--variants", *variants, *out]) == 0
    rows = {row["variant"]: row for row in json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]}
    assert [*rows] == ["library", "flat", "flat_serial", "tapa v_first", "cocodiff", "no messages"]
    assert all((row["size"], row["nodes"], row["batch"]) == (64, 1, 1) for row in rows.values())
    sent = {name: sum(row["bytes"].values()) for name, row in rows.items()}
    assert sent["library"] == sent["flat"] == sent["flat_serial"] > sent["cocodiff"] > 0
    assert rows["no messages"]["communication_share"] == 0


def test_a_batch_that_no_tile_holds_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = "name: small\ntiles: 1\nplanes: [0]\ndevice: {memory_gib: 0.001, memory_gb_s: 1, bf16_tflop_s: 1}\n"
    (tmp_path / "small.yaml").write_text(machine)
    (tmp_path / "toy.yaml").write_text(SHAPE.format(family="FLUX.1", parallel=1))
    words = ["--model", str(tmp_path / "toy.yaml"), "--size", "64", "--variants", "flat", "--batch", "0"]
    words += ["--machine", str(tmp_path / "small.yaml"), "--out", str(tmp_path / "bench")]
    assert main(["bench", "step", *words]) == 2
    assert "toy 64, batch 1: more than a tile's memory holds" in capsys.readouterr().err
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize(("benchmark", "words"), [(alltoall, []), (model_step, ["--model", "qwen-image"])])
def test_the_librarys_own_all_to_all_is_not_what_the_command_line_leaves_to_batches(benchmark: Any, words: list[str]):
    """Whatever `--messages` says of the others."""
    options = with_settings(benchmark.OPTIONS, of_benchmarks)
    values = parse("bench", "", options, words)
    how = {name: benchmark.config_of(name, values).messages for name in ("flat", "library")}
    assert how == {"flat": "batch", "library": "alltoall"}


def test_a_call_takes_as_long_as_on_the_slowest_rank() -> None:
    own = [{"flat": [1.0, 5.0]}, {"flat": [3.0, 2.0]}]
    found = loopback.run_ranks(2, lambda transport: of_slowest_rank(own[transport.rank], transport))
    assert found[0] == {"flat": [3.0, 5.0]}

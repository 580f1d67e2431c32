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


def rows_of(tmp_path: Path, model: str, words: str) -> list[dict[str, Any]]:
    """What is written of a model in this folder, which the benchmark is called with besides."""
    given = ["--model", str(tmp_path / model), *words.split(), "--out", str(tmp_path / "bench"), "--quiet"]
    assert main(["bench", "step", *given]) == 0
    return json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]


def test_one_rank_is_compared_with_plain_diffusers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sd3_inpaint_pipeline().save_pretrained(tmp_path / "model")
    plain, flat = rows_of(tmp_path, "model", "--steps 1 --repeats 2 --preset flat")
    assert (plain["variant"], plain["n"], plain["bytes"], plain["ratio_vs_diffusers"]) == ("diffusers", 2, None, 1)
    assert flat["variant"] == "flat" and set(flat["bytes"].values()) == {0}
    assert flat["ratio_vs_diffusers"] > 0 and flat["ratio_vs_flat"] == 1
    assert "ms a step" in capsys.readouterr().out


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
    words = "--size 64 --steps 6 --repeats 1 --ranks 2 --variants library flat flat_serial tapa_v_first cocodiff"
    found = rows_of(tmp_path, "toy.yaml", words)
    rows = {row["variant"]: row for row in found}
    assert [*rows] == ["library", "flat", "flat_serial", "tapa v_first", "cocodiff", "no messages"]
    assert all((row["size"], row["nodes"], row["batch"]) == (64, 1, 1) for row in rows.values())
    sent = {name: sum(row["bytes"].values()) for name, row in rows.items()}
    assert sent["library"] == sent["flat"] == sent["flat_serial"] > sent["cocodiff"] > 0
    assert rows["no messages"]["communication_share"] == 0


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

"""`cocodiff bench step` with a random model: the rows it writes. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import sd3_inpaint_pipeline

from cocodiff.cli.main import main


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

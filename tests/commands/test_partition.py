"""Which partition of its ranks a command takes: what --dry_run says of a model that has configs and no weights, and
pins."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tifffile
import yaml
from cocodiff_eval.harness.partition import guides, partition_of, with_tokens, with_weights
from cocodiff_eval.harness.pipelines import EMBEDDED, Request, usual_steps
from tiny_models import sd3_transformer

from cocodiff.cli.main import main
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.jobs.folder import Manifest
from cocodiff.models.family import GENERATE, INPAINT
from cocodiff.topology.axes import Partition

SAMPLES = sorted((Path(__file__).parents[2] / "cocodiff" / "demo_model" / "samples").glob("*.tif"))
CASES = yaml.safe_load(Path(__file__).with_name("partitions.yaml").read_text())


def index_of(folder: Path, pipeline: str, **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline, **more}))
    return folder


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A model without a single weight."""
    sd3_transformer(12, layers=3, patch_size=2).save_config(tmp_path / "sd3" / "transformer")
    encoder = ["transformers", "CLIPTextModelWithProjection"]
    return index_of(tmp_path / "sd3", "StableDiffusion3Pipeline", text_encoder=encoder)


@pytest.mark.full
@pytest.mark.parametrize("machine", ["aurora", "local"])
def test_a_dry_run_says_deal_memory_and_time_before_any_weight_is_read(machine, configs, capsys, snapshot):
    out = configs.parent / "out"
    words = ["generate", "--model", configs, "--prompt", "a", "b", "c", "--ranks", 12, "--out", out, "--dry-run"]
    assert main([str(word) for word in [*words, "--machine", machine]]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("cocodiff ") and not out.exists()
    snapshot("\n".join(told[1:]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--input", *map(str, SAMPLES)), f"into {len(SAMPLES)} replicas of {12 // len(SAMPLES)} ranks (U"),
        (("--input", str(SAMPLES[1]), "--samples", "12"), "divided into 6 replicas of 2 ranks (U"),
    ],
)
def test_a_dry_run_of_slices(words, said, tmp_path, capsys):
    assert main(["inpaint", *words, "--ranks", "12", "--out", str(tmp_path / "out"), "--dry_run"]) == 0
    assert said in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_dry_run_takes_the_name_of_results_and_leaves_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text("{}")
    Manifest("", ["metrics.json"]).write(tmp_path)
    words = ["inpaint", "--input", str(SAMPLES[0]), "--ranks", "2", "--out", str(tmp_path)]
    assert main([*words, "--dry_run"]) == 0 and (tmp_path / "metrics.json").read_text() == "{}"
    assert main(words) == 2


@pytest.mark.sample(3)
@pytest.mark.parametrize(("words", "tiles"), CASES["work"].items())
def test_a_dry_run_says_how_much_the_model_has_to_do_and_how_long_it_takes(
    words: str, tiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a call that is timed here, or by the plan where the machine's rates are known. A job says it at its start."""
    monkeypatch.chdir(tmp_path)
    mask = np.zeros((20, 40, 48), np.uint8)
    mask[3:7, 10:20, 8:24] = 1
    scan = np.random.default_rng(0).integers(0, 999, mask.shape, np.uint16)
    for name, voxels in (("scan", scan), ("hole", mask)):
        tifffile.imwrite(f"{name}.tif", voxels, photometric="minisblack")
    fixed = ["inpaint", "--input", "scan.tif", "--mask", "hole.tif", "--steps", "2", "--quiet", "--no_exact"]
    assert main([*fixed, *words.split(), "--dry_run"]) == 0
    told = capsys.readouterr().out
    (said,) = [line for line in told.splitlines() if "tiles for the model" in line]
    assert [int(number) for number in re.findall(r"\d+", said)] == [tiles, 2]
    planned = "for each of 2 call(s) of the pipeline" in told  # of 16 tiles at most
    assert planned == ("aurora" in words) and ("for all" in told) and not Path("restored").exists()
    if not planned:
        (seconds, whole) = re.findall(r"([\d.]+) s", told.splitlines()[-1])
        assert float(whole) == pytest.approx(float(seconds) * tiles / 8, rel=0.02)
        assert main([*fixed, *words.split()]) == 0 and said in capsys.readouterr().out


@pytest.mark.parametrize(("settings", "images", "expected"), CASES["pins"])
def test_pins(configs, settings, images, expected, capsys):
    values = {"parallel": "auto", "dry_run": False, "dtype": "auto", "machine": "local", "device": "auto", "steps": 2}
    config = Config.preset("tapa", guidance_parallel=settings.get("guidance_parallel", "auto"))
    request = Request(str(configs), GENERATE)
    assert partition_of(values | settings, request, [config], 4, images) == tuple(expected)
    assert partition_of(values | settings, Request(EMBEDDED, INPAINT), [config], 4, images)[1] == 1
    assert ("run has one branch" in capsys.readouterr().out) == (config.guidance_parallel == 2)
    with pytest.raises(UserError, match="replicas 3 does not divide 4 ranks"):
        partition_of(values | {"replicas": 3}, request, [config], 4, images)


def test_weights_are_shared_where_the_whole_batch_needs_it(configs: Path, tmp_path: Path) -> None:
    """On a tile whose memory is 8 MiB beside what is left free, a model whose weights take less."""
    machine = tmp_path / "small.yaml"
    machine.write_text(f"name: small\ntiles: 2\nplanes: [0, 1]\ndevice: {{memory_gib: {4 + 8 / 1024}}}\n")
    values = {"machine": str(machine), "dtype": "auto", "device": "auto"}
    given = {"flat": Config.preset("flat", weights="auto")}, values, Request(str(configs), GENERATE), Partition(), 2
    assert [with_weights(*given, batch)["flat"].weights for batch in (1, 8)] == ["whole", "node"]


def test_meshes_are_chosen_for_the_tokens_of_the_job(configs: Path) -> None:
    request, presets = Request(str(configs), GENERATE), {"flat": Config.preset("flat")}
    values = {"dtype": "auto", "machine": "aurora", "device": "auto"}
    found = with_tokens(presets, values, request)["flat"]
    assert found.image_tokens != Config().image_tokens and found.with_(image_tokens=4096) == presets["flat"]
    assert with_tokens(presets, values | {"machine": "local"}, request)["flat"].image_tokens == Config().image_tokens


@pytest.mark.parametrize(("pipeline", "more", "guidance", "expected"), CASES["guides"])
def test_who_guides(tmp_path, pipeline, more, guidance, expected):
    model = index_of(tmp_path / "model", pipeline, **more)
    assert guides(Request(str(model), GENERATE, ("",), guidance)) is expected


@pytest.mark.parametrize(("kind", "task", "runs"), CASES["steps"])
def test_steps_are_the_models_own_unless_they_are_told(tmp_path: Path, kind: str, task: str, runs: str) -> None:
    """The default of the pipeline that runs; of the embedded model, and one trained from it, what was measured."""
    index_of(tmp_path, kind)
    expected = inspect.signature(getattr(diffusers, runs).__call__).parameters["num_inference_steps"].default
    assert usual_steps(Request(str(tmp_path), {"inpaint": INPAINT, "generate": GENERATE}[task])) == expected >= 28
    assert usual_steps(Request(EMBEDDED, INPAINT)) == 10

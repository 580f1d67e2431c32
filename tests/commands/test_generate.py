"""`cocodiff generate`: the images of every family's own text-to-image pipeline, results whole, mistakes in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
import yaml
from cocodiff_eval.harness.pipelines import Request, no_prompt
from launching import assert_succeeded
from PIL import Image
from warm import forked
from words import words

from cocodiff.models import pipelines_of
from cocodiff.models.family import GENERATE

pytestmark = pytest.mark.processes

FAMILIES = {name: build for name, build in tiny_pipelines.PIPELINES.items() if name != "fill"}
FAMILIES["flux2"] = lambda: tiny_pipelines.flux2_pipeline(klein=False)
SIDES = {"height": 32, "width": 48}
PROMPTS = ["a tooth", "A tooth", "bone, polished"]


BOUND = ("--preset", "split", "--quality", "50dB", "--quality_every", "9", "--guidance", "1", "--quiet")
RUNS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    **{name: (build, ("--ranks", "2", "--quiet")) for name, build in FAMILIES.items()},
    "flux": (FAMILIES["flux"], ("--ranks", "2", "--quiet", "--guidance", "0")),
    "text-sd3": (
        lambda: tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()),
        ("--prompt", *PROMPTS, "--preset", "flat,tapa", "--replicas", "2", "--ranks", "4"),
    ),
    "text-klein": (
        lambda: tiny_pipelines.flux2_pipeline(**tiny_pipelines.qwen3_text()),
        ("--prompt", PROMPTS[0], "--order", "v_first", "--no-exact", "--quiet", "--ranks", "2", "--seed", "7"),
    ),
}
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the model of a run, once."""
    folder = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        if not (folder / name).exists():
            RUNS[name][0]().save_pretrained(folder / name)
        return folder / name

    return saved


@pytest.fixture(scope="module")
def made(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Makes the folder of results of a run, once; beside them lies what was said."""
    folder = tmp_path_factory.mktemp("generate")

    def run(name: str, of: Path | None = None, more: tuple[str, ...] = ()) -> Path:
        out = folder / name
        if not out.exists():
            options = {"model": of or model(name), "out": out, "steps": 2, **SIDES}
            done = forked(*words("generate", *(more or RUNS[name][1]), **options), folder=folder)
            assert_succeeded(done)
            (folder / f"{name}.out").write_text(done.stdout)
            (folder / f"{name}.err").write_text(done.stderr)
        return out

    return run


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def alone(pipe: Any, seed: int = 0, **arguments: Any) -> np.ndarray:
    """The image that a plain pipeline makes in this process."""
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(seed)
    image = pipe(num_inference_steps=2, generator=noise, output_type="np", **SIDES, **arguments).images[0]
    return np.rint(image * 255).astype(int)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if f"text-{name}" in RUNS else ()) for name in FAMILIES]
)
def test_two_ranks_make_the_image_of_the_familys_pipeline(made: Run, name: str) -> None:
    """Without prompts; those of two families are made with prompts, too."""
    pipe = FAMILIES[name]()
    pipelines = pipelines_of(type(pipe).__name__, name)
    assert type(pipe).__name__ == pipelines.of_task(GENERATE, name)
    arguments = no_prompt(pipelines, pipe.transformer, torch.float32)
    arguments |= {pipelines.guidance: 0.0 if name == "flux" else 1.0}
    assert np.abs(pixels(made(name) / "images" / "image_tapa.png") - alone(pipe, **arguments)).max() <= 1


def test_prompts_are_encoded_once_with_the_pipelines_own_guidance(made: Run, model: Callable[[str], Path]) -> None:
    """With SD3's negative prompt from `encode_prompt` itself, and klein's from a call of its own."""
    sd3 = diffusers.StableDiffusion3Pipeline.from_pretrained(model("text-sd3"), text_encoder_3=None, tokenizer_3=None)
    klein = diffusers.Flux2KleinPipeline.from_pretrained(model("text-klein"))
    for name, image, pipe, prompt, seed in (
        ("text-sd3", "a_tooth_tapa.png", sd3, PROMPTS[0], 0),
        ("text-sd3", "bone_polished_flat.png", sd3, PROMPTS[2], 0),
        ("text-klein", "a_tooth_tapa.png", klein, PROMPTS[0], 7),
    ):
        assert np.abs(pixels(made(name) / "images" / image) - alone(pipe, seed, prompt=prompt)).max() <= 1


def test_a_bound_on_quality_is_checked_on_some_images_and_kept_on_them(made: Run, model: Callable[[str], Path]) -> None:
    out = made("bounded", model("text-sd3"), ("--prompt", *PROMPTS, *BOUND, "--ranks", "2"))
    document = json.loads((out / "metrics.json").read_text())
    (found,), rows = document["quality"], document["images"]
    taken = next(one for one in found["tried"] if one["setting"] == found["setting"])
    assert found["count"] == 3 and taken["kept"]
    assert found["calibrated_on"] == found["checked"] == ["a_tooth", "A_tooth-2"]
    assert [(row["name"], row["mode"], row["exact_compared"]) for row in rows] == [
        ("a_tooth", "split", True),
        ("A_tooth-2", "split", True),
        ("bone_polished", "split", False),
    ]
    assert all(row["psnr_vs_exact_db"] == pytest.approx(taken["db"][row["name"]], abs=1e-3) for row in rows[:2])
    assert all(0 < sum(row["bytes"].values()) < sum(row["bytes_whole"].values()) for row in rows)
    assert len({pixels(out / "images" / f"{row['name']}_split.png").shape for row in rows}) == 1


def test_results_have_the_promised_names(made: Run) -> None:
    out = made("text-sd3")
    files = {"metrics.json", "report.html", "run.yaml", "trace.json", ".cocodiff-files.json"}
    assert {path.name for path in out.iterdir()} == files | {"images"}
    names = ["a_tooth", "A_tooth-2", "bone_polished"]
    expected = {f"{name}_{preset}.png" for name in names for preset in ("flat", "tapa")}
    assert {path.name for path in (out / "images").iterdir()} == expected
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["schema"], metrics["ranks"], metrics["config"]["prompt"]) == (1, 4, PROMPTS)
    assert [(row["name"], row["mode"]) for row in metrics["images"]] == [
        (n, p) for n in names for p in ("flat", "tapa")
    ]
    for row in metrics["images"]:
        assert row["mask"] is row["psnr_db"] is row["ssim"] is row["mse"] is row["psnr_vs_exact_db"] is None
        # Each of two replicas has two ranks, one for each guidance branch: nothing is sent in attention.
        assert row["exact_compared"] and row["seconds"] > 0 and sum(row["bytes"].values()) == 0
    json.loads((out / "trace.json").read_text())
    assert yaml.safe_load((out / "run.yaml").read_text())["prompt"] == PROMPTS
    (row,) = json.loads((made("text-klein") / "metrics.json").read_text())["images"]
    assert not row["exact_compared"]


def test_the_report_shows_prompts_and_modes_side_by_side(made: Run) -> None:
    page = (made("text-sd3") / "report.html").read_text()
    blocks = re.findall(r'<script type="text/plain" class="picture"[^>]*>(.*?)</script>', page)
    assert [list(json.loads(block)["images"]) for block in blocks] == [["flat", "tapa"]] * 3
    assert "Generated images" in page and all(f"<small>{prompt}</small>" in page for prompt in PROMPTS)
    assert not re.search("<(th|dt)>SSIM", page) and "mask None" not in page and "identical" in page


def test_rank_0_alone_speaks_and_shows_progress(made: Run) -> None:
    for name, said in (("flux", "2 rank(s) ready after"), ("text-sd3", "4 rank(s) in 2 replicas ready after")):
        lines = made(name).with_suffix(".out").read_text()
        assert lines.count(said) == lines.count("report: ") == 1
    errors = made("text-sd3").with_suffix(".err").read_text()
    assert "0 of 3 images" in errors and "3 of 3 images, " in errors and "warn" not in errors.lower()


def test_what_a_run_goes_on_with_is_the_image_and_not_its_name(tmp_path: Path) -> None:
    contents = []
    for name, content in (("a.png", b"one"), ("b.png", b"one"), ("a.png", b"another")):
        (tmp_path / name).write_bytes(content)
        contents.append(Request("model", GENERATE, ("a",), image=str(tmp_path / name)).content)
    assert contents[0] == contents[1] != contents[2]

"""`cocodiff generate` with Wan's models: the videos of diffusers' own pipelines, frames and MP4 whole, and going on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tifffile
import tiny_pipelines
import torch
from cocodiff_eval.harness.images import has_encoder, save_frames, shown_frames
from cocodiff_eval.harness.partition import image_tokens
from cocodiff_eval.harness.pipelines import Request
from launching import assert_succeeded, with_options
from PIL import Image
from warm import forked
from words import words

from cocodiff.cli.main import main
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models.family import GENERATE

pytestmark = pytest.mark.processes

FRAMES, SIDES, STEPS = 5, {"height": 32, "width": 48}, 3
PROMPTS = ["a tooth", "a bone"]
MODELS: dict[str, dict[str, Any]] = {
    "two": {},
    "text": {},
    "clip": {"experts": 1, "image": True, "clip": True},
    "tokens": {"experts": 1, "tokens": True},
}
RUNS: dict[str, tuple[str, ...]] = {
    "two": ("--preset", "flat,tapa", "--ranks", "2", "--fps", "9"),
    "text": ("--prompt", *PROMPTS, "--ranks", "4", "--replicas", "2", "--guidance", "30", "--guidance_2", "2"),
    "clip": ("--ranks", "2"),
    "tokens": ("--ranks", "2", "--preset", "coded"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of results on some ranks, of models with random weights."""
    folder = tmp_path_factory.mktemp("videos")
    first = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(first).save(folder / "first.png")
    for name, more in MODELS.items():
        text = tiny_pipelines.umt5_text() if name == "text" else {}
        tiny_pipelines.wan_pipeline(**more, **text).save_pretrained(folder / f"{name}-model")
        done = forked(*run_of(folder, name, folder / name), *RUNS[name], folder=folder)
        assert_succeeded(done)
        (folder / f"{name}-said").write_text(done.stdout + done.stderr)
    return folder


def run_of(folder: Path, name: str, out: Path) -> list[str]:
    image = {"image": folder / "first.png"} if name in ("clip", "tokens") else {}
    return words("generate", model=folder / f"{name}-model", out=out, steps=STEPS, frames=FRAMES, **SIDES, **image)


def alone(folder: Path, name: str, **arguments: Any) -> np.ndarray:
    """The frames that diffusers' own pipeline makes in this process, [F, Y, X, C]."""
    kind = diffusers.WanImageToVideoPipeline if "image" in arguments else diffusers.WanPipeline
    text = {} if name == "text" else {"text_encoder": None, "tokenizer": None}
    pipe = kind.from_pretrained(folder / f"{name}-model", **text)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    if pipe.text_encoder is None:
        none = torch.zeros(1, 512, tiny_pipelines.TEXT_WIDTH)
        arguments |= {"prompt_embeds": none, "guidance_scale": 1.0}
    settings = {"num_inference_steps": STEPS, "num_frames": FRAMES, "output_type": "np", **SIDES}
    return np.rint(pipe(generator=noise, **settings, **arguments).frames[0] * 255).astype(int)


def frames(path: Path) -> np.ndarray:
    found = tifffile.imread(path)
    assert found.dtype == np.uint8 and found.shape == (FRAMES, SIDES["height"], SIDES["width"], 3)
    return found.astype(int)


def test_some_ranks_make_the_videos_of_diffusers_pipelines(made: Path) -> None:
    image = Image.open(made / "first.png").convert("RGB")
    expected = {"image_flat": alone(made, "two"), "image_tapa": alone(made, "two")}
    for name, video in expected.items():
        assert np.abs(frames(made / "two" / "images" / f"{name}.tif") - video).max() <= 1
    assert np.abs(frames(made / "clip" / "images" / "image_tapa.tif") - alone(made, "clip", image=image)).max() <= 1
    scales = {"guidance_scale": 30.0, "guidance_scale_2": 2.0}
    for prompt, name in zip(PROMPTS, ("a_tooth_tapa", "a_bone_tapa"), strict=True):
        found = frames(made / "text" / "images" / f"{name}.tif")
        assert np.abs(found - alone(made, "text", prompt=prompt, **scales)).max() <= 1
        assert np.abs(found - alone(made, "text", prompt=prompt, guidance_scale=30.0)).max() > 1


def test_what_is_lossy_is_compared_with_the_exact_run_over_all_frames(made: Path) -> None:
    (row,) = json.loads((made / "tokens" / "metrics.json").read_text())["images"]
    exact = alone(made, "tokens", image=Image.open(made / "first.png").convert("RGB"))
    coded = frames(made / "tokens" / "images" / "image_coded.tif")
    assert row["mode"] == "coded" and row["exact_compared"] and sum(row["bytes"].values()) > 0
    assert row["psnr_vs_exact_db"] > 60 and np.abs(coded - exact).max() <= 1
    rows = json.loads((made / "two" / "metrics.json").read_text())["images"]
    assert [(row["exact_compared"], row["psnr_vs_exact_db"]) for row in rows] == [(True, None)] * 2


def test_results_have_the_promised_names_and_the_report_shows_frames(made: Path) -> None:
    ends = ["mp4", "tif"] if has_encoder() else ["tif"]
    names = [f"image_{preset}.{end}" for preset in ("flat", "tapa") for end in ends]
    assert sorted(path.name for path in (made / "two" / "images").iterdir()) == names
    page = (made / "two" / "report.html").read_text()
    assert "Generated videos" in page and "four of a video's 5 frames" in page
    assert "1 of 1 videos" in (made / "two-said").read_text()
    assert ("without an MP4" in (made / "two-said").read_text()) != has_encoder()


def test_a_first_frame_is_not_replaced_by_the_video_made_of_it(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made / "clip", out)
    image = out / "images" / "image_tapa.tif"
    given = with_options(run_of(made, "clip", out), "--image", str(image), "--overwrite")
    assert main(given) == 2
    assert f"{image} is among the results" in capsys.readouterr().err and image.exists()


def test_a_picture_shows_frames_from_the_first_to_the_last() -> None:
    numbered = np.arange(9, dtype=np.uint8)[:, None, None, None] + np.zeros((9, 2, 4, 3), np.uint8)
    assert shown_frames(numbered)[::2, ::4, 0].tolist() == [[0, 3], [5, 8]]
    assert shown_frames(numbered[:3]).shape == (2, 4, 3) and shown_frames(numbered[:3]).max() == 1


def test_frames_are_read_as_they_were_written(tmp_path: Path) -> None:
    for count in (1, 5):
        made = np.random.default_rng(0).integers(0, 255, (count, 16, 32, 3), dtype=np.uint8)
        save_frames(tmp_path / "video.tif", made)
        assert np.array_equal(tifffile.imread(tmp_path / "video.tif").reshape(made.shape), made)


@pytest.mark.skipif(not has_encoder(), reason="imageio-ffmpeg is not installed: no MP4 is written")
def test_an_mp4_has_every_frame(made: Path) -> None:
    from imageio_ffmpeg import count_frames_and_secs, read_frames

    for name, fps in (("two", 9.0), ("clip", 16.0)):
        path = str(made / name / "images" / "image_tapa.mp4")
        assert count_frames_and_secs(path)[0] == FRAMES
        told = next(read_frames(path))
        assert told["size"] == (SIDES["width"], SIDES["height"]) and told["fps"] == fps


def test_the_deal_counts_a_videos_tokens_and_both_experts(made: Path) -> None:
    model = made / "two-model"
    shape, one = load_shape(str(model)), load_shape(str(model / "transformer_2"))
    assert shape.parameters == 2 * one.parameters and shape.branches == 2
    request, path = Request(str(model), GENERATE), model / "transformer" / "config.json"
    assert image_tokens({"frames": 9, **SIDES}, request, path, shape) == 3 * 2 * 3
    assert image_tokens({}, request, path, shape) == 21 * 30 * 52
    assert (request.video.frames, request.video.fps) == (81, 16)
    tokens = Request(str(made / "tokens-model"), GENERATE)
    assert image_tokens({}, tokens, path, shape) == 31 * 44 * 80, "121 frames of 704 x 1280, with a small VAE"
    assert tokens.video.fps == 24

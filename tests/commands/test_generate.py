"""`cocodiff generate`: the images of every family's own pipeline, and the videos of Wan's, with all results."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tifffile
import tiny_pipelines
import torch
import yaml
from cocodiff_eval.harness.images import has_encoder, save_frames, shown_frames
from cocodiff_eval.harness.partition import image_tokens
from cocodiff_eval.harness.pipelines import Request, no_prompt
from launching import assert_succeeded, with_options
from PIL import Image
from value_tables import beside
from warm import forked
from words import words

from cocodiff.cli.main import main
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models import pipelines_of
from cocodiff.models.family import GENERATE

FAMILIES = {name: build for name, build in tiny_pipelines.PIPELINES.items() if name != "fill"}
FAMILIES["flux2"] = lambda: tiny_pipelines.flux2_pipeline(klein=False)
SIDES = {"height": 32, "width": 48}
PROMPTS = ["a tooth", "A tooth", "bone, polished"]
FRAMES, STEPS = 5, 3  # of videos
RUNS: dict[str, Callable[[], Any]] = {
    **FAMILIES,
    "text-sd3": lambda: tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()),
    "text-klein": lambda: tiny_pipelines.flux2_pipeline(**tiny_pipelines.qwen3_text()),
    "wan": tiny_pipelines.wan_pipeline,
    "text-wan": lambda: tiny_pipelines.wan_pipeline(**tiny_pipelines.umt5_text()),
    "clip": partial(tiny_pipelines.wan_pipeline, experts=1, image=True, clip=True),
    "tokens": partial(tiny_pipelines.wan_pipeline, experts=1, tokens=True),
}
WORDS = beside(__file__)  # of each run
Run, Models = Callable[..., Path], Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Makes the model of a run, once."""
    folder = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        if not (folder / name).exists():
            RUNS[name]().save_pretrained(folder / name)
        return folder / name

    return saved


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first frame of a video."""
    path = tmp_path_factory.mktemp("frames") / "first.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def made(model: Models, first: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Makes the folder of results of a run, once; beside them lies what was said."""
    folder = tmp_path_factory.mktemp("generate")

    def run(name: str, of: Path | None = None, more: tuple[str, ...] = ()) -> Path:
        out = folder / name
        if not out.exists():
            options = words("generate", model=of or model(name), out=out, steps=2, **SIDES)
            given = [str(first) if word == first.name else word for word in more or WORDS.get(name, WORDS["others"])]
            done = forked(*with_options(options, *given), folder=folder)
            assert_succeeded(done)
            (folder / f"{name}.out").write_text(done.stdout)
            (folder / f"{name}.err").write_text(done.stderr)
        return out

    return run


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def alone(pipe: Any, seed: int = 0, steps: int = 2, **arguments: Any) -> np.ndarray:
    """The image, or the video [F, Y, X, C], that a plain pipeline makes in this process."""
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(seed)
    found = pipe(num_inference_steps=steps, generator=noise, output_type="np", **SIDES, **arguments)[0]
    return np.rint(found[0] * 255).astype(int)


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


def test_prompts_are_encoded_once_with_the_pipelines_own_guidance(made: Run, model: Models) -> None:
    """With SD3's negative prompt from `encode_prompt` itself, and klein's from a call of its own."""
    sd3 = diffusers.StableDiffusion3Pipeline.from_pretrained(model("text-sd3"), text_encoder_3=None, tokenizer_3=None)
    klein = diffusers.Flux2KleinPipeline.from_pretrained(model("text-klein"))
    for name, image, pipe, prompt, seed in (
        ("text-sd3", "a_tooth_tapa.png", sd3, PROMPTS[0], 0),
        ("text-sd3", "bone_polished_flat.png", sd3, PROMPTS[2], 0),
        ("text-klein", "a_tooth_tapa.png", klein, PROMPTS[0], 7),
    ):
        assert np.abs(pixels(made(name) / "images" / image) - alone(pipe, seed, prompt=prompt)).max() <= 1


def test_a_bound_on_quality_is_checked_on_some_images_and_kept_on_them(made: Run, model: Models) -> None:
    out = made("bounded", model("text-sd3"))
    document = json.loads((out / "metrics.json").read_text())
    (found,), rows = document["quality"], document["images"]
    taken = next(one for one in found["tried"] if one["setting"] == found["setting"])
    assert found["count"] == 3 and taken["kept"]
    assert found["calibrated_on"] == found["checked"] == ["a_tooth", "A_tooth-2"]
    named = zip(("a_tooth", "A_tooth-2", "bone_polished"), ("split",) * 3, (True, True, False), strict=True)
    assert [(row["name"], row["mode"], row["exact_compared"]) for row in rows] == [*named]
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
    assert [(row["name"], row["mode"]) for row in metrics["images"]] == [*product(names, ("flat", "tapa"))]
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


# Videos ---------------------------------------------------------------------------------------------------------------


def video_alone(model: Path, **arguments: Any) -> np.ndarray:
    """The frames that diffusers' own pipeline makes in this process, [F, Y, X, C]."""
    kind = diffusers.WanImageToVideoPipeline if "image" in arguments else diffusers.WanPipeline
    text = {} if "prompt" in arguments else {"text_encoder": None, "tokenizer": None}
    if text:
        arguments |= {"prompt_embeds": torch.zeros(1, 512, tiny_pipelines.TEXT_WIDTH), "guidance_scale": 1.0}
    return alone(kind.from_pretrained(model, **text), steps=STEPS, num_frames=FRAMES, **arguments)


def frames(path: Path) -> np.ndarray:
    found = tifffile.imread(path)
    assert found.dtype == np.uint8 and found.shape == (FRAMES, SIDES["height"], SIDES["width"], 3)
    return found.astype(int)


def test_some_ranks_make_the_videos_of_diffusers_pipelines(made: Run, model: Models, first: Path) -> None:
    expected, image = video_alone(model("wan")), Image.open(first).convert("RGB")
    for name in ("image_flat", "image_tapa"):
        assert np.abs(frames(made("wan") / "images" / f"{name}.tif") - expected).max() <= 1
    found = frames(made("clip") / "images" / "image_tapa.tif")
    assert np.abs(found - video_alone(model("clip"), image=image)).max() <= 1
    scales = {"guidance_scale": 30.0, "guidance_scale_2": 2.0}
    for prompt, name in zip(PROMPTS[::2], ("a_tooth_tapa", "bone_polished_tapa"), strict=True):
        found = frames(made("text-wan") / "images" / f"{name}.tif")
        assert np.abs(found - video_alone(model("text-wan"), prompt=prompt, **scales)).max() <= 1
        assert np.abs(found - video_alone(model("text-wan"), prompt=prompt, guidance_scale=30.0)).max() > 1


def test_what_is_lossy_is_compared_with_the_exact_run_over_all_frames(made: Run, model: Models, first: Path) -> None:
    (row,) = json.loads((made("tokens") / "metrics.json").read_text())["images"]
    exact = video_alone(model("tokens"), image=Image.open(first).convert("RGB"))
    coded = frames(made("tokens") / "images" / "image_coded.tif")
    assert row["mode"] == "coded" and row["exact_compared"] and sum(row["bytes"].values()) > 0
    assert row["psnr_vs_exact_db"] > 60 and np.abs(coded - exact).max() <= 1
    rows = json.loads((made("wan") / "metrics.json").read_text())["images"]
    assert [(row["exact_compared"], row["psnr_vs_exact_db"]) for row in rows] == [(True, None)] * 2


def test_results_of_videos_have_the_promised_names_and_the_report_shows_frames(made: Run) -> None:
    ends = ["mp4", "tif"] if has_encoder() else ["tif"]
    names = [f"image_{preset}.{end}" for preset in ("flat", "tapa") for end in ends]
    assert sorted(path.name for path in (made("wan") / "images").iterdir()) == names
    page = (made("wan") / "report.html").read_text()
    assert "Generated videos" in page and "four of a video's 5 frames" in page
    said = "".join(made("wan").with_suffix(end).read_text() for end in (".out", ".err"))
    assert "1 of 1 videos" in said and ("without an MP4" in said) != has_encoder()


def test_a_first_frame_is_not_replaced_by_its_video(made: Run, model: Models, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(made("clip"), tmp_path / "out")
    image = tmp_path / "out" / "images" / "image_tapa.tif"
    given = {"model": model("clip"), "out": tmp_path / "out", "image": image, "frames": FRAMES, **SIDES}
    assert main(words("generate", "--overwrite", **given)) == 2
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
def test_an_mp4_has_every_frame(made: Run) -> None:
    from imageio_ffmpeg import count_frames_and_secs, read_frames

    for name, fps in (("wan", 9.0), ("clip", 16.0)):
        path = str(made(name) / "images" / "image_tapa.mp4")
        assert count_frames_and_secs(path)[0] == FRAMES
        told = next(read_frames(path))
        assert told["size"] == (SIDES["width"], SIDES["height"]) and told["fps"] == fps


def test_the_deal_counts_a_videos_tokens_and_both_experts(model: Models) -> None:
    wan = model("wan")
    shape, one = load_shape(str(wan)), load_shape(str(wan / "transformer_2"))
    assert shape.parameters == 2 * one.parameters and shape.branches == 2
    request, path = Request(str(wan), GENERATE), wan / "transformer" / "config.json"
    assert image_tokens({"frames": 9, **SIDES}, request, path, shape) == 3 * 2 * 3
    assert image_tokens({}, request, path, shape) == 21 * 30 * 52
    assert (request.video.frames, request.video.fps) == (81, 16)
    tokens = Request(str(model("tokens")), GENERATE)
    assert image_tokens({}, tokens, path, shape) == 31 * 44 * 80, "121 frames of 704 x 1280, with a small VAE"
    assert tokens.video.fps == 24

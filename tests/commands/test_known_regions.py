"""Restoring with families' own pipelines, and with those that only generate, of families and of classes that run by a
plan alone: what is known is kept, and some ranks restore what one process does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import diffusers
import numpy as np
import pytest
import tifffile
import tiny_pipelines
import torch
from cocodiff_eval.data.intensity import IntensityRange, compose_native, prepare_slice
from cocodiff_eval.harness.items import batches_of, count_batches
from cocodiff_eval.harness.pipelines import encode, no_prompt, repeated
from cocodiff_eval.restore.known_regions import LatentLayout, keeping
from cocodiff_eval.restore.pipeline_inpainter import PipelineInpainter, schedule_at
from cocodiff_eval.restore.restore import restore_slices
from cocodiff_eval.restore.tiling import steps_at
from launching import assert_succeeded
from seams import noise_of, unpacking_changed
from torch import Tensor
from warm import forked

from cocodiff.cli.main import main
from cocodiff.config.errors import UserError
from cocodiff.models import pipelines_of
from cocodiff.models.family import INPAINT

# A pipeline, and the frames of its videos. CogVideoX's VAE decodes an odd number of latent frames as it should.
GENERATING: dict[str, tuple[Callable[[], Any], int]] = {
    "flux2": (lambda: tiny_pipelines.flux2_pipeline(klein=False), 1),
    "wan": (tiny_pipelines.wan_pipeline, 5),
    "z_image": (tiny_pipelines.z_image_pipeline, 1),
    "cogvideox": (tiny_pipelines.cogvideox_pipeline, 9),
}
OWN = {name: (build, 1) for name, build in tiny_pipelines.PIPELINES.items()}
MODELS = GENERATING | OWN
STEPS, SIDE, STRENGTH = 4, 32, 0.75
IMAGES_ZYX = np.random.default_rng(0).random((7, 40, 48), dtype=np.float32)
HOLES_ZYX = np.zeros(IMAGES_ZYX.shape, bool)
HOLES_ZYX[1:, 10:26, 8:30] = True
HOLES_ZYX[3:, 30:36, 20:40] = True


def in_one_process(name: str, steps: int = round(STEPS / STRENGTH)) -> tuple[PipelineInpainter, Any]:
    """A family's by its own inpainting pipeline."""
    build, frames = MODELS[name]
    pipe = build()
    pipelines = pipelines_of(type(pipe).__name__, name, type(pipe.transformer).__name__)
    prompt = no_prompt(pipelines, pipe.transformer, torch.float32)
    fixed = {pipelines.guidance: 1.0}
    if name in OWN:
        pipe = getattr(diffusers, pipelines.of_task(INPAINT, name))(**pipe.components)
    inpainter = PipelineInpainter(
        pipe, lambda batch: repeated(prompt, batch) | fixed, steps, 0, side=SIDE, frames=frames
    )
    return inpainter, pipe


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "ranks"), [*product(OWN, (2, 4)), *product(GENERATING, (2, 1, 3, 6))])
def test_some_ranks_restore_what_one_process_does(name: str, ranks: int, tmp_path: Path) -> None:
    """By pipelines that only generate, and by the families' own."""
    build, frames = MODELS[name]
    build().save_pretrained(tmp_path / "model")
    tifffile.imwrite(tmp_path / "scan.tif", IMAGES_ZYX)
    tifffile.imwrite(tmp_path / "holes.tif", HOLES_ZYX.astype(np.uint8))
    options = {"input": "scan.tif", "mask": "holes.tif", "model": "model", "out": "out"}
    words = [word for key, value in options.items() for word in (f"--{key}", tmp_path / value)]
    words += ["--tile", SIDE, "--steps", STEPS, "--strength", STRENGTH, "--ranks", ranks, "--replicas", 1]
    words += ["--frames", frames] if frames > 1 else []
    assert_succeeded(forked("inpaint", *words, "--preset", "flat,tapa", "--no_exact", folder=tmp_path))
    flat_ZYX, tapa_ZYX = (tifffile.imread(tmp_path / f"out/images/scan_holes_{one}.tif") for one in ("flat", "tapa"))
    assert np.array_equal(flat_ZYX, tapa_ZYX) and (tmp_path / "out/report.html").is_file()
    assert np.array_equal(flat_ZYX[~HOLES_ZYX], IMAGES_ZYX[~HOLES_ZYX])
    sent = [sum(row["bytes"].values()) for row in json.loads((tmp_path / "out/metrics.json").read_text())["images"]]
    assert (min(sent[:2]) > 0) is (ranks > 1)

    inpainter, _ = in_one_process(name)
    known = IMAGES_ZYX[~HOLES_ZYX]
    scale = IntensityRange(float(known.min()), float(known.max()))
    batches = batches_of(0, HOLES_ZYX.any((1, 2)), frames, 8, video=frames > 1)
    groups = [batch.indices for batch in batches] if frames > 1 else [range(1, 7)]
    assert len(groups) == (count_batches(6, frames, 1, True)[0] if frames > 1 else 1)
    for group in groups:
        given = [prepare_slice(IMAGES_ZYX[z], HOLES_ZYX[z], scale) for z in group], [HOLES_ZYX[z] for z in group]
        alone = restore_slices(*given, inpainter, batch=16, strength=STRENGTH, limits=scale.limits01)
        for z, alone_YX in zip(group, alone, strict=True):
            alone_YX = compose_native(IMAGES_ZYX[z], alone_YX, HOLES_ZYX[z], scale)
            assert np.abs(alone_YX - flat_ZYX[z]).max() < 1e-4
            assert not np.array_equal(flat_ZYX[z][HOLES_ZYX[z]], IMAGES_ZYX[z][HOLES_ZYX[z]])


@pytest.mark.parametrize(("strength", "fresh"), [(1.0, 0.0), (1.0, 1.0), (0.5, 0.6)])
def test_each_step_keeps_what_is_known_at_its_noise(strength: float, fresh: float) -> None:
    """SD3 by explicit steps of flow matching with the transformer alone."""
    pipe = tiny_pipelines.sd3_pipeline()
    prompt = no_prompt(pipelines_of("StableDiffusion3Pipeline", "sd3"), pipe.transformer, torch.float32)
    inpainter = PipelineInpainter(
        pipe, lambda batch: repeated(prompt, batch) | {"guidance_scale": 1.0}, 6, 3, fresh=fresh
    )
    images_BHW = torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(0))
    masks_BHW = torch.zeros(2, 32, 32)
    masks_BHW[:, 8:24, 12:20] = 1
    restored_BHW = inpainter(images_BHW, masks_BHW, strength, [5, 7])

    generators = noise_of(inpainter, [5, 7])

    def drawn() -> Tensor:
        return torch.stack([torch.randn(16, 16, 16, generator=one) for one in generators])

    with torch.no_grad():
        known = pipe.vae.encode((2 * images_BHW - 1)[:, None].expand(-1, 3, -1, -1)).latent_dist.mode()
        hidden = torch.nn.functional.max_pool2d(masks_BHW[:, None], 2).expand(-1, 16, -1, -1) > 0
        total, running = schedule_at(6, strength)[0], steps_at(6, strength)
        pipe.scheduler.set_timesteps(total)
        sigmas = pipe.scheduler.sigmas[total - running :]
        x = (1 - sigmas[0]) * known + sigmas[0] * drawn() if strength < 1 else drawn()
        embeds = repeated(prompt, 2)
        for sigma, after in pairwise(sigmas):
            of_prompt = embeds["prompt_embeds"], embeds["pooled_prompt_embeds"]
            velocity = pipe.transformer(x, *of_prompt, timestep=(1000 * sigma).expand(2)).sample
            image, noise = x - sigma * velocity, x + (1 - sigma) * velocity
            noise = math.sqrt(1 - fresh**2) * noise + fresh * drawn()
            x = (1 - after) * torch.where(hidden, image, known) + after * noise if after > 0 else image
        pixels_BHW = (pipe.vae.decode(x).sample / 2 + 0.5).clamp(0, 1).mean(dim=1)
    torch.testing.assert_close(restored_BHW, pixels_BHW, atol=1e-4, rtol=0)
    assert restored_BHW.std() > 0.01


def test_a_model_with_an_inpainting_pipeline_restores_either_way(tmp_path: Path) -> None:
    tiny_pipelines.sd3_pipeline().save_pretrained(tmp_path / "model")
    tifffile.imwrite(tmp_path / "scan.tif", IMAGES_ZYX[1])
    words = ["inpaint", "--input", tmp_path / "scan.tif", "--model", tmp_path / "model", "--steps", 3, "--no_exact"]
    for name, more in {"own": [], "ours": ["--fresh_noise", 1], "finer": ["--fresh_noise", 0]}.items():
        assert main([*map(str, [*words, *more, "--quiet", "--out", tmp_path / name])]) == 0
    names = ("own", "ours", "finer")
    assert len({tifffile.imread(tmp_path / name / "images/scan_block_tapa.tif").tobytes() for name in names}) == 3


@pytest.mark.parametrize(
    ("name", "shapes"),
    [("z_image", [(1, SIDE, SIDE), (1, 16, SIDE)]), ("wan", [(1, 5, SIDE, SIDE), (1, 1, SIDE, SIDE)])],
)
def test_sizes_and_numbers_of_frames_have_layouts_of_their_own(name: str, shapes: list[tuple[int, ...]]) -> None:
    calls = [(torch.rand(*shape), torch.ones(*shape), 1.0, [3]) for shape in shapes]
    both, alone = in_one_process(name)[0], in_one_process(name)[0]
    assert both(*calls[0]).shape == shapes[0]
    assert torch.equal(both(*calls[1]), alone(*calls[1]))


@pytest.mark.parametrize(("name", "frames"), [*((name, ()) for name in OWN), ("wan", (3,))])
def test_the_promised_number_of_steps_runs(name: str, frames: tuple[int, ...]) -> None:
    """Steps of videos are counted by slices."""
    inpainter, shape = in_one_process(name, 6)[0], (2, *frames, SIDE, SIDE)
    ticks: list[int] = []
    inpainter.on_step = ticks.append
    for strength in (1.0, 0.5):
        ticks.clear()
        assert inpainter(torch.rand(shape), torch.ones(shape), strength, [0, 1]).shape == shape
        assert ticks == [6 if frames else 2] * steps_at(6, strength)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*GENERATING, "sd3", "flux", "klein", "qwen"])
def test_a_pipeline_is_asked_how_its_latents_lie(name: str, dtype: torch.dtype) -> None:
    """What it takes for the known latents, decoded as it decodes them, are those of its VAE."""
    pipe = MODELS[name][0]()
    if hasattr(pipe.vae, "bn"):
        torch.nn.init.uniform_(pipe.vae.bn.running_mean, -2, 2)
        torch.nn.init.uniform_(pipe.vae.bn.running_var, 0.2, 3)
    pipe.to(dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    pipelines = pipelines_of(type(pipe).__name__, name, type(pipe.transformer).__name__)
    arguments = no_prompt(pipelines, pipe.transformer, dtype) | {pipelines.guidance: 1.0}
    frames = {"wan": 5, "cogvideox": 9}.get(name)
    arguments |= {"height": SIDE, "width": SIDE} | ({"num_frames": frames} if frames else {})
    layout = LatentLayout.asked(pipe, lambda: pipe(num_inference_steps=1, **arguments))
    replaced = (pipe.scheduler, "step"), (pipe.transformer, "_call_impl"), (pipe.vae, "decode")
    assert not any(name in vars(part) for part, name in replaced)
    images_BFHW = torch.rand(1, frames or 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    hidden_BFHW = torch.zeros_like(images_BFHW)
    hidden_BFHW[:, -1, 4:6, 20:24] = 1
    latents_B, hidden_B = layout.known(pipe.vae, images_BFHW, hidden_BFHW)
    assert latents_B.shape == hidden_B.shape and 0 < hidden_B.float().mean() < 0.2

    pipe.vae.decode = Mock(side_effect=KeyboardInterrupt)
    pipe.scheduler.step = lambda _, __, sample, **___: (latents_B.to(sample),)
    with pytest.raises(KeyboardInterrupt):
        pipe(num_inference_steps=1, **arguments)
    decoded = pipe.vae.decode.call_args.args[0]
    pixels = (2 * images_BFHW - 1)[:, None].expand(-1, 3, -1, -1, -1).to(dtype)
    with torch.no_grad():
        encoded = pipe.vae.encode(pixels if len(layout.of_vae) == 4 else pixels[:, :, 0]).latent_dist.mode()
    loose = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(decoded.float(), encoded.float(), atol=loose * float(encoded.abs().max()))


def test_a_pipeline_whose_latents_are_mixed_before_they_are_decoded_is_refused() -> None:
    inpainter, pipe = in_one_process("flux2")
    call = (torch.rand(1, SIDE, SIDE), torch.ones(1, SIDE, SIDE), 1.0, [0])
    with unpacking_changed(pipe, lambda latents: latents + latents.roll(1, -1)), pytest.raises(UserError) as caught:
        inpainter(*call)
    assert all(part in str(caught.value) for part in ("Flux2Pipeline cannot inpaint", "[64, 16]", "VAE"))
    assert inpainter(*call).shape == (1, SIDE, SIDE)


def test_frames_share_a_plan_and_each_keeps_what_is_known_of_it() -> None:
    shown: list[tuple[Tensor, Tensor, Sequence[int]]] = []

    class Videos:
        native_size, multiple, frames, thin = 32, 8, 3, False

        def __call__(self, images_BFHW: Tensor, masks_BFHW: Tensor, strength: float, keys: Sequence[int]) -> Tensor:
            shown.append((images_BFHW, masks_BFHW, keys))
            return torch.where(masks_BFHW > 0, torch.tensor(0.5), images_BFHW)

    images = [np.full((60, 70), value, np.float32) for value in (0.2, 0.4, 0.6, 0.8)]
    masks = [np.zeros((60, 70), bool) for _ in images]
    masks[0][10:20, 10:20] = masks[1][40:50, 50:60] = masks[3][20:30, 20:30] = True
    restored = restore_slices(images, masks, Videos(), batch=4)
    for one_YX, image_YX, mask_YX in zip(restored, images, masks, strict=True):
        assert np.array_equal(one_YX[~mask_YX], image_YX[~mask_YX])
    # The third slice of the first video has nothing hidden, and is its context; the fourth slice is a video of its own.
    assert [images_BFHW.shape[:2] for images_BFHW, *_ in shown] == [(2, 3), (1, 1)]
    hidden = shown[0][1].sum((2, 3))
    assert hidden.sum(0).tolist() == [100, 100, 0]
    shown.clear()
    textured = [*np.random.default_rng(0).random((3, 32, 32), dtype=np.float32)]
    corners = [one_YX[:32, :32] for one_YX in masks[:3]]
    restore_slices(textured, corners, Videos(), batch=4)
    # What is known of a slice is shown as it is, also in holes of the others.
    for image_YX, mask_YX, shown_HW in zip(textured, corners, shown[0][0][0].numpy(), strict=True):
        assert np.array_equal(shown_HW[~mask_YX], image_YX[~mask_YX])
    shown.clear()
    again = restore_slices(images[:2] * 2, masks[:2] * 2, Videos(), batch=4, samples=[0, 0, 1, 1])
    assert [images_BFHW.shape[:2] for images_BFHW, *_ in shown] == [(4, 2)]  # samples are videos of their own
    assert len(again) == 4 and len({*shown[0][2]}) == 4


def test_a_prompt_of_a_class_that_no_family_tells_of() -> None:
    """What it has been turned into makes the image that its words make. Z-Image's prompts are lists, and what its
    `encode_prompt` returns is told by what it looks like."""
    text = tiny_pipelines.qwen3_text()
    pipe = tiny_pipelines.z_image_pipeline(text_encoder=text["text_encoder"].model, tokenizer=text["tokenizer"])
    pipelines = pipelines_of("ZImagePipeline", "z", "ZImageTransformer2DModel")
    (prompt,) = encode(pipelines, pipe, ["a tooth"], True, torch.device("cpu"))
    assert [*prompt] == ["prompt_embeds", "negative_prompt_embeds"]
    pipe.set_progress_bar_config(disable=True)
    settings = {"height": 32, "width": 32, "num_inference_steps": 2, "output_type": "np", "guidance_scale": 3.0}
    whole, by_prompt = (
        pipe(**given, generator=torch.Generator().manual_seed(0), **settings).images
        for given in ({"prompt": "a tooth"}, repeated(prompt, 1))
    )
    assert np.array_equal(by_prompt, whole)
    pipe.encode_prompt = Mock(side_effect=NameError("name 'ftfy' is not defined", name="ftfy"))
    with pytest.raises(UserError, match="pip install ftfy"):
        encode(pipelines, pipe, ["a tooth"], False, torch.device("cpu"))
    pooled, mask, embeds = torch.zeros(1, 4), torch.ones(1, 3, dtype=torch.long), torch.zeros(1, 3, 4)
    ltx = pipelines_of("LTXPipeline", "m", "LTXVideoTransformer3DModel")
    assert ltx.video is not None and ltx.video.frames == 161
    names = ["prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask"]
    assert [*ltx.named((embeds, mask, embeds + 1, mask + 1))] == names
    hunyuan = pipelines_of("HunyuanVideoPipeline", "m", "HunyuanVideoTransformer3DModel")
    assert [*hunyuan.named((embeds, pooled, mask))] == ["prompt_embeds", "pooled_prompt_embeds", names[1]]


@pytest.mark.parametrize("kind", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_a_solver_of_several_steps_takes_each_from_where_the_last_one_left_what_is_known(kind: str) -> None:
    """What it keeps of earlier steps is of another path, so its steps are those of the first order."""
    known_B, hidden_B = torch.full((1, 2, 4), 0.5), torch.arange(8).reshape(1, 2, 4) % 2 == 0

    def restored(order: int) -> Tensor:
        scheduler = getattr(diffusers, kind)(solver_order=order, prediction_type="epsilon")
        pipe = SimpleNamespace(scheduler=scheduler, prepare_latents=lambda: torch.ones(1, 2, 4))
        with keeping(pipe, (known_B, hidden_B), 2, 0.5, [torch.Generator().manual_seed(0)]):
            x = pipe.prepare_latents()
            scheduler.set_timesteps(8)
            for time in scheduler.timesteps:
                x = scheduler.step((0.3 * x).sin(), time, x)[0]
        return x

    torch.testing.assert_close(restored(2), restored(1))

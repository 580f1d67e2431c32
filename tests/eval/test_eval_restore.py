"""Restoring slices of any size: bits outside the mask, determinism, seams, and the diffusers wrapper."""

from typing import Any

import numpy as np
import pytest
import torch
from cocodiff_eval.data.masks import block_mask, center_mask
from cocodiff_eval.restore.pipeline_inpainter import PipelineInpainter, schedule_at
from cocodiff_eval.restore.restore import match_surroundings, plan_slice, restore_slices
from cocodiff_eval.restore.tiling import steps_at
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers import StableDiffusion3InpaintPipeline as InpaintPipeline
from eval_helpers import SmoothInpainter, calls_of, phantom, restore_slice
from hypothesis import given, settings
from hypothesis import strategies as st

from cocodiff.config.errors import UserError

SHAPES = [(97, 131), (256, 256), (20, 500), (500, 20), (16, 16), (32, 32), (31, 200)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["block", "center", "border"])
def test_outside_the_mask_every_bit_stays(shape: tuple[int, int], kind: str) -> None:
    image_YX = phantom(*shape).astype(np.float32)
    mask_YX = block_mask(shape, 4) if kind == "block" else center_mask(shape)
    if kind == "border":
        mask_YX = ~mask_YX
    inpainter = SmoothInpainter()
    restored_YX = restore_slice(image_YX, mask_YX, inpainter, batch=4)
    assert restored_YX.dtype == np.float32 and restored_YX.shape == shape
    assert restored_YX[~mask_YX].tobytes() == image_YX[~mask_YX].tobytes()
    assert restored_YX.min() >= 0 and restored_YX.max() <= 1
    assert len(inpainter.calls) == calls_of(plan_slice(mask_YX, inpainter, 4))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(16, 120), columns=st.integers(16, 120), seed=st.integers(0, 99), batch=st.integers(1, 12))
def test_the_batch_changes_nothing(rows: int, columns: int, seed: int, batch: int) -> None:
    image_YX = phantom(rows, columns).astype(np.float32)
    mask_YX = block_mask((rows, columns), seed)
    one_by_one = SmoothInpainter()
    first_YX = restore_slice(image_YX, mask_YX, one_by_one, batch=1)
    second_YX = restore_slice(image_YX, mask_YX, SmoothInpainter(), batch=batch)
    assert first_YX.tobytes() == second_YX.tobytes()
    keys = [key for _, _, keys in one_by_one.calls for key in keys]
    assert len(set(keys)) == len(keys)


def test_slices_share_calls_and_none_is_changed() -> None:
    """Slices of one and of several levels, with and without a hole, and one with more tiles than a call has."""
    shapes = [(32, 32), (97, 131), (32, 32), (20, 40), (150, 170)]
    images = [phantom(*shape).astype(np.float32) for shape in shapes]
    masks = [block_mask(shape, seed) for seed, shape in enumerate(shapes)]
    masks[2][:] = False
    together, alone = SmoothInpainter(), SmoothInpainter()
    for batch in (3, 16):
        restored = restore_slices(images, masks, together, batch=batch)
        for image_YX, mask_YX, restored_YX in zip(images, masks, restored, strict=True):
            assert restored_YX.tobytes() == restore_slice(image_YX, mask_YX, alone, batch=batch).tobytes()
    assert len(together.calls) < len(alone.calls)
    assert max(len(keys) for _, _, keys in together.calls) <= 16
    together.calls.clear()
    restore_slices(images[:1] * 6, masks[:1] * 6, together, batch=3)
    assert [len(keys) for _, _, keys in together.calls] == [3, 3]


def test_an_empty_mask_calls_no_model() -> None:
    inpainter = SmoothInpainter()
    image_YX = phantom(64, 64).astype(np.float32)
    np.testing.assert_array_equal(restore_slice(image_YX, np.zeros((64, 64), bool), inpainter), image_YX)
    assert not inpainter.calls


def test_a_model_that_knows_the_answer_gives_it_back() -> None:
    """Placing, blending, padding and the levels themselves must add no error of their own."""

    class Constant(SmoothInpainter):
        def __call__(self, images_BHW: Any, masks_BHW: Any, strength: float, noise_keys: Any) -> Any:
            return torch.where(masks_BHW > 0, torch.tensor(0.25), images_BHW)

    mask_YX = center_mask((150, 210))
    image_YX = np.where(mask_YX, 0.9, 0.25).astype(np.float32)
    np.testing.assert_allclose(restore_slice(image_YX, mask_YX, Constant()), 0.25, atol=1e-6)


def test_no_seam_between_tiles_or_at_the_mask() -> None:
    """A model that is too bright everywhere (as a lossy autoencoder is) leaves no step where tiles or holes meet."""

    class Bright(SmoothInpainter):
        def __call__(self, images_BHW: Any, masks_BHW: Any, strength: float, noise_keys: Any) -> Any:
            return (images_BHW + 0.1).clamp(0, 1)

    slope_YX = np.tile(np.linspace(0.2, 0.7, 160, dtype=np.float32), (160, 1))
    mask_YX = np.zeros((160, 160), bool)
    mask_YX[20:140, 70:80] = True
    restored_YX = restore_slice(slope_YX, mask_YX, Bright())
    assert np.abs(restored_YX - slope_YX).max() < 0.02


def test_matching_leaves_a_right_answer_alone() -> None:
    image = phantom(32, 32)
    hidden = center_mask((32, 32))
    np.testing.assert_allclose(match_surroundings(image, image, hidden), image, atol=1e-12)
    np.testing.assert_allclose(match_surroundings(image - 0.1, image, hidden), image, atol=1e-12)
    assert match_surroundings(image, image * 0, hidden | True) is image


@given(steps=st.integers(1, 200), strength=st.floats(0.01, 1.0))
def test_schedules_run_the_promised_steps(steps: int, strength: float) -> None:
    total, start = schedule_at(steps, strength)
    begin = int(max(total - min(total * start, total), 0))  # as diffusers' flow-matching pipelines count
    assert total - begin == steps_at(steps, strength)
    assert (start == 1.0) == (strength == 1.0)


class TinyPipeline:
    """A random-weight SD3 inpainting pipeline, made once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        transformer = SD3Transformer2DModel(
            sample_size=4,
            patch_size=1,
            in_channels=33,
            out_channels=16,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=8,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            pos_embed_max_size=8,
        )
        autoencoder = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            latent_channels=16,
            norm_num_groups=2,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0,
            scaling_factor=1.0,
        )
        absent = dict.fromkeys(
            ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
        )
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.pipe = InpaintPipeline(transformer=transformer, scheduler=scheduler, vae=autoencoder, **absent)
        self.batches: list[int] = []

    def prompt(self, batch: int) -> dict[str, Any]:
        self.batches.append(batch)
        return {
            "prompt_embeds": torch.zeros(batch, 3, 8),
            "pooled_prompt_embeds": torch.zeros(batch, 8),
            "guidance_scale": 1.0,
        }


@pytest.fixture(scope="module")
def tiny() -> TinyPipeline:
    return TinyPipeline()


def test_pipeline_restores_batches(tiny: TinyPipeline, capfd: pytest.CaptureFixture) -> None:
    ticks: list[int] = []
    tiny.batches.clear()
    inpainter = PipelineInpainter(tiny.pipe, tiny.prompt, 5, 7, on_step=ticks.append)
    assert (inpainter.native_size, inpainter.multiple) == (32, 8)
    image_YX = phantom(70, 50).astype(np.float32)
    mask_YX = block_mask((70, 50), 0)
    plan = plan_slice(mask_YX, inpainter, 3)
    restored_YX = restore_slice(image_YX, mask_YX, inpainter, batch=3)
    again_YX = restore_slice(image_YX, mask_YX, inpainter, batch=3)
    assert restored_YX.tobytes() == again_YX.tobytes()
    assert sum(ticks) == 2 * plan.tile_steps(5)
    assert len(tiny.batches) == 2 * calls_of(plan) and max(tiny.batches) > 1
    assert restored_YX[~mask_YX].tobytes() == image_YX[~mask_YX].tobytes()
    assert not np.array_equal(restored_YX, image_YX)
    assert capfd.readouterr() == ("", "")
    assert not hasattr(tiny.pipe, "_progress_bar_config")


def test_pipeline_noise_belongs_to_the_tile(tiny: TinyPipeline) -> None:
    inpainter = PipelineInpainter(tiny.pipe, tiny.prompt, 3, 7)
    images = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    masks = (torch.arange(32)[None, :] > 15).float().expand(32, 32).expand(3, 32, 32)
    for strength in (1.0, 0.4):
        together = inpainter(images, masks, strength, [3, 1, 2])
        alone = inpainter(images[1:2], masks[1:2], strength, [1])
        torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=0)
        other = inpainter(images[1:2], masks[1:2], strength, [9])
        assert (other - alone).abs().max() > 1e-4
    seeded = PipelineInpainter(tiny.pipe, tiny.prompt, 3, 8)(images[1:2], masks[1:2], 1.0, [1])
    assert (seeded - inpainter(images[1:2], masks[1:2], 1.0, [1])).abs().max() > 1e-4


def test_noise_of_each_step_is_the_same_every_time(tiny: TinyPipeline) -> None:
    """A scheduler that draws from torch's global generator, whose state is as it was afterwards."""
    noisy = InpaintPipeline(**tiny.pipe.components | {"scheduler": FlowMatchEulerDiscreteScheduler()})
    noisy.scheduler.register_to_config(stochastic_sampling=True)
    call = (torch.zeros(1, 32, 32), torch.ones(1, 32, 32), 1.0, [3])
    inpainter = PipelineInpainter(noisy, tiny.prompt, 4, 7)
    before = torch.get_rng_state()
    first = inpainter(*call)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(5)
    assert torch.equal(inpainter(*call), first)
    assert not torch.equal(PipelineInpainter(tiny.pipe, tiny.prompt, 4, 7)(*call), first)
    assert not torch.equal(PipelineInpainter(noisy, tiny.prompt, 4, 8)(*call), first)


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
@pytest.mark.parametrize("strength", [0.1, 0.4, 0.5, 1.0])
def test_pipeline_runs_the_promised_steps(tiny: TinyPipeline, steps: int, strength: float) -> None:
    ticks: list[int] = []
    inpainter = PipelineInpainter(tiny.pipe, tiny.prompt, steps, 0, on_step=ticks.append)
    inpainter(torch.zeros(1, 32, 32), torch.ones(1, 32, 32), strength, [0])
    assert len(ticks) == steps_at(steps, strength)


def test_pipeline_keeps_its_own_progress_bar_settings(tiny: TinyPipeline) -> None:
    tiny.pipe.set_progress_bar_config(leave=False)
    PipelineInpainter(tiny.pipe, tiny.prompt, 1, 0)(torch.zeros(1, 32, 32), torch.ones(1, 32, 32), 1.0, [0])
    assert tiny.pipe._progress_bar_config == {"leave": False}
    del tiny.pipe._progress_bar_config


def test_a_pipeline_that_counts_otherwise_or_breaks_down_is_an_error() -> None:
    class Broken:
        default_sample_size, vae_scale_factor, patch_size = 4, 8, 2
        value = float("nan")
        runs = 4

        def set_progress_bar_config(self, **settings: Any) -> None:
            self._progress_bar_config = settings

        def __call__(self, callback_on_step_end: Any, image: torch.Tensor, mask_image: Any, **rest: Any) -> Any:
            for step in range(self.runs):
                callback_on_step_end(self, step, None, {})
            return (torch.full_like(image, self.value),)

    pipe = Broken()
    inpainter = PipelineInpainter(pipe, lambda batch: {}, 4, 0)
    assert inpainter.multiple == 16 and inpainter.native_size == 32
    call = (torch.zeros(1, 32, 32), torch.ones(1, 32, 32), 1.0, [0])
    with pytest.raises(UserError, match="Broken returned NaN or Inf"):
        inpainter(*call)
    pipe.runs = 3
    with pytest.raises(RuntimeError, match=r"Broken ran 3 denoising steps instead of 4 \(num_inference_steps=4"):
        inpainter(*call)
    with pytest.raises(AssertionError, match=r"the model returned \[1, 3\] for \[1, 32, 32\]"):
        fake = SmoothInpainter()
        type(fake).__call__, before = (lambda *_: torch.zeros(1, 3)), type(fake).__call__
        try:
            restore_slice(np.zeros((32, 32), np.float32), center_mask((32, 32)), fake)
        finally:
            type(fake).__call__ = before

"""Restoring slices of any size: bits outside the mask, determinism, seams, and the diffusers wrapper."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cocodiff_eval.data.masks import block_mask, center_mask
from cocodiff_eval.restore.pipeline_inpainter import PipelineInpainter, schedule_at
from cocodiff_eval.restore.restore import match_surroundings, plan_slice, restore_slices
from cocodiff_eval.restore.tiling import steps_at
from diffusers import FlowMatchEulerDiscreteScheduler
from eval_helpers import SmoothInpainter, calls_of, marked, phantom, restore_slice
from hypothesis import given, settings, strategies
from tiny_models import sd3_inpaint_pipeline

from cocodiff.config.errors import UserError


@settings(max_examples=30, deadline=None)
@given(
    rows=strategies.sampled_from([16, 20, 32, 97]),
    columns=strategies.integers(16, 140),
    kind=strategies.sampled_from(["block", "center", "border", "none"]),
    seed=strategies.integers(0, 99),
    batch=strategies.integers(1, 12),
)
def test_outside_the_mask_every_bit_stays_and_the_batch_changes_nothing(
    rows: int, columns: int, kind: str, seed: int, batch: int
) -> None:
    image_YX = phantom(rows, columns).astype(np.float32)
    mask_YX = block_mask((rows, columns), seed) if kind == "block" else center_mask((rows, columns))
    mask_YX = {"border": ~mask_YX, "none": mask_YX & False}.get(kind, mask_YX)
    several, one_by_one = SmoothInpainter(), SmoothInpainter()
    restored_YX = restore_slice(image_YX, mask_YX, several, batch=batch)
    assert restored_YX.dtype == np.float32 and restored_YX.shape == (rows, columns)
    assert restored_YX[~mask_YX].tobytes() == image_YX[~mask_YX].tobytes()
    assert restored_YX.min() >= 0 and restored_YX.max() <= 1
    assert len(several.calls) == calls_of(plan_slice(mask_YX, several, batch)) and bool(several.calls) == mask_YX.any()
    assert restore_slice(image_YX, mask_YX, one_by_one, batch=1).tobytes() == restored_YX.tobytes()
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


class Answering(SmoothInpainter):
    """A model that gives what a function of images and masks says."""

    def __init__(self, answer: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, images_BHW: Any, masks_BHW: Any, strength: float, noise_keys: Any) -> Any:
        return self.answer(images_BHW, masks_BHW)


def test_a_model_that_knows_the_answer_gives_it_back() -> None:
    """Placing, blending, padding and the levels themselves must add no error of their own."""
    mask_YX = center_mask((150, 210))
    image_YX = np.where(mask_YX, 0.9, 0.25).astype(np.float32)
    knowing = Answering(lambda images, masks: torch.where(masks > 0, torch.tensor(0.25), images))
    np.testing.assert_allclose(restore_slice(image_YX, mask_YX, knowing), 0.25, atol=1e-6)


def test_no_seam_between_tiles_or_at_the_mask() -> None:
    """A model that is too bright everywhere (as a lossy autoencoder is) leaves no step where tiles or holes meet."""
    slope_YX = np.tile(np.linspace(0.2, 0.7, 160, dtype=np.float32), (160, 1))
    mask_YX = marked((160, 160), np.s_[20:140, 70:80])
    bright = Answering(lambda images, masks: (images + 0.1).clamp(0, 1))
    assert np.abs(restore_slice(slope_YX, mask_YX, bright) - slope_YX).max() < 0.02


def test_matching_leaves_a_right_answer_alone() -> None:
    image = phantom(32, 32)
    hidden = center_mask((32, 32))
    np.testing.assert_allclose(match_surroundings(image, image, hidden), image, atol=1e-12)
    np.testing.assert_allclose(match_surroundings(image - 0.1, image, hidden), image, atol=1e-12)
    assert match_surroundings(image, image * 0, hidden | True) is image


@given(steps=strategies.integers(1, 200), strength=strategies.floats(0.01, 1.0))
def test_schedules_run_the_promised_steps(steps: int, strength: float) -> None:
    total, start = schedule_at(steps, strength)
    begin = int(max(total - min(total * start, total), 0))  # as diffusers' flow-matching pipelines count
    assert total - begin == steps_at(steps, strength)
    assert (start == 1.0) == (strength == 1.0)
    assert [steps_at(*case) for case in ((20, 1.0), (20, 0.4), (1, 0.4), (2, 0.1), (3, 0.99))] == [20, 8, 1, 1, 3]


@pytest.fixture(scope="module")
def pipe() -> Any:
    """A random-weight SD3 inpainting pipeline of 64 x 64 pixels."""
    return sd3_inpaint_pipeline(2)


def prompt(batch: int) -> dict[str, Any]:
    embeds, pooled = torch.zeros(batch, 3, 16), torch.zeros(batch, 16)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "guidance_scale": 1.0}


ONE = (torch.zeros(1, 64, 64), torch.ones(1, 64, 64))


def test_pipeline_restores_batches_silently(pipe: Any, capfd: pytest.CaptureFixture) -> None:
    """The pipeline's own settings of its progress bar are as they were."""
    ticks, sizes = list[int](), list[int]()
    pipe.set_progress_bar_config(leave=False)
    inpainter = PipelineInpainter(pipe, lambda batch: sizes.append(batch) or prompt(batch), 5, 7, on_step=ticks.append)
    assert (inpainter.native_size, inpainter.multiple) == (64, 8)
    image_YX = phantom(140, 100).astype(np.float32)
    mask_YX = block_mask((140, 100), 0)
    plan = plan_slice(mask_YX, inpainter, 3)
    restored_YX = restore_slice(image_YX, mask_YX, inpainter, batch=3)
    assert restored_YX.tobytes() == restore_slice(image_YX, mask_YX, inpainter, batch=3).tobytes()
    assert sum(ticks) == 2 * plan.tile_steps(5)
    assert len(sizes) == 2 * calls_of(plan) and max(sizes) > 1
    assert restored_YX[~mask_YX].tobytes() == image_YX[~mask_YX].tobytes()
    assert not np.array_equal(restored_YX, image_YX)
    assert capfd.readouterr() == ("", "")
    bar = pipe.progress_bar(total=1)
    assert (bar.leave, bar.disable) == (False, False)
    pipe.set_progress_bar_config()
    PipelineInpainter(pipe, prompt, 1, 0)(*ONE, 1.0, [0])
    assert pipe.progress_bar(total=1).leave


def test_pipeline_noise_belongs_to_the_tile(pipe: Any) -> None:
    inpainter = PipelineInpainter(pipe, prompt, 3, 7)
    images = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    masks = (torch.arange(64)[None, :] > 31).float().expand(64, 64).expand(3, 64, 64)
    for strength in (1.0, 0.4):
        together = inpainter(images, masks, strength, [3, 1, 2])
        alone = inpainter(images[1:2], masks[1:2], strength, [1])
        torch.testing.assert_close(together[1:2], alone, atol=1e-5, rtol=0)
        other = inpainter(images[1:2], masks[1:2], strength, [9])
        assert (other - alone).abs().max() > 1e-4
    seeded = PipelineInpainter(pipe, prompt, 3, 8)(images[1:2], masks[1:2], 1.0, [1])
    assert (seeded - inpainter(images[1:2], masks[1:2], 1.0, [1])).abs().max() > 1e-4


def test_noise_of_each_step_is_the_same_every_time(pipe: Any) -> None:
    """A scheduler that draws from torch's global generator, whose state is as it was afterwards."""
    noisy = type(pipe)(**pipe.components | {"scheduler": FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)})
    inpainter = PipelineInpainter(noisy, prompt, 4, 7)
    before = torch.get_rng_state()
    first = inpainter(*ONE, 1.0, [3])
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(5)
    assert torch.equal(inpainter(*ONE, 1.0, [3]), first)
    assert not torch.equal(PipelineInpainter(pipe, prompt, 4, 7)(*ONE, 1.0, [3]), first)
    assert not torch.equal(PipelineInpainter(noisy, prompt, 4, 8)(*ONE, 1.0, [3]), first)


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
    assert not hasattr(pipe, "_progress_bar_config"), "its own bar is not back"
    pipe.runs = 3
    with pytest.raises(RuntimeError, match=r"Broken ran 3 denoising steps instead of 4 \(num_inference_steps=4"):
        inpainter(*call)
    with pytest.raises(AssertionError, match=r"the model returned \[1, 3\] for \[1, 32, 32\]"):
        restore_slice(np.zeros((32, 32), np.float32), center_mask((32, 32)), Answering(lambda *_: torch.zeros(1, 3)))

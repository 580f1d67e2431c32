"""The shipped checkpoint and its pipeline."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from cocodiff_studies import phantoms
from safetensors import safe_open
from skimage.restoration import inpaint_biharmonic

from cocodiff import demo_model
from cocodiff.demo_model.training import center_mask


def restore(pipeline: Any, images_NHW: np.ndarray, masks_NHW: np.ndarray) -> np.ndarray:
    """Grey images [N, H, W] in [0, 1], restored in two steps; pixels outside the masks as they were."""
    restored = pipeline(
        image=torch.from_numpy(images_NHW)[:, None].repeat(1, 3, 1, 1),
        mask_image=torch.from_numpy(masks_NHW)[:, None].float(),
        height=images_NHW.shape[1],
        width=images_NHW.shape[2],
        strength=1.0,
        num_inference_steps=2,
        guidance_scale=1,
        generator=[torch.Generator().manual_seed(index) for index in range(len(images_NHW))],
        output_type="np",
        **demo_model.prompt_embeddings(len(images_NHW), pipeline.transformer.dtype),
    ).images
    return np.where(masks_NHW, restored[..., 0], images_NHW)


def test_checkpoint_is_small_and_float16() -> None:
    file = demo_model.WEIGHTS / "diffusion_pytorch_model.safetensors"
    assert file.stat().st_size <= 12e6
    with safe_open(file, "pt") as checkpoint:
        assert {checkpoint.get_slice(name).get_dtype() for name in checkpoint.keys()} == {"F16"}  # noqa: SIM118


def test_two_steps_restore_more_than_what_is_smooth_whatever_is_under_the_mask() -> None:
    """Errors are a third of the mean's, and less than half of those of a biharmonic continuation."""
    pipeline = demo_model.load_pipeline()
    assert pipeline.vae_scale_factor == 8
    assert pipeline.transformer.config.num_attention_heads % 12 == 0
    pipeline.set_progress_bar_config(disable=True)
    truth_NHW = np.stack([phantoms.make_slice(seed, family="organ") for seed in phantoms.HELD_OUT_SEEDS[:2]])
    hidden_HW = center_mask()
    masks_NHW = np.stack([hidden_HW] * 2)
    restored_NHW = restore(pipeline, truth_NHW, masks_NHW)
    assert restored_NHW.shape == (2, 96, 96) and np.isfinite(restored_NHW).all()
    random_NHW = np.random.default_rng(0).random(truth_NHW.shape, np.float32)
    assert np.array_equal(restore(pipeline, np.where(masks_NHW, random_NHW, truth_NHW), masks_NHW), restored_NHW)

    def error(restored_HW: np.ndarray | float, truth_HW: np.ndarray) -> float:
        return float(((restored_HW - truth_HW)[hidden_HW] ** 2).mean())

    for restored_HW, truth_HW in zip(restored_NHW, truth_NHW, strict=True):
        smooth_HW = inpaint_biharmonic(np.where(hidden_HW, 0, truth_HW), hidden_HW)
        assert error(restored_HW, truth_HW) < 0.36 * error(truth_HW[~hidden_HW].mean(), truth_HW)
        assert error(restored_HW, truth_HW) < 0.5 * error(smooth_HW, truth_HW)


def test_bfloat16_and_other_sizes() -> None:
    pipeline = demo_model.load_pipeline(torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.transformer.dtype == pipeline.vae.dtype == torch.bfloat16
    images_NHW = np.full((1, 64, 128), 0.5, np.float32)
    masks_NHW = np.zeros((1, 64, 128), bool)
    masks_NHW[:, 16:40, 32:80] = True
    assert np.abs(restore(pipeline, images_NHW, masks_NHW) - 0.5).max() < 0.1


@pytest.mark.full
def test_loading_says_nothing() -> None:
    code = "from cocodiff.demo_model import load_pipeline; load_pipeline()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "" and done.stderr == "", done.stderr

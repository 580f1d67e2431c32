"""Measures the demo model on held-out slices against mean fill and biharmonic inpainting.

    python -m cocodiff_studies.demo_model.evaluate [--steps 20] [--count 20] [--family organ ...] [--sheet FILE.png]

PSNR (decibels, over masked pixels on the [0, 1] range, clipped) and SSIM (scikit-image, window 7, its map averaged in
the mask) are computed per slice and averaged over slices. One sample per slice, strength 1.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from skimage.metrics import structural_similarity
from skimage.restoration import inpaint_biharmonic

from cocodiff.demo_model import WEIGHTS, load_pipeline, prompt_embeddings
from cocodiff.demo_model.training.masks import Mask, block_mask, center_mask

from .slices import FAMILIES, HELD_OUT_SEEDS, make_slice

Stack = NDArray[np.float32]
Masks = NDArray[np.bool_]

SHOWN = 4  # slices of a family and a mask on a sheet


def metrics(restored: Stack, truth: Stack, mask: Mask) -> tuple[float, float]:
    """PSNR in dB and SSIM of one slice [H, W] inside its mask."""
    mse = float(((restored - truth)[mask] ** 2).mean())
    ssim_HW = structural_similarity(restored, truth, win_size=7, data_range=1, full=True)[1]
    return -10 * np.log10(max(mse, 1e-12)), float(ssim_HW[mask].mean())


def fill_mean(images_NHW: Stack, masks_NHW: Masks) -> Stack:
    """The hole gets the mean of the known pixels."""
    means = [image[~mask].mean() for image, mask in zip(images_NHW, masks_NHW, strict=True)]
    return np.where(masks_NHW, np.array(means, np.float32)[:, None, None], images_NHW)


def fill_biharmonic(images_NHW: Stack, masks_NHW: Masks) -> Stack:
    """The hole is continued smoothly from its border."""
    pairs = zip(images_NHW, masks_NHW, strict=True)
    return np.stack([np.clip(inpaint_biharmonic(image, mask), 0, 1) for image, mask in pairs]).astype(np.float32)


def restore(pipeline: Any, images_NHW: Stack, masks_NHW: Masks, steps: int, seed: int = 0, **options: Any) -> Stack:
    """The model's restoration of grey images [N, H, W] in [0, 1]; pixels outside the masks are returned as they
    were."""
    image_N3HW = torch.from_numpy(images_NHW)[:, None].repeat(1, 3, 1, 1)
    # The pipeline takes one image tensor for the whole batch, and one generator per sample.
    restored = pipeline(
        image=image_N3HW,
        mask_image=torch.from_numpy(masks_NHW)[:, None].float(),
        height=images_NHW.shape[1],
        width=images_NHW.shape[2],
        strength=1.0,
        num_inference_steps=steps,
        guidance_scale=1,
        generator=[torch.Generator().manual_seed(seed + index) for index in range(len(images_NHW))],
        output_type="np",
        **prompt_embeddings(len(images_NHW), pipeline.transformer.dtype),
        **options,
    ).images
    return np.where(masks_NHW, restored[..., 0], images_NHW)


def sheet(images_NHW: Stack, masks_NHW: Masks, restored_NHW: Stack) -> NDArray[np.uint8]:
    """One row per slice: original, masked, restored, absolute error times 3."""
    error_NHW = np.minimum(np.abs(restored_NHW - images_NHW) * 3, 1)
    columns = [images_NHW, np.where(masks_NHW, 0, images_NHW), restored_NHW, error_NHW]
    return np.round(np.concatenate([np.concatenate(list(c), 0) for c in columns], 1) * 255).astype(np.uint8)


def measure(pipeline: Any, family: str, count: int, steps: int) -> NDArray[np.uint8]:
    """Prints one line per mask and method; returns a sheet of the first slices of both masks."""
    seeds = HELD_OUT_SEEDS[:count]
    truth_NHW = np.stack([make_slice(seed, family=family) for seed in seeds])
    sheets = []
    for name in ("block", "center"):
        masks = [block_mask(np.random.default_rng(seed)) if name == "block" else center_mask() for seed in seeds]
        masks_NHW = np.stack(masks)
        hidden_NHW = np.where(masks_NHW, 0.5, truth_NHW).astype(np.float32)
        methods: dict[str, Callable[[Stack, Masks], Stack]] = {
            "mean": fill_mean,
            "biharmonic": fill_biharmonic,
            f"model, {steps} steps": lambda images, masks: restore(pipeline, images, masks, steps),
        }
        for method, fill in methods.items():
            restored_NHW = fill(hidden_NHW, masks_NHW)
            values = [metrics(*row) for row in zip(restored_NHW, truth_NHW, masks_NHW, strict=True)]
            psnr, ssim = np.mean(values, 0)
            print(f"{family:8s} {name:7s} {method:18s} {psnr:6.2f} dB  {ssim:.3f}", flush=True)
        sheets.append(sheet(truth_NHW[:SHOWN], masks_NHW[:SHOWN], restored_NHW[:SHOWN]))
    return np.concatenate(sheets, 1)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out slices.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--family", nargs="+", default=["organ"], choices=[*FAMILIES, "mixed"])
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--sheet", type=Path, help="PNG to write: original, masked, restored, error of each family")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pipeline = load_pipeline(weights=arguments.weights)
    pipeline.set_progress_bar_config(disable=True)
    sheets = [measure(pipeline, family, arguments.count, arguments.steps) for family in arguments.family]
    if arguments.sheet:
        from PIL import Image

        Image.fromarray(np.concatenate(sheets)).save(arguments.sheet)


if __name__ == "__main__":
    main()

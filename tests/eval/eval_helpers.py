"""A synthetic slice and a stand-in for a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cocodiff_eval.quality.metrics import Result
from cocodiff_eval.restore.restore import restore_slices
from cocodiff_eval.restore.tiling import RestorationPlan
from torch import Tensor


def phantom(rows: int, columns: int) -> np.ndarray:
    """A disc with an inclusion and a gradient, float64 in [0, 1]."""
    y, x = np.mgrid[0:rows, 0:columns]
    radius = np.hypot((y - rows / 2) / rows, (x - columns / 2) / columns)
    inner = np.hypot((y - rows / 2.5) / rows, (x - columns / 1.8) / columns)
    return np.where(radius < 0.4, 0.6, 0.1) + np.where(inner < 0.1, 0.3, 0.0) + 0.1 * x / columns


def restore_slice(image_YX: np.ndarray, mask_YX: np.ndarray, inpainter: Any, **more: Any) -> np.ndarray:
    """A slice by itself."""
    return restore_slices([image_YX], [mask_YX], inpainter, **more)[0]


def calls_of(plan: RestorationPlan) -> int:
    """How often a plan calls the model."""
    return sum(len(one.batches) for level in plan.levels for one in level.passes)


def row_of(
    name: str, mask: str, mode: str, quality: Mapping[str, Any], seconds: float, sent: Mapping[str, int], **more: Any
) -> dict[str, Any]:
    """A row of metrics.json. more: further fields of `Result`."""
    return Result(name, mask, mode, **quality, seconds=seconds, bytes=sent, **more).row()


class SmoothInpainter:
    """A model without weights: smooth surface plus keyed noise where hidden. Remembers what it was shown."""

    frames, thin = 1, False

    def __init__(self, native_size: int = 32, multiple: int = 8) -> None:
        self.native_size = native_size
        self.multiple = multiple
        self.calls: list[tuple[int, float, tuple[int, ...]]] = []
        self.shown: list[bytes] = []

    def __call__(self, images_BHW: Tensor, masks_BHW: Tensor, strength: float, noise_keys: Sequence[int]) -> Tensor:
        assert images_BHW.dtype == masks_BHW.dtype == torch.float32
        assert images_BHW.shape == masks_BHW.shape == (len(noise_keys), self.native_size, self.native_size)
        assert float(images_BHW.min()) >= 0 and float(images_BHW.max()) <= 1
        self.calls.append((len(noise_keys), strength, tuple(noise_keys)))
        self.shown.append(images_BHW.numpy().tobytes() + masks_BHW.numpy().tobytes())
        noise = torch.stack(
            [
                torch.rand(images_BHW.shape[1:], generator=torch.Generator().manual_seed(key + 1)) - 0.5
                for key in noise_keys
            ]
        )
        return (images_BHW + 0.2 * strength * noise * masks_BHW).clamp(0, 1)

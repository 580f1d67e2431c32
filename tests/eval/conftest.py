"""A synthetic slice and stand-ins for models."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from torch import Tensor

from cocodiff_eval.slices import Stack, open_stack


def phantom(rows: int, columns: int) -> np.ndarray:
    """A disc with an inclusion and a gradient, float64 in [0, 1]."""
    y, x = np.mgrid[0:rows, 0:columns]
    radius = np.hypot((y - rows / 2) / rows, (x - columns / 2) / columns)
    inner = np.hypot((y - rows / 2.5) / rows, (x - columns / 1.8) / columns)
    return np.where(radius < 0.4, 0.6, 0.1) + np.where(inner < 0.1, 0.3, 0.0) + 0.1 * x / columns


class SmoothInpainter:
    """A model without weights: smooth surface plus keyed noise where hidden. Remembers what it was shown."""

    def __init__(self, native_size: int = 32, multiple: int = 8) -> None:
        self.native_size = native_size
        self.multiple = multiple
        self.calls: list[tuple[int, float, tuple[int, ...]]] = []
        self.shown: list[bytes] = []

    def __call__(self, images_BHW: Tensor, masks_BHW: Tensor, strength: float, noise_keys: Sequence[int]) -> Tensor:
        assert images_BHW.dtype == masks_BHW.dtype == torch.float32
        assert images_BHW.shape == masks_BHW.shape == (len(noise_keys), self.native_size, self.native_size)
        assert 0 <= float(images_BHW.min()) and float(images_BHW.max()) <= 1
        self.calls.append((len(noise_keys), strength, tuple(noise_keys)))
        self.shown.append(images_BHW.numpy().tobytes() + masks_BHW.numpy().tobytes())
        noise = torch.stack(
            [
                torch.rand(images_BHW.shape[1:], generator=torch.Generator().manual_seed(key + 1)) - 0.5
                for key in noise_keys
            ]
        )
        return (images_BHW + 0.2 * strength * noise * masks_BHW).clamp(0, 1)


@pytest.fixture
def inpainter() -> SmoothInpainter:
    return SmoothInpainter()


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    """Three slices of 40 x 52, uint16."""
    volume = np.stack([phantom(40, 52) * (0.8 + 0.1 * n) for n in range(3)])
    path = tmp_path / "scan.tif"
    tifffile.imwrite(path, (volume * 60000).astype(np.uint16), photometric="minisblack")
    return open_stack(str(path))

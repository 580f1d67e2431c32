"""Continues an image smoothly into its holes: the harmonic (soap-film) fill, coarse to fine, batched and on any
device."""

import torch
from torch import Tensor
from torch.nn import functional

SWEEPS = 10


def fill_holes(image_BHW: Tensor, known_BHW: Tensor) -> Tensor:
    """Pixels where `known_BHW` (bool) is False get values between those around them; float32 [B, H, W] in and out.

    At every scale, from a few pixels up, the hole starts from the coarser solution and is relaxed `SWEEPS` times
    towards the mean of its neighbours. An image with nothing known becomes 0.
    """
    filled_B1HW = _fill(image_BHW[:, None] * known_BHW[:, None], known_BHW[:, None])
    return filled_B1HW[:, 0]


def _fill(image_B1HW: Tensor, known_B1HW: Tensor) -> Tensor:
    height, width = image_B1HW.shape[2:]
    if max(height, width) <= 2:
        share = known_B1HW.float().mean((2, 3), keepdim=True).clamp_min(1e-6)
        return torch.where(known_B1HW, image_B1HW, image_B1HW.mean((2, 3), keepdim=True) / share)
    odd = (0, width % 2, 0, height % 2)
    share = functional.avg_pool2d(functional.pad(known_B1HW.float(), odd), 2)
    total = functional.avg_pool2d(functional.pad(image_B1HW, odd), 2)
    coarse = _fill(total / share.clamp_min(0.25), share > 0)
    start = functional.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)[:, :, :height, :width]
    filled_B1HW = torch.where(known_B1HW, image_B1HW, start)
    kernel = torch.tensor([[1.0, 2, 1], [2, 0, 2], [1, 2, 1]], device=image_B1HW.device)[None, None] / 12
    for _ in range(SWEEPS):
        mean = functional.conv2d(functional.pad(filled_B1HW, (1, 1, 1, 1), mode="replicate"), kernel)
        filled_B1HW = torch.where(known_B1HW, image_B1HW, mean)
    return filled_B1HW

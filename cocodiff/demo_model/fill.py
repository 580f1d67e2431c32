"""Continues an image smoothly into its holes: the biharmonic (thin-plate) fill, coarse to fine, batched and on any
device."""

import torch
from torch import Tensor
from torch.nn import functional

ITERATIONS = 20


def fill_holes(image_BHW: Tensor, known_BHW: Tensor) -> Tensor:
    """Pixels where `known_BHW` (bool) is False continue their surroundings; float32 [B, H, W] in and out.

    At every scale, from a few pixels up, the hole starts from the coarser solution and takes at most `ITERATIONS`
    steps of conjugate gradients towards the least sum of squared Laplacians. An image with nothing known becomes 0.
    """
    height, width = image_BHW.shape[1:]
    image_BHW = image_BHW * known_BHW
    if max(height, width) <= 3:
        share = known_BHW.float().mean((1, 2), keepdim=True).clamp_min(1e-6)
        return torch.where(known_BHW, image_BHW, image_BHW.mean((1, 2), keepdim=True) / share)
    odd = (0, width % 2, 0, height % 2)
    share = functional.avg_pool2d(functional.pad(known_BHW.float(), odd)[:, None], 2)[:, 0]
    total = functional.avg_pool2d(functional.pad(image_BHW, odd)[:, None], 2)[:, 0]
    coarse = fill_holes(total / share.clamp_min(0.25), share > 0)
    start = functional.interpolate(coarse[:, None], scale_factor=2, mode="bilinear", align_corners=False)
    return _relax(torch.where(known_BHW, image_BHW, start[:, 0, :height, :width]), (~known_BHW).float())


def _relax(image_BHW: Tensor, hole_BHW: Tensor) -> Tensor:
    """Conjugate gradients on the hole's pixels, every image on its own."""
    residual = -hole_BHW * _laplacian(_laplacian(image_BHW))
    direction, size = residual, (residual * residual).sum((1, 2), keepdim=True)
    for _ in range(ITERATIONS):
        image_of = hole_BHW * _laplacian(_laplacian(direction))
        length = size / (direction * image_of).sum((1, 2), keepdim=True).clamp_min(1e-20)
        image_BHW = image_BHW + length * direction
        residual = residual - length * image_of
        size, previous = (residual * residual).sum((1, 2), keepdim=True), size
        direction = residual + size / previous.clamp_min(1e-20) * direction
    return image_BHW


def _laplacian(image_BHW: Tensor) -> Tensor:
    """Sum of the four neighbours' differences; the image goes on evenly beyond its border."""
    rows, columns = image_BHW.diff(dim=1), image_BHW.diff(dim=2)
    return (
        functional.pad(rows, (0, 0, 0, 1))
        - functional.pad(rows, (0, 0, 1, 0))
        + functional.pad(columns, (0, 1))
        - functional.pad(columns, (1, 0))
    )

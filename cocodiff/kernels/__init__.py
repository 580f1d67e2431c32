"""The engine's data movement and element-wise arithmetic as operations: meaning in torch, speed by SYCL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from cocodiff_sycl.parts import Rows
from torch import Tensor

from cocodiff.kernels.dispatch import PATHS, Kernels, moved_by, sycl_ops
from cocodiff.kernels.reference import TorchOps

__all__ = ["PATHS", "Kernels", "Rows", "TorchOps", "moved_by", "sycl_ops", "views"]


def views(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a packed buffer, in the order and the shapes in which `pack` put them there."""
    with torch._C.DisableTorchFunction():  # nobody who counts operations counts these: half of a plan's calls
        parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

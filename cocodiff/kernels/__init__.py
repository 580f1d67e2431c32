"""The engine's data movement and element-wise arithmetic as operations. Torch defines each result; SYCL computes it
faster."""

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
    """Cut a packed buffer into its parts, and return a view of each with its shape. The buffer is not copied.

    Args:
        buffer: one-dimensional buffer that `pack` has filled.
        shapes: shapes of the parts, in the order in which `pack` laid them out.
    """
    with torch._C.DisableTorchFunction():  # half of a plan's calls, which counters of operations need not count
        parts = buffer.split_with_sizes([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

"""The engine's data movement and element-wise arithmetic as operations. Torch defines each result; SYCL computes it
faster."""

from __future__ import annotations

from cocodiff_sycl.parts import Rows

from cocodiff.kernels.dispatch import PATHS, Kernels, moved_by, sycl_ops
from cocodiff.kernels.reference import TorchOps

__all__ = ["PATHS", "Kernels", "Rows", "TorchOps", "moved_by", "sycl_ops"]

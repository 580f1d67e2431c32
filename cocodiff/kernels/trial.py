"""Whether a device's SYCL operations give what torch's do, on small tensors: what no machine without it can show."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cocodiff_sycl import SyclOps
from torch import Tensor

from cocodiff.kernels.reference import TorchOps

STEPS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # relative: an ulp, and some of float32's
B, L, H, D = 1, 70, 3, 128


def wrong_operations(ops: SyclOps, dtypes: Sequence[torch.dtype] = tuple(STEPS)) -> list[str]:
    """Operations, each with its dtype, that differ from torch's by more than docs/kernels.md allows, or fail."""
    wrong = []
    for dtype in dtypes:
        for op in ("pack", "l1_score", "qk_norm_rope", "merge_partials", "select"):
            try:
                found, expected = (_run(op, one, dtype, ops.device) for one in (ops, TorchOps()))
                torch.testing.assert_close(found, expected, rtol=STEPS[dtype], atol=STEPS[dtype])
            except (AssertionError, RuntimeError):
                wrong.append(f"{op} in {str(dtype).removeprefix('torch.')}")
    return wrong


def _run(op: str, ops: SyclOps | TorchOps, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind).to(device)

    x_BLHD, other_BLHD = random(B, L, H + 1, D)[:, :, :H], random(B, L, H, D)
    if op == "pack":
        buffer = torch.zeros(B * L * H * D, dtype=dtype, device=device)
        ops.pack([[x_BLHD]], [buffer])
        return [buffer]
    if op == "l1_score":
        return ops.l1_score(x_BLHD, other_BLHD)
    if op == "select":
        return [ops.select(random(B, L, kind=torch.float32), L // 3)]
    if op == "merge_partials":
        lse_BLH, part_lse_BLH = random(B, L, H, kind=torch.float32), random(B, L, H, kind=torch.float32)
        ops.merge_partials(other_BLHD, lse_BLH, x_BLHD, part_lse_BLH)
        return [other_BLHD, lse_BLH]
    angles_LD = [random(L, D, kind=torch.float32) for _ in "cs"]
    return [ops.qk_norm_rope(x_BLHD, random(D), 1e-6, angles_LD, "pairs")]

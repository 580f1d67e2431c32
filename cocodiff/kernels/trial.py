"""Whether a device's SYCL operations give what torch's do, on small tensors: what no machine without it can show."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cocodiff_sycl import SyclOps
from cocodiff_sycl.rows import Rows
from torch import Tensor

from cocodiff.kernels.choices import OPS
from cocodiff.kernels.reference import TorchOps
from cocodiff.kernels.residual import NOTES, Onward, Prediction, Reconstructions, coded_width

STEPS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # relative: an ulp, and some of float32's
B, L, H, D = 1, 70, 3, 128


def wrong_operations(ops: SyclOps, dtypes: Sequence[torch.dtype] = tuple(STEPS)) -> list[str]:
    """Operations, each with its dtype, that differ from torch's by more than docs/kernels.md allows, or fail."""
    wrong = []
    for dtype in dtypes:
        for op in OPS:
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
    if op in ("unpack", "gather_pack", "scatter_rows"):
        return _moved(op, ops, x_BLHD, other_BLHD)
    if op in ("encode_residual", "decode_residual"):
        return _coded(op, ops, x_BLHD, Reconstructions(other_BLHD, random(B, L, H, D)))
    if op == "continue_linearly":
        operand_BLHD = torch.zeros_like(x_BLHD)
        ops.continue_linearly(x_BLHD, other_BLHD, Onward(0.5, operand_BLHD))
        return [operand_BLHD]
    if op == "note_change":
        notes_N = torch.zeros(NOTES, dtype=torch.int64, device=device)
        ops.note_change(x_BLHD, other_BLHD, notes_N)
        return [other_BLHD, notes_N]
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


def _moved(op: str, ops: SyclOps | TorchOps, x_BLHD: Tensor, other_BLHD: Tensor) -> list[Tensor]:
    """Every second row, from one tensor or to another."""
    index_K = torch.arange(0, L, 2, device=x_BLHD.device)
    if op == "unpack":
        ops.unpack([other_BLHD], [x_BLHD])
        return [x_BLHD]
    if op == "scatter_rows":
        ops.scatter_rows([other_BLHD[0, : len(index_K)]], index_K, [x_BLHD[0]])
        return [x_BLHD]
    buffer = torch.zeros(len(index_K) * H * D, dtype=x_BLHD.dtype, device=x_BLHD.device)
    ops.gather_pack([[Rows(x_BLHD[0], index_K, other_BLHD[0], index_K)]], [buffer])
    return [buffer, other_BLHD]


def _coded(op: str, ops: SyclOps | TorchOps, x_BLHD: Tensor, known: Reconstructions) -> list[Tensor]:
    """By a linear continuation, in all numbers of bits. What is decoded is what torch encoded."""
    assert known.before is not None
    found = []
    for bits in (2, 4, 8):
        code_BLHW = torch.zeros(B, L, H, coded_width(D, bits), dtype=torch.uint8, device=x_BLHD.device)
        notes_N = torch.zeros(NOTES, dtype=torch.int64, device=x_BLHD.device)
        ends = [Reconstructions(known.last, known.before.clone()) for _ in range(2)]
        encoder = ops if op == "encode_residual" else TorchOps()
        how = Prediction(0.75, linear=True, compare=True, measure=True)
        encoder.encode_residual(x_BLHD, ends[0], how, bits, code_BLHW, notes_N)
        operand_BLHD = torch.zeros_like(x_BLHD)
        if op == "decode_residual":
            ops.decode_residual(code_BLHW, ends[1], 0.75, bits, Onward(0.5, operand_BLHD))
        found += [code_BLHW, notes_N, operand_BLHD, *(end.before for end in ends if end.before is not None)]
    return found

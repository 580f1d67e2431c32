"""Which path an operation takes: the sizes from which on it is SYCL's, for `auto` as `cocodiff bench kernels` measured
it per device.

CPU figures are of a 2-core AMD EPYC (docs/benchmarks.md). SYCL is the faster one for smaller tensors too, but a run of
those gains less than the half second that opening it takes. No Intel GPU was measured: there all operations that save
passes over memory go to SYCL, on the evidence of the table of bytes in docs/kernels.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

MIB = 2**20
NEVER = math.inf
CPU: dict[str, float] = {  # bytes
    "pack": MIB // 2,
    "unpack": NEVER,
    "gather_pack": MIB // 2,
    "scatter_rows": MIB // 2,
    "l1_score": MIB // 4,
    "select": 4000,
    "qk_norm_rope": MIB // 2,
    "merge_partials": 8192,
    "encode_residual": MIB // 4,
    "note_change": MIB // 4,
    "decode_residual": MIB // 4,
    "continue_linearly": MIB // 4,
    # torch has no operation for it: bit by bit it takes 4 ms for the smallest tensors, SYCL .05
    **dict.fromkeys(("encode_lossless", "stream_lengths", "decode_lossless"), 1024),
}
OPS = tuple(CPU)
CHOICES: dict[str, dict[str, float]] = {"cpu": CPU, "xpu": dict.fromkeys(OPS, 0)}  # device -> operation -> bytes
WITH_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
PATHS = ("auto", "sycl", "torch")


def begins_of(path: str, device: str, dtype: torch.dtype) -> Mapping[str, float]:
    """The size from which on each operation is SYCL's, on a type of device."""
    if path == "auto" and dtype in WITH_KERNELS and device in CHOICES:
        return CHOICES[device]
    # Bytes, which codes are, have no kernels: torch moves them also where SYCL is asked for.
    return dict.fromkeys(OPS, 0 if path == "sycl" and dtype != torch.uint8 else NEVER)

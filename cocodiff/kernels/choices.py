"""Which path `auto` takes: from how large an operation is on, as `cocodiff bench kernels` measured it per device.

CPU figures are of a 2-core AMD EPYC (docs/benchmarks.md). No Intel GPU was measured: there all operations that save
passes over memory go to SYCL, on the evidence of the table of bytes in docs/kernels.md.
"""

from __future__ import annotations

import torch

NEVER = 2**62
MIB = 2**20
# device -> operation -> bytes from which SYCL is taken, with one thread and with more
CHOICES: dict[str, dict[str, tuple[int, int]]] = {
    "cpu": {
        "pack": (NEVER, NEVER),
        "unpack": (NEVER, NEVER),
        "gather_pack": (MIB // 2, MIB // 2),
        "scatter_rows": (4 * MIB, 32 * MIB),
        "l1_score": (MIB // 4, MIB // 4),
        "select": (4000, 4000),
        "qk_norm_rope": (MIB // 4, MIB // 4),
        "merge_partials": (MIB // 4, MIB // 4),
    },
    "xpu": dict.fromkeys(
        ("pack", "unpack", "gather_pack", "scatter_rows", "l1_score", "select", "qk_norm_rope", "merge_partials"),
        (0, 0),
    ),
}


def chooses_sycl(op: str, device: str, threads: int, dtype: torch.dtype, size: int) -> bool:
    """Whether SYCL is the faster one for `size` bytes. Numbers that are not of 16 or 32 bits have no kernels."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or device not in CHOICES:
        return False
    one, more = CHOICES[device][op]
    return size >= (one if threads == 1 else more)

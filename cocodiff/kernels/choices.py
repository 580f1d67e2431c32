"""Which path `auto` takes: from how large an operation is on, as `cocodiff bench kernels` measured it per device.

CPU figures are of a 2-core AMD EPYC (docs/benchmarks.md). No Intel GPU was measured: there all operations that save
passes over memory go to SYCL, on the evidence of the table of bytes in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = 2**62
MIB = 2**20
# device -> operation -> bytes from which SYCL is taken, with one thread and with more
CHOICES: dict[str, dict[str, tuple[int, int]]] = {
    "cpu": {
        "pack": (MIB // 2, MIB // 2),
        "unpack": (NEVER, NEVER),
        "gather_pack": (MIB // 2, MIB // 2),
        "scatter_rows": (MIB // 2, MIB // 2),
        "l1_score": (MIB // 4, MIB // 4),
        "select": (4000, 4000),
        "qk_norm_rope": (MIB // 2, MIB // 2),
        "merge_partials": (8192, 8192),
    },
    "xpu": dict.fromkeys(
        ("pack", "unpack", "gather_pack", "scatter_rows", "l1_score", "select", "qk_norm_rope", "merge_partials"),
        (0, 0),
    ),
}


# The same, as it is looked up in every call: operation -> on a CPU with one thread and with more, on an XPU.
_LEAST = {op: (*both, CHOICES["xpu"][op][0]) for op, both in CHOICES["cpu"].items()}
_WITH_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


def chooses_sycl(op: str, moved: Sequence[Tensor]) -> bool:
    """Whether SYCL is the faster one for these tensors. Numbers that are not of 16 or 32 bits have no kernels."""
    some = moved[0]
    if some.is_cpu:
        least = _LEAST[op][torch.get_num_threads() > 1]
    elif some.is_xpu:
        least = _LEAST[op][2]
    else:
        return False
    if least == NEVER or some.dtype not in _WITH_KERNELS:
        return False
    for tensor in moved:
        least -= tensor.nbytes
        if least <= 0:
            return True
    return False

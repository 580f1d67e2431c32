"""Which path `auto` takes: from how large an operation is on, as `cocodiff bench kernels` measured it per device.

CPU figures are of a 2-core AMD EPYC (docs/benchmarks.md). SYCL is the faster one for much smaller tensors too, but a
run of those gains less than the half second that opening it takes. No Intel GPU was measured: there all operations that
save passes over memory go to SYCL, on the evidence of the table of bytes in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = 2**62
MIB = 2**20
# device -> operation -> bytes from which SYCL is taken; with one thread and with two the same
CHOICES: dict[str, dict[str, int]] = {
    "cpu": {
        "pack": MIB // 2,
        "unpack": NEVER,
        "gather_pack": MIB // 2,
        "scatter_rows": MIB // 2,
        "l1_score": MIB // 4,
        "select": 4000,
        "qk_norm_rope": MIB // 2,
        "merge_partials": 8192,
    },
    "xpu": dict.fromkeys(
        ("pack", "unpack", "gather_pack", "scatter_rows", "l1_score", "select", "qk_norm_rope", "merge_partials"), 0
    ),
}
_ON_CPU, _ON_XPU = CHOICES["cpu"], CHOICES["xpu"]
_WITH_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


def chooses_sycl(op: str, moved: Sequence[Tensor]) -> bool:
    """Whether SYCL is the faster one for these tensors. Numbers that are not of 16 or 32 bits have no kernels.

    Every operation asks, so this is part of what a launch costs: it looks at as little as it can. Ranks have nearly
    equal shares, so the first tensor tells the size of all.
    """
    some = moved[0]
    least = _ON_CPU[op] if some.is_cpu else _ON_XPU[op] if some.is_xpu else NEVER
    return some.nbytes * len(moved) >= least and some.dtype in _WITH_KERNELS

"""Which path `auto` takes: at which sizes an operation changes between torch and SYCL, as `cocodiff bench kernels`
measured it per device.

CPU figures are of a 2-core AMD EPYC (docs/benchmarks.md). SYCL is the faster one for much smaller tensors too, but a
run of those gains less than the half second that opening it takes. No Intel GPU was measured: there all operations that
save passes over memory go to SYCL, on the evidence of the table of bytes in docs/kernels.md.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

MIB = 2**20
Switches = tuple[int, ...]  # bytes: from the first on SYCL runs, from the second on torch again, and so on
ONE_THREAD: dict[str, Switches] = {
    "pack": (MIB // 2,),
    "unpack": (MIB // 2,),
    "gather_pack": (MIB // 2,),
    "scatter_rows": (MIB // 2,),
    "l1_score": (MIB // 4,),
    "select": (4000,),
    "qk_norm_rope": (MIB // 2,),
    "merge_partials": (8192,),
}
OPS = tuple(ONE_THREAD)
# device -> operation -> sizes
CHOICES: dict[str, dict[str, Switches]] = {
    "cpu": ONE_THREAD,
    # torch's second thread still waits for work of its own, on the core that SYCL's would take (docs/benchmarks.md).
    "cpu, several threads": {**ONE_THREAD, "unpack": (MIB // 2, 3 * MIB // 2, 16 * MIB)},
    "xpu": dict.fromkeys(OPS, (0,)),
}
_WITH_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


def chooser(threads: int) -> Callable[[str, Sequence[Tensor]], bool]:
    """Whether SYCL is the faster one of an operation for tensors, where torch has so many threads. Numbers that are not
    of 16 or 32 bits have no kernels.

    Every operation asks, so this is part of what a launch costs: it looks at as little as it can. Ranks have nearly
    equal shares, so the first tensor tells the size of all.
    """
    on_cpu, on_xpu = CHOICES["cpu" if threads == 1 else "cpu, several threads"], CHOICES["xpu"]

    def chooses_sycl(op: str, moved: Sequence[Tensor]) -> bool:
        some = moved[0]
        switches = on_cpu[op] if some.is_cpu else on_xpu[op] if some.is_xpu else ()
        return bisect(switches, some.nbytes * len(moved)) & 1 == 1 and some.dtype in _WITH_KERNELS

    return chooses_sycl

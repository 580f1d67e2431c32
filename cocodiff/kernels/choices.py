"""Which path an operation takes: the sizes at which it changes between torch and SYCL, for `auto` as
`cocodiff bench kernels` measured it per device.

CPU figures are of a 2-core AMD EPYC (docs/benchmarks.md). SYCL is the faster one for much smaller tensors too, but a
run of those gains less than the half second that opening it takes. No Intel GPU was measured: there all operations that
save passes over memory go to SYCL, on the evidence of the table of bytes in docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

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
    "encode_residual": (MIB // 4,),
    "note_change": (MIB // 4,),
    "decode_residual": (MIB // 4,),
    "continue_linearly": (MIB // 4,),
    # torch has no operation for it: bit by bit it takes 4 ms for the smallest tensors, SYCL .05.
    **dict.fromkeys(("encode_lossless", "stream_lengths", "decode_lossless"), (1024,)),
}
OPS = tuple(ONE_THREAD)
# device -> operation -> sizes
CHOICES: dict[str, dict[str, Switches]] = {
    "cpu": ONE_THREAD,
    # After torch's own work its second thread looks for more, on the core that SYCL's second thread would take:
    # docs/measurements/kernels.md.
    "cpu, several threads": {**ONE_THREAD, "unpack": (MIB // 2, 3 * MIB // 2, 12 * MIB)},
    "xpu": dict.fromkeys(OPS, (0,)),
}
WITH_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
PATHS = ("auto", "sycl", "torch")


def switches_of(path: str, device: str, dtype: torch.dtype, threads: int) -> Mapping[str, Switches]:
    """The sizes at which each operation switches, on a type of device, where torch has so many threads."""
    if path == "auto" and dtype in WITH_KERNELS:
        found = CHOICES.get("cpu, several threads" if device == "cpu" and threads > 1 else device)
        if found is not None:
            return found
    # Bytes, which codes are, have no kernels: torch moves them also where SYCL is asked for.
    return dict.fromkeys(OPS, (0,) if path == "sycl" and dtype != torch.uint8 else ())

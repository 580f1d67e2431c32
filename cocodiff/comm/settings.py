"""Settings of communication libraries that take the overlap of messages and computation away. Pure data.

Sources: CCL_OP_SYNC makes the host wait for each operation and CCL_ATL_TRANSPORT=ofi moves GPU buffers synchronously
(oneCCL's environment variables); CUDA_LAUNCH_BLOCKING and TORCH_NCCL_BLOCKING_WAIT are PyTorch's (its pages on CUDA
semantics and on ProcessGroupNCCL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ONECCL = ("xccl", "ccl")


class Killer(NamedTuple):
    """setting: as it stands in the environment; harm: what it does; remedy: what to do instead."""

    setting: str
    harm: str
    remedy: str


def overlap_killers(environment: Mapping[str, str], library: str, device: str) -> list[Killer]:
    """Variables in the environment that make messages of `library` block on a device ("cpu", "xpu", "cuda")."""

    def is_on(name: str) -> bool:
        return environment.get(name, "").strip().lower() in ("1", "true", "yes", "on")

    found = []
    if library in ONECCL and is_on("CCL_OP_SYNC"):
        found.append(Killer("CCL_OP_SYNC=1", "makes every oneCCL call wait for its end", "unset CCL_OP_SYNC"))
    if library in ONECCL and device == "xpu" and environment.get("CCL_ATL_TRANSPORT", "").lower() == "ofi":
        found.append(
            Killer("CCL_ATL_TRANSPORT=ofi", "makes oneCCL synchronous on GPU buffers", "export CCL_ATL_TRANSPORT=mpi")
        )
    if library == "nccl" and is_on("TORCH_NCCL_BLOCKING_WAIT"):
        found.append(
            Killer("TORCH_NCCL_BLOCKING_WAIT=1", "makes waiting block the host", "unset TORCH_NCCL_BLOCKING_WAIT")
        )
    if device == "cuda" and is_on("CUDA_LAUNCH_BLOCKING"):
        found.append(
            Killer("CUDA_LAUNCH_BLOCKING=1", "makes every kernel launch wait for its end", "unset CUDA_LAUNCH_BLOCKING")
        )
    return found

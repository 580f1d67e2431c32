"""The choice between SYCL and torch, made and reported once for each call of an operation.

`auto` uses SYCL from a size on that depends on the operation. SYCL is opened when the first operation needs it, so a
run without one pays nothing. Where SYCL kernels cannot be built, torch runs and one log line says why. With `sycl`
asked for by name that is an error.

CPU figures are of a 2-core AMD EPYC (docs/measurements/kernels-1-every-case.csv). SYCL is faster for smaller tensors
too, but a run of those gains less than the half second that opening it takes. No Intel GPU was measured. There all
operations go to SYCL, because they save passes over memory by the byte counts in docs/design.md.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cocodiff.config.errors import UserError
from cocodiff.kernels.reference import TorchOps

if TYPE_CHECKING:
    from cocodiff_sycl.ops import SyclOps

MIB = 2**20
NEVER = math.inf
STREAMED = ("encode_lossless", "stream_lengths", "decode_lossless")  # operations of the lossless codec
# The size in bytes from which on each operation runs in SYCL on a CPU.
CPU: dict[str, float] = {
    "pack": MIB // 2,
    "unpack": NEVER,
    "gather_pack": MIB // 2,
    "scatter_rows": MIB // 2,
    "l1_score": MIB // 4,
    "choose": 4000,
    "compact": 8000,
    "qk_norm_rope": MIB // 2,
    "merge_partials": 8192,
    **dict.fromkeys(("encode_residual", "note_change", "decode_residual", "continue_linearly"), MIB // 4),
    # torch has no operation for these: bit by bit it takes 4 ms for the smallest tensors, SYCL .05
    **dict.fromkeys(STREAMED, 1024),
}
OPS = tuple(CPU)
CHOICES: dict[str, dict[str, float]] = {"cpu": CPU, "xpu": dict.fromkeys(OPS, 0)}  # the same by type of device
WITH_KERNELS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes with SYCL kernels
PATHS = ("auto", "sycl", "torch")  # values of the setting `kernels`
# Index of the argument whose size decides, where it is not the first one.
SIZED = {
    **dict.fromkeys(("compact", "pack", "gather_pack", "unpack", "decode_residual"), 1),
    "stream_lengths": 2,
    "decode_lossless": 4,
}
OF_INDICES = ("compact",)  # operations on indices alone, whatever the dtype of the run
STREAM_GROUP = 8  # numbers; a head has to be a multiple, because no group of SYCL's streams spans two heads
ENVIRONMENT = "COCODIFF_KERNELS"  # environment variable that replaces `auto`, for commands without such a setting
Function = Callable[..., Any]
log = logging.getLogger("cocodiff.kernels")


def path_of(setting: str) -> str:
    """Return how operations are to run, one of PATHS: as the setting `kernels` says or, if that is "auto", the
    environment variable COCODIFF_KERNELS."""
    return os.environ.get(ENVIRONMENT, setting) if setting == "auto" else setting


def begins_of(path: str, device: str, dtype: torch.dtype) -> Mapping[str, float]:
    """Return, by operation, the size in bytes from which on SYCL runs it instead of torch; infinite if never.

    Args:
        path: one of PATHS.
        device: type of the device, such as "cpu".
        dtype: dtype of the tensors.
    """
    if path == "auto" and dtype in WITH_KERNELS and device in CHOICES:
        return CHOICES[device]
    # Codes are bytes, which have no kernels: torch moves them even if SYCL is asked for.
    return dict.fromkeys(OPS, 0 if path == "sycl" and dtype != torch.uint8 else NEVER)


class Kernels(TorchOps):
    """The operations of `TorchOps`, each run by SYCL or by torch: as the user asks, or with "auto" by which was
    measured as faster for its size."""

    def __init__(
        self,
        path: str = "auto",
        note: Callable[[str, str], None] | None = None,
        compiled: Callable[[Function], Function] = lambda function: function,
    ) -> None:
        """Choose how operations run. Raise UserError for an unknown path.

        Args:
            path: one of `PATHS`; "auto" may be replaced by the environment.
            note: called with the operation's name and "sycl" or "torch" each time one runs, for the trace.
            compiled: turns a function of modules and tensors into the one to call in its place, as torch.compile does.
        """
        path = path_of(path)
        if path not in PATHS:
            raise UserError(f"kernels {path!r}: choose from {', '.join(PATHS)} (setting kernels, or {ENVIRONMENT})")
        self.path, self.compiled = path, compiled  # path: one of `PATHS`
        self._begins: dict[tuple[str, torch.dtype], Mapping[str, float]] = {}
        self._note = note
        self._torch = TorchOps()

    def by_sycl(self, op: str, *moved: Tensor) -> bool:
        """Return True if SYCL would run an operation on tensors of this size. Callers that have a faster way than
        torch's operation ask this first.

        Args:
            op: name of the operation.
            moved: the tensors whose size counts.
        """
        return self._sycl(op, moved) is not None

    def _run(self, op: str, *arguments: Any, **named: Any) -> Any:
        """Run one operation by SYCL or by torch, report the choice to `note`, and return the operation's result."""
        moved = moved_by(op, arguments)
        whole = op not in STREAMED or moved[0].shape[-1] % STREAM_GROUP == 0
        sycl = self._sycl(op, moved) if whole and len(moved) else None
        if self._note is not None:
            self._note(op, "torch" if sycl is None else "sycl")
        return getattr(sycl or self._torch, op)(*arguments, **named)

    def _sycl(self, op: str, moved: Sequence[Tensor]) -> SyclOps | None:
        """Return the SYCL operations if they are to run `op`, else None.

        Ranks have nearly equal shares, so the first tensor stands for the size of all.

        Args:
            op: name of the operation.
            moved: the tensors whose size counts.
        """
        first = moved[0]
        kind = first.device.type, torch.float32 if op in OF_INDICES else first.dtype
        if kind not in self._begins:
            self._begins[kind] = begins_of(self.path, *kind)
        enough = first.nbytes * len(moved) >= self._begins[kind][op]
        return sycl_ops(first.device, self.path == "sycl") if enough else None


def moved_by(op: str, arguments: Sequence[Any]) -> Sequence[Tensor]:
    """Return the tensors among an operation's arguments whose size decides between SYCL and torch.

    Args:
        op: name of the operation.
        arguments: its positional arguments.
    """
    told = arguments[SIZED.get(op, 0)]
    for name in ("written", "last", "table_KN"):  # a codec's state, or an order of rows: one of its tensors
        told = getattr(told, name, told)
    return (told,) if isinstance(told, Tensor) else told


def _by_path(op: str) -> Callable[..., Any]:
    """Return the method of `Kernels` for one operation, which calls `_run`. A subclass that runs all operations
    differently overrides `_run`."""

    def run(self: Kernels, *arguments: Any, **named: Any) -> Any:
        return self._run(op, *arguments, **named)

    return run


for _op in OPS:
    setattr(Kernels, _op, _by_path(_op))


def sycl_ops(device: torch.device, required: bool = False) -> SyclOps | None:
    """Return the SYCL operations of a device, which are opened once in a process.

    If they cannot be built, one line with the reason is logged, and None is returned.

    Args:
        device: the device that they run on.
        required: True to raise UserError instead of returning None.
    """
    found = _open(device)
    if not isinstance(found, str):
        return found
    if required:
        raise UserError(f"no SYCL kernels on {device}: {found}; or choose kernels auto or torch")
    return None


@cache
def _open(device: torch.device) -> SyclOps | str:
    """Build the SYCL operations of a device, and return them, or the reason why there are none. The result is cached
    for the process."""
    from cocodiff_sycl.find import Unavailable
    from cocodiff_sycl.ops import open_cpu, open_xpu

    openers: dict[str, Callable[[], SyclOps]] = {"cpu": open_cpu, "xpu": partial(open_xpu, device)}
    try:
        if device.type not in openers:
            raise Unavailable(f"a {device.type} device has no SYCL queue")
        ops = openers[device.type]()
    except Unavailable as error:
        log.warning("SYCL kernels are not used on %s, torch's operations are: %s", device, error)
        return str(error)
    log.info("SYCL kernels on %s: %s, %d lanes", device, ops.library.device_name, ops.library.lanes)
    return ops

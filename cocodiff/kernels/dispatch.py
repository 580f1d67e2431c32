"""One door to the operations: which of SYCL and torch runs one is decided here, once for each call, and told.

`auto` goes by the sizes from which on an operation is SYCL's. It opens SYCL when the first operation is due that the
table gives to it, so a run that has none pays nothing. Where SYCL kernels cannot be built, torch runs and one log line
says why; with `sycl` asked for by name that is an error.

CPU figures are of a 2-core AMD EPYC (docs/measurements/kernels-1-every-case.csv). SYCL is the faster one for smaller
tensors too, but a run of those gains less than the half second that opening it takes. No Intel GPU was measured: there
all operations that save passes over memory go to SYCL, on the evidence of the bytes that docs/design.md tells.
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
# Which argument tells an operation's size, where it is not the first: of what is written, or of what is known.
SIZED = {"pack": 1, "gather_pack": 1, "unpack": 1, "decode_residual": 1, "stream_lengths": 2, "decode_lossless": 4}
STREAMED = ("encode_lossless", "stream_lengths", "decode_lossless")
STREAM_GROUP = 8  # numbers; SYCL's streams have none in two heads
ENVIRONMENT = "COCODIFF_KERNELS"  # what `auto` means, for commands that have no such setting
Function = Callable[..., Any]
log = logging.getLogger("cocodiff.kernels")


def path_of(setting: str) -> str:
    """What the setting `kernels` says, or the environment where that is auto."""
    return os.environ.get(ENVIRONMENT, setting) if setting == "auto" else setting


def begins_of(path: str, device: str, dtype: torch.dtype) -> Mapping[str, float]:
    """The size from which on each operation is SYCL's, on a type of device."""
    if path == "auto" and dtype in WITH_KERNELS and device in CHOICES:
        return CHOICES[device]
    # Bytes, which codes are, have no kernels: torch moves them also where SYCL is asked for.
    return dict.fromkeys(OPS, 0 if path == "sycl" and dtype != torch.uint8 else NEVER)


class Kernels(TorchOps):
    """The operations of `TorchOps`, each by the path that was asked for or, with `auto`, the one measured as faster."""

    def __init__(
        self,
        path: str = "auto",
        note: Callable[[str, str], None] | None = None,
        compiled: Callable[[Function], Function] = lambda function: function,
    ) -> None:
        """note: called with the operation's name and "sycl" or "torch" each time one runs. compiled: gives what
        computes in the place of a function of modules and tensors. Raises UserError for an unknown path."""
        path = path_of(path)
        if path not in PATHS:
            raise UserError(f"kernels {path!r}: choose from {', '.join(PATHS)} (setting kernels, or {ENVIRONMENT})")
        self.path, self.compiled = path, compiled
        self._begins: dict[tuple[str, torch.dtype], Mapping[str, float]] = {}
        self._note = note
        self._torch = TorchOps()

    def by_sycl(self, op: str, *moved: Tensor) -> bool:
        """Whether SYCL would run an operation on tensors of this size: for who has another way than torch's form."""
        return self._sycl(op, moved) is not None

    def _run(self, op: str, *arguments: Any, **named: Any) -> Any:
        moved = moved_by(op, arguments)
        whole = op not in STREAMED or moved[0].shape[-1] % STREAM_GROUP == 0
        sycl = self._sycl(op, moved) if whole and len(moved) else None
        if self._note is not None:
            self._note(op, "torch" if sycl is None else "sycl")
        return getattr(sycl or self._torch, op)(*arguments, **named)

    def _sycl(self, op: str, moved: Sequence[Tensor]) -> SyclOps | None:
        """Ranks have nearly equal shares, so the first tensor tells the size of all."""
        first = moved[0]
        kind = first.device.type, first.dtype
        if kind not in self._begins:
            self._begins[kind] = begins_of(self.path, *kind)
        enough = first.nbytes * len(moved) >= self._begins[kind][op]
        return sycl_ops(first.device, self.path == "sycl") if enough else None


def moved_by(op: str, arguments: Sequence[Any]) -> Sequence[Tensor]:
    """The tensors that tell an operation's size, among its arguments."""
    told = arguments[SIZED.get(op, 0)]
    told = getattr(told, "written", getattr(told, "last", told))  # of what is known
    return (told,) if isinstance(told, Tensor) else told


def _by_path(op: str) -> Callable[..., Any]:
    """The method of an operation: a class that runs all of them otherwise overrides `_run`."""

    def run(self: Kernels, *arguments: Any, **named: Any) -> Any:
        return self._run(op, *arguments, **named)

    return run


for _op in OPS:
    setattr(Kernels, _op, _by_path(_op))


def sycl_ops(device: torch.device, required: bool = False) -> SyclOps | None:
    """The SYCL operations of a device, opened once for a process. Where there are none: None, after one log line, or
    with `required` a UserError; both say why."""
    found = _open(device)
    if not isinstance(found, str):
        return found
    if required:
        raise UserError(f"no SYCL kernels on {device}: {found}; or choose kernels auto or torch")
    return None


@cache
def _open(device: torch.device) -> SyclOps | str:
    """The operations, or why there are none. Kept for the process: it belongs to the machine, not to a run."""
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

"""One door to the operations: which of SYCL and torch runs one is decided here, once for each call, and told.

`auto` follows a table of measurements (`choices.py`). It opens SYCL when the first operation is due that the table
gives to it, so a run that has none pays nothing. Where SYCL kernels cannot be built, torch runs and one log line says
why; with `sycl` asked for by name that is an error.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from cocodiff_sycl.rows import Rows
from torch import Tensor

from cocodiff.errors import UserError
from cocodiff.kernels.choices import PATHS, switches_of
from cocodiff.kernels.reference import TorchOps
from cocodiff.kernels.residual import Onward, Prediction, Reconstructions

if TYPE_CHECKING:
    from cocodiff_sycl import SyclOps

    from cocodiff.kernels.lossless import Cut

STREAM_GROUP = 8  # numbers; SYCL's streams have none in two heads
ENVIRONMENT = "COCODIFF_KERNELS"  # what `auto` means, for commands that have no such setting
log = logging.getLogger("cocodiff.kernels")


class Choice:
    """What a path means for tensors of one device and dtype: sizes at which operations switch, and SYCL's operations.

    Every operation asks, so this is part of what a launch costs.
    """

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype) -> None:
        self.switches = switches_of(path, device.type, dtype, torch.get_num_threads())
        self._open = partial(sycl_ops, device, path == "sycl")

    @cached_property
    def sycl(self) -> SyclOps | None:
        """Opened by the first operation that is to use them."""
        return self._open()


class Kernels:
    """The operations of `TorchOps`, each by the path that was asked for or, with `auto`, the one measured as faster."""

    def __init__(self, path: str = "auto", note: Callable[[str, str], None] | None = None) -> None:
        """note: called with the operation's name and "sycl" or "torch" each time one runs.

        Raises UserError for an unknown path.
        """
        if path == "auto":
            path = os.environ.get(ENVIRONMENT, "auto")
        if path not in PATHS:
            raise UserError(f"kernels {path!r}: choose from {', '.join(PATHS)} (setting kernels, or {ENVIRONMENT})")
        self.path = path
        self._choices: dict[tuple[torch.device, torch.dtype], Choice] = {}
        self._note = note
        self._torch = TorchOps()

    def pack(self, messages: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor]) -> None:
        self._run("pack", buffers, messages, buffers)

    def gather_pack(self, messages: Sequence[Sequence[Tensor | Rows]], buffers: Sequence[Tensor]) -> None:
        self._run("gather_pack", buffers, messages, buffers)

    def unpack(self, parts: Sequence[Tensor | Rows], targets: Sequence[Tensor]) -> None:
        self._run("unpack", targets, parts, targets)

    def scatter_rows(self, rows: Sequence[Tensor], index_K: Tensor, caches: Sequence[Tensor]) -> None:
        self._run("scatter_rows", rows, rows, index_K, caches)

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> tuple[Tensor, Tensor]:
        return self._run("l1_score", (v_BLHD,), v_BLHD, reference_BLHD, renew)

    def select(self, score_BN: Tensor, k: int) -> Tensor:
        return self._run("select", (score_BN,), score_BN, k)

    def qk_norm_rope(
        self,
        x_BLHD: Tensor,
        weight_D: Tensor | None,
        epsilon: float | None,
        rotary: Sequence[Tensor],
        layout: str,
        round_before_weight: bool = True,
    ) -> Tensor:
        return self._run("qk_norm_rope", (x_BLHD,), x_BLHD, weight_D, epsilon, rotary, layout, round_before_weight)

    def merge_partials(self, out_BLHD: Tensor, lse_BLH: Tensor, part_BLHD: Tensor, part_lse_BLH: Tensor) -> None:
        self._run("merge_partials", (out_BLHD,), out_BLHD, lse_BLH, part_BLHD, part_lse_BLH)

    def encode_residual(
        self, x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, code_BLHW: Tensor, notes_N: Tensor
    ) -> None:
        self._run("encode_residual", (x_BLHD,), x_BLHD, known, how, bits, code_BLHW, notes_N)

    def note_change(self, x_BLHD: Tensor, last_BLHD: Tensor, notes_N: Tensor) -> None:
        self._run("note_change", (x_BLHD,), x_BLHD, last_BLHD, notes_N)

    def decode_residual(
        self, code_BLHW: Tensor, known: Reconstructions, factor: float | None, bits: int, onward: Onward | None = None
    ) -> None:
        self._run("decode_residual", (known.last,), code_BLHW, known, factor, bits, onward)

    def continue_linearly(self, last_BLHD: Tensor, before_BLHD: Tensor, onward: Onward) -> None:
        self._run("continue_linearly", (last_BLHD,), last_BLHD, before_BLHD, onward)

    def encode_lossless(
        self,
        x_BLHD: Tensor,
        known: Reconstructions,
        factor: float | None,
        cut: Cut,
        streams: Tensor,
        lengths_N: Tensor,
        needed_1: Tensor,
    ) -> None:
        given = x_BLHD, known, factor, cut, streams, lengths_N, needed_1
        self._run("encode_lossless", (x_BLHD,), *given, kernels=x_BLHD.shape[-1] % STREAM_GROUP == 0)

    def stream_lengths(self, code_BLHW: Tensor, cut: Cut, like_BLHD: Tensor, lengths_N: Tensor) -> Tensor | None:
        given = code_BLHW, cut, like_BLHD, lengths_N
        return self._run("stream_lengths", (like_BLHD,), *given, kernels=like_BLHD.shape[-1] % STREAM_GROUP == 0)

    def decode_lossless(
        self,
        code_BLHW: Tensor,
        rests: Tensor,
        lengths_N: Tensor,
        found: Tensor | None,
        known: Reconstructions,
        factor: float | None,
        cut: Cut,
    ) -> None:
        given = code_BLHW, rests, lengths_N, found, known, factor, cut
        # torch's form has found no more than the lengths, and what decodes is what has found them
        self._run("decode_lossless", (known.last,), *given, kernels=found is not None)

    def by_sycl(self, op: str, *moved: Tensor) -> bool:
        """Whether SYCL would run an operation on tensors of this size: for who has another way than torch's form."""
        return self._sycl(op, moved) is not None

    def _run(self, op: str, moved: Sequence[Tensor], *arguments: Any, kernels: bool = True) -> Any:
        """moved: the tensors whose size decides. kernels: whether there are any for these."""
        sycl = self._sycl(op, moved) if moved and kernels else None
        if self._note is not None:
            self._note(op, "torch" if sycl is None else "sycl")
        return getattr(sycl or self._torch, op)(*arguments)

    def _sycl(self, op: str, moved: Sequence[Tensor]) -> SyclOps | None:
        """Ranks have nearly equal shares, so the first tensor tells the size of all."""
        first = moved[0]
        kind = first.device, first.dtype
        choice = self._choices.get(kind)
        if choice is None:
            choice = self._choices[kind] = Choice(self.path, *kind)
        return choice.sycl if bisect(choice.switches[op], first.nbytes * len(moved)) & 1 else None


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
    from cocodiff_sycl import Unavailable, open_cpu, open_xpu

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

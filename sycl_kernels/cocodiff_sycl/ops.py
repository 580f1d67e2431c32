"""The operations as SYCL launches: signatures, shapes and results are those of `cocodiff.kernels.reference`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cocodiff_sycl.checks import check_like
from cocodiff_sycl.library import Library
from cocodiff_sycl.movement import Moves
from cocodiff_sycl.plans import LAYOUTS, Plan, Plans
from cocodiff_sycl.rows import Rows

CHECK_INDICES = "COCODIFF_CHECK_INDICES"
CHUNK_BYTES = {True: 64 * 1024, False: 4 * 1024}  # of a copy, for one group of LANES work-items; True: on a CPU


def open_cpu(lanes: int | None = None, copy_tables: bool = False) -> SyclOps:
    """The operations on the CPU device, on a queue of their own. Raises Unavailable."""
    return SyclOps(_library_of_cpu(lanes, copy_tables), torch.device("cpu"), lambda: None)


@cache
def _library_of_cpu(lanes: int | None, copy_tables: bool) -> Library:
    """One for a process: it is costly to load and holds no state of a run."""
    return Library(None, lanes, copy_tables)


def open_xpu(device: torch.device) -> SyclOps:
    """The operations on torch's current stream of an XPU. Raises Unavailable."""

    def current_queue() -> int:
        return int(torch.xpu.current_stream(device).sycl_queue)

    return SyclOps(_library_of_xpu(device), device, current_queue)


@cache
def _library_of_xpu(device: torch.device) -> Library:
    """Of all streams of a device: torch's queues share a context, for which kernels are compiled."""
    return Library(int(torch.xpu.current_stream(device).sycl_queue))


class SyclOps:
    """All operations of one device. `look`: whether indices are read and checked; by default on a CPU, and where
    COCODIFF_CHECK_INDICES is set: on a GPU it makes every call wait."""

    def __init__(
        self, library: Library, device: torch.device, queue: Callable[[], int | None], look: bool | None = None
    ):
        self.library, self.device, self._queue = library, device, queue
        self.look = library.is_cpu or CHECK_INDICES in os.environ if look is None else look
        self._plans = Plans(library, device)
        self._layouts: dict[Any, Any] = {}  # of pieces that were moved
        self._moving: dict[int, bytes] = {}  # size of a number in bytes -> what the library takes beside pieces
        self._kept = threading.local()

    # Movement -------------------------------------------------------------------------------------------------------

    def pack(self, messages: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor]) -> None:
        self.gather_pack(messages, buffers, "pack")

    def gather_pack(
        self, messages: Sequence[Sequence[Tensor | Rows]], buffers: Sequence[Tensor], op: str = "gather_pack"
    ) -> None:
        if not buffers:
            return
        moves = self._moves(op, buffers[0])
        for pieces, buffer in zip(messages, buffers, strict=True):
            if buffer.dim() != 1 or not buffer.is_contiguous():
                raise ValueError(f"{op}: a buffer must be contiguous and of one dimension, not {list(buffer.shape)}")
            if buffer.dtype is not moves.dtype or buffer.device != self.device:
                check_like(op, self.device, moves.dtype, buffer=buffer)
            address, start, room = buffer.data_ptr(), 0, buffer.numel()
            for piece in pieces:
                start = moves.pack(piece, address, start, room)
        self._move(moves)

    def unpack(self, parts: Sequence[Tensor | Rows], targets: Sequence[Tensor]) -> None:
        if not targets:
            return
        moves = self._moves("unpack", targets[0])
        for part, target in zip(parts, targets, strict=True):
            moves.place(part, target)
        self._move(moves)

    def scatter_rows(self, rows: Sequence[Tensor], index_K: Tensor, caches: Sequence[Tensor]) -> None:
        if not caches:
            return
        moves = self._moves("scatter_rows", caches[0])
        for rows_KHD, cache_RHD in zip(rows, caches, strict=True):
            moves.scatter(rows_KHD, cache_RHD, index_K)
        self._move(moves)

    def _moves(self, op: str, like: Tensor) -> Moves:
        return Moves(op, self.device, like.dtype, self.look and not self.library.is_cpu, self._layouts)

    def _move(self, moves: Moves) -> None:
        itemsize = moves.dtype.itemsize
        launch = self._moving.get(itemsize)
        if launch is None:
            library = self.library
            look, chunk_bytes = self.look and library.is_cpu, CHUNK_BYTES[library.is_cpu]
            launch = self._moving[itemsize] = library.moves_of(itemsize, look, chunk_bytes, self._plans.packed)
        self.library.move(moves.op, launch, moves.pieces(), moves.count, self._queue())

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> tuple[Tensor, Tensor]:
        plan = self._plans.of("l1_score", (v_BLHD, reference_BLHD), renew)
        change_BL, norm_BL = plan.new(), plan.new()
        if plan.groups:
            to = change_BL.data_ptr(), norm_BL.data_ptr()
            self._launch(plan, v_BLHD.data_ptr(), reference_BLHD.data_ptr(), *to)
        else:
            change_BL.zero_(), norm_BL.zero_()
        return change_BL, norm_BL

    def select(self, score_BN: Tensor, k: int) -> Tensor:
        plan = self._plans.of("select", (score_BN,), k)
        chosen_BK = plan.new()
        if plan.groups:
            scratch = self._scratch(258 * plan.groups)
            self._launch(plan, score_BN.data_ptr(), chosen_BK.data_ptr(), scratch.data_ptr())
        return chosen_BK

    def _scratch(self, numbers: int) -> Tensor:
        """So many int64 for one launch. A CPU's launch is done when it returns, so a thread keeps its own."""
        kept: Tensor | None = getattr(self._kept, "scratch", None)
        if kept is None or len(kept) < numbers:
            kept = torch.empty(numbers, dtype=torch.int64, device=self.device)
            if self.library.is_cpu:
                self._kept.scratch = kept
        return kept

    def qk_norm_rope(
        self, x_BLHD: Tensor, weight_D: Tensor | None, epsilon: float | None, rotary: Sequence[Tensor], layout: str,
        twice: bool = True,
    ) -> Tensor:  # fmt: skip
        if layout not in LAYOUTS:
            raise ValueError(f"qk_norm_rope: unknown layout {layout!r}: choose from {', '.join(LAYOUTS)}")
        tables = (torch.view_as_real(rotary[0]).flatten(-2),) if layout == "complex" else rotary
        plan = self._plans.of("qk_norm_rope", (x_BLHD, weight_D, *tables), epsilon, layout, twice)
        out_BLHD = plan.new()
        if plan.groups:
            weight = 0 if weight_D is None else weight_D.data_ptr()
            cosine, sine = (*[table_LD.data_ptr() for table_LD in tables], 0, 0)[:2]
            self._launch(plan, x_BLHD.data_ptr(), out_BLHD.data_ptr(), weight, cosine, sine)
        return out_BLHD

    def merge_partials(self, out_BLHD: Tensor, lse_BLH: Tensor, part_BLHD: Tensor, part_lse_BLH: Tensor) -> None:
        plan = self._plans.of("merge_partials", (out_BLHD, lse_BLH, part_BLHD, part_lse_BLH))
        if plan.groups:
            of = out_BLHD.data_ptr(), part_BLHD.data_ptr(), lse_BLH.data_ptr(), part_lse_BLH.data_ptr()
            self._launch(plan, *of)

    def _launch(self, plan: Plan, *addresses: int) -> None:
        self.library.launch(plan.launch, plan.addresses(*addresses), self._queue())

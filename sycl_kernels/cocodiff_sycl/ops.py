"""The operations as SYCL launches: signatures, shapes and results are those of `cocodiff.kernels.reference`."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from cocodiff_sycl.checks import DTYPES, check_dims, check_last_stride, check_like, check_no_overlap, check_rows
from cocodiff_sycl.library import Library
from cocodiff_sycl.movement import Moves
from cocodiff_sycl.rows import Rows

LAYOUTS = {"pairs": 0, "halves": 1, "complex": 2, "none": 3}
CHECK_INDICES = "COCODIFF_CHECK_INDICES"
GROUPS_OF_ROWS = 16  # GPU: groups of LANES work-items in a work-group
SELECT_ITEMS = 256  # GPU: work-items that search one row of scores
GROUP_BYTES = 8 * 1024, 32 * 1024  # CPU: what one work-item takes of a tensor, at least (starting it costs) and at most
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
        self._packed = 1 if library.lanes == 1 else GROUPS_OF_ROWS

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
        return Moves(op, self.device, like.dtype, self.look and not self.library.is_cpu)

    def _move(self, moves: Moves) -> None:
        library = self.library
        library.move(
            moves.op, moves.pieces(), moves.count, moves.itemsize, self.look and library.is_cpu,
            CHUNK_BYTES[library.is_cpu], self._packed, self._queue(),
        )  # fmt: skip

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> tuple[Tensor, Tensor]:
        check_dims("l1_score", "v", v_BLHD, 4)
        B, L, H, D = shape = v_BLHD.shape
        check_rows("l1_score", self.device, v_BLHD.dtype, shape, v=v_BLHD, reference=reference_BLHD)
        if renew:
            check_no_overlap("l1_score", "reference", reference_BLHD)
        change_BL, norm_BL = (torch.empty((B, L), dtype=torch.float32, device=self.device) for _ in range(2))
        if not H * D:
            return change_BL.zero_(), norm_BL.zero_()
        if B * L:
            of_v, of_reference = v_BLHD.stride(), reference_BLHD.stride()
            runs, numbers = (1, H * D) if of_v[2] == of_reference[2] == D or H == 1 else (H, D)
            each = self._rows_each(B * L, H * D * v_BLHD.element_size())
            self._launch(
                f"l1_score_{DTYPES[v_BLHD.dtype]}", -(-B * L // each),
                (v_BLHD.data_ptr(), reference_BLHD.data_ptr(), change_BL.data_ptr(), norm_BL.data_ptr(), B * L, each,
                 L, *of_v[:3], *of_reference[:3], runs, numbers, int(renew)),
            )  # fmt: skip
        return change_BL, norm_BL

    def select(self, score_BN: Tensor, k: int) -> Tensor:
        check_dims("select", "score", score_BN, 2)
        if score_BN.dtype != torch.float32 or score_BN.device != self.device:
            raise ValueError(
                f"select: score is {score_BN.dtype} on {score_BN.device}: give torch.float32 on {self.device}"
            )
        check_last_stride("select", "score", score_BN)
        B, N = score_BN.shape
        if not 0 <= k <= N:
            raise ValueError(f"select: k is {k} of {N} scores: give 0 to {N}")
        chosen_BK = torch.empty(B, k, dtype=torch.int64, device=self.device)
        if B * k:
            scratch = torch.empty(B, 258, dtype=torch.int64, device=self.device)
            values = (score_BN.data_ptr(), chosen_BK.data_ptr(), scratch.data_ptr(), score_BN.stride(0), N, k)
            items = 1 if self.library.lanes == 1 else SELECT_ITEMS
            self.library.launch("select_largest", B, items, values, self._queue())
        return chosen_BK

    def qk_norm_rope(
        self, x_BLHD: Tensor, weight_D: Tensor | None, epsilon: float | None, rotary: Sequence[Tensor], layout: str
    ) -> Tensor:
        op = "qk_norm_rope"
        if layout not in LAYOUTS:
            raise ValueError(f"{op}: unknown layout {layout!r}: choose from {', '.join(LAYOUTS)}")
        check_dims(op, "x", x_BLHD, 4)
        B, L, H, D = shape = x_BLHD.shape
        check_rows(op, self.device, x_BLHD.dtype, shape, x=x_BLHD)
        if D % 2:
            raise ValueError(f"{op}: heads of {D} numbers have no pairs to rotate: give an even number")
        if weight_D is not None:
            check_rows(op, self.device, x_BLHD.dtype, (D,), weight=weight_D)
        tables = [torch.view_as_real(rotary[0]).flatten(-2)] if layout == "complex" else list(rotary)
        if len(tables) != {"complex": 1, "none": 0}.get(layout, 2):
            raise ValueError(f"{op}: {len(tables)} rotary tables for layout {layout}")
        for table_LD in tables:
            check_rows(op, self.device, torch.float32, (L, D), rotary=table_LD)
            if not table_LD.is_contiguous():
                raise ValueError(f"{op}: a rotary table must be contiguous, not of strides {table_LD.stride()}")
        out_BLHD = torch.empty(shape, dtype=x_BLHD.dtype, device=self.device)
        if out_BLHD.numel():
            each = self._rows_each(B * L * H, D * x_BLHD.element_size())
            weight = 0 if weight_D is None else weight_D.data_ptr()
            addresses = [table_LD.data_ptr() for table_LD in tables]
            cosine, sine = (*addresses, 0, 0)[:2]
            bits = struct.unpack("I", struct.pack("f", -1.0 if epsilon is None else epsilon))[0]
            self._launch(
                f"norm_rope_{DTYPES[x_BLHD.dtype]}", -(-B * L * H // each),
                (x_BLHD.data_ptr(), out_BLHD.data_ptr(), weight, cosine, sine, B * L * H, each, L, H, D,
                 *x_BLHD.stride()[:3], bits, LAYOUTS[layout]),
            )  # fmt: skip
        return out_BLHD

    def merge_partials(self, out_BLHD: Tensor, lse_BLH: Tensor, part_BLHD: Tensor, part_lse_BLH: Tensor) -> None:
        op = "merge_partials"
        check_dims(op, "out", out_BLHD, 4)
        B, L, H, D = shape = out_BLHD.shape
        check_rows(op, self.device, out_BLHD.dtype, shape, out=out_BLHD, part=part_BLHD)
        check_rows(op, self.device, torch.float32, shape[:3], lse=lse_BLH, part_lse=part_lse_BLH)
        check_no_overlap(op, "out", out_BLHD)
        for name, lse in (("lse", lse_BLH), ("part_lse", part_lse_BLH)):
            if not lse.is_contiguous():
                raise ValueError(f"{op}: {name} must be contiguous, not of strides {lse.stride()}")
        if B * L * H:
            each = self._rows_each(B * L * H, max(1, D) * out_BLHD.element_size())
            self._launch(
                f"merge_{DTYPES[out_BLHD.dtype]}", -(-B * L * H // each),
                (out_BLHD.data_ptr(), part_BLHD.data_ptr(), lse_BLH.data_ptr(), part_lse_BLH.data_ptr(), B * L * H,
                 each, L, H, D, *out_BLHD.stride()[:3], *part_BLHD.stride()[:3]),
            )  # fmt: skip

    # Launching ------------------------------------------------------------------------------------------------------

    def _rows_each(self, rows: int, row_bytes: int) -> int:
        """Consecutive rows of one group of LANES work-items."""
        if not self.library.is_cpu or self.library.lanes > 1:
            return 1
        least, most = (size // row_bytes for size in GROUP_BYTES)
        return max(1, least, min(most, rows // (4 * self.library.compute_units)))

    def _launch(self, kernel: str, groups: int, values: Sequence[int]) -> None:
        """groups: of LANES work-items, as many as there is work for; kernels know where it ends."""
        lanes = self.library.lanes
        self.library.launch(kernel, -(-groups // self._packed), self._packed * lanes, values, self._queue())

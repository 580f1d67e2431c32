"""The operations as SYCL launches. `cocodiff.kernels.reference` documents them: signatures, shapes and results are
equal."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cocodiff_sycl.library import Layouts, Library, Tensors, numbers_of
from cocodiff_sycl.movement import Pieces, check_rows_exist, packed, placed, scattered, tensors_of
from cocodiff_sycl.parts import TILE, BlockCut, Rows, width_of
from cocodiff_sycl.plans import LAYOUTS, STREAM_STRIP, TABLES, Plan, Plans

CHECK_INDICES = "COCODIFF_CHECK_INDICES"  # environment variable: check indices on a GPU too
ADDRESS = numbers_of(1)
NOWHERE = ADDRESS.pack(0)
FACTOR = struct.Struct("=f4x")  # a float32, passed with the addresses because it differs in each step
# Arguments of operations: the named tuples of `cocodiff.kernels.residual` and `cocodiff.kernels.lossless`.
Candidates = tuple[Tensor, Tensor, tuple[tuple[int, int], ...]]
RowOrder = tuple[Tensor, Tensor, Tensor]
Reconstructions = tuple[Tensor, Tensor | None]
Prediction = tuple[float, bool, bool]
Onward = tuple[float, Tensor]
Known = tuple[Tensor, Tensor | None, Tensor | None, float]


def open_cpu(lanes: int | None = None, copy_tables: bool = False) -> SyclOps:
    """Return the operations on the CPU device, on a queue of their own. Raise Unavailable if they cannot be built.

    Args:
        lanes: number of work-items that share a row; None for the device's own.
        copy_tables: True to treat the device as one that cannot read the host's memory, for tests.
    """
    return SyclOps(_library_of_cpu(lanes, copy_tables), torch.device("cpu"), lambda: None)


@cache
def _library_of_cpu(lanes: int | None, copy_tables: bool) -> Library:
    """Open the library of the CPU device, once in a process: loading is costly, and it holds no state of a run."""
    return Library(None, lanes, copy_tables)


def open_xpu(device: torch.device) -> SyclOps:
    """Return the operations of an XPU, each launched on torch's current stream. Raise Unavailable if they cannot be
    built."""

    def current_queue() -> int:
        """Return the address of the current stream's queue."""
        return int(torch.xpu.current_stream(device).sycl_queue)

    # For all streams of the device: torch's queues share a context, for which kernels are compiled.
    return SyclOps(Library(current_queue()), device, current_queue)


class SyclOps:
    """The operations of one device as SYCL kernels, with the signatures and results of `TorchOps`."""

    def __init__(self, library: Library, device: torch.device, queue: Callable[[], int | None]) -> None:
        self.library, self.device, self._queue = library, device, queue
        # True to read and check indices. On a GPU (with COCODIFF_CHECK_INDICES set) every call then waits for it.
        self.look = library.is_cpu or CHECK_INDICES in os.environ
        self._plans = Plans(library, device)
        self._moves: Layouts[bytes] = Layouts(library.look)
        self._reads_indices = self.look and not library.is_cpu  # on a CPU the C library reads them
        self._kept = threading.local()

    # Movement -------------------------------------------------------------------------------------------------------

    def pack(self, messages: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor]) -> None:
        self.gather_pack(messages, buffers, "pack")

    def gather_pack(
        self, messages: Sequence[Sequence[Tensor | Rows]], buffers: Sequence[Tensor], op: str = "gather_pack"
    ) -> None:
        if not buffers:
            return
        pieces = list(chain.from_iterable(messages))
        tensors = (*tensors_of(pieces), *buffers)
        self._move(op, (*map(len, messages),), tensors, pieces, packed, messages, buffers)

    def unpack(self, parts: Sequence[Tensor | Rows], targets: Sequence[Tensor]) -> None:
        if targets:
            self._move("unpack", len(parts), (*tensors_of(parts), *targets), parts, placed, parts, targets)

    def scatter_rows(self, rows: Sequence[Tensor], index_K: Tensor, caches: Sequence[Tensor]) -> None:
        if not caches:
            return
        moved = [Rows(cache_RHD, index_K) for cache_RHD in caches] if self._reads_indices else ()
        tensors = (*rows, index_K, *caches)
        self._move("scatter_rows", len(rows), tensors, moved, scattered, rows, index_K, caches)

    def _move(
        self,
        op: str,
        lengths: Hashable,
        tensors: Tensors,
        indexed: Sequence[Tensor | Rows],
        pieces_of: Callable[..., Pieces],
        *arguments: Any,
    ) -> None:
        """Move data for an operation in one launch.

        Args:
            op: the operation.
            lengths: everything about the arguments' structure that the tensors do not determine.
            tensors: the launch's tensors.
            indexed: chosen rows whose indices are to be checked.
            pieces_of: returns the pieces for `arguments`.
            arguments: the operation's own arguments.
        """
        launch, addresses = self._moves.of((op, lengths), tensors, self._launch_of, op, pieces_of, arguments)
        if self._reads_indices:
            check_rows_exist(op, indexed)
        self.library.move(op, launch, addresses, self._queue())

    def _launch_of(self, op: str, pieces_of: Callable[..., Pieces], arguments: tuple[Any, ...]) -> bytes:
        """Return the part of an operation's launches that stays the same for tensors of equal layouts.

        Args:
            op: the operation, which moves data.
            pieces_of: returns the pieces for `arguments`.
            arguments: the operation's own arguments.
        """
        pieces = pieces_of(op, self.device, *arguments)
        return self.library.moves_of(pieces.found, pieces.dtype.itemsize, self.look)

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> Tensor:
        plan, addresses = self._plans.of(self._plans.l1_score, (v_BLHD, reference_BLHD), renew)
        make = torch.empty if plan.launches else torch.zeros
        scores_2BL = make(2, *v_BLHD.shape[:2], dtype=torch.float32, device=self.device)
        self._launch(plan, addresses, *scores_2BL)
        return scores_2BL

    def choose(self, scores: Tensor, among: Candidates, share: float | None, threshold: float) -> Tensor:
        place_CT, begin_M, _ = among
        plan, addresses = self._plans.of(self._plans.choose, (scores, place_CT, begin_M), share, threshold)
        active_T = torch.empty(place_CT.shape[1] + 1, dtype=torch.uint8, device=self.device)
        self._launch(plan, addresses, active_T, self._scratch(258 * (len(begin_M) - 1)))
        return active_T

    def compact(self, active_T: Tensor, order: RowOrder) -> tuple[Tensor, Tensor]:
        _, last_R, table_KN = order
        plan, addresses = self._plans.of(self._plans.compact, (active_T, *order))
        chosen_KN, end_R = torch.empty_like(table_KN), torch.empty_like(last_R)
        self._launch(plan, addresses, chosen_KN, end_R)
        return chosen_KN, end_R

    def _scratch(self, numbers: int) -> Tensor:
        """Return scratch memory for one launch, int64 [numbers or more].

        A launch on a CPU is done when it returns, so there each thread reuses its own.
        """
        kept: Tensor | None = getattr(self._kept, "scratch", None)
        if kept is None or len(kept) < numbers:
            kept = torch.empty(numbers, dtype=torch.int64, device=self.device)
            if self.library.is_cpu:
                self._kept.scratch = kept
        return kept

    def qk_norm_rope(
        self,
        x_BLHD: Tensor,
        weight_D: Tensor | None,
        epsilon: float | None,
        rotary: Sequence[Tensor],
        layout: str,
        round_before_weight: bool = True,
    ) -> Tensor:
        if layout not in LAYOUTS:
            raise ValueError(f"qk_norm_rope: unknown layout {layout!r}: choose from {', '.join(LAYOUTS)}")
        if len(rotary) != TABLES[layout]:
            raise ValueError(f"qk_norm_rope: {len(rotary)} rotary tables for layout {layout}: give {TABLES[layout]}")
        tables = (torch.view_as_real(rotary[0]),) if layout == "complex" else rotary
        cosine, sine, *_ = (*tables, None, None)
        tensors, how = (x_BLHD, weight_D, cosine, sine), (epsilon, layout, round_before_weight)
        plan, addresses = self._plans.of(self._plans.qk_norm_rope, tensors, *how)
        out_BLHD = torch.empty(x_BLHD.shape, dtype=x_BLHD.dtype, device=self.device)
        self._launch(plan, addresses, out_BLHD)
        return out_BLHD

    def merge_partials(self, out_BLHD: Tensor, lse_BLH: Tensor, part_BLHD: Tensor, part_lse_BLH: Tensor) -> None:
        plan, addresses = self._plans.of(self._plans.merge_partials, (out_BLHD, lse_BLH, part_BLHD, part_lse_BLH))
        self._launch(plan, addresses)

    def encode_residual(
        self, x_BLHD: Tensor, known: Reconstructions, how: Prediction, bits: int, code_BLHW: Tensor, notes_N: Tensor
    ) -> None:
        factor, *words = how
        self._residual("encode_residual", (x_BLHD, *known, code_BLHW, None, notes_N), (bits, *words), factor)

    def note_change(self, x_BLHD: Tensor, last_BLHD: Tensor, notes_N: Tensor) -> None:
        self._residual("note_change", (x_BLHD, last_BLHD, None, None, None, notes_N), (8, False, True))

    def decode_residual(
        self, code_BLHW: Tensor, known: Reconstructions, factor: float | None, bits: int, onward: Onward | None = None
    ) -> None:
        further, out_BLHD = onward or (0.0, None)
        tensors = None, *known, code_BLHW, out_BLHD, None
        self._residual("decode_residual", tensors, (bits, factor is not None), factor or 0.0, further)

    def continue_linearly(self, last_BLHD: Tensor, before_BLHD: Tensor, onward: Onward) -> None:
        further, out_BLHD = onward
        self._residual("continue_linearly", (None, last_BLHD, before_BLHD, None, out_BLHD, None), (8,), 0.0, further)

    def _residual(
        self, op: str, tensors: Tensors, words: tuple[Any, ...], factor: float = 0.0, onward: float = 0.0
    ) -> None:
        """Launch an operation of the residual codec.

        Args:
            op: the operation.
            tensors: the tensors that struct Residuals of kernels/coder.hpp begins with, in its order.
            words: further arguments of `Plans.residual`.
            factor: factor of the linear continuation that predicts.
            onward: factor of the linear continuation that is written.
        """
        plan, addresses = self._plans.of(self._plans.residual, tensors, op, *words)
        self._launch(plan, addresses, factors=(factor, onward))

    def encode_lossless(
        self, x_BLHD: Tensor, known: Known, cut: BlockCut, streams: Tensor, lengths_N: Tensor, needed_1: Tensor
    ) -> None:
        written_BLHD, last_BLHD, before_BLHD, factor = known
        tensors = x_BLHD, last_BLHD, before_BLHD, written_BLHD
        plan, addresses = self._plans.of(self._plans.encode_lossless, tensors, cut)
        if plan.tiles:
            begins = self._begins(plan.tiles) if len(plan.launches) > 2 else None
            strips = torch.empty(plan.tiles * TILE * STREAM_STRIP, dtype=torch.int32, device=self.device)
            given = streams, None, plan.table, begins, lengths_N, needed_1, strips
            self._launch(plan, addresses, *given, factors=(factor,))
        else:
            lengths_N.zero_()

    def stream_lengths(self, firsts: Tensor, cut: BlockCut, like_BLHD: Tensor, lengths_N: Tensor) -> Tensor:
        plan, _ = self._plans.of(self._plans.stream_lengths, (like_BLHD,), cut, width_of(firsts, like_BLHD))
        begins = self._begins(plan.tiles)
        given = firsts, None, plan.table, begins, lengths_N, None, None
        self._launch(plan, 4 * NOWHERE, *given, factors=(0.0,))
        return begins

    def decode_lossless(
        self, firsts: Tensor, rests: Tensor, lengths_N: Tensor, found: Tensor, known: Known, cut: BlockCut
    ) -> None:
        written_BLHD, last_BLHD, before_BLHD, factor = known
        tensors = last_BLHD, before_BLHD, written_BLHD
        width = width_of(firsts, written_BLHD)
        plan, addresses = self._plans.of(self._plans.decode_lossless, tensors, cut, width)
        if plan.tiles:
            given = firsts, rests, plan.table, found, lengths_N, None, None
            self._launch(plan, NOWHERE + addresses, *given, factors=(factor,))

    def _begins(self, tiles: int) -> Tensor:
        """Return uninitialised memory for the places at which tiles begin in streams, int64 [tiles]."""
        return torch.empty(tiles, dtype=torch.int64, device=self.device)

    def _launch(self, plan: Plan, addresses: bytes, *more: Tensor | None, factors: Sequence[float] = ()) -> None:
        """Start a plan's launches, one after the other.

        Args:
            plan: the launches.
            addresses: the first members of the kernels' struct.
            more: tensors whose addresses follow; None for a null pointer.
            factors: floats that follow.
        """
        addresses += b"".join([NOWHERE if one is None else ADDRESS.pack(one.data_ptr()) for one in more])
        addresses += b"".join(map(FACTOR.pack, factors))
        for launch in plan.launches:
            self.library.launch(launch, addresses, self._queue())

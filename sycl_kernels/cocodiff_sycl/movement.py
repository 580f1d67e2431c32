"""The pieces of a movement launch as numbers: what is moved from where to where. The C library makes the launch's table
of them and looks at indices (moves.hpp).

A piece costs Python a few microseconds, so what is asked of every one is asked here in one place, and plainly.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from cocodiff_sycl.checks import check_index, check_last_stride, check_like, check_no_overlap
from cocodiff_sycl.rows import Rows

Four = tuple[int, int, int, int]
NOWHERE: Four = (0, 0, 0, 0)


class Moves:
    """Pieces of one launch, all of one device and dtype. Adding checks them."""

    def __init__(self, op: str, device: torch.device, dtype: torch.dtype, look: bool) -> None:
        """look: whether the numbers of indices are read and checked here, for memory that the C library cannot read."""
        check_like(op, device, dtype)
        self.op, self.device, self.dtype, self._look = op, device, dtype, look
        self.itemsize = dtype.itemsize
        self.numbers: list[int] = []  # struct Piece of moves.hpp, one after the other
        self.count = 0

    def pieces(self) -> bytes:
        return array("q", self.numbers).tobytes()

    def pack(self, piece: Tensor | Rows, address: int, start: int, room: int) -> int:
        """Adds a piece that goes to a contiguous buffer of `room` numbers from number `start` on. Returns its end."""
        outer, rows, heads, numbers = sizes = self._sizes(piece)
        row = heads * numbers
        end = start + outer * rows * row
        if end > room:
            raise ValueError(f"{self.op}: {end} numbers and more for a buffer of {room}")
        self._add(piece, sizes, address + start * self.itemsize, (rows * row, row, numbers, 1))
        return end

    def place(self, piece: Tensor | Rows, target: Tensor) -> None:
        """Adds a piece that goes to a slice of its own shape."""
        self._check(target, "a target")
        strides = target.stride()
        if 0 in strides:
            check_no_overlap(self.op, "a target", target)
        if target.shape != piece.shape:
            raise ValueError(f"{self.op}: a piece of {list(piece.shape)} for a target of {list(target.shape)}")
        self._add(piece, self._sizes(piece), target.data_ptr(), _padded(strides, 0))

    def scatter(self, rows_KHD: Tensor, cache_RHD: Tensor, index_K: Tensor) -> None:
        """Adds rows that go to rows index_K of a cache."""
        self._check(cache_RHD, "a cache")
        check_no_overlap(self.op, "a cache", cache_RHD)
        rows, count = cache_RHD.shape[0], index_K.shape[0]
        if cache_RHD.dim() != 3 or rows_KHD.shape != (count, *cache_RHD.shape[1:]):
            raise ValueError(f"{self.op}: rows of {list(rows_KHD.shape)} for {count} places in {list(cache_RHD.shape)}")
        self._index(index_K, rows)
        to = _padded(cache_RHD.stride(), 0)
        self._add(rows_KHD, self._sizes(rows_KHD), cache_RHD.data_ptr(), to, index_K.data_ptr(), rows)

    def _sizes(self, piece: Tensor | Rows) -> Four:
        shape = piece.shape
        if not 1 <= len(shape) <= 4:
            raise ValueError(f"{self.op}: a piece of {len(shape)} dimensions {list(shape)}: give one to four")
        return _padded(shape, 1)

    def _check(self, x: Tensor, what: str) -> None:
        if x.dtype is not self.dtype or x.device != self.device:
            check_like(self.op, self.device, self.dtype, **{what.replace(" ", "_"): x})
        if x.stride(-1) != 1:
            check_last_stride(self.op, what, x)

    def _index(self, index: Tensor, rows: int, least: int = 0) -> None:
        if self._look or index.dtype is not torch.int64 or index.dim() != 1 or index.device != self.device:
            check_index(self.op, index, self.device, rows, self._look, least)
        elif index.stride(0) != 1:
            check_index(self.op, index, self.device, rows, False)

    def _add(
        self, piece: Tensor | Rows, sizes: Four, target: int, to: Four, target_index: int = 0, target_rows: int = 0
    ) -> None:
        """Notes a piece of so many numbers that goes to an address, with these strides."""
        self.count += 1
        if isinstance(piece, Tensor):
            self._check(piece, "a piece")
            self.numbers += (piece.data_ptr(), target, 0, 0, target_index, 0, 0, target_rows, 0)
            self.numbers += (*sizes, *_padded(piece.stride(), 0), *to, *NOWHERE)
            return
        source, index = piece.source_RHD, piece.index_K
        self._check(source, "a source")
        self._index(index, source.shape[0])
        reference = reference_index = reference_rows = 0
        kept = NOWHERE
        if piece.reference_RHD is not None:
            reference, kept, reference_index, reference_rows = self._reference(piece, piece.reference_RHD)
        self.numbers += (source.data_ptr(), target, reference, index.data_ptr(), target_index, reference_index)
        self.numbers += (source.shape[0], target_rows, reference_rows)
        self.numbers += (*sizes, *_padded(source.stride(), 0), *to, *kept)

    def _reference(self, rows: Rows, kept: Tensor) -> tuple[int, Four, int, int]:
        """Address, strides, index and rows of the place where chosen rows are written as well."""
        self._check(kept, "a reference")
        check_no_overlap(self.op, "a reference", kept)
        index = rows.reference_index_K
        if index is None or len(index) != len(rows.index_K) or kept.shape[1:] != rows.source_RHD.shape[1:]:
            raise ValueError(
                f"{self.op}: a reference of {list(kept.shape)} needs an index of {len(rows.index_K)} rows and heads of "
                f"{list(rows.source_RHD.shape[1:])}"
            )
        self._index(index, len(kept), least=-1)
        return kept.data_ptr(), _padded(kept.stride(), 0), index.data_ptr(), len(kept)


def _padded(of: tuple[int, ...], missing: int) -> Four:
    """Sizes or strides as those of four dimensions, with new ones in front."""
    return (*(missing,) * (4 - len(of)), *of) if len(of) < 4 else tuple(of)  # type: ignore[return-value]

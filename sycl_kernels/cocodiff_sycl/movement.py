"""The table of a movement launch: what goes where, an entry for each piece (struct Move of kernels/movement.cpp).

An entry costs Python a few microseconds, so what is asked of every piece is asked here in one place, and plainly.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from cocodiff_sycl.checks import check_index, check_last_stride, check_like, check_no_overlap
from cocodiff_sycl.rows import Rows

ENTRY = struct.Struct("20q")
MAX_RUNS = 2**32 - 1
EVERY_ROW = 2**62  # rows of one outer row where there is only one
Four = tuple[int, int, int, int]


class Moves:
    """Pieces of one launch, all of one device and dtype. Adding checks them; `entries` makes the table."""

    def __init__(self, op: str, device: torch.device, dtype: torch.dtype, look: bool) -> None:
        """look: whether the numbers of indices are read and checked, which makes a GPU wait."""
        check_like(op, device, dtype)
        self.op, self.device, self.dtype, self._look = op, device, dtype, look
        self._itemsize = dtype.itemsize
        self._seen: set[tuple[int, int]] = set()  # indices that were looked at
        self._pieces: list[tuple[int, ...]] = []
        self._addresses = 0  # all addresses, strides and run lengths or-ed: what is common to them is the unit
        self.bytes = 0  # what is moved, counted once

    def pack(self, piece: Tensor | Rows, buffer: Tensor, start: int) -> int:
        """Adds a piece that goes to a contiguous buffer from number `start` on. Returns where it ends."""
        sizes = self._sizes(piece)
        outer, rows, heads, numbers = sizes
        row = heads * numbers
        end = start + outer * rows * row
        if end > buffer.numel():
            raise ValueError(f"{self.op}: {end} numbers and more for a buffer of {buffer.numel()}")
        self._add(piece, sizes, buffer.data_ptr() + start * self._itemsize, (rows * row, row, numbers, 1))
        return end

    def place(self, piece: Tensor | Rows, target: Tensor) -> None:
        """Adds a piece that goes to a slice of its own shape."""
        self._check(target, "a target")
        check_no_overlap(self.op, "a target", target)
        sizes = self._sizes(piece)
        if tuple(target.shape) != sizes[4 - target.dim() :] or target.dim() != len(piece.shape):
            raise ValueError(f"{self.op}: a piece of {list(piece.shape)} for a target of {list(target.shape)}")
        self._add(piece, sizes, target.data_ptr(), _padded(target.stride(), 0))

    def scatter(self, rows_KHD: Tensor, cache_RHD: Tensor, index_K: Tensor) -> None:
        """Adds rows that go to rows index_K of a cache."""
        self._check(cache_RHD, "a cache")
        check_no_overlap(self.op, "a cache", cache_RHD)
        wanted = (len(index_K), *cache_RHD.shape[1:])
        if cache_RHD.dim() != 3 or tuple(rows_KHD.shape) != wanted:
            raise ValueError(
                f"{self.op}: rows of {list(rows_KHD.shape)} for {len(index_K)} places in {list(cache_RHD.shape)}"
            )
        self._index(index_K, len(cache_RHD))
        sizes = self._sizes(rows_KHD)
        self._add(rows_KHD, sizes, cache_RHD.data_ptr(), _padded(cache_RHD.stride(), 0), index_K.data_ptr())

    def _sizes(self, piece: Tensor | Rows) -> Four:
        shape = piece.shape
        if not 1 <= len(shape) <= 4:
            raise ValueError(f"{self.op}: a piece of {len(shape)} dimensions {list(shape)}: give one to four")
        return _padded(shape, 1)

    def _check(self, x: Tensor, what: str) -> None:
        if x.dtype is not self.dtype or x.device != self.device:
            check_like(self.op, self.device, self.dtype, **{what.replace(" ", "_"): x})
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            check_last_stride(self.op, what, x)

    def _index(self, index: Tensor, rows: int, least: int = 0) -> None:
        key = (index.data_ptr(), rows)
        if key not in self._seen:
            check_index(self.op, index, self.device, rows, self._look, least)
            self._seen.add(key)

    def _add(self, piece: Tensor | Rows, sizes: Four, target: int, to: Four, target_index: int = 0) -> None:
        """Notes a piece of so many numbers that goes to an address, with these strides."""
        reference = source_index = reference_index = 0
        kept: Four = (0, 0, 0, 0)
        if isinstance(piece, Tensor):
            self._check(piece, "a piece")
            source, by = piece.data_ptr(), _padded(piece.stride(), 0)
        else:
            tensor = piece.source_RHD
            self._check(tensor, "a source")
            self._index(piece.index_K, len(tensor))
            source, by, source_index = tensor.data_ptr(), _padded(tensor.stride(), 0), piece.index_K.data_ptr()
            if piece.reference_RHD is not None:
                reference, kept, reference_index = self._reference(piece, piece.reference_RHD)
        outer, rows, heads, numbers = sizes
        count = outer * rows
        if not count * heads * numbers:
            return
        if heads == 1 or (by[2] == numbers == to[2] and kept[2] in (0, numbers)):
            numbers, heads = heads * numbers, 1
        if count * heads > MAX_RUNS:
            raise ValueError(f"{self.op}: {count * heads} runs in one piece: at most {MAX_RUNS}")
        size = self._itemsize
        indexed = source_index or target_index
        inner = EVERY_ROW if indexed or outer == 1 else rows
        run, first, second = numbers * size, by[1] * size, to[1] * size
        addresses = source | target | reference | run | first | second | kept[1] * size
        if inner == rows:
            addresses |= (by[0] | to[0]) * size
        if heads > 1:
            addresses |= (by[2] | to[2] | kept[2]) * size
        self._addresses |= addresses
        self.bytes += run * count * heads
        self._pieces.append(
            (source, target, reference, source_index, target_index, reference_index, inner, by[0] * size, first,
             by[2] * size, to[0] * size, second, to[2] * size, kept[1] * size, kept[2] * size, heads, run,
             count * heads)
        )  # fmt: skip

    def _reference(self, rows: Rows, kept: Tensor) -> tuple[int, Four, int]:
        """Address, strides and index of the place where chosen rows are written as well."""
        self._check(kept, "a reference")
        check_no_overlap(self.op, "a reference", kept)
        index = rows.reference_index_K
        if index is None or len(index) != len(rows.index_K) or kept.shape[1:] != rows.source_RHD.shape[1:]:
            raise ValueError(
                f"{self.op}: a reference of {list(kept.shape)} needs an index of {len(rows.index_K)} rows and heads of "
                f"{list(rows.source_RHD.shape[1:])}"
            )
        self._index(index, len(kept), least=-1)
        return kept.data_ptr(), _padded(kept.stride(), 0), index.data_ptr()

    @property
    def unit(self) -> int:
        """The bytes that all addresses and runs are whole numbers of: 16, 4 or 2."""
        return next(unit for unit in (16, 4, 2) if not self._addresses & (unit - 1))

    def entries(self, lanes: int, chunk_bytes: int) -> tuple[bytes, int, int, int]:
        """The table, its entries, the chunks of all, and the accesses of a chunk."""
        unit = self.unit
        block = 64 if unit > 2 else 32
        chunk = max(lanes, chunk_bytes // block)
        table, first = [], 0
        for *start, run, count in self._pieces:
            blocks = run // block
            accesses = blocks + (run - blocks * block) // unit
            total = accesses * count
            table.append(ENTRY.pack(*start, blocks, accesses, first, total))
            first += -(-total // chunk)
        return b"".join(table), len(table), first, chunk


def _padded(of: tuple[int, ...], missing: int) -> Four:
    """Sizes or strides as those of four dimensions, with new ones in front."""
    return ((missing,) * (4 - len(of)) + tuple(of)) if len(of) < 4 else tuple(of)  # type: ignore[return-value]

"""The pieces of a movement launch as numbers: what is moved from where to where. The C library makes the launch's table
of them and looks at indices (moves.hpp).

A piece costs Python a few microseconds: what can be told from its layout is told once (`memo.py`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from cocodiff_sycl.checks import check_index, check_last_stride, check_like, check_no_overlap
from cocodiff_sycl.library import numbers_of
from cocodiff_sycl.memo import known
from cocodiff_sycl.rows import Rows

Four = tuple[int, int, int, int]
NOWHERE: Four = (0, 0, 0, 0)
Layout = tuple[bytes, int]  # of a piece: the members of struct Piece after its six addresses, and how many numbers move
ADDRESSES = numbers_of(6)


class Moves:
    """Pieces of one launch, all of one device and dtype. Adding checks them."""

    def __init__(
        self, op: str, device: torch.device, dtype: torch.dtype, look: bool, layouts: dict[Any, Any] | None = None
    ) -> None:
        """look: whether the numbers of indices are read and checked here, for memory that the C library cannot read.
        layouts: what earlier launches on the device found out (`known`), and what this one adds."""
        check_like(op, device, dtype)
        self.op, self.device, self.dtype, self._look = op, device, dtype, look
        self._layouts = {} if layouts is None else layouts
        self._words = (dtype,)
        self._parts: list[bytes] = []  # struct Piece of moves.hpp, addresses and the rest in turn

    @property
    def count(self) -> int:
        return len(self._parts) // 2

    def pieces(self) -> bytes:
        return b"".join(self._parts)

    def pack(self, piece: Tensor | Rows, address: int, start: int, room: int) -> int:
        """Adds a piece that goes to a contiguous buffer of `room` numbers from number `start` on. Returns its end."""
        of = (piece, None, None, None, None) if isinstance(piece, Tensor) else (*self._rows(piece), None)
        rest, numbers = known(self._layouts, self._layout, of, self._words)
        end = start + numbers
        if end > room:
            raise ValueError(f"{self.op}: {end} numbers and more for a buffer of {room}")
        self._add(of, address + start * self.dtype.itemsize, rest)
        return end

    def place(self, part: Tensor | Rows, target: Tensor) -> None:
        """Adds a piece that goes to a slice of its own shape."""
        of = (part, None, None, None, target) if isinstance(part, Tensor) else (*self._rows(part), target)
        self._add(of, target.data_ptr(), known(self._layouts, self._layout, of, self._words)[0])

    def scatter(self, rows_KHD: Tensor, cache_RHD: Tensor, index_K: Tensor) -> None:
        """Adds rows that go to rows index_K of a cache."""
        rest = known(self._layouts, self._scattered, (rows_KHD, cache_RHD, index_K), self._words)[0]
        if self._look:
            check_index(self.op, index_K, self.device, cache_RHD.shape[0], True)
        of = rows_KHD.data_ptr(), cache_RHD.data_ptr(), 0, 0, index_K.data_ptr(), 0
        self._parts += (ADDRESSES.pack(*of), rest)

    def _rows(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What chosen rows consist of, without a reference where it lacks one of its two."""
        source, index, reference, kept = rows.source_RHD, rows.index_K, rows.reference_RHD, rows.reference_index_K
        if self._look:
            check_index(self.op, index, self.device, source.shape[0], True)
            if reference is not None and kept is not None:
                check_index(self.op, kept, self.device, reference.shape[0], True, least=-1)
        return source, index, reference, kept

    def _add(self, of: tuple[Any, ...], target: int, rest: bytes) -> None:
        """Notes a piece that goes to an address: its own addresses, and what is known of its layout."""
        source, index, reference, kept, _ = of
        if index is None:
            self._parts += (ADDRESSES.pack(source.data_ptr(), target, 0, 0, 0, 0), rest)
            return
        written = (0, 0) if reference is None else (reference.data_ptr(), kept.data_ptr())
        self._parts += (
            ADDRESSES.pack(source.data_ptr(), target, written[0], index.data_ptr(), 0, written[1]),
            rest,
        )

    # Layouts: worked out where they are new ---------------------------------------------------------------------------

    def _layout(
        self, source: Tensor, index: Tensor | None, reference: Tensor | None, reference_index: Tensor | None,
        target: Tensor | None, _dtype: torch.dtype,
    ) -> Layout:  # fmt: skip
        """Of a piece, or of chosen rows, that goes to a slice or, without target, to a contiguous buffer."""
        shape = tuple(source.shape) if index is None else (1, len(index), *source.shape[1:])
        if not 1 <= len(shape) <= 4:
            raise ValueError(f"{self.op}: a piece of {len(shape)} dimensions {list(shape)}: give one to four")
        if target is not None:
            self._check(target, "a target")
            check_no_overlap(self.op, "a target", target)
            if tuple(target.shape) != shape:
                raise ValueError(f"{self.op}: a piece of {list(shape)} for a target of {list(target.shape)}")
        self._check(source, "a piece" if index is None else "a source")
        of_rows, kept = (0, 0, 0), NOWHERE
        if index is not None:
            check_index(self.op, index, self.device, source.shape[0], False)
            of_rows = source.shape[0], 0, 0
            if reference is not None:
                kept = self._reference(source, index, reference, reference_index)
                of_rows = source.shape[0], 0, reference.shape[0]
        _, rows, heads, numbers = sizes = _padded(shape, 1)
        packed = rows * heads * numbers, heads * numbers, numbers, 1
        to = packed if target is None else _padded(target.stride(), 0)
        return numbers_of(19).pack(*of_rows, *sizes, *_padded(source.stride(), 0), *to, *kept), prod(shape)

    def _scattered(self, rows_KHD: Tensor, cache_RHD: Tensor, index_K: Tensor, _dtype: torch.dtype) -> Layout:
        self._check(cache_RHD, "a cache")
        check_no_overlap(self.op, "a cache", cache_RHD)
        rows, count = cache_RHD.shape[0], index_K.shape[0]
        if cache_RHD.dim() != 3 or rows_KHD.shape != (count, *cache_RHD.shape[1:]):
            raise ValueError(f"{self.op}: rows of {list(rows_KHD.shape)} for {count} places in {list(cache_RHD.shape)}")
        check_index(self.op, index_K, self.device, rows, False)
        self._check(rows_KHD, "a piece")
        to, sizes = _padded(cache_RHD.stride(), 0), _padded(rows_KHD.shape, 1)
        of_rows = 0, rows, 0
        return numbers_of(19).pack(*of_rows, *sizes, *_padded(rows_KHD.stride(), 0), *to, *NOWHERE), prod(sizes)

    def _reference(self, source: Tensor, index: Tensor, kept: Tensor, kept_index: Tensor | None) -> Four:
        """Strides of the place where chosen rows are written as well."""
        self._check(kept, "a reference")
        check_no_overlap(self.op, "a reference", kept)
        if kept_index is None or len(kept_index) != len(index) or kept.shape[1:] != source.shape[1:]:
            raise ValueError(
                f"{self.op}: a reference of {list(kept.shape)} needs an index of {len(index)} rows and heads of "
                f"{list(source.shape[1:])}"
            )
        check_index(self.op, kept_index, self.device, len(kept), False)
        return _padded(kept.stride(), 0)

    def _check(self, x: Tensor, what: str) -> None:
        check_like(self.op, self.device, self.dtype, **{what.replace(" ", "_"): x})
        check_last_stride(self.op, what, x)


def _padded(of: tuple[int, ...], missing: int) -> Four:
    """Sizes or strides as those of four dimensions, with new ones in front."""
    return (*(missing,) * (4 - len(of)), *of)  # type: ignore[return-value]

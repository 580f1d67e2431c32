"""The pieces of a launch that moves data, as numbers: which of its tensors are copied to which others.

The C library makes the launch's table from them and from addresses, and checks row indices (moves.hpp).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from cocodiff_sycl.checks import check_index, check_last_stride, check_like, check_no_overlap, check_numbers
from cocodiff_sycl.library import numbers_of
from cocodiff_sycl.parts import Rows

Four = tuple[int, int, int, int]  # sizes or strides of four dimensions
NOWHERE: Four = (0, 0, 0, 0)
PLACES = 4  # number of a launch's tensors that a piece takes: a tensor, or the four tensors of chosen rows
NONE = -1  # the place of a tensor that is absent


def tensors_of(pieces: Iterable[Tensor | Rows]) -> list[Tensor | None]:
    """Return the tensors of all pieces in one list, PLACES for each piece: a tensor and Nones, or the four tensors of
    chosen rows."""
    found: list[Tensor | None] = []
    for piece in pieces:
        found += (piece, None, None, None) if isinstance(piece, Tensor) else piece.contained_tensors()
    return found


def packed(
    op: str, device: torch.device, messages: Sequence[Sequence[Tensor | Rows]], buffers: Sequence[Tensor]
) -> Pieces:
    """Check what `pack` copies, and return its pieces, message after message.

    Args:
        op: the operation that errors name.
        device: the device of all tensors.
        messages: for each message its tensors or chosen rows.
        buffers: the contiguous buffer of each message.
    """
    pieces, place = Pieces(op, device, buffers[0].dtype), 0
    into = PLACES * sum(map(len, messages))
    for number, (message, buffer) in enumerate(zip(messages, buffers, strict=True)):
        if buffer.dim() != 1 or not buffer.is_contiguous():
            raise ValueError(f"{op}: a buffer must be contiguous and of one dimension, not {list(buffer.shape)}")
        check_like(op, device, pieces.dtype, buffer=buffer)
        start, room = 0, buffer.numel()
        for piece in message:
            end = start + pieces.add(piece, place, None, into + number, start)
            if end > room:
                raise ValueError(f"{op}: {end} numbers and more for a buffer of {room}")
            start, place = end, place + PLACES
    return pieces


def placed(op: str, device: torch.device, parts: Sequence[Tensor | Rows], targets: Sequence[Tensor]) -> Pieces:
    """Check what `unpack` copies, and return its pieces.

    Args:
        op: the operation that errors name.
        device: the device of all tensors.
        parts: the tensors or chosen rows to copy.
        targets: for each part the slice of the same shape that it is copied to.
    """
    pieces = Pieces(op, device, targets[0].dtype)
    for number, (part, target) in enumerate(zip(parts, targets, strict=True)):
        pieces.add(part, PLACES * number, target, PLACES * len(parts) + number)
    return pieces


def scattered(
    op: str, device: torch.device, rows: Sequence[Tensor], index_K: Tensor, caches: Sequence[Tensor]
) -> Pieces:
    """Check what `scatter_rows` copies, and return its pieces. The launch's tensors are the rows, then the index, then
    the caches.

    Args:
        op: the operation that errors name.
        device: the device of all tensors.
        rows: tensors of K rows, [K, H, D].
        index_K: the rows of the caches that are written, int64.
        caches: for each tensor the cache that its rows are written to.
    """
    pieces = Pieces(op, device, caches[0].dtype)
    for number, (rows_KHD, cache_RHD) in enumerate(zip(rows, caches, strict=True)):
        pieces.scatter(rows_KHD, number, cache_RHD, len(rows) + 1 + number, index_K, len(rows))
    return pieces


def check_rows_exist(op: str, pieces: Iterable[Tensor | Rows]) -> None:
    """Raise ValueError if chosen rows are out of range. It is for devices whose memory the C library cannot read.

    Args:
        op: the operation that errors name.
        pieces: tensors, which need no check, and chosen rows.
    """
    for piece in pieces:
        if isinstance(piece, Tensor):
            continue
        check_numbers(op, piece.index_K, piece.source_RHD.shape[0])
        if piece.reference_RHD is not None and piece.reference_index_K is not None:
            check_numbers(op, piece.reference_index_K, piece.reference_RHD.shape[0], least=-1)


class Pieces:
    """The pieces of one launch, on one device and of one dtype. Tensors are named by their places in the launch.

    Adding a piece checks it.
    """

    def __init__(self, op: str, device: torch.device, dtype: torch.dtype) -> None:
        check_like(op, device, dtype)
        self.op, self.device, self.dtype = op, device, dtype
        self.found: list[bytes] = []  # a struct Piece of moves.hpp each

    def add(self, piece: Tensor | Rows, place: int, target: Tensor | None, into: int, start: int = 0) -> int:
        """Add a copy of a tensor or of chosen rows. Return the number of elements copied.

        Args:
            place: place of the piece's first tensor in the launch.
            target: a slice of the piece's shape; None for a contiguous buffer.
            into: place of the target in the launch.
            start: first element of the buffer that is written.
        """
        rows = None if isinstance(piece, Tensor) else piece
        source = piece if isinstance(piece, Tensor) else piece.source_RHD
        shape = tuple(piece.shape)
        if not 1 <= len(shape) <= 4:
            raise ValueError(f"{self.op}: a piece of {len(shape)} dimensions {list(shape)}: give one to four")
        if target is not None:
            self._check_written(target, "a target")
            if tuple(target.shape) != shape:
                raise ValueError(f"{self.op}: a piece of {list(shape)} for a target of {list(target.shape)}")
        self._check(source, "a piece" if rows is None else "a source")
        places, counts, kept = (place, into, NONE, NONE, NONE, NONE), (0, 0, 0), NOWHERE
        if rows is not None:
            check_index(self.op, rows.index_K, self.device)
            places, counts = (place, into, NONE, place + 1, NONE, NONE), (source.shape[0], 0, 0)
            if rows.reference_RHD is not None:
                kept = self._reference(rows, rows.reference_RHD)
                places = place, into, place + 2, place + 1, NONE, place + 3
                counts = source.shape[0], 0, rows.reference_RHD.shape[0]
        _, length, heads, numbers = sizes = _padded(shape, 1)
        side_by_side = length * heads * numbers, heads * numbers, numbers, 1
        to = side_by_side if target is None else _padded(target.stride(), 0)
        self._note(places, start, counts, sizes, _padded(source.stride(), 0), to, kept)
        return prod(shape)

    def scatter(
        self, rows_KHD: Tensor, place: int, cache_RHD: Tensor, into: int, index_K: Tensor, index_place: int
    ) -> None:
        """Add a copy of rows to given rows of a cache.

        Args:
            rows_KHD: the rows.
            place: place of the rows among the launch's tensors.
            cache_RHD: the cache.
            into: its place.
            index_K: the rows of the cache that are written, int64.
            index_place: its place.
        """
        self._check_written(cache_RHD, "a cache")
        length, count = cache_RHD.shape[0], index_K.shape[0]
        if cache_RHD.dim() != 3 or rows_KHD.shape != (count, *cache_RHD.shape[1:]):
            raise ValueError(f"{self.op}: rows of {list(rows_KHD.shape)} for {count} places in {list(cache_RHD.shape)}")
        check_index(self.op, index_K, self.device)
        self._check(rows_KHD, "a piece")
        places, counts = (place, into, NONE, NONE, index_place, NONE), (0, length, 0)
        of, to = _padded(rows_KHD.stride(), 0), _padded(cache_RHD.stride(), 0)
        self._note(places, 0, counts, _padded(rows_KHD.shape, 1), of, to, NOWHERE)

    def _note(self, places: tuple[int, ...], start: int, counts: tuple[int, int, int], *fours: Four) -> None:
        """Add a struct Piece of moves.hpp.

        Args:
            places: places of its tensors in the launch; NONE for absent ones.
            start: first element of the buffer that is written.
            counts: numbers of rows by which indices are checked; 0 for none.
            fours: sizes, strides of the source, of the target and of the reference.
        """
        numbers = [number for four in fours for number in four]
        self.found.append(numbers_of(26).pack(*places, start, *counts, *numbers))

    def _reference(self, rows: Rows, reference: Tensor) -> Four:
        """Check the reference that chosen rows are written to as well, and return its strides."""
        self._check_written(reference, "a reference")
        index, kept = rows.index_K, rows.reference_index_K
        if kept is None or len(kept) != len(index) or reference.shape[1:] != rows.source_RHD.shape[1:]:
            raise ValueError(
                f"{self.op}: a reference of {list(reference.shape)} needs an index of {len(index)} rows and heads of "
                f"{list(rows.source_RHD.shape[1:])}"
            )
        check_index(self.op, kept, self.device)
        return _padded(reference.stride(), 0)

    def _check_written(self, x: Tensor, what: str) -> None:
        """Raise an error unless a tensor can be written: its device, dtype and last stride fit, and no elements share
        memory. `what` is the word for it in the message."""
        self._check(x, what)
        check_no_overlap(self.op, what, x)

    def _check(self, x: Tensor, what: str) -> None:
        """Raise an error unless a tensor's device, dtype and last stride fit. `what` is the word for it in the
        message."""
        check_like(self.op, self.device, self.dtype, **{what.replace(" ", "_"): x})
        check_last_stride(self.op, what, x)


def _padded(of: tuple[int, ...], missing: int) -> Four:
    """Return sizes or strides extended to four dimensions, with the number `missing` in front."""
    return (*(missing,) * (4 - len(of)), *of)  # type: ignore[return-value]

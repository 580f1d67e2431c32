"""The launches of each arithmetic operation for tensors of given layouts. They are checked and computed once, then
looked up.

A later call with tensors of the same layouts (`library.Layouts`) finds the plan and only brings addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from cocodiff_sycl.checks import DTYPES, check_dims, check_last_stride, check_no_overlap, check_rows, check_shape
from cocodiff_sycl.library import Layouts, Library, Tensors
from cocodiff_sycl.parts import RUN, TOKENS, BlockCut, room_of, stream_places

T = TypeVar("T")
LAYOUTS = {"pairs": 0, "halves": 1, "complex": 2, "none": 3}  # the kernel's number of each rotary layout
TABLES = {"pairs": 2, "halves": 2, "complex": 1, "none": 0}  # number of rotary tables
GROUPS_OF_UNIT = 16  # fewest groups of LANES work-items for a GPU's compute unit: twice its threads
CODE_BITS, CODE_GROUP = (2, 4, 8), 32  # bits of a residual code; channels that share a scale
STREAM_STRIP = 2 + RUN * TOKENS * 28 // 32  # room of a strip before it is joined, in units of 32 bits
STREAM_ADDRESSES = 12  # addresses and factors that structs of the lossless codec begin with
FEW_TILES = 1024  # up to this number, each tile of a block adds up the sizes of those before it to find its place
NOTES = 4  # counters of a tensor's codec
SELECT_ITEMS = 256  # work-items that choose in one set of tokens on a GPU, or find one rank's rows
GROUP_BYTES = 8 * 1024, 32 * 1024  # least bytes (starting costs) and most bytes of a tensor for a CPU's work-item


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one operation, one after the other, which lack only the tensors' addresses."""

    launches: tuple[bytes, ...]  # as the C library takes them; none if there is nothing to do
    table: Tensor | None = None  # description of the blocks, for kernels of the lossless codec
    tiles: int = 0  # number of tiles of all blocks, for the lossless codec


def _divisor(number: int) -> int:
    """Return a divisor in the form in which kernels take it; 0 for 1. They multiply by its inverse and shift, which is
    exact below 2**31."""
    shift = (number - 1).bit_length()
    return -(-(2 ** (31 + shift)) // number) | (shift - 1) << 32 if number > 1 else 0


def _strides_of(*tensors: Tensor | None) -> list[int]:
    """Return the strides of four-dimensional tensors without the last, three for each; zeros for absent tensors."""
    return [number for x in tensors for number in ((0, 0, 0) if x is None else x.stride()[:3])]


class Plans:
    """The plans of one device's arithmetic operations. Making a plan raises an error if the tensors do not fit the
    operation."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self._library, self._device = library, device
        self._layouts: Layouts[Any] = Layouts(library.look)

    def of(self, make: Callable[..., T], tensors: Tensors, *words: object) -> tuple[T, bytes]:
        """Return (the plan of an operation, perhaps from the cache; the addresses of its tensors).

        Args:
            make: the method of this class that makes the plan.
            tensors: its first arguments.
            words: its other arguments.
        """
        return self._layouts.of((make, words), tensors, make, *tensors, *words)

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool) -> Plan:
        """Return the plan of `l1_score`."""
        op = "l1_score"
        check_dims(op, "v", v_BLHD, 4)
        B, L, H, D = shape = v_BLHD.shape
        check_rows(op, self._device, v_BLHD.dtype, shape, v=v_BLHD, reference=reference_BLHD)
        if renew:
            check_no_overlap(op, "reference", reference_BLHD)
        of_v, of_reference = v_BLHD.stride(), reference_BLHD.stride()
        runs, numbers = (1, H * D) if of_v[2] == of_reference[2] == D or H == 1 else (H, D)
        rows, row_bytes = B * L if H * D else 0, H * D * v_BLHD.element_size()
        values = L, *of_v[:3], *of_reference[:3], runs, numbers, int(renew)
        return self._of_rows(f"l1_score_{DTYPES[v_BLHD.dtype]}", 4, rows, row_bytes, values)

    def choose(self, scores: Tensor, place_CT: Tensor, begin_M: Tensor, share: float | None, threshold: float) -> Plan:
        """Return the plan of `choose`."""
        op = "choose"
        check_dims(op, "scores", scores, 1)
        self._check_kind(op, "scores", scores, torch.float32)
        check_last_stride(op, "scores", scores)
        self._check_tables(op, place=place_CT, begin=begin_M)
        columns, tokens = place_CT.shape
        if share is None and columns < 2:
            raise ValueError(f"{op}: a threshold needs the places of norms too: give two columns of places")
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"{op}: a share of {share} of the tokens stays: give 0 to 1")
        bits = struct.unpack("=2q", struct.pack("=2d", share or 0.0, threshold))
        items = 1 if self._library.lanes == 1 else SELECT_ITEMS
        return self._plan("choose_tokens", 5, len(begin_M) - 1, items, (tokens, int(share is not None), *bits))

    def compact(self, active_T: Tensor, token_N: Tensor, last_R: Tensor, table_KN: Tensor) -> Plan:
        """Return the plan of `compact`."""
        op = "compact"
        self._check_kind(op, "active", active_T, torch.uint8)
        check_last_stride(op, "active", active_T)
        self._check_tables(op, token=token_N, last=last_R, table=table_KN)
        (columns, rows), ranks = table_KN.shape, len(last_R)
        check_shape(op, "token", token_N, (rows,))
        groups, items = (1, 1) if self._library.lanes == 1 else (ranks, SELECT_ITEMS)
        return self._plan("compact_rows", 6, groups, items, (ranks, rows, columns, ranks // groups))

    def _check_tables(self, op: str, **tables: Tensor) -> None:
        """Raise ValueError unless all tensors are contiguous int64 on the device.

        Args:
            op: the operation that the message names.
            tables: the tensors, by the names for the message.
        """
        for name, table in tables.items():
            self._check_kind(op, name, table, torch.int64)
            if not table.is_contiguous():
                raise ValueError(f"{op}: {name} must be contiguous, not of strides {table.stride()}")

    def qk_norm_rope(
        self,
        x_BLHD: Tensor,
        weight_D: Tensor | None,
        cosine_LD: Tensor | None,
        sine_LD: Tensor | None,
        epsilon: float | None,
        layout: str,
        round_before_weight: bool,
    ) -> Plan:
        """Return the plan of `qk_norm_rope`.

        Args:
            cosine_LD: with layout "complex" cosines and sines side by side, [L, D / 2, 2].
        """
        op = "qk_norm_rope"
        check_dims(op, "x", x_BLHD, 4)
        B, L, H, D = shape = x_BLHD.shape
        check_rows(op, self._device, x_BLHD.dtype, shape, x=x_BLHD)
        if D % 2:
            raise ValueError(f"{op}: heads of {D} numbers have no pairs to rotate: give an even number")
        if weight_D is not None:
            check_rows(op, self._device, x_BLHD.dtype, (D,), weight=weight_D)
        shape_of_table = (L, D // 2, 2) if layout == "complex" else (L, D)
        for table in (cosine_LD, sine_LD)[: TABLES[layout]]:
            assert table is not None
            check_rows(op, self._device, torch.float32, shape_of_table, rotary=table)
            if not table.is_contiguous():
                raise ValueError(f"{op}: a rotary table must be contiguous, not of strides {table.stride()}")
        rows, row_bytes = B * L * H if D else 0, D * x_BLHD.element_size()
        bits = struct.unpack("I", struct.pack("f", -1.0 if epsilon is None else epsilon))[0]
        values = L, H, D, *x_BLHD.stride()[:3], bits, LAYOUTS[layout], int(round_before_weight)
        return self._of_rows(f"norm_rope_{DTYPES[x_BLHD.dtype]}", 5, rows, row_bytes, values, H)

    def merge_partials(self, out_BLHD: Tensor, lse_BLH: Tensor, part_BLHD: Tensor, part_lse_BLH: Tensor) -> Plan:
        """Return the plan of `merge_partials`."""
        op = "merge_partials"
        check_dims(op, "out", out_BLHD, 4)
        B, L, H, D = shape = out_BLHD.shape
        widened = out_BLHD.dtype == torch.float32  # the parts may have 16 bits
        check_rows(op, self._device, out_BLHD.dtype, shape, out=out_BLHD)
        check_rows(op, self._device, part_BLHD.dtype if widened else out_BLHD.dtype, shape, part=part_BLHD)
        check_rows(op, self._device, torch.float32, shape[:3], lse=lse_BLH, part_lse=part_lse_BLH)
        check_no_overlap(op, "out", out_BLHD)
        for name, lse in (("lse", lse_BLH), ("part_lse", part_lse_BLH)):
            if not lse.is_contiguous():
                raise ValueError(f"{op}: {name} must be contiguous, not of strides {lse.stride()}")
        rows = B * L * H
        if rows >= 2**32:
            raise ValueError(f"{op}: {rows} rows in one call: at most {2**32 - 1}")
        values = L, H, D, *out_BLHD.stride()[:3], *part_BLHD.stride()[:3]
        kernel = f"merge_{DTYPES[out_BLHD.dtype]}_{DTYPES[part_BLHD.dtype]}"
        return self._of_rows(kernel, 4, rows, max(1, D) * out_BLHD.element_size(), values)

    def _check_kind(self, op: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Raise ValueError unless a tensor has this dtype and is on the device. `op` and `name` are the operation and
        the tensor in the message."""
        if tensor.dtype != dtype or tensor.device != self._device:
            raise ValueError(f"{op}: {name} is {tensor.dtype} on {tensor.device}: give {dtype} on {self._device}")

    def residual(
        self,
        x_BLHD: Tensor | None,
        last_BLHD: Tensor,
        before_BLHD: Tensor | None,
        code_BLHW: Tensor | None,
        out_BLHD: Tensor | None,
        notes_N: Tensor | None,
        op: str,
        bits: int,
        linear: bool = False,
        measure: bool = False,
    ) -> Plan:
        """Return the plan of an operation of the residual codec. All of them take one struct.

        Args:
            op: the operation's name.
            bits: of the code; 8 for operations without a code.
            linear: True to predict by linear continuation.
            measure: True to measure the relative change.
        """
        like_BLHD = last_BLHD if x_BLHD is None else x_BLHD
        if notes_N is not None:
            check_dims(op, "x", like_BLHD, 4)
            check_rows(op, self._device, like_BLHD.dtype, like_BLHD.shape, x=like_BLHD)
            if notes_N.dtype != torch.int64 or notes_N.shape != (NOTES,) or notes_N.device != self._device:
                raise ValueError(
                    f"{op}: notes are {notes_N.dtype} {list(notes_N.shape)} on {notes_N.device}: give torch.int64 "
                    f"[{NOTES}] on {self._device}"
                )
            check_last_stride(op, "notes", notes_N)
            if code_BLHW is not None:
                check_no_overlap(op, "code", code_BLHW)
        check_dims(op, "the last reconstruction", last_BLHD, 4)
        B, L, H, D = shape = like_BLHD.shape
        named = {"last": last_BLHD, "before": before_BLHD, "out": out_BLHD}
        there = {name: tensor for name, tensor in named.items() if tensor is not None}
        check_rows(op, self._device, like_BLHD.dtype, shape, **there)
        for name, tensor in there.items():
            check_no_overlap(op, name, tensor)
        if bits not in CODE_BITS:
            raise ValueError(f"{op}: {bits} bits: choose from {', '.join(map(str, CODE_BITS))}")
        if code_BLHW is not None:
            self._check_kind(op, "code", code_BLHW, torch.uint8)
            check_shape(op, "code", code_BLHW, (B, L, H, -(-D * bits // 8) + -(-D // CODE_GROUP)))
            check_last_stride(op, "code", code_BLHW)
        rows = B * L * H if D else 0
        if rows >= 2**32:
            raise ValueError(f"{op}: {rows} rows in one call: at most {2**32 - 1}")
        strides = _strides_of(x_BLHD, last_BLHD, before_BLHD, code_BLHW, out_BLHD)
        values = L, H, D, *strides, bits, int(linear and before_BLHD is not None), int(measure)
        row_bytes = max(1, D) * like_BLHD.element_size()
        return self._of_rows(f"{op}_{DTYPES[like_BLHD.dtype]}", 8, rows, row_bytes, values, H)

    def encode_lossless(
        self, x_BLHD: Tensor, last_BLHD: Tensor | None, before_BLHD: Tensor | None, written_BLHD: Tensor, cut: BlockCut
    ) -> Plan:
        """Return the plan of `encode_lossless`."""
        tensors = x_BLHD, last_BLHD, before_BLHD, written_BLHD
        self._check_known("encode_lossless", tensors)
        places = stream_places(cut.cells(x_BLHD.shape), x_BLHD.shape[-1])
        return self._streams(("code_strips", "join_strips"), tensors, cut, places, 0)

    def stream_lengths(self, like_BLHD: Tensor, cut: BlockCut, width: int) -> Plan:
        """Return the plan of `stream_lengths`.

        Args:
            like_BLHD: a tensor with the shape of the decoded one.
            cut: the cut of that tensor into blocks.
            width: bytes of a stream's first part for each token and head.
        """
        return self._streams(("stream_begins",), (None, None, None, like_BLHD), cut, None, width)

    def decode_lossless(
        self, last_BLHD: Tensor | None, before_BLHD: Tensor | None, written_BLHD: Tensor, cut: BlockCut, width: int
    ) -> Plan:
        """Return the plan of `decode_lossless`."""
        tensors = None, last_BLHD, before_BLHD, written_BLHD
        self._check_known("decode_lossless", tensors)
        return self._streams(("read_streams",), tensors, cut, None, width)

    def _check_known(self, op: str, tensors: Sequence[Tensor | None]) -> None:
        """Raise an error unless the tensors fit the lossless codec.

        Args:
            op: the operation that the message names.
            tensors: x, the last values, those before, and the tensor that the next ones are written to; None for absent
                ones.
        """
        there = {name: x for name, x in zip(("x", "last", "before", "written"), tensors, strict=True) if x is not None}
        written_BLHD = there["written"]
        check_dims(op, "x", there.get("x", written_BLHD), 4)
        if written_BLHD.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"{op}: {written_BLHD.dtype} travels whole: give torch.bfloat16 or torch.float16")
        if written_BLHD.shape[-1] % RUN:
            raise ValueError(f"{op}: heads of {written_BLHD.shape[-1]} numbers: give a multiple of {RUN}")
        check_rows(op, self._device, written_BLHD.dtype, written_BLHD.shape, **there)
        check_no_overlap(op, "written", written_BLHD)
        for name, tensor in there.items():
            spanned = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            if spanned >= 2**32:
                raise ValueError(f"{op}: {name} spans {spanned} numbers: give less than {2**32}")

    def _streams(
        self, kernels: Sequence[str], tensors: Tensors, cut: BlockCut, places: Sequence[int] | None, width: int
    ) -> Plan:
        """Return the plan of kernels of the lossless codec, which are launched one after the other.

        Args:
            kernels: names of the kernels.
            tensors: x, the last values, those before, and the tensor that the next ones are written to; None for absent
                ones.
            cut: the cut of the tensor into blocks.
            places: first byte of every stream; None for first parts, one after the other.
            width: bytes of a first part for each token and head.
        """
        *_, before, written = tensors
        assert written is not None
        *_, H, D = shape = written.shape
        blocks, first_tile, start, place, all_tiles = [], 0, 0, 0, cut.tiles(shape, D)
        for number, (batch, tokens, heads) in enumerate(cut.shapes(shape)):
            columns, chunks = heads * D // RUN, -(-tokens // TOKENS)
            strips, cells, tiles = batch * chunks * columns, batch * tokens * heads, all_tiles[number]
            begins = place if places is None else places[number]
            of_strips = columns, chunks, _divisor(columns), _divisor(chunks)
            blocks.append((first_tile, tiles, strips, cells, start, tokens, begins, room_of(cells, width), *of_strips))
            first_tile, start, place = first_tile + tiles, start + cut.sizes[number], place + cells * width
        if len(kernels) > 1 and max(all_tiles, default=0) > FEW_TILES:
            kernels = kernels[0], "stream_begins", *kernels[1:]
        odd = int(any(begins % 2 for *_, begins, _, _, _, _, _ in blocks))
        table = torch.tensor(blocks, dtype=torch.int64).to(self._device)
        how = int(cut.dim == 1), int(before is not None), _divisor(D // RUN), odd
        values = first_tile, len(blocks), H, D, *how, *_strides_of(*tensors)
        library, launches = self._library, []
        for kernel in kernels:
            typed = kernel in ("code_strips", "read_streams")
            groups, items = -(-first_tile // library.packed), library.packed * library.lanes
            if kernel == "stream_begins":
                groups, items = len(blocks), 1 if library.lanes == 1 else SELECT_ITEMS
            kernel += f"_{DTYPES[written.dtype]}" if typed else ""
            launches.append(library.launch_of(kernel, groups, items, STREAM_ADDRESSES, values))
        return Plan(tuple(launches), table, first_tile)

    def _rows_each(self, rows: int, row_bytes: int, alike: int) -> int:
        """Return the number of consecutive rows for one group of LANES work-items.

        Args:
            rows: number of all rows.
            row_bytes: bytes of a row.
            alike: number of rows that share data which a GPU then keeps.
        """
        library = self._library
        if library.lanes > 1:
            return max(1, min(alike, rows // (GROUPS_OF_UNIT * library.compute_units)))
        if not rows or not library.is_cpu:
            return 1
        least, most = (size // row_bytes for size in GROUP_BYTES)
        return max(1, least, min(most, rows // (4 * library.compute_units)))

    def _of_rows(
        self, kernel: str, addresses: int, rows: int, row_bytes: int, values: tuple[int, ...], alike: int = 1
    ) -> Plan:
        """Return the plan of a kernel that goes through rows, with as many work-groups as there is work for.

        Args:
            kernel: name of the kernel.
            addresses: number of addresses that the kernel's struct begins with.
            rows: number of rows.
            row_bytes: bytes of a row.
            values: members of the struct after the number of rows and the rows of one group.
            alike: number of rows that share data which a GPU then keeps.
        """
        library, each = self._library, self._rows_each(rows, row_bytes, alike)
        groups = -(-rows // (each * library.packed))
        return self._plan(kernel, addresses, groups, library.packed * library.lanes, (rows, each, *values))

    def _plan(self, kernel: str, addresses: int, groups: int, items: int, values: tuple[int, ...]) -> Plan:
        """Return a plan of one launch, or of none if `groups` is 0.

        Args:
            kernel: name of the kernel.
            addresses: number of addresses that the kernel's struct begins with.
            groups: number of work-groups.
            items: work-items of a work-group.
            values: the other members of the struct.
        """
        return Plan((self._library.launch_of(kernel, groups, items, addresses, values),) if groups else ())

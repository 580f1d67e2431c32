"""A comparison of a device's operations with torch's on small tensors, for machines on which no test has run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cocodiff_sycl.ops import SyclOps
from cocodiff_sycl.parts import BlockCut, Rows, room_of, stream_places
from torch import Tensor

from cocodiff.kernels.dispatch import OPS, STREAMED
from cocodiff.kernels.lossless import CODED, Known, least_room
from cocodiff.kernels.reference import TorchOps
from cocodiff.kernels.residual import NOTES, Candidates, Onward, Prediction, Reconstructions, RowOrder, coded_width

# Allowed relative error: one ulp, and several for float32.
STEPS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
B, L, H, D = 1, 70, 3, 128


class KernelTrial(NamedTuple):
    """The result of trying one operation on small tensors."""

    op: str  # name of the operation
    dtype: str  # name of the tensors' dtype
    shapes: str  # shapes of its results
    difference: float  # largest absolute difference from the expected result
    wrong: str = ""  # the error, or that it differs by more than rounding; "" if it is right


def try_operations(ops: SyclOps | None, device: torch.device) -> list[KernelTrial]:
    """Try all operations in all dtypes on small tensors, and compare the results. `cocodiff doctor` reports them.

    Args:
        ops: the SYCL operations, whose results are compared with torch's on the same device; None to compare torch's
            results on the device with those on the CPU.
        device: the device that is tried.
    """
    return [_try(op, dtype, ops, device) for op in OPS for dtype in STEPS if op not in STREAMED or dtype in CODED]


def _try(op: str, dtype: torch.dtype, ops: SyclOps | None, device: torch.device) -> KernelTrial:
    """Run one operation in one dtype in both ways, and compare the results. Return the difference, or the error that it
    raised.

    Args:
        op: name of the operation.
        dtype: dtype of the tensors.
        ops: the SYCL operations; None to try torch's on the device.
        device: the device that is tried.
    """
    name, cpu = str(dtype).removeprefix("torch."), torch.device("cpu")
    try:
        found = _run(op, ops or TorchOps(), dtype, device)
        expected = _run(op, TorchOps(), dtype, device if ops is not None else cpu)
    except RuntimeError as error:
        return KernelTrial(op, name, "", float("inf"), f"fails: {str(error).splitlines()[0]}")
    pairs = [(a.to(cpu), b.to(cpu)) for a, b in zip(found, expected, strict=True)]
    shapes = " ".join(dict.fromkeys(str(list(a.shape)) for a, _ in pairs))
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    close = all(torch.allclose(a, b, STEPS[dtype], STEPS[dtype]) for a, b in pairs)
    return KernelTrial(op, name, shapes, difference, "" if close else "differs by more than rounding")


def _run(op: str, ops: SyclOps | TorchOps, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """Run one operation on random tensors, the same ones for all implementations. Return all tensors that it returned
    or wrote.

    Args:
        op: name of the operation.
        ops: the implementation to run.
        dtype: dtype of the tensors.
        device: the device that it runs on.
    """
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        """Return normally distributed random numbers of a shape, as a tensor on the device."""
        return torch.randn(shape, generator=generator).to(kind).to(device)

    x_BLHD, other_BLHD = random(B, L, H + 1, D)[:, :, :H], random(B, L, H, D)
    if op in ("encode_residual", "decode_residual"):
        return _coded(op, ops, x_BLHD, Reconstructions(other_BLHD, random(B, L, H, D)))
    if op in STREAMED:
        return _streamed(op, ops, x_BLHD, other_BLHD, random(B, L, H, D))
    if op in ("choose", "compact"):
        return _chosen(op, ops, random(2, L, kind=torch.float32))
    if op == "l1_score":
        return [ops.l1_score(x_BLHD, other_BLHD)]
    if op == "merge_partials":
        lse_BLH, part_lse_BLH = random(B, L, H, kind=torch.float32), random(B, L, H, kind=torch.float32)
        ops.merge_partials(other_BLHD, lse_BLH, x_BLHD, part_lse_BLH)
        return [other_BLHD, lse_BLH]
    if op == "qk_norm_rope":
        angles_LD = [random(L, D, kind=torch.float32) for _ in "cs"]
        return [ops.qk_norm_rope(x_BLHD, random(D), 1e-6, angles_LD, "pairs")]
    index_K = torch.arange(0, L, 2, device=device)  # every second row
    all_N, some_N = (x_BLHD.new_zeros(rows * H * D) for rows in (L, len(index_K)))
    operand_BLHD, notes_N = torch.zeros_like(x_BLHD), torch.zeros(NOTES, dtype=torch.int64, device=device)
    cases: dict[str, tuple[tuple[Any, ...], list[Tensor]]] = {  # arguments, and the tensors that are written
        "pack": (([[x_BLHD]], [all_N]), [all_N]),
        "unpack": (([other_BLHD], [x_BLHD]), [x_BLHD]),
        "gather_pack": (([[Rows(x_BLHD[0], index_K, other_BLHD[0], index_K)]], [some_N]), [some_N, other_BLHD]),
        "scatter_rows": (([other_BLHD[0, : len(index_K)]], index_K, [x_BLHD[0]]), [x_BLHD]),
        "note_change": ((x_BLHD, other_BLHD, notes_N), [other_BLHD, notes_N]),
        "continue_linearly": ((x_BLHD, other_BLHD, Onward(0.5, operand_BLHD)), [operand_BLHD]),
    }
    arguments, written = cases[op]
    getattr(ops, op)(*arguments)
    return written


def _chosen(op: str, ops: SyclOps | TorchOps, scores_2L: Tensor) -> list[Tensor]:
    """Run one of V-Major's two operations that choose tokens, on two cards' tokens, by share and by threshold. Return
    all tensors that it returned.

    Rows are always ordered (`compact`) from tokens that torch chose.

    Args:
        op: "choose" or "compact".
        ops: the implementation to run.
        scores_2L: scores and norms of L tokens, float32.
    """
    device, cards = scores_2L.device, torch.arange(2 * L).view(2, 1, L).split((L // 3, L - L // 3), 2)
    among, values = Candidates.of_sets(cards, device), scores_2L.abs().flatten()
    chooser = ops if op == "choose" else TorchOps()
    masks = [chooser.choose(values, among, share, 1.0) for share in (0.4, None)]
    if op == "choose":
        return masks
    rows = torch.arange(L + 2, device=device).clamp(max=L)  # two rows more that are always sent
    order = RowOrder(rows, torch.tensor([L // 2, L + 1], device=device), torch.stack([rows, -rows]))
    found = [ops.compact(active_T, order) for active_T in masks]
    return [x for chosen_KN, end_R in found for x in (end_R, chosen_KN[:, : int(end_R[-1])])]


def _coded(op: str, ops: SyclOps | TorchOps, x_BLHD: Tensor, known: Reconstructions) -> list[Tensor]:
    """Run an operation of the residual codec in 2, 4 and 8 bits. Return all tensors that were written.

    Values are predicted from the two known reconstructions. For decoding, the code is always made by torch, so that
    both implementations decode the same one.

    Args:
        op: "encode_residual" or "decode_residual".
        ops: the implementation to try.
        x_BLHD: the tensor to code.
        known: the two last reconstructions of it.
    """
    assert known.before is not None
    found = []
    for bits in (2, 4, 8):
        code_BLHW = torch.zeros(B, L, H, coded_width(D, bits), dtype=torch.uint8, device=x_BLHD.device)
        notes_N = torch.zeros(NOTES, dtype=torch.int64, device=x_BLHD.device)
        ends = [Reconstructions(known.last, known.before.clone()) for _ in range(2)]
        encoder = ops if op == "encode_residual" else TorchOps()
        how = Prediction(0.75, linear=True, measure=True)
        encoder.encode_residual(x_BLHD, ends[0], how, bits, code_BLHW, notes_N)
        operand_BLHD = torch.zeros_like(x_BLHD)
        if op == "decode_residual":
            ops.decode_residual(code_BLHW, ends[1], 0.75, bits, Onward(0.5, operand_BLHD))
        found += [code_BLHW, notes_N, operand_BLHD, *(end.before for end in ends if end.before is not None)]
    return found


def _streamed(op: str, ops: SyclOps | TorchOps, x_BLHD: Tensor, last_BLHD: Tensor, before_BLHD: Tensor) -> list[Tensor]:
    """Run an operation of the lossless codec on a tensor in two blocks of rows. Return all tensors that were written.

    Values are predicted by continuing the two last ones. For decoding, the streams are always made by torch, and most
    of each is in its second part.

    Args:
        op: "encode_lossless", "stream_lengths" or "decode_lossless".
        ops: the implementation to try.
        x_BLHD: the tensor to code.
        last_BLHD: its values at the last call.
        before_BLHD: its values at the call before that.
    """
    cut, device = BlockCut(1, (L - 1, 1)), x_BLHD.device
    cells, width = cut.cells(x_BLHD.shape), least_room(D) + 1
    places, written = stream_places(cells, D), [before_BLHD.clone() for _ in range(2)]
    ends = [Known(before_BLHD, last_BLHD, before_BLHD, 0.75) for before_BLHD in written]
    streams = torch.zeros(places[-1], dtype=torch.uint8, device=device)
    lengths_N, found_N, needed_1 = (torch.zeros(n, dtype=torch.int64, device=device) for n in (2, 2, 1))
    encoder = ops if op == "encode_lossless" else TorchOps()
    encoder.encode_lossless(x_BLHD, ends[0], cut, streams, lengths_N, needed_1)
    ends_at = [place + length for place, length in zip(places, lengths_N.tolist(), strict=False)]
    if op == "encode_lossless":
        found = [streams[place:end] for place, end in zip(places, ends_at, strict=False)]
        return [*found, lengths_N, needed_1, written[0]]
    rooms = [room_of(count, width) for count in cells]
    first = [streams[place : place + count * width] for place, count in zip(places, cells, strict=False)]
    firsts = torch.cat(first)
    rests = torch.cat([streams[place + room : end] for place, room, end in zip(places, rooms, ends_at, strict=False)])
    tiles = ops.stream_lengths(firsts, cut, x_BLHD, found_N)
    if op == "decode_lossless":
        ops.decode_lossless(firsts, rests, found_N, tiles, ends[1], cut)
    return [found_N, written[1]]

"""Roofline: a device computes as long as its arithmetic or its memory traffic takes, whichever is longer. Of a layer of
a model, and of every operation of `kernels`, whose instructions count as well."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cocodiff_sycl.parts import Cut
from torch import Tensor

from cocodiff.attention.residual import BITS
from cocodiff.config.config import Config
from cocodiff.config.machine import Device, Topology
from cocodiff.kernels import Rows
from cocodiff.kernels.lossless import Known
from cocodiff.kernels.residual import Prediction, Reconstructions
from cocodiff.planner.costs import TYPICAL
from cocodiff.planner.memory import ModelShape
from cocodiff.topology.layout import Layout

ITEMSIZE = 2  # bf16
COPIES = frozenset(["pack", "gather_pack", "unpack", "scatter_rows"])  # what they read is what they write

# Instructions of a lane for a number in bf16, counted in what GPU Max's compiler makes of them (docs/design.md).
# A copy's are for a number that is moved; those of renewing a reference are among them.
LANES = 16
INSTRUCTIONS = {
    **dict.fromkeys(COPIES, 27.4),
    "l1_score": 16.6,
    "qk_norm_rope": 51.2,
    "merge_partials": 70.2,
    "encode_residual": 50.4,
    "note_change": 26.1,
    "decode_residual": 27.6,
    "continue_linearly": 26.2,
    "encode_lossless": 104.0,
    "stream_lengths": 2.0,
    "decode_lossless": 113.0,
}
# Of those that are not one. Encoding is three where a block has four million numbers or more, which then weigh more.
# The lengths of streams are copied to the host besides, which waits for them.
LAUNCHES = {"encode_lossless": 2, "stream_lengths": 2}
# The codec's are of 4 or 8 bits and the newest reconstruction; these take so many more.
MORE = {
    "encode_residual": {"int2": 41.6, "taylor": 8.2, "measure": 7.2},
    "decode_residual": {"int2": 1.5, "taylor": 8.4, "onward": 12.9},
}


def started(op: str, numbers: float, parts: Sequence[str] = ()) -> float:
    """Instructions that an operation of `kernels` starts for a tensor of so many numbers; `select` is left out. parts:
    of MORE."""
    return (INSTRUCTIONS.get(op, 0.0) + sum(MORE[op][part] for part in parts)) * numbers / LANES


def seconds(device: Device, flops: float, moved_bytes: float, instructions: float = 0.0) -> float:
    """Of one kernel at the device's full rates: matrix arithmetic, traffic or vector instructions, whichever takes
    longest. A rate of 0 is one that the machine file does not tell: then nothing is charged for it."""
    arithmetic = flops / (device.bf16_tflop_s * 1e12) if device.bf16_tflop_s else 0.0
    traffic = moved_bytes / (device.memory_gb_s * 1e9) if device.memory_gb_s else 0.0
    vector = instructions / (device.instructions_g_s * 1e9) if device.instructions_g_s else 0.0
    return max(arithmetic, traffic, vector)


@dataclass(frozen=True)
class Layer:
    """Seconds of one attention layer's parts on one rank of the real machine, all rows and heads of the rank. rest:
    output projection and MLP."""

    project_v: float
    project_qk: float
    attention: float
    rest: float

    @property
    def total(self) -> float:
        return self.project_v + self.project_qk + self.attention + self.rest


def roofline(shape: ModelShape, topology: Topology, tokens: int, batch: int, rank: int, layout: Layout) -> Layer:
    """Each part takes as long as its arithmetic or its memory traffic, whichever is longer, at the device's full rate.
    Counted are matrix products with their weights and tensors, attention as one fused kernel, and for q and k one pass
    of normalisation and rotation with the instructions that our kernels take. Not counted: modulation, residuals,
    launches, embeddings."""
    device, W, D = topology.machine.device, shape.width, shape.head_dim
    L, G = layout.rows[rank] * batch, layout.heads[rank]

    def kernel(flops: float, moved: float) -> float:
        return seconds(device, flops, moved * ITEMSIZE)

    def product(width_in: float, width_out: float) -> float:
        return kernel(2 * L * width_in * width_out, L * (width_in + width_out) + width_in * width_out)

    hidden = shape.mlp_ratio * W
    mlp = product(W, hidden * (2 if shape.gated_mlp else 1)) + product(hidden, W)
    attention = kernel(4.0 * batch * tokens**2 * G * D, 4.0 * batch * tokens * G * D)
    norm_rope = 2 * seconds(device, 0, 2 * L * W * ITEMSIZE, started("qk_norm_rope", L * W))
    return Layer(product(W, W), 2 * product(W, W) + norm_rope, attention, product(W, W) + mlp)


# Operations of kernels ------------------------------------------------------------------------------------------------


def copied_s(device: Device, count: float, itemsize: int) -> float:
    """Seconds of a copy of so many bytes, of numbers of this size."""
    return seconds(device, 0.0, 2 * count, started("pack", count / itemsize))


def merged_s(device: Device, numbers: float) -> float:
    """Seconds of merging a part of so many numbers in bf16 into a sum in float32."""
    return seconds(device, 0.0, 10 * numbers, started("merge_partials", numbers))


def scored_s(device: Device, count: float) -> float:
    """Seconds of scoring v in bf16 of so many bytes, which becomes the reference."""
    return seconds(device, 0.0, 3 * count, started("l1_score", count / ITEMSIZE))


def coded_s(device: Device, x: Tensor, config: Config, width: int, sends: bool) -> float:
    """Seconds of the passes and launches that code a tensor [B, L, H, D] at one end. width: bytes of one head of one
    token on the wire."""
    return sum(operation_s(device, op, [x], arguments) for op, arguments in passes(x, config, width, sends))


def operation_s(device: Device, op: str, moved: Sequence[Tensor], arguments: Sequence[Any]) -> float:
    """Seconds of an operation of `kernels` with its launches; see `cost_of`."""
    return seconds(device, 0.0, *cost_of(op, moved, arguments)) + LAUNCHES.get(op, 1) * device.launch_us * 1e-6


def passes(x: Tensor, config: Config, width: int, sends: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The operations of `kernels` that code a tensor [B, L, H, D] at one end, and their arguments."""
    linear = config.predictor != "last"
    code, numbers = x.new_empty(*x.shape[:3], width, dtype=torch.uint8), torch.empty(4, device="meta")
    if config.codec == "lossless":
        cut, number, both = Cut(1, (x.shape[1],)), numbers[:1], Known(x, x, x if linear else None)
        if sends:
            yield "encode_lossless", (x, both, cut, code, number, number)
        else:
            yield "stream_lengths", (code, cut, x, number)
            yield "decode_lossless", (code, number, number, None, both, cut)
        return
    known, factor = Reconstructions(x, x if linear else None), 1.0 if linear else None
    bits = BITS[config.codec]
    assert bits is not None, "without a codec nothing is coded"
    if sends:
        yield "encode_residual", (x, known, Prediction(1.0, linear), bits, code, numbers)
    else:
        yield "decode_residual", (code, known, factor, bits)


def cost_of(op: str, moved: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[float, float]:
    """Bytes that an operation of `kernels` reads and writes, and instructions that it starts. moved, arguments: as
    `Kernels` has them."""
    parts: dict[str, bool] = {}
    if op == "encode_residual":
        x_BLHD, known, how, bits, code_BLHW, notes_N = arguments
        both = how.linear and known.before is not None
        parts = {"int2": bits == 2, "taylor": both, "measure": how.measure}
        traffic = bytes_of((x_BLHD, code_BLHW, notes_N)) + bytes_of_state(known, both)
    elif op == "decode_residual":
        code_BLHW, known, factor, bits, *onward = arguments
        parts = {"int2": bits == 2, "taylor": factor is not None, "onward": any(onward)}
        traffic = code_BLHW.nbytes + bytes_of_state(known, factor is not None) + bytes_of(onward)
    elif op == "encode_lossless":  # what is sent is written by one launch, read and written by another
        x_BLHD, known, _, streams, *_ = arguments
        sent = streams.nbytes if streams.dim() == 4 else TYPICAL * x_BLHD.nbytes
        traffic = x_BLHD.nbytes + 3 * sent + bytes_of(known)
    elif op == "stream_lengths":
        traffic = arguments[2].numel() // 2048  # 16 bits for a tile
    elif op == "decode_lossless":
        code_BLHW, rests, _, _, known, _ = arguments
        traffic = code_BLHW.nbytes + rests.nbytes + bytes_of(known)
    elif op == "note_change":
        x_BLHD, last_BLHD, notes_N = arguments
        traffic = bytes_of((x_BLHD, last_BLHD, last_BLHD, notes_N))  # x is the last one afterwards
    else:
        traffic = bytes_of(arguments)
    itemsize = moved[0].element_size() if moved else 1
    numbers = traffic / (2 * itemsize) if op in COPIES else moved[0].numel()
    return traffic, started(op, numbers, [part for part, here in parts.items() if here])


def bytes_of_state(known: Reconstructions, both: bool) -> int:
    """Reading the newest reconstruction, with `both` the one before as well, and writing the next."""
    return (3 if both and known.before is not None else 2) * known.last.nbytes


def bytes_of(value: Any) -> int:
    """Of all tensors in nested sequences and mappings; chosen rows count as what is read and written of them."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):  # most are of tensors
        return sum([one.nbytes if type(one) is Tensor else bytes_of(one) for one in value])
    if isinstance(value, Rows):
        source = value.source_RHD
        rows = math.prod(value.shape) * source.element_size()
        return rows if value.reference_RHD is None else 2 * rows
    return bytes_of(list(value.values())) if isinstance(value, dict) else 0

"""The seconds of a layer or of a kernel by the roofline model: its arithmetic or its memory traffic, whichever takes
longer.

It is given for a layer of a model, and for every operation of `kernels`, where vector instructions count as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cocodiff_sycl.parts import BlockCut
from torch import Tensor

from cocodiff.attention.lossless import TYPICAL
from cocodiff.attention.residual import BITS
from cocodiff.config.config import Config
from cocodiff.config.machine import Device
from cocodiff.kernels.lossless import Known
from cocodiff.kernels.residual import Prediction, Reconstructions
from cocodiff.planner.memory import ModelShape
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout

ITEMSIZE = 2  # bf16

# Instructions of a lane for one element in bf16, counted in the output of GPU Max's compiler (docs/design.md).
# Those of "pack" are for one moved element.
LANES = 16
INSTRUCTIONS = {
    "pack": 27.4,
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
# Launches of operations that take more than one. Encoding takes three for blocks of four million elements or more, for
# which launches matter little. The lengths of streams are also copied to the host, which waits for them.
LAUNCHES = {"encode_lossless": 2, "stream_lengths": 2}
# The codec's counts are for 4 or 8 bits and one reconstruction. These variants take this number of instructions more.
MORE = {
    "encode_residual": {"int2": 41.6, "taylor": 8.2, "measure": 7.2},
    "decode_residual": {"int2": 1.5, "taylor": 8.4, "onward": 12.9},
}


def started(op: str, numbers: float, parts: Sequence[str] = ()) -> float:
    """Return the vector instructions that an operation of `kernels` starts for one tensor; 0 for those without a count,
    such as `choose`.

    Args:
        op: name of the operation.
        numbers: elements of the tensor.
        parts: variants of the operation that take more instructions, keys of MORE.
    """
    return (INSTRUCTIONS.get(op, 0.0) + sum(MORE[op][part] for part in parts)) * numbers / LANES


def seconds(device: Device, flops: float, moved_bytes: float, instructions: float = 0.0) -> float:
    """Return the seconds of one kernel at the rates that the device reaches: of matrix arithmetic, traffic or vector
    instructions, whichever takes longest.

    A rate of 0 is not known, and nothing is charged for it.

    Args:
        device: the rates of the device.
        flops: floating-point operations of matrix products.
        moved_bytes: bytes that are read and written.
        instructions: vector instructions, of LANES elements each.
    """
    arithmetic = flops / (device.bf16_tflop_s * device.peak_share * 1e12) if device.bf16_tflop_s else 0.0
    traffic = moved_bytes / (device.memory_gb_s * 1e9) if device.memory_gb_s else 0.0
    vector = instructions / (device.instructions_g_s * 1e9) if device.instructions_g_s else 0.0
    return max(arithmetic, traffic, vector)


class Layer(NamedTuple):
    """The seconds of one layer's parts on one rank, for all its rows and heads."""

    project_v: float  # seconds to make v
    project_qk: float  # seconds to make q and k, with normalisation and rotation
    attention: float  # seconds of attention to one group's keys
    rest: float  # seconds of output projection and MLP

    @property
    def total(self) -> float:
        """The seconds of all parts of the layer."""
        return self.project_v + self.project_qk + self.attention + self.rest


def roofline(shape: ModelShape, topology: Topology, tokens: int, batch: int, rank: int, layout: Layout) -> Layer:
    """Return the seconds of a layer's parts on one rank, at the rates of the device.

    Counted are matrix products with their weights and tensors, attention as one fused kernel, and for q and k one pass
    of normalisation and rotation with our kernels' instructions. Not counted are modulation, residuals, launches and
    embeddings.

    Args:
        shape: the sizes of the model.
        topology: the ranks, with their machine.
        tokens: number of tokens of the whole sequence.
        batch: batch rows.
        rank: index of the rank in `layout`.
        layout: the tokens and heads of every rank.
    """
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
    """Return the seconds in which a device copies bytes, such as to pack a message.

    Args:
        device: the rates of the device.
        count: number of bytes.
        itemsize: bytes of an element.
    """
    return seconds(device, 0.0, 2 * count, started("pack", count / itemsize))


def merged_s(device: Device, numbers: float) -> float:
    """Return the seconds in which a device merges a partial attention result in bf16 into a running one in float32.

    Args:
        device: the rates of the device.
        numbers: elements of the partial result.
    """
    return seconds(device, 0.0, 10 * numbers, started("merge_partials", numbers))


def scored_s(device: Device, count: float) -> float:
    """Return the seconds in which a device scores v in bf16 for V-Major, and copies it as the next reference.

    Args:
        device: the rates of the device.
        count: bytes of v.
    """
    return seconds(device, 0.0, 3 * count, started("l1_score", count / ITEMSIZE))


def coded_s(device: Device, x: Tensor, config: Config, width: int, sends: bool) -> float:
    """Return the seconds of the passes and launches that code or decode one tensor.

    Args:
        device: the rates of the device.
        x: a tensor [B, L, H, D] of the same sizes, which may be a meta tensor.
        config: the engine's settings, with the codec and its predictor.
        width: bytes on the wire of one token for one head.
        sends: True to code the tensor, False to decode it.
    """
    before, numbers = x if config.predictor != "last" else None, torch.empty(4, device="meta")
    code = x.new_empty(*x.shape[:3], width, dtype=torch.uint8)
    passes: dict[str, tuple[Any, ...]]
    if config.codec == "lossless":
        cut, number, known = BlockCut(1, (x.shape[1],)), numbers[:1], Known(x, x, before)
        passes = {"stream_lengths": (code, cut, x, number), "decode_lossless": (code, number, number, None, known, cut)}
        if sends:
            passes = {"encode_lossless": (x, known, cut, code, number, number)}
    else:
        bits, states, linear = BITS[config.codec], Reconstructions(x, before), before is not None
        passes = {"decode_residual": (code, states, 1.0 if linear else None, bits)}
        if sends:
            passes = {"encode_residual": (x, states, Prediction(1.0, linear), bits, code, numbers)}
    return sum(operation_s(device, op, [x], arguments) for op, arguments in passes.items())


def operation_s(device: Device, op: str, moved: Sequence[Tensor], arguments: Sequence[Any]) -> float:
    """Return the seconds of one call of an operation of `kernels`, with its launches.

    Args:
        device: the rates of the device.
        op: name of the operation.
        moved: the tensors whose size counts, as `moved_by` of `kernels/dispatch.py` returns them.
        arguments: all arguments of the call.
    """
    return seconds(device, 0.0, *cost_of(op, moved, arguments)) + LAUNCHES.get(op, 1) * device.launch_us * 1e-6


def cost_of(op: str, moved: Sequence[Tensor], arguments: Sequence[Any]) -> tuple[float, float]:
    """Return (bytes that an operation of `kernels` reads and writes, vector instructions that it starts), for one call.

    Args:
        op: name of the operation.
        moved: the tensors whose size counts, as `moved_by` of `kernels/dispatch.py` returns them.
        arguments: all arguments of the call.
    """
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
    elif op == "encode_lossless":  # one launch writes the payload, another one reads and writes it
        x_BLHD, known, _, streams, *_ = arguments
        sent = streams.nbytes if streams.dim() == 4 else TYPICAL * x_BLHD.nbytes
        traffic = x_BLHD.nbytes + 3 * sent + bytes_of(known)
    elif op == "stream_lengths":
        traffic = arguments[2].numel() // 2048  # 16 bits for a tile
    elif op == "decode_lossless":
        code_BLHW, rests, _, _, known, _ = arguments
        traffic = code_BLHW.nbytes + rests.nbytes + bytes_of(known)
    elif op == "note_change":
        traffic = bytes_of(arguments) + arguments[1].nbytes  # the last values are read, then replaced by x
    else:
        traffic = bytes_of(arguments)
    return traffic, started(op, moved[0].numel(), [part for part, here in parts.items() if here])


def bytes_of_state(known: Reconstructions, both: bool) -> int:
    """Return the bytes of a codec's pass over a tensor's reconstructions: it reads the newest and writes the next.

    Args:
        known: the two reconstructions.
        both: True if it also reads the one before the newest, where there is one.
    """
    return (3 if both and known.before is not None else 2) * known.last.nbytes


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors in nested sequences."""
    if isinstance(value, (list, tuple)):  # most are of tensors
        return sum([one.nbytes if type(one) is Tensor else bytes_of(one) for one in value])
    return value.nbytes if isinstance(value, Tensor) else 0

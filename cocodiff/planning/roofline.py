"""Roofline: a device computes as long as its arithmetic or its memory traffic takes, whichever is longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocodiff.planning.memory import ModelShape
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Device, Topology

ITEMSIZE = 2  # bf16


# Instructions of a lane for a number in bf16, counted in what GPU Max's compiler makes of them (docs/kernels.md).
# A copy's are for a number that is moved; those of renewing a reference are among them.
LANES = 16
INSTRUCTIONS = {
    **dict.fromkeys(("pack", "gather_pack", "unpack", "scatter_rows"), 27.4),
    "l1_score": 16.6,
    "qk_norm_rope": 51.2,
    "merge_partials": 70.2,
    "encode_residual": 50.4,
    "note_change": 26.1,
    "decode_residual": 27.6,
    "continue_linearly": 26.2,
    "encode_lossless": 153.7,
    "stream_lengths": 2.0,
    "decode_lossless": 83.2,
}
# Of those that are not one. Encoding is three where a block has half a million numbers or more, which then weigh more.
# The lengths of streams are copied to the host besides, which waits for them.
LAUNCHES = {"encode_lossless": 2, "stream_lengths": 2}
# The codec's are of 4 or 8 bits and the newest reconstruction; these take so many more.
MORE = {
    "encode_residual": {"int2": 41.6, "taylor": 8.2, "compare": 7.6, "measure": 7.2},
    "decode_residual": {"int2": 1.5, "taylor": 9.2, "onward": 12.9},
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
    launches, embeddings.
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

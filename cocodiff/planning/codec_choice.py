"""`codec: auto`: which codec a machine's links call for, by its file's rates. Pure arithmetic, alike on every rank.

A layer computes as long as the roofline says, the passes of the codec's two ends on top, and sends its tensors over the
fullest link at the file's rate. What attention waits for is added; what it does not wait for takes time only where it
is on its way for longer than the layer computes. As with `ring: auto` the layer is that of an image of 1024 x 1024
pixels with a prompt of 512 tokens: the engine chooses before it has seen a call. Larger images compute somewhat longer
for their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cocodiff.assemble import Work
from cocodiff.kernels import Prediction, Reconstructions
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.placement import choose, price
from cocodiff.planning.pricing import cost_of
from cocodiff.planning.roofline import roofline, seconds
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Device, Topology

FROM_THE_FINEST = ("none", "int8", "int4", "int2")
GAIN = 1.02  # a coarser codec is chosen where a finer one takes more than so many times as long
# Of a run's tensors, the part that attention waits for: the first step and the last ones of 50, and with `adaptive` as
# many as the embedded model's controller has waited for.
AWAITED = {"now": 1.0, "displaced": 0.06, "adaptive": 0.3}


class CodecChoice(NamedTuple):
    """seconds: of a layer, by codec; none where the machine file tells no rates."""

    codec: str
    seconds: Mapping[str, float]

    def line(self) -> str:
        if not self.seconds:
            return f"codec auto: {self.codec}, as the machine file does not tell rates, or one rank sends nothing"
        listed = ", ".join(f"{codec} {of * 1e3:.3g}" for codec, of in self.seconds.items())
        return f"codec auto: {self.codec}; predicted ms a layer: {listed}"


def choose_codec(topology: Topology, work: Work, settings: Any, width: Callable[[str], int]) -> CodecChoice:
    """The finest codec that is as fast as any. settings: of the engine, with ring, placement, predictor and arrival.
    width: of a codec, bytes of one head of one token on the wire."""
    if topology.size == 1 or topology.machine.untold:
        return CodecChoice(FROM_THE_FINEST[0], {})
    mesh = choose(topology, work, settings.ring, settings.placement, prefer_ulysses=True)
    layout = mesh.layouts(work.segments, work.heads)[0]
    shape = ModelShape("a layer", work.heads, work.head_dim, 1, 1)
    device, tokens = topology.machine.device, sum(layout.rows)
    compute_s = max(
        roofline(shape, topology, tokens, work.batch, slot, layout).total for slot in range(len(layout.rows))
    )
    found = {}
    for codec in FROM_THE_FINEST:
        sent_s = price(mesh, replace(work, head_bytes=width(codec))).ulysses_s
        passes_s = 0.0 if codec == "none" else coding_s(device, work, layout, settings.predictor, codec, width(codec))
        busy_s, awaited = compute_s + passes_s, AWAITED[settings.arrival]
        found[codec] = busy_s + awaited * sent_s + (1 - awaited) * max(0.0, sent_s - busy_s)
    fastest = min(found.values())
    return CodecChoice(next(codec for codec in FROM_THE_FINEST if found[codec] <= GAIN * fastest), found)


def coding_s(device: Device, work: Work, layout: Layout, predictor: str, codec: str, width: int) -> float:
    """Seconds of the passes that code q, k, v and the output at both ends, on the first rank of a group."""
    heads, linear, bits = sum(layout.heads), predictor != "last", int(codec.removeprefix("int"))
    of_heads, of_rows = (sum(layout.rows), layout.heads[0]), (layout.rows[0], heads)
    ends = [("encode_residual", of_rows)] * 3 + [("encode_residual", of_heads)]
    ends += [("decode_residual", of_heads)] * 3 + [("decode_residual", of_rows)]
    return sum(_pass_s(device, work, op, shape, (linear, bits, width)) for op, shape in ends)


def _pass_s(device: Device, work: Work, op: str, shape: Sequence[int], how: tuple[bool, int, int]) -> float:
    linear, bits, width = how
    dtype = torch.bfloat16 if work.itemsize == 2 else torch.float32
    x = torch.empty(work.batch, *shape, work.head_dim, device="meta", dtype=dtype)
    code = torch.empty(work.batch, *shape, width, device="meta", dtype=torch.uint8)
    known = Reconstructions(x, x if linear else None)
    if op == "encode_residual":
        arguments: tuple[Any, ...] = (x, known, Prediction(1.0, linear), bits, code, torch.empty(4, device="meta"))
    else:
        arguments = (code, known, 1.0 if linear else None, bits)
    return seconds(device, 0.0, *cost_of(op, [x], arguments)) + device.launch_us * 1e-6

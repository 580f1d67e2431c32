"""`codec: auto`: which codec a machine's links call for, by its file's rates. Pure arithmetic, alike on every rank.

A layer computes as long as the roofline says, the passes of the codec's two ends on top, and sends its tensors over the
fullest link at the file's rate. What attention waits for is added; what it does not wait for takes time only where it
is on its way for longer than the layer computes. As with `ring: auto` the layer is that of an image of 1024 x 1024
pixels with a prompt of 512 tokens: the engine chooses before it has seen a call. Larger images compute somewhat longer
for their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.assemble import AttentionWork
from cocodiff.kernels import Prediction, Reconstructions
from cocodiff.kernels.lossless import Cut
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.placement import choose, price
from cocodiff.planning.pricing import cost_of
from cocodiff.planning.roofline import LAUNCHES, roofline, seconds
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Device, Topology

EXACT = ("none", "lossless")
FROM_THE_FINEST = (*EXACT, "int8", "int4", "int2")
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


def choose_codec(topology: Topology, work: AttentionWork, settings: Any, width: Callable[[str], int]) -> CodecChoice:
    """The finest codec that is as fast as any. settings: of the engine, with ring, placement, predictor and arrival.
    width: of a codec, bytes of one head of one token on the wire."""
    if topology.size == 1 or topology.machine.missing_rates:
        return CodecChoice(FROM_THE_FINEST[0], {})
    mesh = choose(topology, work, settings.ring, settings.placement, prefer_ulysses=True)
    layout = mesh.layouts(work.segments, work.heads)[0]
    shape = ModelShape("a layer", work.heads, work.head_dim, 1, 1)
    device, tokens = topology.machine.device, sum(layout.rows)
    compute_s = max(
        roofline(shape, topology, tokens, work.batch, slot, layout).total for slot in range(len(layout.rows))
    )
    found = {}
    for codec in EXACT if settings.only_exact else FROM_THE_FINEST:
        sent_s = price(mesh, replace(work, head_bytes=width(codec))).ulysses_s
        passes_s = 0.0 if codec == "none" else coding_s(device, work, layout, settings.predictor, codec, width(codec))
        busy_s, awaited = compute_s + passes_s, AWAITED[settings.arrival]
        found[codec] = busy_s + awaited * sent_s + (1 - awaited) * max(0.0, sent_s - busy_s)
    fastest = min(found.values())
    return CodecChoice(next(codec for codec in found if found[codec] <= GAIN * fastest), found)


def coding_s(device: Device, work: AttentionWork, layout: Layout, predictor: str, codec: str, width: int) -> float:
    """Seconds of the passes that code q, k, v and the output at both ends, on the first rank of a group."""
    ends_of = _lossless_end_s if codec == "lossless" else _residual_end_s
    of_heads, of_rows = (sum(layout.rows), layout.heads[0]), (layout.rows[0], sum(layout.heads))
    ends = [(True, of_rows)] * 3 + [(True, of_heads)] + [(False, of_heads)] * 3 + [(False, of_rows)]
    return sum(ends_of(device, work, shape, sends, (predictor != "last", codec, width)) for sends, shape in ends)


def _residual_end_s(
    device: Device, work: AttentionWork, shape: tuple[int, int], sends: bool, how: tuple[bool, str, int]
) -> float:
    """Seconds of one tensor's pass at one end. shape: its tokens and heads."""
    linear, codec, width = how
    bits = int(codec.removeprefix("int"))
    x, code, known = _at_an_end(work, shape, linear, width)
    if sends:
        notes = torch.empty(4, device="meta")
        return _pass_s(device, "encode_residual", x, (x, known, Prediction(1.0, linear), bits, code, notes))
    return _pass_s(device, "decode_residual", x, (code, known, 1.0 if linear else None, bits))


def _lossless_end_s(
    device: Device, work: AttentionWork, shape: tuple[int, int], sends: bool, how: tuple[bool, str, int]
) -> float:
    linear, _, width = how
    if work.itemsize != 2:
        return 0.0
    x, code, known = _at_an_end(work, shape, linear, width)
    factor, numbers, cut = 1.0 if linear else None, torch.empty(1, device="meta"), Cut(1, (shape[0],))
    if sends:
        return _pass_s(device, "encode_lossless", x, (x, known, factor, cut, code, numbers, numbers))
    found_s = _pass_s(device, "stream_lengths", x, (code, cut, x, numbers))
    return found_s + _pass_s(device, "decode_lossless", x, (code, numbers, numbers, None, known, factor, cut))


def _at_an_end(
    work: AttentionWork, shape: tuple[int, int], linear: bool, width: int
) -> tuple[Tensor, Tensor, Reconstructions]:
    """A tensor, its code, and what is known of it."""
    dtype = torch.bfloat16 if work.itemsize == 2 else torch.float32
    x = torch.empty(work.batch, *shape, work.head_dim, device="meta", dtype=dtype)
    code = torch.empty(work.batch, *shape, width, device="meta", dtype=torch.uint8)
    return x, code, Reconstructions(x, x if linear else None)


def _pass_s(device: Device, op: str, moved: Tensor, arguments: tuple[Any, ...]) -> float:
    launches = LAUNCHES.get(op, 1)
    return seconds(device, 0.0, *cost_of(op, [moved], arguments)) + launches * device.launch_us * 1e-6

"""`codec: auto`: which codec a machine's links call for, by its file's rates. Pure arithmetic, alike on every rank.

A layer computes as long as the roofline says, the passes of the codec's two ends on top, and sends its tensors over the
fullest link at the file's rate. What attention waits for is added; what it does not wait for takes time only where it
is on its way for longer than the layer computes. As with `ring: auto` the layer is that of an image of 1024 x 1024
pixels with a prompt of 512 tokens: the engine chooses before it has seen a call. Larger images compute somewhat longer
for their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from cocodiff.assemble import AttentionWork
from cocodiff.attention.residual import BITS
from cocodiff.config import Config
from cocodiff.kernels.lossless import Cut
from cocodiff.kernels.residual import Prediction, Reconstructions
from cocodiff.planning.costs import costs_of
from cocodiff.planning.memory import ModelShape
from cocodiff.planning.placement import choose, price
from cocodiff.planning.pricing import DTYPES, cost_of
from cocodiff.planning.roofline import LAUNCHES, roofline, seconds
from cocodiff.registry import EXACT_CODECS
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Device, Topology

FROM_THE_FINEST = (*EXACT_CODECS, "int8", "int4", "int2")
GAIN = 1.02  # a coarser codec is chosen where a finer one takes more than so many times as long
# Of a run's tensors, the part that attention waits for: the first step and the last ones of 50, and with `adaptive` as
# many as the embedded model's controller has waited for.
AWAITED = {"now": 1.0, "displaced": 0.06, "adaptive": 0.3}


def codec_of(config: Config, topology: Topology, work: AttentionWork) -> tuple[Config, str]:
    """The settings of ranks that share a sequence with `codec: auto` decided, the finest one that is as fast as any,
    and what was decided in words."""
    if topology.size == 1 or topology.machine.missing_rates:
        codec = FROM_THE_FINEST[0]
        told = f"codec auto: {codec}, as the machine file does not tell rates, or one rank sends nothing"
        return config.with_(codec=codec), told
    mesh = choose(topology, work, config.ring, config.placement, True, config.ring_kind)
    codecs = EXACT_CODECS if config.only_exact else FROM_THE_FINEST
    found = {codec: layer_s(config.with_(codec=codec), mesh, work) for codec in codecs}
    fastest = min(found.values())
    codec = next(codec for codec in found if found[codec] <= GAIN * fastest)
    listed = ", ".join(f"{codec} {of * 1e3:.3g}" for codec, of in found.items())
    return config.with_(codec=codec), f"codec auto: {codec}; predicted ms a layer: {listed}"


def layer_s(config: Config, mesh: Mesh, work: AttentionWork) -> float:
    """Seconds of a layer by the settings, whose codec is not auto."""
    topology, layout = mesh.topology, mesh.layouts(work.segments, work.heads)[0]
    shape = ModelShape("a layer", work.heads, work.head_dim, 1, 1)
    slots, tokens = range(len(layout.rows)), sum(layout.rows)
    busy_s = max(roofline(shape, topology, tokens, work.batch, slot, layout).total for slot in slots)
    width = costs_of(config).head_bytes(config, work.head_dim, work.itemsize)
    sent_s, awaited = price(mesh, replace(work, head_bytes=width)).ulysses_s, AWAITED[config.arrival]
    if config.codec != "none":
        busy_s += coding_s(topology.machine.device, work, layout, config, width)
    return busy_s + awaited * sent_s + (1 - awaited) * max(0.0, sent_s - busy_s)


def coding_s(device: Device, work: AttentionWork, layout: Layout, config: Config, width: int) -> float:
    """Seconds of the passes that code q, k, v and the output at both ends, on the first rank of a group. width: bytes
    of one head of one token on the wire."""
    if config.codec == "lossless" and work.itemsize != 2:
        return 0.0
    of_heads, of_rows = (sum(layout.rows), layout.heads[0]), (layout.rows[0], sum(layout.heads))
    ends = [(True, of_rows)] * 3 + [(True, of_heads)] + [(False, of_heads)] * 3 + [(False, of_rows)]
    found = 0.0
    for sends, shape in ends:
        x = torch.empty(work.batch, *shape, work.head_dim, device="meta", dtype=DTYPES[work.itemsize])
        for op, arguments in passes(x, config, width, sends):
            launches_s = LAUNCHES.get(op, 1) * device.launch_us * 1e-6
            found += seconds(device, 0.0, *cost_of(op, [x], arguments)) + launches_s
    return found


def passes(x: torch.Tensor, config: Config, width: int, sends: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The operations of `kernels` that code a tensor [B, L, H, D] at one end, and their arguments."""
    linear = config.predictor != "last"
    known, factor = Reconstructions(x, x if linear else None), 1.0 if linear else None
    code, numbers = x.new_empty(*x.shape[:3], width, dtype=torch.uint8), torch.empty(4, device="meta")
    if config.codec == "lossless":
        cut, number = Cut(1, (x.shape[1],)), numbers[:1]
        if sends:
            yield "encode_lossless", (x, known, factor, cut, code, number, number)
        else:
            yield "stream_lengths", (code, cut, x, number)
            yield "decode_lossless", (code, number, number, None, known, factor, cut)
        return
    bits = BITS[config.codec]
    assert bits is not None, "without a codec nothing is coded"
    if sends:
        yield "encode_residual", (x, known, Prediction(1.0, linear), bits, code, numbers)
    else:
        yield "decode_residual", (code, known, factor, bits)

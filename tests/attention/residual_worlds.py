"""Worlds of ranks whose attention is coded or displaced, call after call, beside one process."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from residual_reference import Reference
from torch import Tensor
from worlds import topology_of

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import Trace
from cocodiff.config.config import Config
from cocodiff.engine.assemble import build_strategy
from cocodiff.exchange.codec import StepInfo
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout

SIGMAS = [1.0, 0.97, 0.93, 0.87, 0.87, 0.86, 0.7, 0.6, 0.5, 0.45, 0.4, 0.3, 0.2, 0.1]


@dataclass(frozen=True)
class Call:
    """One call of the layer. spoilt: one number of q that no scale fits. steps: of the run, where they are known."""

    step: int
    run: int = 0
    text: int = 7
    spoilt: float = 0.0
    steps: int | None = None

    @property
    def moment(self) -> StepInfo:
        return StepInfo(self.run, self.step, self.steps, SIGMAS[self.step])


RUN = [*map(Call, range(7))]
# Residuals without a scale, of which the next call is whole; a step that skips the layer; another image, whose text
# then has another length.
TROUBLED = [
    *(*map(Call, range(4)), Call(4, spoilt=math.nan), Call(5), Call(6), Call(8), Call(9)),
    *(Call(0, 1), Call(1, 1), Call(2, 1, text=9), Call(3, 1, 9, -math.inf), Call(4, 1, 9)),
    *(Call(5, 1, 9, 1e7), Call(6, 1, 9), Call(7, 1, 9)),
]


@dataclass(frozen=True)
class World:
    size: int
    heads: int = 5
    image: int = 23
    channels: int = 40
    batch: int = 2
    machine: str = "local"
    kernels: str = "torch"
    dtype: torch.dtype = torch.float32

    def segments(self, call: Call) -> Any:
        return image_and_text(self.image, call.text)

    def layout(self, call: Call) -> Layout:
        return Layout.build(topology_of(self.machine, self.size), self.segments(call), max(self.heads, self.size))

    def tensors(self, call: Call) -> list[Tensor]:
        """q, k and v [B, S, H, D], rank by rank, on curves over the noise level."""
        generator = torch.Generator().manual_seed(7)
        shape = (3, self.batch, self.image + call.text, self.heads, self.channels)
        start, drift, pace = (torch.randn(shape, generator=generator) for _ in range(3))
        x = start + 0.3 * drift * torch.sin(3 * SIGMAS[call.step] + pace)
        if call.spoilt:
            x[0, -1, 3, -1, -1] = call.spoilt
        return list(x.to(self.dtype))


Sent = dict[str, dict[str, int]]  # bytes by purpose and link class


class Ranks:
    """Attention of all ranks of a world, call after call."""

    def __init__(self, world: World, delayed: bool = False, **settings: Any) -> None:
        """delayed: every message, lane and rank is late now and then."""
        self.world, self.config, self.delayed = world, Config(machine=world.machine, **settings), delayed
        self.topology = topology_of(world.machine, world.size)
        self.mesh = Mesh.build(self.topology, settings.get("ring", 1))

    def attend(self, calls: Sequence[tuple[Call, list[Tensor]]]) -> list[tuple[list[Tensor], list[Sent], Any]]:
        """Every rank's rows of the outputs of all calls, what it had sent after each of them, and its codec."""

        def work(transport: Any) -> Any:
            trace, outputs, sent = Trace(transport.rank), [], []
            over = Delayed(transport) if self.delayed else transport
            strategy = build_strategy(self.config, self.mesh, over, trace, Kernels(self.world.kernels))
            for call, tensors in calls:
                if self.delayed:
                    dawdle()
                rows = self.world.layout(call).row_slices[transport.rank]
                strategy.codec.begin_step(call.moment)
                q, k, v = (lambda x=x[:, rows]: x for x in tensors)
                qkv = LazyQKV(q, k, v, self.world.segments(call), self.world.heads)
                outputs.append(strategy.attend(qkv, LayerKey("layer")).clone())
                sent.append({purpose: trace.bytes(purpose) for purpose in ("attention", "notes")})
            return outputs, sent, strategy.codec

        return run_ranks(self.world.size, work)


def dawdle() -> None:
    time.sleep(random.choice((0.0, 0.0, 0.001, 0.004)))


class Delayed:
    """A transport whose lanes, groups and messages are late now and then."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.control, self.world = DelayedLane(transport.control), DelayedGroup(transport.world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def group(self, ranks: Sequence[int], together: bool = False) -> DelayedGroup:
        return DelayedGroup(self._transport.group(ranks, together))

    def lane(self, name: str) -> DelayedLane:
        return DelayedLane(self._transport.lane(name))


class DelayedLane:
    def __init__(self, lane: Any) -> None:
        self._lane = lane

    def submit(self, work: Callable[..., Any], *given: Any) -> Any:
        return self._lane.submit(lambda *given: (dawdle(), work(*given))[1], *given)


class DelayedGroup:
    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def send_recv(self, sends: Any, recvs: Any) -> Any:
        dawdle()
        pending = self._group.send_recv(sends, recvs)
        dawdle()
        return pending

    collective = send_recv


def check(
    world: World, calls: list[Call], uncoded: Ranks | None = None, unchunked: Ranks | None = None, **settings: Any
) -> Reference:
    """uncoded: ranks whose attention to the reconstructions is the reference's, where summing has an order of its
    own; unchunked: for calls that do not wait for all tensors."""
    ranks = Ranks(world, **settings)
    config = ranks.config
    bits = None if config.codec == "none" else int(config.codec[3:])
    expected = Reference(bits, config.predictor, config.arrival, config.tau)
    of_ranks = ranks.attend([(call, world.tensors(call)) for call in calls])
    for number, call in enumerate(calls):
        layout = world.layout(call)
        expected.fine = call.steps is not None and call.step >= call.steps - config.fine_steps
        if bits is not None:
            expected.bits = min(2 * bits, 8) if expected.fine else bits

        def attend(*whole: Tensor, call: Call = call, layout: Layout = layout) -> Tensor:
            those = unchunked if expected.displaced[-1] and unchunked is not None else uncoded
            if those is not None:
                return torch.cat([outputs[0] for outputs, *_ in those.attend([(call, list(whole))])], 1)
            heads = layout.head_slices
            return torch.cat([LocalAttention().whole(*(x[:, :, of].contiguous() for x in whole)) for of in heads], 2)

        def sampled(name: str, layout: Layout = layout) -> list[int]:
            parts = [slice(0, sum(layout.rows))] if name == "o" else layout.row_slices
            return [row for part in parts for row in range(part.start, part.stop, 16)]

        o_BSHD = expected.call(world.tensors(call), call.run, call.step, SIGMAS[call.step], attend, sampled)
        for rank, (outputs, *_) in enumerate(of_ranks):
            own = o_BSHD[:, layout.row_slices[rank]]
            assert torch.equal(outputs[number].nan_to_num(1e30), own.nan_to_num(1e30)), f"call {number}, rank {rank}"
    return expected

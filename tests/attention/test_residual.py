"""The residual codec gives, bit for bit, what one process with whole tensors gives; and what it sends is as short as
its codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from residual_reference import Reference
from torch import Tensor
from worlds import topology_of

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.residual.coding import Residual
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.attention.ulysses import Ulysses, v_first
from cocodiff.comm.loopback import run_ranks
from cocodiff.models.tokens import image_and_text
from cocodiff.routes.choice import Chunking
from cocodiff.topology.layout import Layout
from cocodiff.trace import Trace
from cocodiff.wire.coding import AllRanks, Moment
from cocodiff.wire.exchange import Exchange

SIGMAS = [1.0, 0.95, 0.88, 0.88, 0.7, 0.6, 0.5]


@dataclass(frozen=True)
class Call:
    """One call of the site. spoilt: one number of q that no scale fits."""

    step: int
    run: int = 0
    sigma: float | None = None
    text: int = 7
    spoilt: float = 0.0

    @property
    def noise(self) -> float:
        return SIGMAS[self.step % len(SIGMAS)] if self.sigma is None else self.sigma


@dataclass(frozen=True)
class World:
    size: int
    heads: int = 5
    image: int = 23
    channels: int = 40
    batch: int = 2
    machine: str = "local"
    dtype: torch.dtype = torch.float32

    def layout(self, text: int) -> Layout:
        return Layout.build(topology_of(self.machine, self.size), image_and_text(self.image, text), self.heads)

    def tensors(self, call: Call) -> list[Tensor]:
        """q, k and v [B, S, H, D], rank by rank, that follow the noise level on curves."""
        generator = torch.Generator().manual_seed(7)
        shape = (3, self.batch, self.image + call.text, self.heads, self.channels)
        start, drift, pace = (torch.randn(shape, generator=generator) for _ in range(3))
        x = start + 0.3 * drift * torch.sin(call.noise + pace)
        if call.spoilt:
            x[0, -1, 3, -1, -1] = call.spoilt
        return list(x.to(self.dtype))


def distributed(world: World, calls: list[Call], bits: int, predictor: str, exchange: str, order: Any, chunks: int = 1):
    """Every rank's outputs of all calls, its coding and its trace."""
    topology = topology_of(world.machine, world.size)
    inputs = [world.tensors(call) for call in calls]

    def work(transport: Any) -> Any:
        trace, outputs = Trace(transport.rank), []
        ours = Exchange(exchange, topology, transport, trace, chunking=Chunking(chunks))
        coding = Residual(ours, AllRanks(topology, transport), bits, predictor)
        strategy = Ulysses(topology, ours, trace, order, coding)
        for call, tensors in zip(calls, inputs, strict=True):
            segments = image_and_text(world.image, call.text)
            rows = world.layout(call.text).row_slices[transport.rank]
            coding.begin_step(Moment(call.run, call.step, None, call.noise))
            q, k, v = (lambda x=x[:, rows]: x for x in tensors)
            outputs.append(strategy.attend(LazyQKV(q, k, v, segments, world.heads), Site("layer")).clone())
        return outputs, coding, trace

    return run_ranks(world.size, work)


def check(world: World, calls: list[Call], bits: int, predictor: str, exchange: str, order: Any = v_first) -> None:
    expected = Reference(bits, predictor)
    of_ranks = distributed(world, calls, bits, predictor, exchange, order)
    for number, call in enumerate(calls):
        layout = world.layout(call.text)

        def attend(*whole: Tensor, heads: Any = layout.head_slices) -> Tensor:
            return torch.cat([LocalAttention().whole(*(x[:, :, of].contiguous() for x in whole)) for of in heads], 2)

        o_BSHD = expected.call(world.tensors(call), call.run, call.step, call.noise, attend)
        for rank, (outputs, _, _) in enumerate(of_ranks):
            same = outputs[number].nan_to_num(1e30), o_BSHD[:, layout.row_slices[rank]].nan_to_num(1e30)
            assert torch.equal(*same), f"call {number}, rank {rank}"


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("predictor", ["last", "taylor", "auto"])
def test_equals_one_process(bits, predictor):
    check(World(3), [Call(step) for step in range(7)], bits, predictor, "split")

"""The engine's exchange and attention without an engine: the only module in which benchmarks build and drive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cocodiff.assemble import build_strategy, chunking, exchange_table
from cocodiff.attention.merge import partial_attention
from cocodiff.attention.strategy import Strategy
from cocodiff.attention.torus import LocalPart
from cocodiff.attention.ulysses import Local
from cocodiff.attention.v_major.strategy import Moment
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.exchange import Exchange


def make_strategy(
    config: Config,
    mesh: Mesh,
    transport: Any,
    trace: Trace,
    local: Local | None = None,
    part: LocalPart = partial_attention,
    kernels: Kernels | None = None,
    now: Callable[[], Moment] = lambda: Moment(0, 0, 1),
) -> Strategy:
    """This rank's attention by the settings. local, part: what is done in the place of attention to all tokens and to
    some of them; kernels: what packs and scores, instead of the settings' own."""
    kernels = kernels or Kernels(config.kernels, trace.note_kernel)
    return build_strategy(config, mesh, transport, trace, kernels, now, local, part)


def make_exchange(config: Config, topology: Topology, transport: Any, trace: Trace) -> Exchange:
    """This rank's end of the exchange by the settings, among all ranks."""
    return Exchange(
        config.exchange,
        topology,
        transport,
        trace,
        exchange_table(config, topology),
        config.nic_balance,
        Kernels(config.kernels, trace.note_kernel),
        chunking(config, topology),
    )


def send(
    exchange: Exchange, tensors_BLHD: Sequence[Tensor], layout: Layout, names: str, kind: str = "", soon: bool = False
) -> list[Tensor]:
    """Sends each tensor [B, L, H, D] in one message to each peer and returns, when all has arrived, [B, S, G, D].

    soon: on the thread that calls, as attention does where nothing is left to compute meanwhile."""
    return exchange.forward(tensors_BLHD, layout, names, kind, soon=soon).wait()


def send_back(exchange: Exchange, out_BSGD: Tensor, layout: Layout, kind: str = "") -> Tensor:
    """Sends attention's output [B, S, G, D] back and returns [B, L, H, D] when all has arrived."""
    return exchange.back(out_BSGD, layout, "o", kind).wait()

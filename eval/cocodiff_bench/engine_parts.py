"""The engine's exchange and attention without an engine: the only module in which benchmarks build and drive them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cocodiff.assemble import build_strategy, chunking, exchange_table
from cocodiff.attention.local import LocalAttention
from cocodiff.attention.ulysses import Ulysses
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.coded import CodedCall
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.transfer import Transfer


def make_strategy(
    config: Config,
    mesh: Mesh,
    transport: Any,
    trace: Trace,
    local: LocalAttention | None = None,
    kernels: Kernels | None = None,
) -> Ulysses:
    """This rank's attention by the settings. local: what computes in the place of attention; kernels: what packs and
    scores, instead of the settings' own."""
    return build_strategy(config, mesh, transport, trace, kernels or Kernels(config.kernels, trace.note_kernel), local)


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


def send(exchange: Exchange, layout: Layout, kind: str = "", wait_next: bool = False, **x_BLHD: Tensor) -> list[Tensor]:
    """Sends each tensor [B, L, H, D] in one message to each peer and returns, when all has arrived, [B, S, G, D].

    wait_next: on the thread that calls, as attention does where nothing is left to compute meanwhile."""
    sent = Transfer(exchange, CodedCall(layout), kind).send(wait_next=wait_next, **x_BLHD)
    return [arriving.wait() for arriving in sent.values()]


def send_back(exchange: Exchange, out_BSGD: Tensor, layout: Layout, kind: str = "") -> Tensor:
    """Sends attention's output [B, S, G, D] back and returns [B, L, H, D] when all has arrived."""
    return Transfer(exchange, CodedCall(layout), kind).back(out_BSGD)

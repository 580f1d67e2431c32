"""The engine's exchange without an engine, and timed waits in the place of projections and of attention, so that the
cores that all ranks share do not decide what messages can hide behind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocodiff.assemble import chunking, exchange_table
from cocodiff.attention.local import LocalAttention, Partial
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.outgoing import CodedCall
from cocodiff.wire.transfer import Transfer


def make_exchange(config: Config, topology: Topology, transport: Any, trace: Trace) -> Exchange:
    """This rank's end of the exchange by the settings, among all ranks."""
    table, kernels = exchange_table(config, topology), Kernels(config.kernels, trace.note_kernel)
    chunked = chunking(config, topology)
    return Exchange(config.exchange, topology, transport, trace, table, config.nic_balance, kernels, chunked)


def send(exchange: Exchange, layout: Layout, kind: str = "", wait_next: bool = False, **x_BLHD: Tensor) -> list[Tensor]:
    """Sends each tensor [B, L, H, D] in one message to each peer and returns, when all has arrived, [B, S, G, D].

    wait_next: on the thread that calls, as attention does where nothing is left to compute meanwhile."""
    sent = Transfer(exchange, CodedCall(layout), kind).send(wait_next=wait_next, **x_BLHD)
    return [arriving.wait() for arriving in sent.values()]


def send_back(exchange: Exchange, out_BSGD: Tensor, layout: Layout, kind: str = "") -> Tensor:
    """Sends attention's output [B, S, G, D] back and returns [B, L, H, D] when all has arrived."""
    return Transfer(exchange, CodedCall(layout), kind).back(out_BSGD)


def after(seconds: float, x_BLHD: Tensor) -> Callable[[], Tensor]:
    """A projection that takes so long and gives this tensor."""

    def project() -> Tensor:
        time.sleep(seconds)
        return x_BLHD

    return project


@dataclass
class WaitingAttention(LocalAttention):
    """Attention itself while `seconds` is None, else a wait: `seconds` for so many `pairs` of a query and a key of one
    head. The wait's result depends on every element of q, k and v, and is the same up to rounding for all keys at once
    and for parts of them."""

    pairs: float = 1.0
    seconds: float | None = None

    def whole(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        if self.seconds is None:
            return super().whole(q_BSGD, k_BSGD, v_BSGD, mask_B11S)
        return self._wait(self.seconds, q_BSGD, k_BSGD, v_BSGD)

    def part(self, q_BTGD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor, mask_B11U: Tensor | None = None) -> Partial:
        if self.seconds is None:
            return super().part(q_BTGD, k_BUGD, v_BUGD, mask_B11U)
        out_BTGD = self._wait(self.seconds, q_BTGD, k_BUGD, v_BUGD)
        log_keys = math.log(k_BUGD.shape[1])
        return Partial(out_BTGD, out_BTGD.new_full(out_BTGD.shape[:3], log_keys, dtype=torch.float32))

    def _wait(self, seconds: float, q_BTGD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor) -> Tensor:
        started = time.perf_counter()
        out_BTGD = q_BTGD + (k_BUGD + v_BUGD).mean(1, keepdim=True)
        share = q_BTGD.shape[1] * k_BUGD.shape[1] * q_BTGD.shape[2] / self.pairs
        time.sleep(max(0.0, seconds * share - (time.perf_counter() - started)))
        return out_BTGD

"""Attention of a model that is not there: real messages by the engine's own strategies, and waits for what computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.attention.ulysses import Call, FullCall, Sent, Ulysses
from cocodiff.comm.transport import LanePending
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.exchange import Exchange


class StandIn(Ulysses):
    """Ulysses whose attention is a wait. selective: like V-Major scoring at the source, a fraction of the image tokens
    stays behind; scores are gathered before the first message leaves. Which tokens stay plays no part: the first go."""

    def __init__(
        self, topology: Topology, exchange: Exchange, trace: Trace, order: Any, transport: Any, selective: bool
    ) -> None:
        super().__init__(topology, exchange, trace, order, self._wait)
        self.selective, self.rank = selective, transport.rank
        self.fraction = self.attention_s = self.score_s = 0.0
        self._out_rows = 0
        if selective:
            self.group, self.lane = transport.group(range(transport.size)), transport.lane("select")

    def set_call(self, fraction: float, attention_s: float, score_s: float) -> None:
        """Of the calls that follow: the stable fraction, and how long attention and scoring take."""
        self.fraction, self.attention_s, self.score_s = fraction, attention_s, score_s

    def call(self, qkv: LazyQKV, exchange: Exchange, layout: Layout, site: Site) -> Call:
        self._out_rows = sum(layout.rows)
        if self.fraction == 0:
            return FullCall(qkv, exchange, layout, self._trace, site.kind)
        return SomeRows(qkv, exchange, layout, self._trace, site.kind, self)

    def _wait(self, q_BSGD: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None) -> Tensor:
        time.sleep(self.attention_s)
        B, _, G, D = q_BSGD.shape
        return q_BSGD.new_empty(B, self._out_rows, G, D)


@dataclass
class SomeRows(FullCall):
    """A selective step: all rows but so many of those that may stay travel, once the scores have been gathered."""

    strategy: StandIn
    scored: LanePending[None] | None = None

    def know_v(self, v_BLHD: Tensor) -> None:
        strategy, layout = self.strategy, self.layout

        def score() -> None:
            time.sleep(strategy.score_s)
            parts = [torch.empty(len(v_BLHD), tokens) for tokens in layout.may_stay]
            strategy.group.all_gather(torch.zeros(len(v_BLHD), layout.may_stay[strategy.rank]), parts).wait()

        self.scored = strategy.lane.submit(score)

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Sent:
        strategy = self.strategy
        rows = zip(self.layout.rows, self.layout.may_stay, strict=True)
        some = self.layout.of_rows([all_rows - int(tokens * strategy.fraction) for all_rows, tokens in rows])
        scored: Callable[[], Any] | None = None if self.scored is None else self.scored.wait

        def ready() -> tuple[list[Tensor], Layout]:
            if scored is not None:
                scored()
            return [x_BLHD[:, : some.rows[strategy.rank]] for x_BLHD in tensors_BLHD], some

        return [(names, self.travel(ready, names, tensors_BLHD[0]))]

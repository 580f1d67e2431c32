"""Attention of a model that is not there: real messages by the engine's own strategies, and waits for what computes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention
from cocodiff.comm.transport import LanePending
from cocodiff.topology.layout import Layout
from cocodiff.wire.coding import CodedCall, Coding, Encoded
from cocodiff.wire.exchange import Arriving, Exchange, Transfer


class WaitingAttention(LocalAttention):
    """A wait of so many seconds in attention's place."""

    seconds = 0.0
    rows = 0  # of the output

    def whole(self, q_BSGD: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None = None) -> Tensor:
        time.sleep(self.seconds)
        B, _, G, D = q_BSGD.shape
        return q_BSGD.new_empty(B, self.rows, G, D)


class SomeTokens(Coding):
    """Like V-Major scoring at the source: a fraction of the tokens that may stay behind does; scores are gathered
    before the first message leaves. Which tokens stay plays no part: the first go."""

    def __init__(self, transport: Any, local: WaitingAttention) -> None:
        self.transport, self.local = transport, local
        self.fraction = self.score_s = 0.0

    def call(self, exchange: Exchange, layout: Layout, site: Any) -> CodedCall:
        self.local.rows = sum(layout.rows)
        return CodedCall(layout) if self.fraction == 0 else SomeRows(layout, self)


class SomeRows(CodedCall):
    """A selective step: all rows but so many of those that may stay travel, once the scores have been gathered."""

    _scored: LanePending[None]

    def __init__(self, layout: Layout, coding: SomeTokens) -> None:
        super().__init__(layout)
        self._coding = coding
        rows = zip(layout.rows, layout.may_stay, strict=True)
        self._some = layout.of_rows([every - int(tokens * coding.fraction) for every, tokens in rows])

    def send(self, transfer: Transfer, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> Arriving:
        if "v" in tensors_BLHD:
            batch = len(tensors_BLHD["v"])
            self._scored = self._coding.transport.control.submit(lambda: self._score(batch))
        return transfer.post(tensors_BLHD)

    def encode(self, tensors_BLHD: Mapping[str, Tensor]) -> Encoded:
        self._scored.wait()
        rows = self._some.rows[self._coding.transport.rank]
        return Encoded([x_BLHD[:, :rows] for x_BLHD in tensors_BLHD.values()], self._some)

    def _score(self, batch: int) -> None:
        time.sleep(self._coding.score_s)
        tokens_of, transport = self.layout.may_stay, self._coding.transport
        parts = [torch.empty(batch, tokens) for tokens in tokens_of]
        transport.world.all_gather(torch.zeros(batch, tokens_of[transport.rank]), parts).wait()

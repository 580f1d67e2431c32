"""One layer of a model that is not there, by the engine's own attention: real messages, and waits for what computes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention, Partial
from cocodiff.attention.strategy import Site
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.topology.axes import Mesh
from cocodiff.trace import Trace
from cocodiff.wire.coding import Moment
from cocodiff_bench.engine_parts import make_strategy

if TYPE_CHECKING:
    from cocodiff_bench.model_step import Call


class WaitingKernels(Kernels):
    """Scoring is a wait, and all scores are zero: which tokens stay plays no part."""

    score_s = 0.0

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> tuple[Tensor, Tensor]:
        time.sleep(self.score_s)
        return torch.zeros(v_BLHD.shape[:2]), torch.ones(v_BLHD.shape[:2])


class Timed(LocalAttention):
    """A wait in attention's place: `seconds` for all queries and keys, `pairs` of them, and less for fewer."""

    seconds, pairs = 0.0, 1

    def whole(self, q_BSGD: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None = None) -> Tensor:
        time.sleep(self.seconds)
        return torch.empty_like(q_BSGD)

    def part(self, q_BTGD: Tensor, k_BUGD: Tensor, _v: Tensor, _mask: Tensor | None = None) -> Partial:
        time.sleep(self.seconds * q_BTGD.shape[1] * k_BUGD.shape[1] / self.pairs)
        return Partial(torch.empty_like(q_BTGD), torch.zeros(q_BTGD.shape[:3]))


class StandIn:
    """An exchange in an order, of all tokens or of V-Major's. Every `run` is the next step of one image."""

    def __init__(self, config: Config, mesh: Mesh, transport: Any, trace: Trace) -> None:
        self._step, self._attention = 0, Timed()
        self._kernels = WaitingKernels(config.kernels, trace.note_kernel)
        self._strategy = make_strategy(config, mesh, transport, trace, self._attention, self._kernels)
        self.selective = self._strategy.coding.keeps_state

    def run(self, call: Call, fraction: float, dilation: float) -> None:
        """One layer with this part of the tokens staying behind, all that computes so many times longer."""
        self._step += 1
        self._attention.seconds, self._kernels.score_s = call.layer.attention * dilation, call.layer.score * dilation
        self._attention.pairs = sum(call.layout.rows) ** 2
        self._strategy.coding.begin_step(Moment(0, self._step, 1))
        self._strategy.coding.hold_at(fraction or None)
        self._strategy.attend(call.qkv(dilation), Site("layer"))
        time.sleep(call.layer.rest * dilation)

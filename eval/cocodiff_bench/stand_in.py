"""One layer of a model that is not there, by the engine's own attention: real messages, and waits for what computes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cocodiff.attention.strategy import Site
from cocodiff.attention.v_major.strategy import Moment, VMajor
from cocodiff.config import Config
from cocodiff.kernels import Kernels
from cocodiff.planning.layers import held_at
from cocodiff.topology.axes import Mesh
from cocodiff.trace import Trace
from cocodiff_bench.engine_parts import make_strategy

if TYPE_CHECKING:
    from cocodiff_bench.model_step import Call


class WaitingKernels(Kernels):
    """Scoring is a wait, and all scores are zero: which tokens stay plays no part."""

    score_s = 0.0

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> tuple[Tensor, Tensor]:
        time.sleep(self.score_s)
        return torch.zeros(v_BLHD.shape[:2]), torch.ones(v_BLHD.shape[:2])


class StandIn:
    """An exchange in an order, of all tokens or of V-Major's. Every `run` is the next step of one image."""

    def __init__(self, config: Config, mesh: Mesh, transport: Any, trace: Trace) -> None:
        self._step, self._attention_s = 0, 0.0
        self._kernels = WaitingKernels(config.kernels, trace.note_kernel)
        self._strategy = make_strategy(
            config, mesh, transport, trace, self._wait, kernels=self._kernels, now=lambda: Moment(0, self._step, 1)
        )
        self.selective = config.selection == "v_major"

    def run(self, call: Call, fraction: float, dilation: float) -> None:
        """One layer with this part of the image tokens staying behind, all that computes so many times longer."""
        self._step += 1
        self._attention_s, self._kernels.score_s = call.layer.attention * dilation, call.layer.score * dilation
        if isinstance(self._strategy, VMajor):
            self._strategy.schedule = held_at(self._strategy.schedule, fraction or None)
        self._strategy.attend(call.qkv(dilation), Site("layer"))
        time.sleep(call.layer.rest * dilation)

    def _wait(self, q_BSGD: Tensor, _k: Tensor, _v: Tensor, _mask: Tensor | None) -> Tensor:
        time.sleep(self._attention_s)
        return torch.empty_like(q_BSGD)

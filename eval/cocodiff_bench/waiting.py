"""Timed waits in the place of projections and of attention, so that the cores that all ranks share do not decide what
messages can hide behind."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention, Partial


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

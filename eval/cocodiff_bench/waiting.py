"""What computes in `bench attention`: timed waits in the place of projections and of attention."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.attention.local import Partial
    from cocodiff.attention.strategy import LazyQKV, Site
    from cocodiff.topology.layout import Segments

V_SHARE = 0.1  # T(V) as a part of T(Q,K); the paper's example has 0.1 ms and 1.0 ms
LOCAL_WAIT_S = 0.002


@dataclass(frozen=True)
class StandInLayer:
    """One attention layer of a model that is not there: this rank's rows of random q, k and v."""

    site: Site
    q_BLHD: Tensor
    k_BLHD: Tensor
    v_BLHD: Tensor
    segments: Segments
    heads: int

    def qkv(self, project_qk_s: float) -> LazyQKV:
        """q, k and v after waits for as long as their projections shall take."""
        from cocodiff.attention.strategy import LazyQKV

        def projected(x_BLHD: Tensor, seconds: float) -> Callable[[], Tensor]:
            def project() -> Tensor:
                time.sleep(seconds)
                return x_BLHD

            return project

        q, k = (projected(x_BLHD, project_qk_s / 2) for x_BLHD in (self.q_BLHD, self.k_BLHD))
        v = projected(self.v_BLHD, project_qk_s * V_SHARE)
        return LazyQKV(q, k, v, self.segments, self.heads)


class WaitingAttention:
    """In attention's place: a wait, and a result that every element of q, k and v has a part in, the same up to
    rounding for keys as a whole and in parts."""

    def __init__(self) -> None:
        self.seconds, self.tokens = LOCAL_WAIT_S, 0

    def whole(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, _mask: Tensor | None) -> Tensor:
        return self._attend(q_BSGD, k_BSGD, v_BSGD)

    def part(self, q_BTGD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor, _mask: Tensor | None) -> Partial:
        import torch

        from cocodiff.attention.local import Partial

        out_BTGD = self._attend(q_BTGD, k_BUGD, v_BUGD)
        log_keys = math.log(k_BUGD.shape[1])
        return Partial(out_BTGD, out_BTGD.new_full(out_BTGD.shape[:3], log_keys, dtype=torch.float32))

    def _attend(self, q_BTGD: Tensor, k_BUGD: Tensor, v_BUGD: Tensor) -> Tensor:
        """Waits as long as these pairs are of all pairs of a query and a key."""
        started = time.perf_counter()
        out_BTGD = q_BTGD + (k_BUGD + v_BUGD).mean(1, keepdim=True)
        share = q_BTGD.shape[1] * k_BUGD.shape[1] / self.tokens**2
        time.sleep(max(0.0, self.seconds * share - (time.perf_counter() - started)))
        return out_BTGD

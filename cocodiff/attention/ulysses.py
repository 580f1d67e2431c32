"""Ulysses sequence parallelism (CoCoDiff section II-A): exchange q, k and v, attend to all tokens with some of
the heads, exchange the output back. Which way the messages take is the exchange's business."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.attention.exchange import Exchange
from cocodiff.attention.layout import Layout
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.device import used_on_current_stream
from cocodiff.topology import Topology
from cocodiff.trace import Trace


class Ulysses:
    """Exact: with every exchange the result equals one process's up to the rounding of another summation order."""

    def __init__(self, topology: Topology, exchange: Exchange | None, trace: Trace) -> None:
        """exchange: None when there is one rank, which has nothing to exchange."""
        self._topology, self._exchange, self._trace = topology, exchange, trace
        self._layouts: dict[tuple[int, int, int], Layout] = {}

    def attend(self, qkv: LazyQKV, site: Site) -> Tensor:
        q_BLHD, k_BLHD, v_BLHD = qkv.q(), qkv.k(), qkv.v()
        if self._exchange is None:
            return local_attention(q_BLHD, k_BLHD, v_BLHD)
        layout = self.layout(qkv)
        with self._trace.span("wait for qkv"):
            received = self._exchange.forward([q_BLHD, k_BLHD, v_BLHD], layout).wait()
        q_BSGD, k_BSGD, v_BSGD = map(used_on_current_stream, received)
        with self._trace.span("attention"):
            out_BSGD = local_attention(q_BSGD, k_BSGD, v_BSGD)
        with self._trace.span("wait for o"):
            out_BLHD = self._exchange.back(out_BSGD, layout).wait()
        return used_on_current_stream(out_BLHD)

    def layout(self, qkv: LazyQKV) -> Layout:
        key = (qkv.image_tokens, qkv.text_tokens, qkv.heads)
        if key not in self._layouts:
            self._layouts[key] = Layout.build(self._topology, *key)
        return self._layouts[key]


def local_attention(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor) -> Tensor:
    """Plain attention of the heads that are here: [B, S, H, D]."""
    out_BHSD = scaled_dot_product_attention(q_BSHD.transpose(1, 2), k_BSHD.transpose(1, 2), v_BSHD.transpose(1, 2))
    return out_BHSD.transpose(1, 2)

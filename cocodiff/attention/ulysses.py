"""Ulysses sequence parallelism (CoCoDiff section II-A): exchange q, k and v, attend to all tokens with some of
the heads, exchange the output back. Which way the messages take is the exchange's business; what is projected and sent
before what is the order's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.attention.exchange import Exchange
from cocodiff.attention.layout import Layout
from cocodiff.attention.strategy import LazyQKV, Site, nothing
from cocodiff.device import used_on_current_stream
from cocodiff.topology import Topology
from cocodiff.trace import Trace

if TYPE_CHECKING:
    from cocodiff.attention.ring import Ring


class Arriving(Protocol):
    """q, k or v on their way."""

    def wait(self) -> Sequence[Tensor]:
        """The whole sequence of this rank's heads, [B, S, G, D] of each tensor."""
        ...


class Call(Protocol):
    """One attention call on several ranks, as an order sees it."""

    qkv: LazyQKV
    trace: Trace
    layer: str

    def know_v(self, v_BLHD: Tensor) -> None:
        """v is there: what depends on it can start. Called before anything is sent."""
        ...

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Arriving:
        """Starts the exchange of one or more of q, k and v, which `names` spells, in one message to each peer.

        soon: they are waited for next, so there is nothing to travel behind."""
        ...


@dataclass
class FullCall:
    """A call in which all tokens travel."""

    qkv: LazyQKV
    exchange: Exchange
    layout: Layout
    trace: Trace
    layer: str

    def know_v(self, v_BLHD: Tensor) -> None:
        return

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Arriving:
        return self.exchange.forward(tensors_BLHD, self.layout, names, self.layer, soon)


Order = Callable[[Call], tuple[Tensor, Tensor, Tensor]]  # -> q, k, v, each [B, S, G, D]
Local = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]  # as `local_attention`


def joint(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Projects everything, then sends q, k and v in one message to each peer."""
    with call.trace.span("project qk", layer=call.layer):
        q_BLHD, k_BLHD = call.qkv.q(), call.qkv.k()
    with call.trace.span("project v", layer=call.layer):
        v_BLHD = call.qkv.v()
    call.know_v(v_BLHD)
    travelling = call.send("qkv", [q_BLHD, k_BLHD, v_BLHD], soon=call.qkv.meanwhile is nothing)
    with call.trace.span("meanwhile", layer=call.layer):
        call.qkv.meanwhile()
    with call.trace.span("wait for qkv", layer=call.layer):
        q_BSGD, k_BSGD, v_BSGD = travelling.wait()
    return q_BSGD, k_BSGD, v_BSGD


class Ulysses:
    """Exact: with every exchange and order the result equals one process's up to the rounding of another summation
    order."""

    def __init__(
        self, topology: Topology, exchange: Exchange | None, trace: Trace, order: Order = joint,
        local: Local | None = None, ring: Ring | None = None,
    ) -> None:  # fmt: skip
        """exchange: None when there is one rank, which has nothing to exchange.

        local: what is done with the heads that are here, instead of `local_attention`.
        ring: brings the keys and values of other Ulysses groups and attends to them in `local`'s place; `topology` and
        `exchange` are those of this rank's group then.
        """
        self._topology, self._exchange, self._trace, self._order = topology, exchange, trace, order
        self._local, self._ring = local or local_attention, ring
        self._layouts: dict[tuple[int, int, int], Layout] = {}

    def attend(self, qkv: LazyQKV, site: Site) -> Tensor:
        layout = self.layout(qkv)
        if self._exchange is None:
            out_BLHD = self.attention(qkv.q(), qkv.k(), qkv.v(), qkv, layout, site)
            qkv.meanwhile()
            return out_BLHD
        arrived = self._order(self.call(qkv, self._exchange, layout, site))
        q_BSGD, k_BSGD, v_BSGD = map(used_on_current_stream, arrived)
        out_BSGD = self.attention(q_BSGD, k_BSGD, v_BSGD, qkv, layout, site)
        with self._trace.span("wait for o", layer=site.kind):
            out_BLHD = self._exchange.back(out_BSGD, layout, "o", site.kind).wait()
        return used_on_current_stream(out_BLHD)

    def call(self, qkv: LazyQKV, exchange: Exchange, layout: Layout, site: Site) -> Call:
        """What travels in this call: everything."""
        return FullCall(qkv, exchange, layout, self._trace, site.kind)

    def attention(
        self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, qkv: LazyQKV, layout: Layout, site: Site
    ) -> Tensor:
        """Attention of the queries that are here to all keys, with the heads that are here."""
        with self._trace.span("attention", layer=site.kind):
            if self._ring is not None:
                return self._ring.attend(q_BSGD, k_BSGD, v_BSGD, qkv, site.kind)
            return self._local(q_BSGD, k_BSGD, v_BSGD, mask_in_rank_order(qkv, layout))

    def layout(self, qkv: LazyQKV) -> Layout:
        key = (qkv.image_tokens, qkv.text_tokens, qkv.heads)
        if self._ring is not None:
            return self._ring.layout(*key)
        if key not in self._layouts:
            self._layouts[key] = Layout.build(self._topology, *key)
        return self._layouts[key]


def local_attention(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
    """Plain attention of the heads that are here: [B, S, H, D]. mask_B11S: bool, the keys that are attended to."""
    q_BHSD, k_BHSD, v_BHSD = (x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD))
    return scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask_B11S).transpose(1, 2)


def mask_in_rank_order(qkv: LazyQKV, layout: Layout) -> Tensor | None:
    """Which keys are attended to, for the sequence after the exchange, rank 0's rows, then rank 1's: [B, 1, 1, S]; None
    for all."""
    if qkv.text_mask_BT is None:
        return None
    parts_BS = []
    for text, image in zip(layout.text_slices, layout.image, strict=True):
        pair = [qkv.text_mask_BT[:, text], qkv.text_mask_BT.new_ones(len(qkv.text_mask_BT), image)]
        parts_BS += pair if qkv.text_first else pair[::-1]
    return torch.cat(parts_BS, dim=1)[:, None, None]

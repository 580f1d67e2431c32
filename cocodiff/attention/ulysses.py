"""Ulysses sequence parallelism (CoCoDiff section II-A): exchange q, k and v, attend to all tokens with some of
the heads, exchange the output back. Which way the messages take is the exchange's business; what is projected and sent
before what is the order's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.attention.merge import partial_attention
from cocodiff.attention.strategy import LazyQKV, Site, nothing
from cocodiff.attention.torus import InChunks, LocalPart, Torus
from cocodiff.device import used_on_current_stream
from cocodiff.topology.layout import Layout, Segments
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.staged import Ready, Staged

if TYPE_CHECKING:
    from cocodiff.attention.ring import Ring


class Arriving(Protocol):
    """q, k or v on their way."""

    def wait(self) -> Sequence[Tensor]:
        """The whole sequence of this rank's heads, [B, S, G, D] of each tensor."""
        ...


Sent = list[tuple[str, Arriving]]  # what travels together: its names, and how it arrives


class Call(Protocol):
    """One attention call on several ranks, as an order sees it."""

    qkv: LazyQKV
    trace: Trace
    layer: str

    def know_v(self, v_BLHD: Tensor) -> None:
        """v is there: what depends on it can start. Called before anything is sent."""
        ...

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Sent:
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

    def send(self, names: str, tensors_BLHD: list[Tensor], soon: bool = False) -> Sent:
        return [(names, self.travel(lambda: (tensors_BLHD, self.layout), names, tensors_BLHD[0], soon))]

    def travel(self, ready: Ready, names: str, like_BLHD: Tensor, soon: bool = False) -> Arriving:
        """Sends what `ready` gives when asked on a lane, in stages where those pay for tensors like this one."""
        staged = self.staged(like_BLHD)
        if staged is not None:
            return staged.forward(ready, names, self.layer)
        return self.exchange.forward_when(ready, names, self.layer, soon=soon)

    def staged(self, like_BLHD: Tensor) -> Staged | None:
        staged = self.exchange.staged
        return staged if staged is not None and staged.pays(self.layout, like_BLHD) else None


Order = Callable[[Call], Sent]
Local = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]  # as `local_attention`


def joint(call: Call) -> Sent:
    """Projects everything, then sends q, k and v in one message to each peer."""
    with call.trace.span("project qk", layer=call.layer):
        q_BLHD, k_BLHD = call.qkv.q(), call.qkv.k()
    with call.trace.span("project v", layer=call.layer):
        v_BLHD = call.qkv.v()
    call.know_v(v_BLHD)
    travelling = call.send("qkv", [q_BLHD, k_BLHD, v_BLHD], soon=call.qkv.meanwhile is nothing)
    with call.trace.span("meanwhile", layer=call.layer):
        call.qkv.meanwhile()
    return travelling


class Ulysses:
    """Exact: with every exchange and order the result equals one process's up to the rounding of another summation
    order."""

    def __init__(
        self,
        topology: Topology,
        exchange: Exchange | None,
        trace: Trace,
        order: Order = joint,
        local: Local | None = None,
        partial: LocalPart = partial_attention,
        ring: Ring | None = None,
    ) -> None:
        """exchange: None when there is one rank, which has nothing to exchange.

        local: what is done with the heads that are here, instead of `local_attention`; partial: with some of the
        tokens, where they come in chunks.
        ring: brings the keys and values of other Ulysses groups and attends to them in `local`'s place; `topology` and
        `exchange` are those of this rank's group then.
        """
        self._topology, self._exchange, self._trace, self._order = topology, exchange, trace, order
        self._local, self._partial, self._ring = local or local_attention, partial, ring
        self._layouts: dict[tuple[Segments, int], Layout] = {}

    def attend(self, qkv: LazyQKV, site: Site) -> Tensor:
        layout = self.layout(qkv)
        if self._exchange is None:
            out_BLHD = self.attention(qkv.q(), qkv.k(), qkv.v(), qkv, layout, site)
            qkv.meanwhile()
            return out_BLHD
        sent = self._order(self.call(qkv, self._exchange, layout, site))
        staged = self._exchange.staged
        if staged is not None and all(isinstance(arriving, InChunks) for _, arriving in sent):
            chunks = {name: cast(InChunks, arriving) for names, arriving in sent for name in names}
            torus = Torus(staged, layout, self._exchange.kernels, self._trace, site.kind, self._partial, self._ring)
            return used_on_current_stream(torus.attend(chunks, qkv, mask_in_rank_order(qkv, layout)))
        arrived: dict[str, Tensor] = {}
        for names, arriving in sent:
            with self._trace.span(f"wait for {names}", layer=site.kind):
                arrived |= zip(names, map(used_on_current_stream, arriving.wait()), strict=True)
        out_BSGD = self.attention(arrived["q"], arrived["k"], arrived["v"], qkv, layout, site)
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
        key = (qkv.segments, qkv.heads)
        if self._ring is not None:
            return self._ring.layout(*key)
        if key not in self._layouts:
            staged = None if self._exchange is None else self._exchange.staged
            sequence = () if staged is None else staged.sequence
            self._layouts[key] = replace(Layout.build(self._topology, *key), sequence=sequence)
        return self._layouts[key]


def local_attention(q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
    """Plain attention of the heads that are here: [B, S, H, D]. mask_B11S: bool, the keys that are attended to."""
    q_BHSD, k_BHSD, v_BHSD = (x.transpose(1, 2) for x in (q_BSHD, k_BSHD, v_BSHD))
    return scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask_B11S).transpose(1, 2)


def mask_in_rank_order(qkv: LazyQKV, layout: Layout) -> Tensor | None:
    """Which keys are attended to, for the sequence after the exchange, rank by rank in the layout's order:
    [B, 1, 1, S]; None for all."""
    if not qkv.masks:
        return None
    some_BT = next(iter(qkv.masks.values()))
    of_part = [
        qkv.masks.get(part.segment.name, some_BT.new_ones(len(some_BT), part.segment.tokens)) for part in layout.parts
    ]
    parts_BS = [
        mask_BT[:, part.slices[rank]]
        for rank in layout.in_sequence
        for mask_BT, part in zip(of_part, layout.parts, strict=True)
    ]
    return torch.cat(parts_BS, dim=1)[:, None, None]

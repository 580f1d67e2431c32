"""Ulysses sequence parallelism (CoCoDiff section II-A).

Ranks exchange q, k and v, attend to all tokens with some of the heads, and exchange the output back. An *order*
determines in which order tensors are projected and sent; it is the part that differs between strategies. The exchange
determines the routes of messages, the codec their content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from cocodiff.attention.local import AttentionCall, LocalAttention
from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.trace import Trace
from cocodiff.exchange.codec import Codec
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.outgoing import TensorFuture
from cocodiff.exchange.transfer import Transfer
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout, Segments

if TYPE_CHECKING:
    from cocodiff.attention.ring import Ring

# Projects and sends q, k and v of a call, in an order of its own; returns the futures of what this rank receives.
Order = Callable[[LazyQKV, Transfer, Trace], dict[str, TensorFuture]]


def joint(qkv: LazyQKV, transfer: Transfer, trace: Trace) -> dict[str, TensorFuture]:
    """Project q, k and v, then send all three in one message to each peer. Return their futures by name.

    While they are sent, `qkv.meanwhile` runs. This is the setting `order: joint`.

    Args:
        qkv: the functions that project.
        transfer: the messages of the call.
        trace: takes the times.
    """
    with trace.span("project qk", layer=transfer.layer):
        q_BLHD, k_BLHD = qkv.q(), qkv.k()
    with trace.span("project v", layer=transfer.layer):
        v_BLHD = qkv.v()
    sent = transfer.send(q=q_BLHD, k=k_BLHD, v=v_BLHD)
    with trace.span("meanwhile", layer=transfer.layer):
        qkv.meanwhile()
    return sent


def v_first(qkv: LazyQKV, transfer: Transfer, trace: Trace) -> dict[str, TensorFuture]:
    """Project and send v first, so that it is being sent while q and k are computed (V-First, CoCoDiff section III-C).

    Return the futures of q, k and v by name. v needs neither normalisation nor rotation, so it is ready early. Then
    `qkv.meanwhile` runs. This is the setting `order: v_first`.

    Args:
        qkv: the functions that project.
        transfer: the messages of the call.
        trace: takes the times.
    """
    with trace.span("project v", layer=transfer.layer):
        v_BLHD = qkv.v()
    v = transfer.send(v=v_BLHD)
    with trace.span("project qk", layer=transfer.layer):
        q_BLHD, k_BLHD = qkv.q(), qkv.k()
    qk = transfer.send(q=q_BLHD, k=k_BLHD)
    with trace.span("meanwhile", layer=transfer.layer):
        qkv.meanwhile()
    return v | qk


class Ulysses:
    """The attention of one rank in a Ulysses group: ranks exchange tokens for heads, attend, and exchange back.

    With a codec that sends tensors as they are it is exact: the result equals one process's, up to the rounding of
    another order of summation.
    """

    def __init__(
        self,
        topology: Topology,
        exchange: Exchange | None,
        trace: Trace,
        order: Order = joint,
        codec: Codec | None = None,
        local: LocalAttention | None = None,
        ring: Ring | None = None,
    ) -> None:
        """Set up attention on this rank.

        Args:
            topology: the ranks of the Ulysses group.
            exchange: this rank's end of the group's exchange; None for one rank.
            trace: takes the times.
            order: the function that projects and sends q, k and v.
            codec: decides what is sent in place of tensors; None to send them as they are.
            local: computes attention on this rank; None for `LocalAttention`.
            ring: brings other groups' keys and values; None for one group.
        """
        self.codec, self._topology, self.exchange = codec or Codec(), topology, exchange
        self._trace, self._order, self._ring = trace, order, ring
        self.local = local or LocalAttention()
        self._group = 0 if ring is None else ring.group
        self._layouts: dict[tuple[Segments, int], list[Layout]] = {}

    def attend(self, qkv: LazyQKV, layer_key: LayerKey) -> Tensor:
        """Return attention of this rank's rows to all tokens, [B, L, H, D]. All ranks that share the sequence call it.

        Args:
            qkv: functions that compute this rank's queries, keys and values.
            layer_key: the layer and guidance branch.
        """
        call = AttentionCall(qkv, self.layouts(qkv), layer_key.kind)
        if self.exchange is None:
            out_BLHD = self._attend_here(qkv.q(), qkv.k(), qkv.v(), call)
            qkv.meanwhile()
            return out_BLHD
        transfer = self.codec.open(self.exchange, call.layouts[self._group], layer_key)
        sent = self._order(qkv, transfer, self._trace)
        if transfer.in_stages:
            from cocodiff.attention.torus import Torus

            return Torus(transfer, sent, self.local, self._ring, call).attend()
        here = transfer.wait(sent)
        return transfer.back(self._attend_here(here["q"], here["k"], here["v"], call))

    def _attend_here(self, q_BSGD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, call: AttentionCall) -> Tensor:
        """Return attention of this Ulysses group's queries to all tokens, [B, S, G, D]: the group's tokens, this rank's
        heads.

        The given keys and values are the group's. If there are other groups, the ring brings theirs in.

        Args:
            q_BSGD: queries of the group's tokens, for this rank's heads.
            k_BSGD: keys of the same tokens.
            v_BSGD: their values.
            call: the attention call, with masks.
        """
        with self._trace.span("attention", layer=call.layer):
            if self._ring is not None:
                return self._ring.attend(q_BSGD, k_BSGD, v_BSGD, call)
            return self.local.whole(q_BSGD, k_BSGD, v_BSGD, call.mask(0))

    def layouts(self, qkv: LazyQKV) -> list[Layout]:
        """Return the tokens and heads of every rank in a call, one layout for each Ulysses group. They are cached.

        Args:
            qkv: the call's tensors, of which the segments and the number of heads are used.
        """
        key = (qkv.segments, qkv.heads)
        if key not in self._layouts:
            if self._ring is not None:
                layouts, sequences = self._ring.mesh.layouts(*key), self._ring.sequences
            else:
                staged = None if self.exchange is None else self.exchange.staged
                layouts, sequences = (Layout.build(self._topology, *key),), [() if staged is None else staged.sequence]
            self._layouts[key] = [replace(one, sequence=order) for one, order in zip(layouts, sequences, strict=True)]
        return self._layouts[key]

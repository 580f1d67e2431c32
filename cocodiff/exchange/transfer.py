"""The messages of one attention call.

v = transfer.send(v=v_BLHD)                    # travels while q and k are made
qk = transfer.send(q=q_BLHD, k=k_BLHD)         # together: one message to each peer
here = transfer.wait(v | qk)
...
out_BLHD = transfer.back(out_BSGD)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import groupby

from torch import Tensor

from cocodiff.comm.lane import LaneFuture
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.messages import Target
from cocodiff.exchange.outgoing import OUTPUT, EncodedCall, Outgoing, TensorFuture
from cocodiff.topology.layout import Layout

TENSORS = 3  # number of tensors of a call: q, k and v, in any order


class Transfer(EncodedCall):
    """The messages of one attention call on one rank: it sends q, k and v, and attention's output back.

    A codec's subclass says by `encode` and `decode` what is sent. By `post` and `back` it says when, where that
    differs.
    """

    in_stages = False  # True if tensors are sent in chunks of tokens; set at the first `send`, the same on every rank

    def __init__(self, exchange: Exchange, layout: Layout, layer: str = "") -> None:
        super().__init__(exchange, layout, layer)
        self.exchange, self._given = exchange, 0

    def send(self, **tensors_BLHD: Tensor) -> dict[str, TensorFuture]:
        """Start sending this rank's rows of q, k or v, each [B, L, H, D]. Return by name the futures of what this rank
        receives.

        Tensors that are given together share one message to each peer.

        Args:
            tensors_BLHD: one or more of q, k and v, by keyword.
        """
        if not self._given:
            self.open(tensors_BLHD)
        self._given += len(tensors_BLHD)
        if len({len(x) for x in tensors_BLHD.values()}) > 1:  # queries in groups that share keys: a larger batch
            return self.post({"q": tensors_BLHD.pop("q")}) | self.post(tensors_BLHD)
        return self.post(tensors_BLHD)

    @property
    def all_sent(self) -> bool:
        """True once q, k and v of the call were all given to `send`."""
        return self._given == TENSORS

    def open(self, tensors_BLHD: Mapping[str, Tensor]) -> None:
        """Begin the call, and decide if tensors are sent in chunks. The first `send` calls it.

        Args:
            tensors_BLHD: the tensors that are sent first, by name.
        """
        like_BLHD = next(iter(tensors_BLHD.values()))
        self.begin(like_BLHD)
        staged = self.exchange.staged
        self.in_stages = staged is not None and staged.pays(self.layout, self.cell_bytes(like_BLHD))

    def post(self, tensors_BLHD: Mapping[str, Tensor]) -> dict[str, TensorFuture]:
        """Start sending tensors for `send`, which calls it and returns its result: the tensors' futures by name.

        Subclasses override it to say when tensors are sent. Here they are sent at once. A background thread encodes
        and packs them, so neither `post` nor `send` waits.

        Args:
            tensors_BLHD: the tensors, by name.
        """
        staged = self.exchange.staged
        if staged is None or not self.in_stages:
            outgoing = Outgoing(self, tensors_BLHD)
            return arriving_whole(outgoing, self.exchange.submit(outgoing))
        one_by_one = [Outgoing(self, {name: x_BLHD}) for name, x_BLHD in tensors_BLHD.items()]
        return staged.send(one_by_one, self.all_sent)

    def wait(self, sent: Mapping[str, TensorFuture]) -> dict[str, Tensor]:
        """Wait for tensors and return them by name: all rows of this rank's heads, [B, S, G, D] each.

        Args:
            sent: the futures that `send` returned.
        """
        here: dict[str, Tensor] = {}
        for together, tensors in groupby(sent.items(), key=lambda item: item[1].together):
            with self.exchange.trace.span(f"wait for {together}", layer=self.layer):
                here |= {name: arriving.wait() for name, arriving in tensors}
        return here

    def back(self, out_BSGD: Tensor) -> Tensor:
        """Send attention's output for this rank's heads to the ranks of its rows. Return all heads of this rank's rows,
        [B, L, H, D].

        A displaced call returns a stand-in for them instead, see `DisplacedCall`. Calls that are sent in chunks use
        `staged.OutputSender`.

        Args:
            out_BSGD: the output, with all rows of this rank's heads.
        """
        outgoing = Outgoing(self, {OUTPUT: out_BSGD})
        pending = self.exchange.submit(outgoing)
        with self.exchange.trace.span(f"wait for {outgoing.label}", layer=self.layer):
            return outgoing.decode(pending.wait().tensors)[0]


def arriving_whole(outgoing: Outgoing, pending: LaneFuture[Target]) -> dict[str, TensorFuture]:
    """Return futures, by name, of tensors that are received together and not in chunks. They are decoded together, at
    the first wait.

    Args:
        outgoing: the tensors, as this rank sends them.
        pending: the future of the received payloads.
    """
    decoded = cache(lambda: dict(zip(outgoing.names, outgoing.decode(pending.wait().tensors), strict=True)))

    def arriving(name: str) -> TensorFuture:
        """Return the future of the tensor `name`, whose wait decodes all of them."""
        return TensorFuture("".join(outgoing.names), lambda _chunk: decoded()[name])

    return {name: arriving(name) for name in outgoing.names}

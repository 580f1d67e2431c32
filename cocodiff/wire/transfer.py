"""The messages of one attention call.

v = transfer.send(v=v_BLHD)                    # travels while q and k are made
qk = transfer.send(q=q_BLHD, k=k_BLHD)         # together: one message to each peer
here = transfer.wait(v | qk)
...
out_BLHD = transfer.back(out_BSGD)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

from torch import Tensor

from cocodiff.comm.transport import LanePending
from cocodiff.wire.blocks import Target
from cocodiff.wire.cargo import Back, End, Forward
from cocodiff.wire.coded import CodedCall
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.staged import OutputInStages


class Arriving(Protocol):
    """One tensor on its way to this rank's heads. together: the names of those that it travels with."""

    together: str

    def wait(self) -> Tensor:
        """All rows of this rank's heads, [B, S, G, D]."""
        ...

    def chunk(self, number: int) -> Tensor:
        """The whole sequence, of which this chunk and those asked for before are here. In ascending order, each chunk
        once."""
        ...

    def expect(self, number: int) -> object:
        """Has a chunk put in place as soon as it is here. Chunks land in the order in which they are expected."""
        ...


class Transfer:
    """in_stages: whether tensors come chunk by chunk; known once something was sent, the same on all ranks."""

    in_stages = False
    _opened = False

    def __init__(self, exchange: Exchange, coded: CodedCall, layer: str = "") -> None:
        """coded: what travels in tensors' place. layer: the kind of layer, for the trace."""
        self.exchange, self.coded, self.layer, self.layout = exchange, coded, layer, coded.layout
        self.end = End(exchange.rank, exchange.kernels, coded, layer)

    def send(self, wait_next: bool = False, **tensors_BLHD: Tensor) -> dict[str, Arriving]:
        """Starts sending this rank's rows of some tensors, each [B, L, H, D], in one message to each peer.

        wait_next: the caller waits for them next, so there is nothing to travel behind: the lane's job runs on the
        thread that waits.
        """
        if not self._opened:
            self._opened = True
            self.open(tensors_BLHD)
        if len({len(x) for x in tensors_BLHD.values()}) > 1:  # queries in groups that share keys have a larger batch
            return self.post({"q": tensors_BLHD.pop("q")}, wait_next) | self.post(tensors_BLHD, wait_next)
        return self.post(tensors_BLHD, wait_next)

    def open(self, tensors_BLHD: Mapping[str, Tensor]) -> None:
        """What is decided once for the call, by the first tensors that are sent."""
        like_BLHD, staged = next(iter(tensors_BLHD.values())), self.exchange.staged
        self.coded.begin(like_BLHD)
        self.in_stages = staged is not None and staged.pays(self.layout, self.coded.cell_bytes(like_BLHD))

    def post(self, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> dict[str, Arriving]:
        """As `send`, with the coding's `encode` as the lane's first work; in stages where those pay for this size."""
        staged = self.exchange.staged
        if staged is not None and self.in_stages:
            self.coded.comes_in_stages()
            return {**staged.send({name: Forward(self.end, {name: x_BLHD}) for name, x_BLHD in tensors_BLHD.items()})}
        cargo = Forward(self.end, tensors_BLHD)
        return tensors_of(Whole(cargo, self.exchange.submit(cargo, wait_next)))

    def wait(self, sent: Mapping[str, Arriving]) -> dict[str, Tensor]:
        """By name all rows of this rank's heads of what was sent, [B, S, G, D] each."""
        here: dict[str, Tensor] = {}
        for together, tensors in groupby(sent.items(), key=lambda item: item[1].together):
            with self.exchange.trace.span(f"wait for {together}", layer=self.layer):
                here |= {name: arriving.wait() for name, arriving in tensors}
        return here

    def back(self, out_BSGD: Tensor) -> Tensor:
        """Sends all rows of this rank's heads of attention's output; returns what the model goes on with in the place
        of all heads of its own rows, [B, L, H, D]. Not where it goes in stages."""
        cargo = Back(self.end, out_BSGD)
        arriving = WholeOutput(cargo, self.exchange.submit(cargo, wait_next=True), self.coded)
        with self.exchange.trace.span("wait for o", layer=self.layer):
            return arriving.wait()

    def back_in_stages(self) -> OutputInStages:
        """The way back, chunk by chunk."""
        assert self.exchange.staged is not None, "what came in stages goes back in stages"
        return OutputInStages(self.exchange.staged, self.end)


class Whole:
    """Tensors that travel together, each whole."""

    def __init__(self, cargo: Forward, pending: LanePending[Target]) -> None:
        self.cargo, self._pending = cargo, pending
        self._decoded: list[Tensor] = []

    def received(self) -> Sequence[Tensor]:
        """What has come, once it is here, as it travels."""
        return self._pending.wait().tensors

    def wait(self) -> list[Tensor]:
        """The tensors, decoded once."""
        if not self._decoded:
            self._decoded = self.cargo.decode(self.received())
        return self._decoded


class OneOf:
    """One of the tensors that travel together: every chunk is there when all are. See `Arriving`."""

    def __init__(self, whole: Whole, index: int) -> None:
        self._whole, self._index, self.together = whole, index, "".join(whole.cargo.names)

    def wait(self) -> Tensor:
        return self._whole.wait()[self._index]

    def chunk(self, number: int) -> Tensor:
        return self.wait()

    def expect(self, number: int) -> None:
        return


def tensors_of(whole: Whole) -> dict[str, Arriving]:
    """By name those that travel together."""
    return {name: OneOf(whole, index) for index, name in enumerate(whole.cargo.names)}


class WholeOutput:
    """Attention's output on its way to the ranks of its rows, whole."""

    def __init__(self, cargo: Back, pending: LanePending[Target], coded: CodedCall) -> None:
        self.cargo, self._pending, self._coded = cargo, pending, coded

    def received(self) -> Tensor:
        """What has come, once it is here, as it travels."""
        (received_BLHW,) = self._pending.wait().tensors
        return received_BLHW

    def wait(self) -> Tensor:
        """All heads of this rank's rows, [B, L, H, D]."""
        return self._coded.decode_output(self.received())

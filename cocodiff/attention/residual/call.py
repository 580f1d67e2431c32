"""One attention call of the residual codec: what its two ends send, keep and wait for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cocodiff.attention.residual.state import TENSORS, End, SiteState, kept
from cocodiff.attention.strategy import Site
from cocodiff.kernels.residual import Onward, Prediction, coded_width
from cocodiff.topology.layout import Layout
from cocodiff.wire.coding import CodedCall, Encoded
from cocodiff.wire.exchange import Arriving, Exchange, Together, Transfer

if TYPE_CHECKING:
    from cocodiff.attention.residual.coding import Residual

SAMPLING = 16  # of so many rows one tells how tensors change that travel as they are


class ResidualCall(CodedCall):
    """state, number, bits, predictions, displaced, operands: known once q, k or v was sent. number: of the call among
    those that follow one another, 0 for the first. bits: of a channel; None where tensors travel as they are.
    predictions: by name, none in a call that is not coded. displaced: the tensors in whose place attention, or the
    model, takes operands made of what the last call left; what is sent of them is received before the site's next call.
    operands: by name, of displaced tensors that are continued; the others' are the newest reconstructions."""

    begun = False
    state: SiteState
    number: int
    bits: int | None
    predictions: dict[str, Prediction]
    displaced: frozenset[str]
    operands: dict[str, Onward]
    notes: Tensor | None = None

    def __init__(self, coding: Residual, exchange: Exchange, layout: Layout, site: Site) -> None:
        super().__init__(layout)
        self.coding, self.kernels, self.trace, self.site = coding, exchange.kernels, exchange.trace, site
        self._rank = exchange.rank
        self._late: dict[str, Tensor] = {}  # to be sent once nothing is left that attention waits for

    def _begin(self, like_BLHD: Tensor) -> None:
        self.begun = True
        self.state = state = self.coding.begin_call(self.site, like_BLHD, self.layout)
        self._head_dim, self._dtype = like_BLHD.shape[-1], like_BLHD.dtype
        self.number, self.bits = state.follows, self.coding.bits(state)
        self.predictions, self.displaced = self.coding.predictions(state), self.coding.displaced(state)
        self.awaited = not self.displaced
        self._take_up()
        if self.coded or (self.number and self.coding.measures):
            self.notes = self.coding.notes_of(state, like_BLHD.device)
        self.coding.note_step(self)

    def _take_up(self) -> None:
        """Receives what the last call left. Where this call continues that, the operand is written in the same pass."""
        state, self.operands = self.state, {}
        for name in filter(self.displaced.__contains__, TENSORS):
            factor = self.coding.damped(self.predictions.get(name))
            if factor is not None:
                newest_BTHD = state.received[name].newest(self.number)
                self.operands[name] = Onward(factor, torch.empty_like(newest_BTHD))
        for name, onward in state.catch_up(self.operands).items():
            last_BTHD, before_BTHD = state.received[name].known(self.number, slice(None))
            assert before_BTHD is not None, "what is continued has one before"
            self.kernels.continue_linearly(last_BTHD, before_BTHD, onward)

    @property
    def coded(self) -> bool:
        return self.bits is not None

    def width(self, x_BLHD: Tensor) -> int:
        """Bytes of one head of one token on the wire."""
        return width_of(x_BLHD.shape[-1], x_BLHD.element_size(), self.bits)

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        return len(x_BLHD) * self.width(x_BLHD)

    # Sending and waiting ----------------------------------------------------------------------------------------------

    def send(self, transfer: Transfer, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> Arriving:
        if not self.begun:
            self._begin(next(iter(tensors_BLHD.values())))
        awaited = {name: x_BLHD for name, x_BLHD in tensors_BLHD.items() if name not in self.displaced}
        parts: list[Arriving] = [transfer.post(awaited, wait_next)] if awaited else []
        known = {name: self._operand(name) for name in tensors_BLHD if name in self.displaced}
        if known:
            parts.append(Known(known))
            self._late |= {name: tensors_BLHD[name] for name in known}
        if self._late and "k" in tensors_BLHD:  # the last of the three, in every order: those awaited go first
            in_flight = sum(map(self._in_flight, self._late.values()))
            self.state.owe(transfer.post(self._late, late=True).wait, in_flight)
            self._late = {}
        return parts[0] if len(parts) == 1 else Together(tuple(tensors_BLHD), parts)

    def back(self, transfer: Transfer, out_BSGD: Tensor) -> Tensor:
        if "o" not in self.displaced:
            return super().back(transfer, out_BSGD)
        self.state.owe(transfer.post_back(out_BSGD, late=True).wait, self._in_flight(out_BSGD))
        return self._operand("o")

    def _in_flight(self, x: Tensor) -> int:
        """Bytes of a tensor on the wire, both of what this rank sends and of what it receives."""
        layout, own = self.layout, self._rank
        cells = layout.rows[own] * sum(layout.heads) + sum(layout.rows) * layout.heads[own]
        return self.cell_bytes(x) * cells

    def _operand(self, name: str) -> Tensor:
        """All rows of a displaced tensor that attention, or the model, goes on with."""
        if name in self.operands:
            return self.operands.pop(name).out_BLHD  # what is owed keeps this call until the next one, and not these
        return self.state.received[name].known(self.number, slice(None)).last

    # On the wire ------------------------------------------------------------------------------------------------------

    def encode(self, tensors_BLHD: Mapping[str, Tensor]) -> Encoded:
        payloads = [self._sent(name, x, slice(0, x.shape[1]), x.shape[1]) for name, x in tensors_BLHD.items()]
        return Encoded(payloads, self.layout)

    def decode(self, received_BSGW: Mapping[str, Tensor], coded: Layout, rows: slice) -> list[Tensor]:
        return [self._received(name, x, rows) for name, x in received_BSGW.items()]

    def encode_output(self, out_BTGD: Tensor, rows: slice) -> Tensor:
        return self._sent("o", out_BTGD, rows, sum(self.layout.rows))

    def decode_output(self, received_BLHW: Tensor) -> Tensor:
        return self._received("o", received_BLHW, slice(0, received_BLHW.shape[1]))

    def _sent(self, name: str, x_BTHD: Tensor, rows: slice, length: int) -> Tensor:
        """What travels in the place of `rows` of a tensor's `length` rows."""
        if not self.coding.codes:
            if self.coding.measures:
                self._measure(name, x_BTHD, rows, length)
            return x_BTHD
        ends = self.state.sent
        if name not in ends:
            ends[name] = self._end(x_BTHD, length)
        if self.bits is None:
            ends[name].written(self.number)[:, rows] = x_BTHD
            return x_BTHD
        code_BTHW = x_BTHD.new_empty(*x_BTHD.shape[:3], self.width(x_BTHD), dtype=torch.uint8)
        known = ends[name].known(self.number, rows)
        with self._span("encode", name):
            how, notes = self.predictions[name], self._notes_of(name)
            self.kernels.encode_residual(x_BTHD, known, how, self.bits, code_BTHW, notes)
        return code_BTHW

    def _end(self, like_BTHW: Tensor, length: int) -> End:
        """The reconstructions of a tensor of so many rows, in a first call: where it is coded, what it is predicted by
        is zero."""
        B, _, H, _ = like_BTHW.shape
        new = like_BTHW.new_zeros if self.coded else like_BTHW.new_empty
        last_BTHD = new(B, length, H, self._head_dim, dtype=self._dtype)
        return End([*(torch.empty_like(last_BTHD) for _ in range(self.coding.kept - 1)), last_BTHD])

    def _measure(self, name: str, x_BTHD: Tensor, rows: slice, length: int) -> None:
        """Notes by some rows how a tensor that travels as it is has changed since the last call."""
        sampled = self.state.sampled
        first = -rows.start % SAMPLING  # every so many of all rows, however many of them are here
        some_BNHD = x_BTHD[:, first::SAMPLING]
        if name not in sampled:
            B, _, H, D = x_BTHD.shape
            sampled[name] = x_BTHD.new_empty(B, -(-length // SAMPLING), H, D)
        start = (rows.start + first) // SAMPLING
        last_BNHD = sampled[name][:, start : start + some_BNHD.shape[1]]
        if not self.number:
            last_BNHD.copy_(some_BNHD)
        elif some_BNHD.shape[1]:
            with self._span("measure", name):
                self.kernels.note_change(some_BNHD, last_BNHD, self._notes_of(name))

    def _span(self, work: str, name: str) -> AbstractContextManager[None]:
        """Of a pass over a tensor. Those of displaced ones are the main thread's work: nobody waits for a lane's."""
        return self.trace.span(f"{work} {name}", "main" if name in self.displaced else "codec", self.site.kind)

    def _notes_of(self, name: str) -> Tensor:
        assert self.notes is not None, "a call that follows others has notes"
        return self.notes[TENSORS.index(name)]

    def _received(self, name: str, x_BSGW: Tensor, rows: slice) -> Tensor:
        """All rows of a tensor, of which `rows` have just come."""
        ends = self.state.received
        if self.bits is None:
            if not self.coding.codes or name not in ends:  # else these are more rows of the same memory
                ends[name] = kept(x_BSGW, self.coding.kept)
            return x_BSGW
        if name not in ends:
            ends[name] = self._end(x_BSGW, x_BSGW.shape[1])
        how, known = self.predictions[name], ends[name].known(self.number, rows)
        code_BTGW = x_BSGW[:, rows]
        onward = self.state.taken_up(name)
        assert onward is None or code_BTGW.shape == x_BSGW.shape, "what no call waits for comes in one piece"
        with self._span("decode", name):
            factor = how.factor if how.linear else None
            self.kernels.decode_residual(code_BTGW, known, factor, self.bits, onward)
        return ends[name].written(self.number)


class Known(Arriving):
    """Tensors that are here; see `Arriving`. They never come in chunks."""

    def __init__(self, tensors_BSGD: Mapping[str, Tensor]) -> None:
        self.names, self._tensors = tuple(tensors_BSGD), tensors_BSGD

    def wait(self) -> list[Tensor]:
        return list(self._tensors.values())

    def chunk(self, name: str, number: int) -> Tensor:
        return self._tensors[name]

    def expect(self, name: str, number: int) -> None:
        return


def width_of(head_dim: int, itemsize: int, bits: int | None) -> int:
    """Bytes of one head of one token on the wire; bits None: of a tensor that travels as it is."""
    return head_dim * itemsize if bits is None else coded_width(head_dim, bits)

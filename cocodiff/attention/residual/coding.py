"""The residual codec: what travels is what a tensor differs by from its prediction, in 2, 4 or 8 bits a channel.

Sender and receiver keep the same reconstruction of q, k, v and the output of every site, and both add to it what was
sent, so errors do not add up: the next residual contains them. A code is a tensor of bytes of the same rows and heads,
which every exchange carries unopened. The rank's own block is coded like all others, so that results do not depend on
the number of ranks. `cocodiff.kernels.residual` defines the arithmetic, docs/codec.md when tensors travel whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.residual.state import TENSORS, CodedStep, SiteState, kept
from cocodiff.attention.strategy import Site
from cocodiff.comm.transport import LanePending
from cocodiff.device import used_on_current_stream
from cocodiff.kernels.residual import Prediction, coded_width
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.coding import AllRanks, CodedCall, Coding, Encoded, Moment, StepNotes
from cocodiff.wire.exchange import Arriving, Exchange, Transfer

BITS = {"int8": 8, "int4": 4, "int2": 2}
FINEST = 8


class Residual(Coding):
    """Sends residuals. On one rank nothing travels, and nothing is coded."""

    keeps_state = prefers_ulysses = True
    steps_to_settle = 2  # in which there is no continuation, and no comparison with it

    def __init__(
        self, exchange: Exchange | None, everyone: AllRanks, bits: int, predictor: str, fine_steps: int
    ) -> None:
        """everyone: the ranks that share the sequence, who decide together. predictor: "last", "taylor" or "auto".
        fine_steps: at the end of a run, with twice the bits."""
        self.predictor, self.moment = predictor, Moment(-1, 0, None)
        self._bits, self._fine_steps = bits, fine_steps
        self.kept = 1 if predictor == "last" else 2  # reconstructions
        self._exchange, self._everyone = exchange, everyone
        self._held: tuple[float | None] | None = None  # the one kind of step that is predicted
        self._sites: dict[Site, SiteState] = {}
        self._coded: list[SiteState] = []  # the coded sites of the current call of the model, in order
        self._notes: Tensor | None = None  # theirs, int64 [sites * tensors, 2]
        self._report: defaultdict[int, CodedStep] = defaultdict(CodedStep)
        self._deciding: tuple[list[SiteState], LanePending[list[Any] | None]] | None = None

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Any, everyone: AllRanks
    ) -> Residual:
        return cls(exchange, everyone, BITS[settings.codec], settings.predictor, settings.fine_steps)

    @classmethod
    def head_bytes(cls, settings: Any, head_dim: int, itemsize: int) -> int:
        return coded_width(head_dim, BITS[settings.codec])

    @classmethod
    def step_kinds(cls, settings: Any, steps: int, typical: float) -> list[float | None]:
        """None for the first step, which is whole; 1 for those with twice the bits, 0 for the others."""
        fine = settings.fine_steps if BITS[settings.codec] < FINEST else 0
        return [None, *(float(step >= steps - fine) for step in range(1, steps))][:steps]

    @classmethod
    def state_bytes(cls, settings: Any, topology: Topology, layout: Layout, cell: int) -> list[Mapping[str, int]]:
        """Exact: of q, k, v and the output the own rows with all heads, and all rows with the own heads. One rank alone
        keeps nothing."""
        if topology.size == 1:
            return [{}]
        kept, rows, heads = (1 if settings.predictor == "last" else 2), sum(layout.rows), sum(layout.heads)
        ends = (L * heads + rows * G for L, G in zip(layout.rows, layout.heads, strict=True))
        return [{"reconstructions": len(TENSORS) * kept * end * cell} for end in ends]

    def call(self, exchange: Exchange, layout: Layout, site: Site) -> CodedCall:
        return ResidualCall(self, exchange, layout, site)

    # Lifecycle --------------------------------------------------------------------------------------------------------

    def begin_step(self, moment: Moment) -> None:
        """Has all ranks' notes of the last call summed, behind what comes before the first attention."""
        if self._exchange is None:
            return
        if moment.run != self.moment.run:  # a new image: nothing of the last one may be seen
            self.end()
        self.moment = moment
        self._settle()
        if self._coded:
            assert self._notes is not None, "coded sites have notes"
            own = self._notes[: len(self._coded) * len(TENSORS)]
            self._deciding = self._coded, self._everyone.ranks.control.submit(partial(self._sum_notes, own))
            self._coded, self._notes = [], None

    def agree(self) -> None:
        self._settle()

    def forget(self, site: Site) -> None:
        self._sites.pop(site, None)

    def end(self) -> None:
        self._sites.clear()
        self._coded, self._notes, self._deciding = [], None, None

    def bytes_held(self) -> int:
        return sum(site.bytes_held() for site in self._sites.values())

    def report(self) -> dict[int, StepNotes]:
        return {**self._report}

    def forget_report(self) -> None:
        self._report.clear()

    def hold_at(self, fraction: float | None) -> None:
        self._held = (fraction,)

    @property
    def bits(self) -> int:
        """Of a channel at this step."""
        if self._held is not None:
            fine = self._held == (1.0,)
        else:
            steps = self.moment.steps
            fine = steps is not None and self.moment.step >= steps - self._fine_steps
        return min(2 * self._bits, FINEST) if fine else self._bits

    # Deciding ---------------------------------------------------------------------------------------------------------

    def begin_call(self, site: Site, like_BLHD: Tensor, layout: Layout) -> tuple[SiteState, dict[str, Prediction]]:
        """The state of a site whose call begins, and how its tensors are predicted: by name, none in a whole call."""
        self._settle()
        state, moment = self._sites.setdefault(site, SiteState()), self.moment
        form = tuple(like_BLHD.shape), like_BLHD.dtype, layout, torch.is_inference_mode_enabled()
        level = float(moment.step) if moment.sigma is None else moment.sigma
        state.begin(form, moment.step, level, self._held == (None,))
        predictions = {name: self._prediction(state, name) for name in TENSORS} if state.coded else {}
        self._report[moment.step].add(predictions.values())
        return state, predictions

    def _prediction(self, state: SiteState, name: str) -> Prediction:
        factor = state.factor
        linear = factor > 0 and (self.predictor == "taylor" or name in state.linear)
        return Prediction(factor, linear, compare=factor > 0 and self.predictor == "auto")

    def notes_of(self, state: SiteState, device: torch.device) -> Tensor:
        """Where encoding notes how it went, [tensors, 2], for a call that is coded."""
        if self._notes is None:  # a site is coded at most once in a call of the model, and was called before that
            self._notes = torch.zeros(len(self._sites) * len(TENSORS), 2, dtype=torch.int64, device=device)
        first = len(self._coded) * len(TENSORS)
        self._coded.append(state)
        return self._notes[first : first + len(TENSORS)]

    def _sum_notes(self, own: Tensor) -> list[Any] | None:
        """Every rank's notes in one message to each; None for tensors without numbers, as predictions have them."""
        topology, ranks = self._everyone
        assert self._exchange is not None, "one rank alone has no notes"
        trace = self._exchange.trace
        with trace.span("gather notes", "control"):
            parts = [torch.empty_like(used_on_current_stream(own)) for _ in range(ranks.size)]
            ranks.world.all_gather(own, parts).wait()
        for peer in range(ranks.size):
            trace.count(topology.link_class(ranks.rank, peer), own.nbytes, purpose="notes")
        total = torch.stack(parts).sum(0)
        return None if total.is_meta else total.tolist()

    def _settle(self) -> None:
        """Waits for the notes, and has their sites decide by them: alike on all ranks."""
        if self._deciding is None:
            return
        (states, pending), self._deciding = self._deciding, None
        notes = pending.wait() or []
        of_sites = [notes[first : first + len(TENSORS)] for first in range(0, len(notes), len(TENSORS))]
        for state, of_site in zip(states, of_sites, strict=bool(of_sites)):
            state.settle(of_site)


class ResidualCall(CodedCall):
    """One attention call of the codec, coded or whole. state, predictions: see `Residual.begin_call`; known once q, k
    or v was sent, as the bits of a channel are."""

    begun = False
    state: SiteState
    predictions: dict[str, Prediction]
    bits: int
    notes: Tensor

    def __init__(self, coding: Residual, exchange: Exchange, layout: Layout, site: Site) -> None:
        super().__init__(layout)
        self.coding, self.kernels, self.trace, self.site = coding, exchange.kernels, exchange.trace, site

    @property
    def coded(self) -> int:
        """The number of this call among those since the last whole one, which itself is 0."""
        return self.state.coded

    def send(self, transfer: Transfer, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> Arriving:
        if not self.begun:
            self.begun, like_BLHD = True, next(iter(tensors_BLHD.values()))
            self.state, self.predictions = self.coding.begin_call(self.site, like_BLHD, self.layout)
            self.bits = self.coding.bits
            if self.coded:
                self.notes = self.coding.notes_of(self.state, like_BLHD.device)
        return transfer.post(tensors_BLHD, wait_next)

    def cell_bytes(self, x_BLHD: Tensor) -> int:
        return len(x_BLHD) * self._width(x_BLHD) if self.coded else super().cell_bytes(x_BLHD)

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
        used_on_current_stream(x_BTHD)
        ends, coded = self.state.sent, self.coded
        if not coded:
            if name not in ends:
                B, _, H, D = x_BTHD.shape
                ends[name] = kept(x_BTHD.new_empty(B, length, H, D), self.coding.kept)
            ends[name].written(coded)[:, rows] = x_BTHD
            return x_BTHD
        code_BTHW = x_BTHD.new_empty(*x_BTHD.shape[:3], self._width(x_BTHD), dtype=torch.uint8)
        known, notes_2 = ends[name].known(coded, rows), used_on_current_stream(self.notes)[TENSORS.index(name)]
        with self.trace.span(f"encode {name}", "codec", self.site.kind):
            self.kernels.encode_residual(x_BTHD, known, self.predictions[name], self.bits, code_BTHW, notes_2)
        return code_BTHW

    def _received(self, name: str, x_BSGW: Tensor, rows: slice) -> Tensor:
        """All rows of a tensor, of which `rows` have just come."""
        ends, coded = self.state.received, self.coded
        if not coded:
            if name not in ends:  # else these are more rows of the same memory
                ends[name] = kept(x_BSGW, self.coding.kept)
            return x_BSGW
        how, known = self.predictions[name], ends[name].known(coded, rows)
        code_BTGW = used_on_current_stream(x_BSGW)[:, rows]
        with self.trace.span(f"decode {name}", "codec", self.site.kind):
            self.kernels.decode_residual(code_BTGW, known, how.factor if how.linear else None, self.bits)
        return ends[name].written(coded)

    def _width(self, x_BLHD: Tensor) -> int:
        return coded_width(x_BLHD.shape[-1], self.bits)

"""What travels is what a tensor differs by from its prediction (the residual codec, in 2, 4 or 8 bits a channel), and
attention need not wait for it (displacement).

Sender and receiver keep the same reconstruction of q, k, v and the output of every site, and both add to it what was
sent, so errors do not add up: the next residual contains them. A code is a tensor of bytes of the same rows and heads,
which every exchange carries unopened. The rank's own block is coded like all others, so that results do not depend on
the number of ranks. `cocodiff.kernels.residual` defines the arithmetic, docs/codec.md when tensors travel whole.

In a displaced tensor's place the newest reconstruction is taken, or a continuation of the last two, and what is sent of
it is received before the site's next call: always the state of exactly one call before, so that results depend on no
timing. With `arrival: adaptive` a tensor is displaced at a call if it is expected to change by less than tau: as at the
call before, which all its senders saw, times how much farther the noise level moves now, and LAG times that where it is
taken as it was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cocodiff.attention.residual.call import ResidualCall
from cocodiff.attention.residual.state import TENSORS, CodedStep, SiteState
from cocodiff.attention.strategy import Site
from cocodiff.comm.transport import LanePending
from cocodiff.kernels.residual import GROUP, NOTES, Prediction
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.coding import AllRanks, CodedCall, Coding, Moment, StepNotes
from cocodiff.wire.exchange import Exchange

BITS: dict[str, int | None] = {"none": None, "int8": 8, "int4": 4, "int2": 2}  # None: as they are
FINEST = 8
NOTED_SITES = 64  # whose notes are one tensor: nobody tells a first step how many there are
FIRST_BITS = 4  # times the bits: of a first call, which has nothing to predict by; whole above FINEST
# The operand of a displaced tensor goes half as far as the prediction that codes are made against: what it errs by is
# not corrected within the call.
DAMPING = 0.5
# What is taken as it was lags behind everywhere: it costs as much as a continuation of what changes by so much more.
LAG = 1.5


class Held(NamedTuple):
    """A kind of call. anew: it follows no other. fine: with the bits of the last steps. displaced: see
    `ResidualCall`."""

    anew: bool
    fine: bool
    displaced: frozenset[str]


class Residual(Coding):
    """Sends residuals. On one rank nothing travels, and nothing is coded."""

    keeps_state = prefers_ulysses = True
    held: Held | None = None  # in the place of what calls are decided by, for recordings of one kind of them

    def __init__(self, exchange: Exchange | None, everyone: AllRanks, settings: Any) -> None:
        """everyone: the ranks that share the sequence, who decide together. settings: codec, predictor, fine_steps,
        arrival and tau, see `Config`."""
        self._settings, self.moment = settings, Moment(-1, 0, None)
        self.kept, self.codes = reconstructions(settings), settings.codec != "none"
        self.measures = settings.arrival == "adaptive"
        self._exchange, self._everyone = exchange, everyone
        self._sites: dict[Site, SiteState] = {}
        self._coded: list[SiteState] = []  # the coded sites of the current call of the model, in order
        self._notes: list[Tensor] = []  # theirs, int64 [tensors, NOTES] of so many sites each
        self._report: defaultdict[int, CodedStep] = defaultdict(CodedStep)
        self._deciding: tuple[list[SiteState], LanePending[list[Any] | None]] | None = None

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Any, everyone: AllRanks
    ) -> Residual:
        return cls(exchange, everyone, settings)

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
        self.settle()
        if self._coded:
            noted = torch.cat(self._notes) if len(self._notes) > 1 else self._notes[0]
            own = noted[: len(self._coded) * len(TENSORS)]
            self._deciding = self._coded, self._everyone.ranks.control.submit(self._sum_notes, own)
            self._coded, self._notes = [], []

    def catch_up(self) -> None:
        for site in self._sites.values():
            site.catch_up()

    def forget(self, site: Site) -> None:
        if site in self._sites:
            self._sites.pop(site).catch_up()

    def end(self, drain: bool = True) -> None:
        if drain:
            self.settle()
            self.catch_up()
        self._sites.clear()
        self._coded, self._notes, self._deciding = [], [], None

    def bytes_held(self) -> int:
        return sum(site.bytes_held() for site in self._sites.values())

    def report(self) -> dict[int, StepNotes]:
        return {**self._report}

    def forget_report(self) -> None:
        self._report.clear()

    @property
    def fine(self) -> bool:
        """Whether this is one of the last steps, whose errors no later step corrects."""
        if self.held is not None:
            return self.held.fine
        steps = self.moment.steps
        return steps is not None and self.moment.step >= steps - self._settings.fine_steps

    def bits(self, state: SiteState) -> int | None:
        """Of a channel in a site's call; None where tensors travel as they are."""
        bits = BITS[self._settings.codec]
        if bits is None:
            return None
        if state.follows:
            return min(2 * bits, FINEST) if self.fine else bits
        return FIRST_BITS * bits if codes_first_calls(self._settings.codec) and not state.plain else None

    # Deciding ---------------------------------------------------------------------------------------------------------

    def begin_call(self, site: Site, like_BLHD: Tensor, layout: Layout) -> SiteState:
        """The state of a site whose call begins."""
        self.settle()
        state, moment = self._sites.setdefault(site, SiteState()), self.moment
        form = tuple(like_BLHD.shape), like_BLHD.dtype, layout, torch.is_inference_mode_enabled()
        level = float(moment.step) if moment.sigma is None else moment.sigma
        state.begin(form, moment.step, level, self.held is not None and self.held.anew)
        return state

    def predictions(self, state: SiteState) -> dict[str, Prediction]:
        """How the call's tensors are predicted: by name, none where they travel as they are. In a first call what they
        are predicted by is zero."""
        return {name: self._prediction(state, name) for name in TENSORS} if self.bits(state) is not None else {}

    def _prediction(self, state: SiteState, name: str) -> Prediction:
        factor, predictor = state.factor, self._settings.predictor
        linear = factor > 0 and (predictor == "taylor" or name in state.linear)
        return Prediction(factor, linear, factor > 0 and predictor == "auto", self.measures and state.follows > 0)

    def damped(self, how: Prediction | None) -> float | None:
        """The factor by which a displaced tensor is continued; None where its newest reconstruction stands for it."""
        return DAMPING * how.factor if how is not None and how.linear else None

    def displaced(self, state: SiteState) -> frozenset[str]:
        """The tensors that this call does not wait for, alike on all ranks: attention takes what the last call left."""
        if self._settings.arrival == "now" or not state.follows or self.fine:
            return frozenset()
        if self.held is not None:
            return self.held.displaced
        if self._settings.arrival == "displaced":
            return frozenset(TENSORS)
        limit, how = self._settings.tau / state.pace, self.predictions(state)
        limits = {name: limit if name in how and how[name].linear else limit / LAG for name in TENSORS}
        return frozenset(name for name in TENSORS if state.changes.get(name, math.inf) < limits[name])

    def note_step(self, call: ResidualCall) -> None:
        share = (call.bits + 8 / GROUP) / 16 if call.coded and call.bits is not None else 1.0
        self._report[self.moment.step].add(call.predictions.values(), call.displaced, share)

    def notes_of(self, state: SiteState, device: torch.device) -> Tensor:
        """Where is noted how encoding went and how tensors change, [tensors, NOTES]."""
        first = len(self._coded) % NOTED_SITES * len(TENSORS)
        if not first:
            shape = NOTED_SITES * len(TENSORS), NOTES
            self._notes.append(torch.zeros(shape, dtype=torch.int64, device=device))
        self._coded.append(state)
        return self._notes[-1][first : first + len(TENSORS)]

    def _sum_notes(self, own: Tensor) -> list[Any] | None:
        """Every rank's notes in one message to each; None for tensors without numbers, as predictions have them."""
        topology, ranks = self._everyone
        assert self._exchange is not None, "one rank alone has no notes"
        trace = self._exchange.trace
        with trace.span("gather notes", "control"):
            parts = [torch.empty_like(own) for _ in range(ranks.size)]
            ranks.world.all_gather(own, parts).wait()
        for peer in range(ranks.size):
            trace.count(topology.link_class(ranks.rank, peer), own.nbytes, purpose="notes")
        total = torch.stack(parts).sum(0)
        return None if total.is_meta else total.tolist()

    def settle(self) -> None:
        """Waits for the notes, and has their sites decide by them: alike on all ranks."""
        if self._deciding is None:
            return
        (states, pending), self._deciding = self._deciding, None
        assert self._exchange is not None, "one rank alone has no notes"
        with self._exchange.trace.span("wait for notes"):
            notes = pending.wait() or []
        of_sites = [notes[first : first + len(TENSORS)] for first in range(0, len(notes), len(TENSORS))]
        for state, of_site in zip(states, of_sites, strict=bool(of_sites)):
            state.settle(of_site)


def codes_first_calls(codec: str) -> bool:
    """Whether a run's first calls, which nothing predicts, are coded; else their tensors travel as they are."""
    bits = BITS.get(codec)
    return bits is not None and FIRST_BITS * bits <= FINEST


def reconstructions(settings: Any) -> int:
    """How many of a tensor an end keeps: one where the newest is all that is looked at."""
    return 1 if settings.codec == "none" or settings.predictor == "last" else 2

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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cocodiff.attention.residual.call import SAMPLING, ResidualCall, width_of
from cocodiff.attention.residual.state import TENSORS, CodedStep, SiteState
from cocodiff.attention.strategy import Site
from cocodiff.comm.transport import LanePending
from cocodiff.kernels.residual import GROUP, NOTES, Prediction
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.coding import WHOLE, AllRanks, CallKind, Cell, CodedCall, Coding, Moment, StepNotes, Typical
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


class Residual(Coding):
    """Sends residuals. On one rank nothing travels, and nothing is coded."""

    keeps_state = prefers_ulysses = True
    steps_to_settle = 2  # in which there is no continuation, no comparison with it, and nothing is in flight

    def __init__(self, exchange: Exchange | None, everyone: AllRanks, settings: Any) -> None:
        """everyone: the ranks that share the sequence, who decide together. settings: codec, predictor, fine_steps,
        arrival and tau, see `Config`."""
        self._settings, self.moment = settings, Moment(-1, 0, None)
        self.kept, self.codes = reconstructions(settings), settings.codec != "none"
        self.measures = settings.arrival == "adaptive"
        self._exchange, self._everyone = exchange, everyone
        self._held: CallKind | None = None  # the one kind of call that is predicted
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

    @classmethod
    def head_bytes(cls, settings: Any, head_dim: int, itemsize: int) -> int:
        return width_of(head_dim, itemsize, BITS[settings.codec])

    @classmethod
    def kinds_of_steps(cls, settings: Any, steps: int, typical: Typical) -> list[Mapping[CallKind, float]]:
        """The first step is whole, the last ones are fine; what is displaced in the others is told by `typical`, or all
        tensors are."""
        bits, last = BITS[settings.codec], steps - settings.fine_steps
        finer = CallKind(fine=bits is not None and bits < FINEST)
        of_arrival: dict[str, Callable[[int], Mapping[str, float]]] = {
            "now": lambda _: {"": 1.0},
            "displaced": lambda _: {"".join(TENSORS): 1.0},
            "adaptive": lambda step: typical.displaced[step],
        }
        found: list[Mapping[CallKind, float]] = [{WHOLE: 1.0}]
        for step in range(1, steps):
            sets = of_arrival[settings.arrival](step) if step < last else {}
            found.append({CallKind(displaced=names): part for names, part in sets.items()} or {finer: 1.0})
        return found[:steps]

    @classmethod
    def state_bytes(cls, settings: Any, topology: Topology, layout: Layout, cell: Cell) -> list[Mapping[str, int]]:
        """Exact. What is kept: see `kept_cells`. In flight where calls do not wait: what a call has sent of every
        tensor until it has left, and what came until the next call takes it, as wide as it travels."""
        if topology.size == 1:
            return [{}]
        S, H, width = sum(layout.rows), sum(layout.heads), cls.head_bytes(settings, cell.head_dim, cell.itemsize)
        late = len(TENSORS) * cell.batch * width if settings.arrival != "now" else 0
        return [
            {"reconstructions": kept_cells(settings, L, S, G, H) * cell.bytes, "in_flight": late * (L * H + S * G)}
            for L, G in zip(layout.rows, layout.heads, strict=True)
        ]

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
            noted = torch.cat(self._notes) if len(self._notes) > 1 else self._notes[0]
            own = noted[: len(self._coded) * len(TENSORS)]
            self._deciding = self._coded, self._everyone.ranks.control.submit(self._sum_notes, own)
            self._coded, self._notes = [], []

    def agree(self) -> None:
        self._settle()

    def catch_up(self) -> None:
        for site in self._sites.values():
            site.catch_up()

    def forget(self, site: Site) -> None:
        if site in self._sites:
            self._sites.pop(site).catch_up()

    def end(self, drain: bool = True) -> None:
        if drain:
            self._settle()
            self.catch_up()
        self._sites.clear()
        self._coded, self._notes, self._deciding = [], [], None

    def bytes_held(self) -> int:
        return sum(site.bytes_held() for site in self._sites.values())

    def report(self) -> dict[int, StepNotes]:
        return {**self._report}

    def forget_report(self) -> None:
        self._report.clear()

    def hold_at(self, kind: CallKind) -> None:
        self._held = kind

    @property
    def fine(self) -> bool:
        """Whether this is one of the last steps, whose errors no later step corrects."""
        if self._held is not None:
            return self._held.fine
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
        self._settle()
        state, moment = self._sites.setdefault(site, SiteState()), self.moment
        form = tuple(like_BLHD.shape), like_BLHD.dtype, layout, torch.is_inference_mode_enabled()
        level = float(moment.step) if moment.sigma is None else moment.sigma
        state.begin(form, moment.step, level, self._held == WHOLE)
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
        if self._held is not None:
            return frozenset(self._held.displaced)
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

    def _settle(self) -> None:
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


def kept_cells(settings: Any, L: int, S: int, G: int, H: int) -> int:
    """Tokens times heads that a rank with L of S rows and G of H heads keeps of q, k, v and the output: with a codec
    the reconstructions of both ends; else what the last call received, where calls do not wait, and the rows by which
    the sender measures how they change."""
    if settings.codec != "none":
        return len(TENSORS) * reconstructions(settings) * (L * H + S * G)
    received, sampled = 3 * S * G + L * H, 3 * -(-L // SAMPLING) * H + -(-S // SAMPLING) * G
    return received + (sampled if settings.arrival == "adaptive" else 0)


def reconstructions(settings: Any) -> int:
    """How many of a tensor an end keeps: one where the newest is all that is looked at."""
    return 1 if settings.codec == "none" or settings.predictor == "last" else 2

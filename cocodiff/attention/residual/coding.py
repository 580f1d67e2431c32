"""The residual codec: a tensor travels as its difference from a prediction, in 2, 4 or 8 bits a channel.

Sender and receiver keep the same reconstruction of q, k, v and the output of every site, and both add to it what was
sent, so errors do not add up: the next residual contains them. A code is a tensor of bytes of the same rows and heads,
which every exchange carries unopened. The rank's own block is coded like all others, so that results do not depend on
the number of ranks. `cocodiff.kernels.residual` defines the arithmetic, docs/codec.md when tensors travel whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.attention.calls import TENSORS, SharedNotes, is_fine
from cocodiff.attention.residual.call import ResidualCall
from cocodiff.attention.residual.state import CodedStep, SiteState
from cocodiff.attention.strategy import Site
from cocodiff.kernels.residual import GROUP, Prediction
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.coded import CodedCall
from cocodiff.wire.coding import AllRanks, Coding, Moment, StepNotes
from cocodiff.wire.exchange import Exchange

BITS: dict[str, int | None] = {"none": None, "int8": 8, "int4": 4, "int2": 2}  # None: as they are
FINEST = 8
FIRST_BITS = 4  # times the bits: of a first call, which has nothing to predict by; whole above FINEST


class ResidualKind(NamedTuple):
    """A kind of call. anew: it follows no other. fine: with the bits of the last steps."""

    anew: bool
    fine: bool


class Residual(Coding):
    """Sends residuals. On one rank nothing travels, and nothing is coded."""

    keeps_state = prefers_ulysses = True
    fixed_kind: ResidualKind | None = None  # every call is of this kind, in recordings

    def __init__(self, exchange: Exchange | None, everyone: AllRanks, settings: Any) -> None:
        """everyone: the ranks that share the sequence, who decide together. settings: codec, predictor, fine_steps and
        arrival, see `Config`."""
        self._settings, self.moment, self.kept = settings, Moment(-1, 0, None), reconstructions(settings)
        self.measures = settings.arrival == "adaptive"  # encoding tells how tensors change, in the same pass
        self.notes = None if exchange is None else SharedNotes(everyone, exchange.trace)
        self._sites: dict[Site, SiteState] = {}
        self._report: defaultdict[int, CodedStep] = defaultdict(CodedStep)

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Any, everyone: AllRanks
    ) -> Residual:
        return cls(exchange, everyone, settings)

    def call(self, exchange: Exchange, layout: Layout, site: Site) -> CodedCall:
        state = self._sites.setdefault(site, SiteState())
        return ResidualCall(self, state, exchange.kernels, exchange.trace, layout, site.kind)

    # Lifecycle --------------------------------------------------------------------------------------------------------

    def begin_step(self, moment: Moment) -> None:
        """Has all ranks' notes of the last call summed, behind what comes before the first attention."""
        if self.notes is None:
            return
        if moment.run != self.moment.run:  # a new image: nothing of the last one may be seen
            self.end()
        self.moment = moment
        self.notes.begin_step(moment)

    def forget(self, site: Site) -> None:
        self._sites.pop(site, None)

    def end(self, drain: bool = True) -> None:
        if self.notes is not None:
            if drain:
                self.notes.hand_out()
            self.notes.clear()
        self._sites.clear()

    def bytes_held(self) -> int:
        return sum(site.bytes_held() for site in self._sites.values())

    def report(self) -> dict[int, StepNotes]:
        return {**self._report}

    def forget_report(self) -> None:
        self._report.clear()

    # Deciding ---------------------------------------------------------------------------------------------------------

    @property
    def fine(self) -> bool:
        """Whether this is one of the last steps, whose errors no later step corrects."""
        return is_fine(self.moment, self._settings.fine_steps) if self.fixed_kind is None else self.fixed_kind.fine

    def begin_call(self, call: ResidualCall, like_BLHD: Tensor) -> None:
        """Decides how a call is coded, alike on all ranks."""
        assert self.notes is not None, "one rank alone codes nothing"
        state = call.state
        self.notes.hand_out()
        state.begin(like_BLHD, call.layout, self.moment, self.fixed_kind is not None and self.fixed_kind.anew)
        call.number, call.bits, call.predictions = state.follows, self.bits(state), self.predictions(state)
        if call.bits is not None:
            call.share = (call.bits + 8 / GROUP) / 16  # of 16-bit numbers in heads of whole groups
            call.noted = self.notes.of_call(like_BLHD.device)
            call.noted.takers.append(state.take_notes)
        self._report[self.moment.step].add(call.predictions.values(), call.share)

    def bits(self, state: SiteState) -> int | None:
        """Of a channel in a site's call; None where tensors travel as they are."""
        bits = BITS[self._settings.codec]
        if bits is None:
            return None
        if state.follows:
            return min(2 * bits, FINEST) if self.fine else bits
        return FIRST_BITS * bits if codes_first_calls(self._settings.codec) and not state.plain else None

    def predictions(self, state: SiteState) -> Mapping[str, Prediction]:
        """How the call's tensors are predicted: by name, none where they travel as they are. In a first call what they
        are predicted by is zero."""
        return {name: self._prediction(state, name) for name in TENSORS} if self.bits(state) is not None else {}

    def _prediction(self, state: SiteState, name: str) -> Prediction:
        factor, predictor = state.factor, self._settings.predictor
        linear = factor > 0 and (predictor == "taylor" or name in state.linear)
        return Prediction(factor, linear, factor > 0 and predictor == "auto", self.measures and state.follows > 0)


def codes_first_calls(codec: str) -> bool:
    """Whether a run's first calls, which nothing predicts, are coded; else their tensors travel as they are."""
    bits = BITS.get(codec)
    return bits is not None and FIRST_BITS * bits <= FINEST


def reconstructions(settings: Any) -> int:
    """How many of a tensor an end keeps: one where the newest is all that is looked at."""
    return 1 if settings.codec == "none" or settings.predictor == "last" else 2

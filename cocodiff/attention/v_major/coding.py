"""V-Major (CoCoDiff section III-D): only tokens whose v changed travel; the others are what they were when they last
did, for every rank alike.

Each rank keeps, for every site, the q, k and v it received: whole sequences of its own heads. A selective step gathers
the active rows, sends them through the very exchange that carries full ones, and writes what arrives into those caches.
The output always travels whole.
"""

from __future__ import annotations

from typing import Any

import torch

from cocodiff.attention.strategy import Site
from cocodiff.attention.v_major.call import SiteCache
from cocodiff.attention.v_major.card import CardTransfer
from cocodiff.attention.v_major.drift import DriftNotes
from cocodiff.attention.v_major.selection import Cards, Schedule
from cocodiff.attention.v_major.source import SourceTransfer
from cocodiff.comm.transport import Ranks
from cocodiff.errors import UserError
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.coding import AllRanks, Coding, Moment, StepNotes
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.transfer import Transfer


class VMajor(Coding):
    """Sends active tokens only. On one rank nothing travels, and nothing is selected."""

    keeps_state = prefers_ulysses = True

    def __init__(
        self, exchange: Exchange | None, transport: Ranks, schedule: Schedule, scoring: str, reference: str
    ) -> None:
        """transport: of the Ulysses group's ranks. scoring: "source" (each rank scores its own tokens over all heads
        before they travel) or "card" (after v's first phase the card's first tile scores the card's tokens with its
        plane's heads; TAPA only). reference: "prev" (v at the call before) or "sent" (v as it was last sent)."""
        self.schedule, self.scoring, self.reference = schedule, scoring, reference
        self.rank, self.transport, self.moment = transport.rank, transport, Moment(-1, 0, None)
        self.drift = DriftNotes()
        self._exchange = exchange
        self._caches: dict[Site, SiteCache] = {}
        self._cards: dict[tuple[Layout, torch.device], Cards] = {}

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Ranks, everyone: AllRanks
    ) -> VMajor:
        return cls(exchange, transport, Schedule.of(settings), settings.scoring, settings.reference)

    def open(self, exchange: Exchange, layout: Layout, site: Site) -> Transfer:
        opens = SourceTransfer if self.scoring == "source" else CardTransfer
        return opens(self, exchange, layout, site, self._caches.setdefault(site, SiteCache()))

    # Lifecycle --------------------------------------------------------------------------------------------------------

    def begin_step(self, moment: Moment) -> None:
        if moment.steps is None and self._exchange is not None:
            raise UserError("V-Major needs to know how many steps run: parallelize(..., steps=N)")
        if moment.run != self.moment.run:  # a new image: nothing of the last one may be seen
            self.end()
            self.drift.sync_to_host()
        self.moment = moment

    def forget(self, site: Site) -> None:
        self._caches.pop(site, None)

    def end(self, drain: bool = True) -> None:
        self._caches.clear()

    def bytes_held(self) -> int:
        caches = self._caches.values()
        return sum(t.nbytes for c in caches for t in [*c.received.values(), c.reference] if t is not None)

    def report(self) -> dict[int, StepNotes]:
        return {**self.drift.by_step()}

    def forget_report(self) -> None:
        self.drift.clear()

    # Choosing ---------------------------------------------------------------------------------------------------------

    @property
    def exchanges(self) -> bool:
        """Whether there are ranks to select for."""
        return self._exchange is not None

    @property
    def steps(self) -> int:
        return self.moment.steps or 0

    @property
    def fraction(self) -> float | None:
        """r(t) of this step; None where the threshold decides."""
        return self.schedule.stable_fraction(self.moment.step, self.steps)

    def cards(self, layout: Layout, device: torch.device) -> Cards:
        assert self._exchange is not None, "one rank alone selects nothing"
        key = layout, device
        if key not in self._cards:
            self._cards[key] = Cards.build(self._exchange.topology, layout, device)
        return self._cards[key]

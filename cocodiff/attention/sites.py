"""What codings share that keep the last values of every site at both ends: these values, and the life of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from cocodiff.attention.calls import SharedNotes, SiteCalls
from cocodiff.attention.strategy import Site
from cocodiff.kernels.residual import Reconstructions
from cocodiff.wire.coding import AllRanks, Coding, Moment, StepNotes
from cocodiff.wire.exchange import Exchange


@dataclass
class End:
    """One end's values of one tensor at the last calls, each contiguous, in turn the newest."""

    buffers: list[Tensor]

    def newest(self, call: int) -> Tensor:
        """The newest one that the call of this number, from 1, finds."""
        return self.buffers[(call - 1) % len(self.buffers)]

    def known(self, call: int, rows: slice) -> Reconstructions:
        """Some rows for that call: the newest, and what is written over."""
        last, written = self.newest(call), self.written(call)
        return Reconstructions(last[:, rows], None if written is last else written[:, rows])

    def written(self, call: int) -> Tensor:
        """The buffer that that call's values are written to."""
        return self.buffers[call % len(self.buffers)]


@dataclass
class SiteEnds(SiteCalls):
    """sent, received: what both ends hold of a site, by the tensors' names: of q, k and v the sender has its own rows
    and all heads, the receiver all rows and its own heads; of the output it is the other way round."""

    sent: dict[str, End] = field(default_factory=dict)
    received: dict[str, End] = field(default_factory=dict)

    def begin_anew(self) -> None:
        self.sent, self.received = {}, {}

    def bytes_held(self) -> int:
        ends = (*self.sent.values(), *self.received.values())
        return sum(buffer.nbytes for end in ends for buffer in end.buffers)


S = TypeVar("S", bound=SiteEnds)
N = TypeVar("N", bound=StepNotes)


class SiteCoding(Coding, Generic[S, N]):
    """Keeps the last values of every site, and decides by what all ranks noted of the last call. On one rank nothing
    travels, and nothing is coded."""

    keeps_state = prefers_ulysses = True

    def __init__(
        self, exchange: Exchange | None, everyone: AllRanks, site: Callable[[], S], step: Callable[[], N]
    ) -> None:
        """everyone: the ranks that share the sequence, who decide together. site, step: make what is kept of a site,
        and noted of a step."""
        self.moment = Moment(-1, 0, None)
        self.notes = None if exchange is None else SharedNotes(everyone, exchange.trace)
        self._sites: dict[Any, S] = {}
        self._site, self._report = site, defaultdict[int, N](step)

    def state_of(self, site: Site) -> S:
        return self._sites.setdefault(site, self._site())

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

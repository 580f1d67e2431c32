"""The lossless codec: what travels is what a tensor differs by from its prediction, in units of the last place.

Both ends of a tensor of 16 bits hold what it was at the last calls of its site, exactly, and so its prediction. The
difference takes few bits, but how many depends on the data, and whoever receives or passes on a message has to know
its size before. So a block's stream (`cocodiff.kernels.lossless` defines it) goes in two parts. The first is as long
as all ranks have agreed, by the longest stream of the site's last call; it goes along the routes of the exchange,
which carry it unopened. What does not fit, the rest, goes straight to the rank that decodes, which reads in the first
part how long it is: nobody else need know that there is one. Where all fits, no message is added.

A site's first call travels whole. docs/lossless.md has the figures.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from cocodiff.attention.calls import TENSORS
from cocodiff.attention.lossless.call import LosslessCall
from cocodiff.attention.lossless.state import LosslessStep, SiteState
from cocodiff.attention.sites import SiteCoding
from cocodiff.attention.strategy import Site
from cocodiff.comm.transport import Ranks
from cocodiff.kernels.lossless import CODED, PARTS, least_room
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology
from cocodiff.wire.coded import CodedCall
from cocodiff.wire.coding import AllRanks
from cocodiff.wire.exchange import Exchange

FIRST_ROOM = 0.5  # of a whole tensor: the first part's size where no call before tells
MARGIN = 0.125  # bits for a number that the first part has room for beyond what the last call needed
CONTINUED = {"last": 0.0, "auto": 0.5, "taylor": 0.5}  # by the setting `predictor`: times the continuation's factor


class LosslessKind(NamedTuple):
    """A kind of call, for recordings. anew: it follows no other. share: what the first part takes of a whole tensor."""

    anew: bool
    share: float


class Lossless(SiteCoding[SiteState, LosslessStep]):
    """Sends streams."""

    fixed_kind: LosslessKind | None = None

    def __init__(self, exchange: Exchange | None, ranks: Ranks, everyone: AllRanks, settings: Any) -> None:
        """ranks: of the Ulysses group."""
        super().__init__(exchange, everyone, SiteState, LosslessStep)
        self.ranks, self.factor, self.kept = ranks, CONTINUED[settings.predictor], values_kept(settings)

    @classmethod
    def of(
        cls, settings: Any, topology: Topology, exchange: Exchange | None, transport: Any, everyone: AllRanks
    ) -> Lossless:
        return cls(exchange, transport, everyone, settings)

    def call(self, exchange: Exchange, layout: Layout, site: Site) -> CodedCall:
        return LosslessCall(self, self.state_of(site), exchange, layout, site.kind)

    def begin_call(self, call: LosslessCall, like_BLHD: Tensor) -> None:
        """Decides how a call is coded, alike on all ranks."""
        assert self.notes is not None, "one rank alone codes nothing"
        state, head_dim = call.state, like_BLHD.shape[-1]
        self.notes.hand_out()
        state.begin(like_BLHD, call.layout, self.moment, self.fixed_kind is not None and self.fixed_kind.anew)
        call.number, call.factor = state.follows, state.factor * self.factor or None
        call.noted_step, call.codes = self._report[self.moment.step], like_BLHD.dtype in CODED
        if call.codes and state.follows:
            call.rooms = {name: self._room(state, name, head_dim) for name in TENSORS if name in state.sent}
            call.share = sum(call.rooms.values()) / (len(call.rooms) * 2 * head_dim)
            call.noted = self.notes.of_call(like_BLHD.device, largest=True)
            call.noted.takers.append(state.take_notes)
        call.noted_step.add(bool(call.rooms), len(TENSORS) * call.share)

    def _room(self, state: SiteState, name: str, head_dim: int) -> int:
        """Bytes for a token and head of the first part of a tensor's streams: what the last call needed, and more where
        the noise level moves farther now than it did then, as a bit more holds twice the difference."""
        whole, needed = 2 * head_dim, state.needed.get(name, 0)
        if self.fixed_kind is not None:
            room = self.fixed_kind.share * whole
        elif not needed:
            room = FIRST_ROOM * whole
        else:
            room = needed / PARTS + (MARGIN + max(0.0, math.log2(state.pace))) * head_dim / 8
        return max(least_room(head_dim), min(math.ceil(room), whole))


def values_kept(settings: Any) -> int:
    """How many of a tensor an end keeps: one where the newest is all that is looked at."""
    return 1 if not CONTINUED[settings.predictor] else 2

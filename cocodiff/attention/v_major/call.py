"""One attention call of V-Major, whoever scores: which rows travel, and what they are written into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from cocodiff.attention.strategy import Site
from cocodiff.attention.v_major.drift import DriftNotes
from cocodiff.attention.v_major.selection import Cards, Schedule, Selection
from cocodiff.comm.transport import Ranks
from cocodiff.kernels import Rows
from cocodiff.topology.layout import Layout
from cocodiff.wire.arriving import Arriving
from cocodiff.wire.coded import CodedCall, Encoded
from cocodiff.wire.coding import Moment
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.transfer import Transfer


class Selector(Protocol):
    """The part of `VMajor` that a call uses."""

    schedule: Schedule
    reference: str
    rank: int
    transport: Ranks
    moment: Moment
    drift: DriftNotes

    @property
    def steps(self) -> int: ...

    @property
    def fraction(self) -> float | None: ...

    def cards(self, layout: Layout, device: torch.device) -> Cards: ...


@dataclass
class SiteCache:
    """The state of a site between steps. reference: v at the scored rows; received: q, k and v, each [B, S, G, D].
    inference: whether they were made in torch's inference mode, outside of which they cannot be written to."""

    shape: tuple[int, ...] = ()
    layout: Layout | None = None
    last_step: int = -2
    inference: bool = False
    reference: Tensor | None = None
    received: dict[str, Tensor] = field(default_factory=dict)


class SelectiveCall(CodedCall, ABC):
    """One attention call of V-Major; how it scores is the subclass's. full: whether all tokens travel, known once the
    call has begun."""

    full = True

    def __init__(self, coding: Selector, exchange: Exchange, layout: Layout, site: Site, cache: SiteCache) -> None:
        super().__init__(layout)
        self.coding, self.exchange, self.cache, self.layer = coding, exchange, cache, site.kind
        self.kernels = exchange.kernels

    @abstractmethod
    def selection(self) -> Selection:
        """The rows that travel in a selective call; waits for the choice."""

    def begin(self, like_BLHD: Tensor) -> None:
        cache, step, inference = self.cache, self.coding.moment.step, torch.is_inference_mode_enabled()
        same = cache.shape == like_BLHD.shape and cache.layout == self.layout and cache.inference == inference
        known = same and cache.last_step == step - 1
        self.coding.drift.ensure_step(step)
        self.full = not known or self.coding.schedule.is_full(step, self.coding.steps)
        if not known:
            cache.reference, cache.received = None, {}
        cache.last_step, cache.shape, cache.layout = step, tuple(like_BLHD.shape), self.layout
        cache.inference = inference

    def encode(self, tensors_BLHD: Mapping[str, Tensor]) -> Encoded:
        if self.full:
            return super().encode(tensors_BLHD)
        selection = self.selection()
        own = selection.of_rank[self.coding.rank]
        payloads = [travelling_rows(x_BLHD, own) for x_BLHD in tensors_BLHD.values()]
        return Encoded(payloads, selection.layout)

    def decode(self, received_BSGW: Mapping[str, Tensor], coded: Layout, rows: slice) -> list[Tensor]:
        """Into the caches: everything, or in one launch those rows that came."""
        caches = self.cache.received
        if self.full:
            caches |= received_BSGW
        else:
            here = [x_1NGD[0, rows] for x_1NGD in received_BSGW.values()]
            into = [caches[name].flatten(0, 1) for name in received_BSGW]
            self.kernels.scatter_rows(here, self.selection().arriving[rows], into)
        return [caches[name] for name in received_BSGW]

    def update_reference(self, v_BNHD: Tensor, active_BN: Tensor | None) -> None:
        """Updates the reference where scoring has not: all of it at the first call, else the tokens that travel."""
        if self.cache.reference is None:
            self.cache.reference = v_BNHD.clone(memory_format=torch.contiguous_format)
        elif active_BN is not None and self.coding.reference == "sent":
            self.cache.reference[active_BN] = v_BNHD[active_BN]

    def score(self, v_BNHD: Tensor) -> tuple[Tensor, Tensor]:
        """Change and norm of every token against the reference, which must be there; noted in the profile. At full
        steps, and where the reference is "prev", the same pass makes v the reference."""
        assert self.cache.reference is not None, "a selective step follows a full one"
        with self.exchange.trace.span("score", "select", self.layer):
            renew = self.full or self.coding.reference == "prev"
            change_BN, norm_BN = self.kernels.l1_score(v_BNHD, self.cache.reference, renew)
        self.coding.drift.scored(self.coding.moment.step, change_BN, norm_BN)
        return change_BN, norm_BN

    def gather(self, own_BN: Tensor, parts_BN: list[Tensor]) -> None:
        """Every rank's scores or selection, on the lane that calls; counted like all bytes of attention."""
        with self.exchange.trace.span("gather selection", "select", self.layer):
            self.coding.transport.world.all_gather(own_BN.contiguous(), parts_BN).wait()
        for peer in range(len(parts_BN)):
            self.exchange.port.count(peer, own_BN.nbytes)


class SelectiveTransfer(Transfer):
    """Orders send v before or together with q and k, since it decides what of them travels."""

    coded: SelectiveCall

    def open(self, tensors_BLHD: Mapping[str, Tensor]) -> None:
        """Raises RuntimeError where an order sends q or k before v: they would travel whole, v would not."""
        if "v" not in tensors_BLHD:
            raise RuntimeError("V-Major chooses tokens by v: an order has to send v before or together with q and k")
        super().open(tensors_BLHD)

    def post(self, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> dict[str, Arriving]:
        return super().post(tensors_BLHD, wait_next and self.coded.full)


def travelling_rows(x_BLHD: Tensor, index_N: Tensor) -> Rows:
    """The chosen rows of all batch rows in one, [1, N, H, D], gathered where they are packed."""
    return Rows(x_BLHD.flatten(0, 1), index_N)

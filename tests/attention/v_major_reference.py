"""V-Major in one process: whole tensors, no communication, written from its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.v_major.selection import Schedule
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout, slices


@dataclass
class Reference:
    """One layer. Sequences are in rank order: rank 0's rows, then rank 1's; images of rank r at `image_rows[r]`."""

    topology: Topology
    layout: Layout
    schedule: Schedule
    scoring: str
    reference: str
    caches: list[Tensor] | None = None
    known_v: Tensor | None = None
    last_step: int = -2
    active_counts: list[int] = field(default_factory=list)

    def image_rows(self, rank: int) -> list[int]:
        kinds = [part.segment.may_stay for part in self.layout.parts for _ in range(part.shares[rank])]
        return [self.layout.row_slices[rank].start + row for row, may_stay in enumerate(kinds) if may_stay]

    def attend(self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, step: int, steps: int) -> Sequence[Tensor]:
        """Every rank's output [B, S, G, D] over its own heads."""
        fresh = [q_BSHD, k_BSHD, v_BSHD]
        full = self.last_step != step - 1 or self.schedule.is_full(step, steps)
        self.last_step = step
        active_BS = torch.ones(v_BSHD.shape[:2], dtype=torch.bool)
        if not full:
            for card in self.topology.cards.values():
                self.settle(active_BS, v_BSHD, sorted(card), step, steps)
        self.active_counts.append(int(active_BS.sum()))
        if self.caches is None:
            self.caches = [x.clone() for x in fresh]
            self.known_v = v_BSHD.clone()
        for cache, x in zip(self.caches, fresh, strict=True):
            cache[active_BS] = x[active_BS]
        if self.reference == "prev":
            self.known_v = v_BSHD.clone()
        else:
            self.known_v[active_BS] = v_BSHD[active_BS]
        return [
            LocalAttention().whole(*(cache[:, :, heads].contiguous() for cache in self.caches))
            for heads in slices(self.layout.heads)
        ]

    def settle(self, active_BS: Tensor, v_BSHD: Tensor, card: list[int], step: int, steps: int) -> None:
        """Marks a card's stable tokens."""
        heads = list(range(v_BSHD.shape[2]))
        if self.scoring == "card":
            plane = self.topology.places[card[0]].plane
            owners = [place.rank for place in self.topology.places if place.plane == plane]
            heads = [head for owner in owners for head in range(*slices(self.layout.heads)[owner].indices(len(heads)))]
        rows = [row for rank in card for row in self.image_rows(rank)]
        new, old = v_BSHD[:, rows][:, :, heads].double(), self.known_v[:, rows][:, :, heads].double()
        score_BN = (new - old).abs().sum((-2, -1)).float()
        norm_BN = old.abs().sum((-2, -1)).float()
        fraction = self.schedule.stable_fraction(step, steps)
        for b in range(len(v_BSHD)):
            if fraction is None:
                limit = self.schedule.settings.threshold * norm_BN[b].double().mean()
                stable = [n for n in range(len(rows)) if score_BN[b, n].double() <= limit]
            else:
                by_score = sorted(range(len(rows)), key=lambda n: (float(score_BN[b, n]), n))
                stable = by_score[: math.floor(len(rows) * fraction)]
            for n in stable:
                active_BS[b, rows[n]] = False

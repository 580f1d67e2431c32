"""What V-Major costs (CoCoDiff section III-D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cocodiff.attention.v_major.coding import VMajor
from cocodiff.attention.v_major.selection import Schedule, scored_blocks
from cocodiff.planning.costs import WHOLE, CallKind, Cell, Costs, Typical
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology


class VMajorCosts(Costs):
    @classmethod
    def kinds_of_steps(cls, settings: Any, steps: int, typical: Typical) -> list[Mapping[CallKind, float]]:
        schedule, found = Schedule.of(settings), list[Mapping[CallKind, float]]()
        for step in range(steps):
            part = schedule.stable_fraction(step, steps)
            selective = CallKind(stable=typical.stable if part is None else part)
            found.append({WHOLE if schedule.is_full(step, steps) else selective: 1.0})
        return found

    @classmethod
    def state_bytes(cls, settings: Any, topology: Topology, layout: Layout, cell: Cell) -> list[Mapping[str, int]]:
        """Exact. What is received are all tokens for the rank's own heads. The reference is v at the scored rows: the
        own image tokens with all heads (source), or on the first tile of a card the card's image tokens with that
        tile's plane's heads (card). One rank alone keeps nothing."""
        if topology.size == 1:
            return [{}]
        found: list[Mapping[str, int]] = []
        for rank, heads in enumerate(layout.heads):
            rows, scored_heads = layout.may_stay[rank], sum(layout.heads)
            if settings.scoring == "card":
                card, of_plane = scored_blocks(topology, rank)
                rows = sum(layout.may_stay[other] for other in card) if card[0] == rank else 0
                scored_heads = sum(layout.heads[other] for other in of_plane)
            found.append(
                {
                    "image_cache": 3 * sum(layout.may_stay) * heads * cell.bytes,
                    "reference_cache": rows * scored_heads * cell.bytes,
                    "text_cache": 3 * (sum(layout.rows) - sum(layout.may_stay)) * heads * cell.bytes,
                }
            )
        return found

    @staticmethod
    def prepare(coding: VMajor, layout: Layout, device: torch.device) -> None:
        if coding.exchanges:
            coding.cards(layout, device)

    @staticmethod
    def hold_at(coding: VMajor, kind: CallKind) -> None:
        coding.schedule = coding.schedule.held_at(None if kind.whole else kind.stable)

"""What the lossless codec costs, where its sizes, which depend on the data, are those of a typical run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cocodiff.attention.lossless import Lossless, LosslessKind, values_kept
from cocodiff.attention.sites import TENSORS
from cocodiff.kernels.lossless import least_room
from cocodiff.planning.costs import WHOLE, CallKind, Cell, Costs, Typical
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology

# Of a whole tensor, what a coded call sends in a run of 50 steps, where heads are so wide that rounding to whole bytes
# does not count (docs/lossless.md).
TYPICAL = 0.37


class LosslessCosts(Costs):
    steps_to_settle = 2  # in which there is no continuation

    @classmethod
    def head_bytes(cls, settings: Any, head_dim: int, itemsize: int) -> int:
        whole = head_dim * itemsize
        return whole if itemsize != 2 else max(least_room(head_dim), math.ceil(TYPICAL * whole))

    @classmethod
    def kinds_of_steps(cls, settings: Any, steps: int, typical: Typical) -> list[Mapping[CallKind, float]]:
        """The first step is whole, all others are alike."""
        coded: list[Mapping[CallKind, float]] = [{CallKind(): 1.0}]
        return [{WHOLE: 1.0}, *coded * (steps - 1)][:steps]

    @classmethod
    def state_bytes(cls, settings: Any, topology: Topology, layout: Layout, cell: Cell) -> list[Mapping[str, int]]:
        """Exact: of every tensor what both ends know."""
        if topology.size == 1 or cell.itemsize != 2:
            return [{} for _ in range(topology.size)]
        S, H = sum(layout.rows), sum(layout.heads)
        of_cell = len(TENSORS) * values_kept(settings) * cell.bytes
        return [{"reconstructions": of_cell * (L * H + S * G)} for L, G in zip(layout.rows, layout.heads, strict=True)]

    @staticmethod
    def hold_at(coding: Lossless, kind: CallKind) -> None:
        coding.fixed_kind = LosslessKind(kind.whole, TYPICAL)

    @staticmethod
    def agree(coding: Lossless) -> None:
        if coding.notes is not None:
            coding.notes.hand_out()

"""What the residual codec and displacement cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cocodiff.attention import arrival
from cocodiff.attention.arrival import SAMPLING, Displaced
from cocodiff.attention.lossless import Lossless
from cocodiff.attention.residual import BITS, FINEST, Residual, ResidualKind, reconstructions, width_of
from cocodiff.attention.sites import TENSORS
from cocodiff.planning.costs import WHOLE, CallKind, Cell, Costs, Typical
from cocodiff.planning.costs.lossless import LosslessCosts
from cocodiff.topology.layout import Layout
from cocodiff.topology.machine import Topology


class ResidualCosts(Costs):
    steps_to_settle = 2  # in which there is no continuation, no comparison with it, and nothing is in flight

    @classmethod
    def head_bytes(cls, settings: Any, head_dim: int, itemsize: int) -> int:
        if settings.codec == "lossless":
            return LosslessCosts.head_bytes(settings, head_dim, itemsize)
        return width_of(head_dim, itemsize, BITS[settings.codec])

    @classmethod
    def kinds_of_steps(cls, settings: Any, steps: int, typical: Typical) -> list[Mapping[CallKind, float]]:
        """The first step is whole, the last ones are fine; what is displaced in the others is told by `typical`, or all
        tensors are."""
        bits, last = BITS.get(settings.codec), steps - settings.fine_steps
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

    @staticmethod
    def hold_at(coding: Residual | Displaced, kind: CallKind) -> None:
        if isinstance(coding, Displaced):
            coding.fixed_kind = arrival.DisplacedKind(kind.whole, frozenset(kind.displaced))
        inner = coding.inner if isinstance(coding, Displaced) else coding
        if isinstance(inner, Residual):
            inner.fixed_kind = ResidualKind(kind.whole, kind.fine)
        elif isinstance(inner, Lossless):
            LosslessCosts.hold_at(inner, kind)

    @staticmethod
    def agree(coding: Residual | Displaced) -> None:
        if coding.notes is not None:
            coding.notes.hand_out()

    @staticmethod
    def catch_up(coding: Residual | Displaced) -> None:
        if isinstance(coding, Displaced):
            coding.catch_up()


def kept_cells(settings: Any, L: int, S: int, G: int, H: int) -> int:
    """Tokens times heads that a rank with L of S rows and G of H heads keeps of q, k, v and the output: with a codec
    the reconstructions of both ends; else what the last call received, where calls do not wait, and the rows by which
    the sender measures how they change."""
    if settings.codec != "none":
        return len(TENSORS) * reconstructions(settings) * (L * H + S * G)
    received, sampled = 3 * S * G + L * H, 3 * -(-L // SAMPLING) * H + -(-S // SAMPLING) * G
    return received + (sampled if settings.arrival == "adaptive" else 0)

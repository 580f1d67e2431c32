"""What the ranks of an engine have done together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cocodiff.attention.v_major.drift import merge_drift


@dataclass(frozen=True)
class Results:
    """bytes: of attention, by link class. drift: of every step, see `Engine.drift_profile`."""

    bytes: dict[str, int]
    drift: list[dict[str, float | None]]

    @classmethod
    def merged(cls, of_ranks: Sequence[tuple[dict[str, int], Any]]) -> Results:
        """of_ranks: of each rank its bytes and its `DriftNotes.by_step()`."""
        sums = {link: sum(sent[link] for sent, _ in of_ranks) for link in of_ranks[0][0]}
        return cls(sums, merge_drift([drift for _, drift in of_ranks]))

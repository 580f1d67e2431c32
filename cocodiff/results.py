"""What the ranks of an engine have done together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cocodiff.wire.coding import merge_notes


@dataclass(frozen=True)
class Results:
    """bytes: by purpose and link class. drift: of every step, see `Engine.drift_profile`."""

    bytes: dict[str, dict[str, int]]
    drift: list[dict[str, Any]]

    @classmethod
    def merged(cls, of_ranks: Sequence[tuple[dict[str, dict[str, int]], list[Any]]]) -> Results:
        """of_ranks: of each rank its bytes, and the report of every coding that it ran."""
        sums = {
            purpose: {link: sum(sent[purpose][link] for sent, _ in of_ranks) for link in links}
            for purpose, links in of_ranks[0][0].items()
        }
        return cls(sums, merge_notes([report for _, reports in of_ranks for report in reports]))

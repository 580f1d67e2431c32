"""Which exchange is the fastest for messages of a size, and from which size on chunks pay: measured, by machine."""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff.topology.layout import Layout


@dataclass(frozen=True)
class ExchangeTable:
    """Rows (up to so many MB per rank, exchange), ascending; the last one's limit is infinite."""

    rows: tuple[tuple[float, str], ...]

    def exchange_for(self, megabytes: float) -> str:
        return next(name for limit, name in self.rows if megabytes <= limit)


@dataclass(frozen=True)
class Chunking:
    """Torus: in how many chunks, and from how many MB of q, k and v per rank on. 1 chunk: not at all."""

    chunks: int = 1
    from_mb: float = 0.0


def megabytes_per_rank(layout: Layout, cell: int) -> float:
    """MB (1e6 bytes) of a mean rank's tensors: the same number on every rank. cell: bytes of a token and head."""
    return sum(layout.rows) * sum(layout.heads) * cell / len(layout.rows) / 1e6

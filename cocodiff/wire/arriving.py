"""A tensor that attention will have: what a strategy holds between sending and waiting."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Arriving:
    """One tensor on its way to this rank's heads. together: the names of those that it travels with."""

    def __init__(
        self,
        together: str,
        wait_for_chunk: Callable[[int], Tensor],
        chunks: int = 1,
        land: Callable[[int], object] | None = None,
    ) -> None:
        """wait_for_chunk: see `chunk`. land: has a chunk put in place, once and for all calls; None for a tensor that
        comes whole, or is here."""
        self.together, self._wait_for_chunk, self._chunks, self._land = together, wait_for_chunk, chunks, land

    def wait(self) -> Tensor:
        """All rows of this rank's heads, [B, S, G, D]."""
        return [self.chunk(number) for number in range(self._chunks)][-1]

    def chunk(self, number: int) -> Tensor:
        """The whole sequence, of which this chunk and those asked for before are here. In ascending order, each chunk
        once."""
        return self._wait_for_chunk(number)

    def expect(self, number: int) -> None:
        """Has a chunk put in place as soon as it is here. Chunks land in the order in which they are expected."""
        if self._land is not None:
            self._land(number)

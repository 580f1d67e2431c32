"""The engines of a job's modes on the ranks of a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from cocodiff.config import Config

if TYPE_CHECKING:
    from cocodiff.engine import Engine


class Engines(Mapping[str, "Engine"]):
    """An engine for each mode, made when it is first asked for: it costs groups of ranks. All ranks of a replica ask
    in the same order. made: those that there are."""

    def __init__(self, modes: Mapping[str, Config], make: Callable[[Config], Engine]) -> None:
        self._modes, self._make = modes, make
        self.made: dict[str, Engine] = {}

    def __getitem__(self, mode: str) -> Engine:
        if mode not in self.made:
            self.made[mode] = self._make(self._modes[mode])
        return self.made[mode]

    def chosen(self) -> list[str]:
        """What they have chosen by themselves, a line each."""
        return [f"{mode}: {engine.sequence.chosen}" for mode, engine in self.made.items() if engine.sequence.chosen]

    def compiled(self) -> list[str]:
        """What torch.compile did for them on this rank, a line each."""
        return [f"{mode}: {engine.compiled}" for mode, engine in self.made.items() if engine.compiled]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modes)

    def __len__(self) -> int:
        return len(self._modes)

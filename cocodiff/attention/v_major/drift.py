"""How far v drifts from step to step, and how many tokens stay: what V-Major notes of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Drift:
    """Of one step, over a rank's sites: change of v (sums of L1 distances and norms), tokens and stable tokens."""

    change: float = 0.0
    norm: float = 0.0
    tokens: int = 0
    stable: int = 0

    @classmethod
    def merged(cls, parts: Sequence[Drift]) -> dict[str, float | None]:
        """Over ranks: "change" (mean relative change of v, None where nothing was compared) and "stable_fraction"."""
        norm, tokens = sum(part.norm for part in parts), sum(part.tokens for part in parts)
        change = sum(part.change for part in parts) / norm if norm else None
        return {"change": change, "stable_fraction": sum(part.stable for part in parts) / tokens if tokens else 0.0}


class DriftNotes:
    """One rank's notes. Sums stay on the device until a run is over: to read a number is to wait for its queue."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # seen, with the tokens that were chosen among
        self._sums: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._on_host: dict[tuple[str, int], float] = defaultdict(float)

    def ensure_step(self, step: int) -> None:
        self._steps.setdefault(step, 0)

    def scored(self, step: int, change_BN: Tensor, norm_BN: Tensor) -> None:
        """Adds a scored call."""
        self.ensure_step(step)
        self._sums["change", step].append(change_BN.sum(dtype=torch.float64))
        self._sums["norm", step].append(norm_BN.sum(dtype=torch.float64))

    def chosen(self, step: int, active_BN: Tensor) -> None:
        """Adds a choice."""
        self.ensure_step(step)
        self._steps[step] += active_BN.numel()
        self._sums["active", step].append(active_BN.sum())

    def sync_to_host(self) -> None:
        """Reads what was noted, between two runs, so that notes of many runs take no more memory than one's."""
        for key, sums in self._sums.items():
            self._on_host[key] += sum(torch.stack(sums).tolist())
        self._sums.clear()

    def by_step(self) -> dict[int, Drift]:
        self.sync_to_host()
        found = {}
        for step, tokens in self._steps.items():
            change, norm, active = (self._on_host.get((name, step), 0.0) for name in ("change", "norm", "active"))
            found[step] = Drift(change, norm, tokens, tokens - round(active))
        return found

    def clear(self) -> None:
        for notes in (self._steps, self._sums, self._on_host):
            notes.clear()

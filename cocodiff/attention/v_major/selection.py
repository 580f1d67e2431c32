"""Which tokens travel (V-Major, CoCoDiff section III-D): schedules, scores of change, and the choice they lead to.

A token is *active* when it travels at this step and *stable* when every rank uses what it received earlier. Tokens of
segments that may not stay (text) are always active. `DriftNotes` tells how far v drifts from step to step, and how many
tokens stay. Pure arithmetic: nothing here communicates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cocodiff.config.grouping import by_key
from cocodiff.config.machine import Topology
from cocodiff.kernels import Kernels
from cocodiff.topology.layout import Layout, slices


@dataclass(frozen=True)
class Schedule:
    """The stable fraction r(t) of the tokens that may stay over the steps that run, t from 0.

    kind            linear (0 at the end of the warm-up, 1 at the last step), fixed (`ratio`), reverse (1 - linear),
                    cosine (half a wave from 0 to 1), list (`ratios`, the last one repeated) or threshold (tokens whose
                    score is at most `threshold` times the card's mean L1 norm of V are stable)
    warmup          full steps at the start; None is a tenth of the steps, at least one
    sync_interval   every so many steps after the warm-up all tokens travel; 1 is at every step, 0 never"""

    kind: str = "linear"
    ratio: float = 0.5
    ratios: tuple[float, ...] = ()
    threshold: float = 0.1
    warmup: int | None = None
    sync_interval: int = 10

    @classmethod
    def of(cls, settings: Any) -> Schedule:
        """V-Major's schedule by the engine's settings."""
        s = settings
        return cls(s.schedule, s.ratio, s.ratios, s.threshold, s.warmup, s.sync_interval)

    def held_at(self, fraction: float | None) -> Schedule:
        """One that has every step be as one of this fraction, None: full. A threshold stays one: what travels does."""
        if fraction is None:
            return replace(self, warmup=0, sync_interval=1)
        if self.kind == "threshold":
            return replace(self, warmup=0, sync_interval=0)
        return Schedule("fixed", fraction, warmup=0, sync_interval=0)

    def warm_steps(self, steps: int) -> int:
        return max(1, steps // 10) if self.warmup is None else self.warmup

    def is_full(self, step: int, steps: int) -> bool:
        """Whether all tokens travel, whatever their scores."""
        since = step - self.warm_steps(steps)
        if since < 0 or self.sync_interval == 1:
            return True
        return self.sync_interval > 0 and since > 0 and since % self.sync_interval == 0

    def stable_fraction(self, step: int, steps: int) -> float | None:
        """r(t) of a step that is not full; None where the threshold decides."""
        warm = self.warm_steps(steps)
        progress = (step - warm) / max(1, steps - 1 - warm)
        if self.kind == "threshold":
            return None
        if self.kind == "list":
            return self.ratios[min(step, len(self.ratios) - 1)]
        shapes = {
            "linear": progress,
            "fixed": self.ratio,
            "reverse": 1 - progress,
            "cosine": (1 - math.cos(math.pi * progress)) / 2,
        }
        return min(1.0, max(0.0, shapes[self.kind]))


def stable_tokens(score_BN: Tensor, fraction: float, kernels: Kernels) -> Tensor:
    """The floor(N x fraction) tokens of each row with the smallest (score, position): bool [B, N]."""
    tokens = score_BN.shape[1]
    active_BK = kernels.select(score_BN.contiguous(), tokens - math.floor(tokens * fraction))
    return torch.ones_like(score_BN, dtype=torch.bool).scatter_(1, active_BK, False)


def staying(score_BN: Tensor, norm_BN: Tensor, fraction: float | None, threshold: float, kernels: Kernels) -> Tensor:
    """The tokens of each row that stay, bool [B, N]: that fraction, or where it is None those whose score is at most
    `threshold` times the mean L1 norm of the row's tokens."""
    if fraction is None:
        return score_BN.double() <= threshold * norm_BN.double().mean(1, keepdim=True)
    return stable_tokens(score_BN, fraction, kernels)


@dataclass(frozen=True)
class Cards:
    """Where the tokens of every card are that may stay, on the device that chooses among them.

    sizes: their numbers. all_S: their positions, card by card, of each ascending. alike: the same for choosing: cards
    of as many tokens together, [C, N] each, since one launch can choose in all of them. rows: see `rows_in_order`.
    single: whether every card has one tile, so that a schedule's fraction tells how many rows of each rank travel."""

    sizes: tuple[int, ...]
    all_S: Tensor
    alike: tuple[Tensor, ...]
    rows: tuple[Tensor, Tensor, Tensor, Tensor]
    single: bool

    @classmethod
    def build(cls, topology: Topology, layout: Layout, device: torch.device) -> Cards:
        of_rank = slices(layout.may_stay)
        cards = [
            torch.cat([torch.arange(of_rank[rank].start, of_rank[rank].stop) for rank in sorted(ranks)])
            for ranks in topology.cards.values()
        ]
        of_size = by_key((len(positions), positions) for positions in cards)
        alike = tuple(torch.stack(same).to(device) for same in of_size.values())
        single = all(len(ranks) == 1 for ranks in topology.cards.values())
        sizes = tuple(map(len, cards))
        return cls(sizes, torch.cat(cards).to(device), alike, rows_in_order(layout, device), single)

    def active(
        self, score_BS: Tensor, norm_BS: Tensor, fraction: float | None, threshold: float, kernels: Kernels
    ) -> Tensor:
        """The tokens that travel, bool [B, S]: all but those that stay among their own card's, see `staying`."""
        active_BS = torch.ones_like(score_BS, dtype=torch.bool)
        for positions_CN in self.alike:
            chosen, tokens = positions_CN.flatten(), positions_CN.shape[1]
            score_BN, norm_BN = (x_BS[:, chosen].view(-1, tokens) for x_BS in (score_BS, norm_BS))
            stays_BN = staying(score_BN, norm_BN, fraction, threshold, kernels)
            active_BS[:, chosen] = ~stays_BN.view(len(score_BS), -1)
        return active_BS


@dataclass(frozen=True)
class Selection:
    """The rows that travel in one attention call, the same on every rank.

    layout     their numbers, of all batch rows together, and the heads: the exchange's layout for [1, rows, H, D]
    of_rank    of every rank, indices of its rows in its flattened [B * L]
    arriving   indices of all ranks' rows in the flattened [B * S], in the order of the sequence"""

    layout: Layout
    of_rank: tuple[Tensor, ...]
    arriving: Tensor

    def contained_tensors(self) -> tuple[Tensor, ...]:
        return (*self.of_rank, self.arriving)

    @classmethod
    def build(cls, active_BS: Tensor, layout: Layout, cards: Cards, fraction: float | None) -> Selection:
        """active_BS: bool, of the tokens that may stay those that travel. fraction: of a card's that stay, None where a
        threshold decides. Rows go by batch row, then in the model's order.

        The host waits for the device once, for the numbers of rows; on cards of one tile a fraction tells them."""
        token_S, turn_S, first_S, rows_of = cards.rows
        batch, ranks, places = len(active_BS), layout.in_sequence, len(token_S)
        travels_BS = active_BS.index_select(1, token_S.clamp(min=0)) | (token_S < 0)
        # Rank by rank, of each the batch rows one after the other; what stays comes last.
        turn_N, order_N = torch.where(travels_BS, turn_S, len(ranks)).flatten().sort(stable=True)
        if cards.single and fraction is not None:
            stay = [math.floor(layout.may_stay[rank] * fraction) for rank in ranks]
            in_turn = [batch * (layout.rows[rank] - left) for rank, left in zip(ranks, stay, strict=True)]
        else:
            counts = torch.zeros(len(ranks) + 1, dtype=torch.long, device=turn_N.device)
            in_turn = counts.scatter_add_(0, turn_N, torch.ones_like(turn_N)).tolist()[:-1]
        arriving_N = order_N[: sum(in_turn)]
        place_N, turn_N = arriving_N % places, turn_N[: sum(in_turn)]
        own_N = arriving_N // places * rows_of[turn_N] + place_N - first_S[place_N]
        of_rank = dict(zip(ranks, zip(in_turn, own_N.split(in_turn), strict=True), strict=True))
        counts_P, rows = zip(*(of_rank[rank] for rank in range(len(ranks))), strict=True)
        return cls(layout.of_rows(counts_P), rows, arriving_N)


def rows_in_order(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every row of the sequence, in its order of ranks and in the model's order: its number among the tokens that
    may stay, rank by rank (-1: it always travels), its rank's turn, that rank's first row. And every rank's rows."""
    tokens = torch.full((sum(layout.rows),), -1)
    turns, first, numbers = [], [], slices(layout.may_stay)
    for turn, rank in enumerate(layout.in_sequence):
        rows, own = layout.row_slices[rank], layout.may_stay_slices[rank]
        tokens[rows][own] = torch.arange(numbers[rank].start, numbers[rank].stop)
        turns.append(torch.full((rows.stop - rows.start,), turn))
        first.append(torch.full((rows.stop - rows.start,), rows.start))
    rows_of = torch.tensor([layout.rows[rank] for rank in layout.in_sequence])
    return tokens.to(device), torch.cat(turns).to(device), torch.cat(first).to(device), rows_of.to(device)


def scored_blocks(topology: Topology, rank: int) -> tuple[list[int], list[int]]:
    """The blocks that scoring by card looks at: the ranks of this rank's card, its first tile (which scores) first, and
    the ranks whose heads are of that tile's plane."""
    card = sorted(topology.cards[topology.places[rank].card])
    plane = topology.places[card[0]].plane
    return card, [place.rank for place in topology.places if place.plane == plane]


@dataclass
class Drift:
    """Of one step, over a rank's layers: change of v (sums of L1 distances and norms), tokens and stable tokens."""

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


PENDING = 64  # steps whose sums stay on the device


class DriftNotes:
    """One rank's notes. Sums stay on the device for many steps: to read a number is to wait for its queue."""

    def __init__(self) -> None:
        self._steps: dict[int, Drift] = {}
        self._sums: dict[tuple[str, int], list[Tensor]] = defaultdict(list)  # that these lack

    def ensure_step(self, step: int) -> None:
        if step not in self._steps and len({of for _, of in self._sums}) >= PENDING:
            self.sync_to_host()
        self._steps.setdefault(step, Drift())

    def scored(self, step: int, change_BN: Tensor, norm_BN: Tensor) -> None:
        """Adds a scored call."""
        self.ensure_step(step)
        self._sums["change", step].append(change_BN.sum(dtype=torch.float64))
        self._sums["norm", step].append(norm_BN.sum(dtype=torch.float64))

    def chosen(self, step: int, active_BN: Tensor) -> None:
        """Adds a choice."""
        self.ensure_step(step)
        noted = self._steps[step]
        noted.tokens, noted.stable = noted.tokens + active_BN.numel(), noted.stable + active_BN.numel()
        self._sums["active", step].append(active_BN.sum())

    def sync_to_host(self) -> None:
        """Reads what was noted, also between two runs, so that notes of many take no more memory than those of one."""
        for (name, step), sums in self._sums.items():
            noted, total = self._steps[step], sum(torch.stack(sums).tolist())
            if name == "active":
                noted.stable -= total
            else:
                setattr(noted, name, getattr(noted, name) + total)
        self._sums.clear()

    def by_step(self) -> dict[int, Drift]:
        self.sync_to_host()
        return {**self._steps}

    def clear(self) -> None:
        self._steps.clear()
        self._sums.clear()

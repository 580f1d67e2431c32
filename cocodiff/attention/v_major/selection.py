"""The choice of tokens to send (V-Major, CoCoDiff section III-D): schedules, scores of change, and the selection.

A token is *active* if it is sent at this step, and *stable* if every rank uses what it received earlier. Tokens of
segments that may not stay (text) are always active. `DriftNotes` records how far v drifts from step to step, and how
many tokens stay. Nothing here communicates.
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
    """The stable fraction r(t): the share of the tokens that may stay which do so, at step t (from 0) of a run.

    linear     0 at the end of the warm-up, 1 at the last step;
    fixed      `ratio`;
    reverse    1 - linear;
    cosine     half a wave from 0 to 1;
    list       `ratios`, the last one repeated;
    threshold  tokens are stable if their score is at most `threshold` times the card's mean L1 norm of v.
    """

    kind: str = "linear"  # one of these
    ratio: float = 0.5  # for "fixed"
    ratios: tuple[float, ...] = ()  # for "list", by step
    threshold: float = 0.1  # for "threshold"
    warmup: int | None = None  # full steps at the start; None: a tenth of the steps, at least one
    sync_interval: int = 10  # after the warm-up, every step at this interval is full; 1: every step; 0: none

    @classmethod
    def of(cls, settings: Any) -> Schedule:
        """Return the schedule that the engine's settings describe."""
        s = settings
        return cls(s.schedule, s.ratio, s.ratios, s.threshold, s.warmup, s.sync_interval)

    def held_at(self, fraction: float | None) -> Schedule:
        """Return a schedule whose every step has this stable fraction; None makes every step full. A threshold stays a
        threshold."""
        if fraction is None:
            return replace(self, warmup=0, sync_interval=1)
        if self.kind == "threshold":
            return replace(self, warmup=0, sync_interval=0)
        return Schedule("fixed", fraction, warmup=0, sync_interval=0)

    def warm_steps(self, steps: int) -> int:
        """Return the number of full steps at the start of a run with `steps` steps."""
        return max(1, steps // 10) if self.warmup is None else self.warmup

    def is_full(self, step: int, steps: int) -> bool:
        """Return True if all tokens are sent at a step, regardless of their scores."""
        since = step - self.warm_steps(steps)
        if since < 0 or self.sync_interval == 1:
            return True
        return self.sync_interval > 0 and since > 0 and since % self.sync_interval == 0

    def stable_fraction(self, step: int, steps: int) -> float | None:
        """Return r(t) of a step that is not full; None if a threshold decides."""
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
    """Return the floor(N x fraction) tokens of each row with the smallest (score, position): bool [B, N]."""
    tokens = score_BN.shape[1]
    active_BK = kernels.select(score_BN.contiguous(), tokens - math.floor(tokens * fraction))
    return torch.ones_like(score_BN, dtype=torch.bool).scatter_(1, active_BK, False)


def staying(score_BN: Tensor, norm_BN: Tensor, fraction: float | None, threshold: float, kernels: Kernels) -> Tensor:
    """Return the tokens of each row that stay, bool [B, N].

    Args:
        fraction: share of the tokens that stay; None to use the threshold.
        threshold: tokens stay if their score is at most this number times the mean L1 norm of the row's tokens.
    """
    if fraction is None:
        return score_BN.double() <= threshold * norm_BN.double().mean(1, keepdim=True)
    return stable_tokens(score_BN, fraction, kernels)


@dataclass(frozen=True)
class Cards:
    """The tokens of every card that may stay, on the device that chooses among them."""

    sizes: tuple[int, ...]  # number of tokens of every card
    all_S: Tensor  # their positions, card by card, ascending in each
    # The same in one tensor [C, N] for all cards with the same number of tokens: one launch can choose in all of them.
    alike: tuple[Tensor, ...]
    rows: tuple[Tensor, Tensor, Tensor, Tensor]  # see `rows_in_order`
    single: bool  # True if every card has one tile, so that a fraction determines the number of each rank's rows

    @classmethod
    def build(cls, topology: Topology, layout: Layout, device: torch.device) -> Cards:
        """Compute the positions for a layout."""
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
        """Return the tokens that are sent, bool [B, S]: all except those that stay among their own card's, see
        `staying`."""
        active_BS = torch.ones_like(score_BS, dtype=torch.bool)
        for positions_CN in self.alike:
            chosen, tokens = positions_CN.flatten(), positions_CN.shape[1]
            score_BN, norm_BN = (x_BS[:, chosen].view(-1, tokens) for x_BS in (score_BS, norm_BS))
            stays_BN = staying(score_BN, norm_BN, fraction, threshold, kernels)
            active_BS[:, chosen] = ~stays_BN.view(len(score_BS), -1)
        return active_BS


@dataclass(frozen=True)
class Selection:
    """The rows that are sent in one attention call, the same on every rank."""

    layout: Layout  # of the exchange of [1, rows, H, D], with the batch flattened
    of_rank: tuple[Tensor, ...]  # for every rank, indices of its rows in its flattened [B * L]
    arriving: Tensor  # indices of all ranks' rows in the flattened [B * S], in the order of the sequence

    def contained_tensors(self) -> tuple[Tensor, ...]:
        return (*self.of_rank, self.arriving)

    @classmethod
    def build(cls, active_BS: Tensor, layout: Layout, cards: Cards, fraction: float | None) -> Selection:
        """Build the selection. A rank's rows are ordered by batch entry, then in the model's order.

        The host waits for the device once, for the numbers of rows. On cards of one tile a fraction determines these.

        Args:
            active_BS: bool, True for tokens that are sent, of those that may stay.
            fraction: share of a card's tokens that stay; None if a threshold decides.
        """
        token_S, turn_S, first_S, rows_of = cards.rows
        batch, ranks, places = len(active_BS), layout.in_sequence, len(token_S)
        travels_BS = active_BS.index_select(1, token_S.clamp(min=0)) | (token_S < 0)
        # Rank by rank, and for each rank one batch entry after the other; rows that stay come last.
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
    """Return four int64 tensors, the first three with a number for every row of the sequence.

    [0]  its index among the tokens that may stay, rank by rank; -1 if it is always sent;
    [1]  the turn of its rank in the sequence;
    [2]  the first row of its rank;
    [3]  for every rank in turn, its number of rows.
    """
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
    """Return the blocks that scoring by card looks at, as two lists of ranks.

    The first has the ranks of this rank's card, with its first tile, which scores, in front. The second has the ranks
    whose heads belong to that tile's plane.
    """
    card = sorted(topology.cards[topology.places[rank].card])
    plane = topology.places[card[0]].plane
    return card, [place.rank for place in topology.places if place.plane == plane]


@dataclass
class Drift:
    """The counts of one step over a rank's layers."""

    change: float = 0.0  # sum of the L1 distances of v to its reference
    norm: float = 0.0  # sum of the L1 norms of the reference
    tokens: int = 0  # number of tokens that could stay
    stable: int = 0  # number of tokens that stayed

    @classmethod
    def merged(cls, parts: Sequence[Drift]) -> dict[str, float | None]:
        """Return the counts of several ranks as columns of a profile.

        These are "change" (mean relative change of v; None if nothing was compared) and "stable_fraction".
        """
        norm, tokens = sum(part.norm for part in parts), sum(part.tokens for part in parts)
        change = sum(part.change for part in parts) / norm if norm else None
        return {"change": change, "stable_fraction": sum(part.stable for part in parts) / tokens if tokens else 0.0}


PENDING = 64  # most steps whose sums stay on the device


class DriftNotes:
    """The record of v's drift on one rank. Sums stay on the device for many steps, because reading a number waits for
    its queue."""

    def __init__(self) -> None:
        self._steps: dict[int, Drift] = {}
        self._sums: dict[tuple[str, int], list[Tensor]] = defaultdict(list)  # on the device, not yet in `_steps`

    def ensure_step(self, step: int) -> None:
        """Make an entry for a step."""
        if step not in self._steps and len({of for _, of in self._sums}) >= PENDING:
            self.sync_to_host()
        self._steps.setdefault(step, Drift())

    def scored(self, step: int, change_BN: Tensor, norm_BN: Tensor) -> None:
        """Add the scores of a call."""
        self.ensure_step(step)
        self._sums["change", step].append(change_BN.sum(dtype=torch.float64))
        self._sums["norm", step].append(norm_BN.sum(dtype=torch.float64))

    def chosen(self, step: int, active_BN: Tensor) -> None:
        """Add the choice of a call."""
        self.ensure_step(step)
        noted = self._steps[step]
        noted.tokens, noted.stable = noted.tokens + active_BN.numel(), noted.stable + active_BN.numel()
        self._sums["active", step].append(active_BN.sum())

    def sync_to_host(self) -> None:
        """Read the sums from the device. This is also called between runs, so that records of many runs take no more
        memory there."""
        for (name, step), sums in self._sums.items():
            noted, total = self._steps[step], sum(torch.stack(sums).tolist())
            if name == "active":
                noted.stable -= total
            else:
                setattr(noted, name, getattr(noted, name) + total)
        self._sums.clear()

    def by_step(self) -> dict[int, Drift]:
        """Return the counts by step."""
        self.sync_to_host()
        return {**self._steps}

    def clear(self) -> None:
        """Drop all counts."""
        self._steps.clear()
        self._sums.clear()

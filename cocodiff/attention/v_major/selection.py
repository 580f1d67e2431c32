"""The choice of tokens to send (V-Major, CoCoDiff section III-D): schedules, scores of change, and the selection.

A token is *active* if it is sent at this step, and *stable* if every rank uses what it received earlier. Tokens of
segments that may not stay (text) are always active. `DriftNotes` records how far v drifts from step to step, and how
many tokens stay. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cocodiff.config.config import Config
from cocodiff.kernels import Kernels
from cocodiff.kernels.residual import Candidates, RowOrder
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout


@dataclass(frozen=True)
class Schedule:
    """The rule that says which fraction of tokens stays unsent at each step, and at which steps all are sent.

    The fraction r(t) is of the tokens that may stay unsent, at step t (from 0) of a run:

    linear     0 at the end of the warm-up, 1 at the last step;
    fixed      `ratio`;
    reverse    1 - linear;
    cosine     half a wave from 0 to 1;
    list       `ratios`, the last one repeated;
    threshold  tokens stay if their score is at most `threshold` times the card's mean L1 norm of v.
    """

    settings: Config  # schedule (the rule), ratio, ratios, warmup and sync_interval are read

    def held_at(self, fraction: float | None) -> Schedule:
        """Return a schedule that is the same at every step, for recordings.

        Args:
            fraction: fraction of tokens that stay unsent at every step; None to send all tokens. A threshold stays a
                threshold.
        """
        if fraction is None:
            return Schedule(self.settings.with_(warmup=0, sync_interval=1))
        rule = {} if self.settings.schedule == "threshold" else {"schedule": "fixed", "ratio": fraction}
        return Schedule(self.settings.with_(**rule, warmup=0, sync_interval=0))

    def warm_steps(self, steps: int) -> int:
        """Return the number of steps at the start of a run of `steps` steps that send all tokens."""
        return max(1, steps // 10) if self.settings.warmup is None else self.settings.warmup

    def is_full(self, step: int, steps: int) -> bool:
        """Return True if all tokens are sent at a step, regardless of their scores.

        Args:
            step: index of the step in the run.
            steps: number of steps of the run.
        """
        since, interval = step - self.warm_steps(steps), self.settings.sync_interval
        if since < 0 or interval == 1:
            return True
        return interval > 0 and since > 0 and since % interval == 0

    def stable_fraction(self, step: int, steps: int) -> float | None:
        """Return the fraction of tokens that stay unsent at a step that does not send all; None if a threshold decides.

        Args:
            step: index of the step in the run.
            steps: number of steps of the run.
        """
        warm, rule = self.warm_steps(steps), self.settings.schedule
        progress = (step - warm) / max(1, steps - 1 - warm)
        if rule == "threshold":
            return None
        if rule == "list":
            return self.settings.ratios[min(step, len(self.settings.ratios) - 1)]
        shapes = {
            "linear": progress,
            "fixed": self.settings.ratio,
            "reverse": 1 - progress,
            "cosine": (1 - math.cos(math.pi * progress)) / 2,
        }
        return min(1.0, max(0.0, shapes[rule]))


@dataclass(frozen=True)
class Cards:
    """The places of the tokens that V-Major may leave unsent, card by card, for one layout, batch size and device."""

    among: Candidates  # the tokens among which this rank chooses, in sets
    order: RowOrder  # the order in which rows are sent, with three indices for every row, see `order_of_rows`
    tokens: tuple[int, ...]  # by rank: on a card's first tile the number of such tokens of the whole card, else 0
    single: bool  # True if every card has one tile: a fraction then gives the number of rows that each rank sends

    @classmethod
    def build(
        cls,
        topology: Topology,
        layout: Layout,
        batch: int,
        columns: int,
        device: torch.device,
        by_card: bool,
        rank: int,
    ) -> Cards:
        """Compute the places of the tokens that may stay unsent.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads in the call.
            batch: rows of the batch.
            columns: 2 if a threshold decides and norms are gathered with scores, else 1.
            device: the device of the index tensors.
            by_card: True if the first tile of each card chooses among the card's tokens; False if every rank chooses
                among all cards' tokens, from scores [columns, B, N] of one rank after the other.
            rank: this rank.
        """
        numbers, start = [], 0
        for count in layout.may_stay:
            size = columns * batch * count
            numbers.append(torch.arange(start, start + size).view(columns, batch, count))
            start += size
        cards = sorted(sorted(ranks) for ranks in topology.cards.values())
        tokens = {ranks[0]: sum(layout.may_stay[one] for one in ranks) for ranks in cards}
        if by_card:
            own = columns, batch, tokens.get(rank, 0)
            places = [torch.arange(math.prod(own)).view(own)]
        else:
            cards.sort(key=lambda ranks: tokens[ranks[0]])
            places = [torch.cat([numbers[one] for one in ranks], 2) for ranks in cards]
        among = Candidates.of_sets(places, device)
        of_card = torch.arange(batch * sum(layout.may_stay)).split([batch * tokens[ranks[0]] for ranks in cards])
        candidates: dict[int, Tensor] = {}
        for ranks, card_N in zip(cards, of_card, strict=True):
            parts = card_N.view(batch, -1).split([layout.may_stay[one] for one in ranks], 1)
            candidates |= zip(ranks, parts, strict=True)
        counts = tuple(tokens.get(one, 0) for one in range(topology.size))
        return cls(among, order_of_rows(layout, batch, candidates, device), counts, len(cards) == topology.size)


@dataclass(frozen=True)
class Selection:
    """The rows (tokens) of all ranks that are sent in one attention call. It is the same on every rank."""

    layout: Layout  # the number of rows that each rank sends, batch entries together, and its heads
    of_rank: tuple[Tensor, ...]  # for every rank, indices of its rows in its flattened [B * L]
    kept: tuple[Tensor, ...]  # the indices of the same rows in the rank's flattened reference; -1 if they are not there
    arriving: Tensor  # indices of all ranks' rows in the flattened [B * S], in the order of the sequence

    def contained_tensors(self) -> tuple[Tensor, ...]:
        return (*self.of_rank, *self.kept, self.arriving)

    @classmethod
    def build(
        cls, active_T: Tensor, layout: Layout, batch: int, cards: Cards, fraction: float | None, kernels: Kernels
    ) -> Selection:
        """Build the selection from the choice among all tokens. A rank's rows are ordered by batch entry, then in the
        model's order.

        The host waits for the device once, for the number of each rank's rows. With one tile a card and a fraction it
        knows these, and does not wait.

        Args:
            active_T: uint8, 1 for tokens to send, of all that may stay unsent in the order of the cards; at last a 1.
            layout: the tokens and heads of every rank in the call.
            batch: rows of the batch.
            cards: the places of the tokens.
            fraction: share of a card's tokens that stay unsent; None if a threshold decides.
            kernels: the operations, of which `compact` is used.
        """
        chosen_3N, end_R = kernels.compact(active_T, cards.order)
        ranks = layout.in_sequence
        if cards.single and fraction is not None:
            stay = [math.floor(layout.may_stay[rank] * fraction) for rank in ranks]
            in_turn = [batch * (layout.rows[rank] - left) for rank, left in zip(ranks, stay, strict=True)]
        else:
            in_turn = [end - start for start, end in pairwise([0, *end_R.tolist()])]
        arriving_N, own_N, kept_N = chosen_3N[:, : sum(in_turn)]
        of_ranks = zip(in_turn, own_N.split(in_turn), kept_N.split(in_turn), strict=True)
        of_rank = dict(zip(ranks, of_ranks, strict=True))
        counts_P, rows, kept = zip(*(of_rank[rank] for rank in range(len(ranks))), strict=True)
        return cls(layout.of_rows(counts_P), rows, kept, arriving_N)


def order_of_rows(layout: Layout, batch: int, candidates: Mapping[int, Tensor], device: torch.device) -> RowOrder:
    """Return the order in which the rows of all ranks are sent, with three indices for every row.

    [0]  its index in the flattened [B * S];
    [1]  its index in its rank's flattened [B * L];
    [2]  its index among its rank's tokens that may stay, in their flattened [B * N]; -1 if it is always sent.

    Args:
        layout: the tokens and heads of every rank in the call.
        batch: rows of the batch.
        candidates: for every rank, its tokens that may stay unsent, as numbers among those of all ranks, [B, N].
        device: the device of the result.
    """
    always, tables = batch * sum(layout.may_stay), []
    for rank in layout.in_sequence:
        rows, own = layout.rows[rank], layout.may_stay_slices[rank]
        table_4BL = torch.full((4, batch, rows), -1)
        table_4BL[0] = always
        table_4BL[0, :, own] = candidates[rank]
        first_B1 = torch.arange(batch)[:, None] * sum(layout.rows) + layout.row_slices[rank].start
        table_4BL[1] = first_B1 + torch.arange(rows)
        table_4BL[2] = torch.arange(batch * rows).view(batch, rows)
        table_4BL[3, :, own] = torch.arange(candidates[rank].numel()).view_as(candidates[rank])
        tables.append(table_4BL.flatten(1))
    table_4N = torch.cat(tables, 1).to(device)
    last_R = torch.tensor([batch * layout.rows[rank] for rank in layout.in_sequence]).cumsum(0) - 1
    return RowOrder(table_4N[0], last_R.to(device), table_4N[1:])


def scored_blocks(topology: Topology, rank: int) -> tuple[list[int], list[int]]:
    """Return which blocks of v the first tile of a rank's card looks at to score the card's tokens: two lists of ranks.

    The first has the ranks of the card, ascending; the first of them scores. The second has the ranks whose heads are
    used: those of that tile's plane.

    Args:
        topology: the ranks of the Ulysses group.
        rank: a rank of the card.
    """
    card = sorted(topology.cards[topology.places[rank].card])
    plane = topology.places[card[0]].plane
    return card, [place.rank for place in topology.places if place.plane == plane]


@dataclass
class Drift:
    """The counts of V-Major in one denoising step, over all layers of one rank: how far v moved, and how many tokens
    stayed."""

    change: float = 0.0  # sum of the L1 distances of v to its reference
    norm: float = 0.0  # sum of the L1 norms of the reference
    tokens: int = 0  # number of tokens that could stay
    stable: int = 0  # number of tokens that stayed

    @classmethod
    def merged(cls, parts: Sequence[Drift]) -> dict[str, float | None]:
        """Return the counts of several ranks as columns of the drift profile, by name.

        "change" is the mean relative change of v, None if nothing was compared. "stable_fraction" is the fraction of
        the tokens that could stay unsent that did.

        Args:
            parts: the counts of each rank.
        """
        norm, tokens = sum(part.norm for part in parts), sum(part.tokens for part in parts)
        change = sum(part.change for part in parts) / norm if norm else None
        return {"change": change, "stable_fraction": sum(part.stable for part in parts) / tokens if tokens else 0.0}


PENDING = 64  # most steps whose sums of changes are kept on the device before the host reads them


class DriftNotes:
    """The record of how far v moves from step to step on one rank, and of how many tokens stay unsent.

    Sums are kept on the device for many steps, because reading a number makes the host wait for the device.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Drift] = {}
        self._sums: dict[int, list[Tensor]] = defaultdict(list)  # on the device, not yet in `_steps`

    def ensure_step(self, step: int) -> None:
        """Make an entry for a step if there is none, so that it appears in the profile even if nothing is scored."""
        if step not in self._steps and len(self._sums) >= PENDING:
            self.sync_to_host()
        self._steps.setdefault(step, Drift())

    def scored(self, step: int, scores_2BN: Tensor) -> None:
        """Add the scores of one attention call to a step.

        Args:
            step: index of the step.
            scores_2BN: the changes of N tokens' v and the norms of their reference, see `SelectiveCall.score`.
        """
        self.ensure_step(step)
        self._sums[step].append(scores_2BN.sum((1, 2), dtype=torch.float64))

    def chosen(self, step: int, tokens: int, stable: int) -> None:
        """Add one attention call's choice of tokens to the counts of a step.

        Args:
            step: index of the step.
            tokens: number of tokens that could stay unsent.
            stable: number of these that stayed unsent.
        """
        self.ensure_step(step)
        noted = self._steps[step]
        noted.tokens, noted.stable = noted.tokens + tokens, noted.stable + stable

    def sync_to_host(self) -> None:
        """Read the sums from the device and add them to the counts of their steps.

        It is also called between runs, so that records of many runs take no more memory on the device.
        """
        for step, sums in self._sums.items():
            noted, (change, norm) = self._steps[step], torch.stack(sums).sum(0).tolist()
            noted.change, noted.norm = noted.change + change, noted.norm + norm
        self._sums.clear()

    def by_step(self) -> dict[int, Drift]:
        """Return the counts of every step so far, by step."""
        self.sync_to_host()
        return {**self._steps}

    def clear(self) -> None:
        """Delete the counts and sums of all steps."""
        self._steps.clear()
        self._sums.clear()

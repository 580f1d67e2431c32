"""What each codec costs: bytes on the wire, calls of which kinds in every step, memory kept between calls.

The planner's side of a codec. `Costs` tells of those that send tensors whole and keep nothing; the table `COSTS` of
the registry names the class of any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cocodiff.attention.arrival import SAMPLING, Displaced
from cocodiff.attention.lossless import Lossless
from cocodiff.attention.residual import BITS, FINEST, Residual, bits_of, width_of
from cocodiff.attention.stateful import TENSORS, FixedKind, values_kept
from cocodiff.attention.v_major.codec import VMajor
from cocodiff.attention.v_major.selection import Schedule, scored_blocks
from cocodiff.config.config import Config
from cocodiff.config.machine import Topology
from cocodiff.config.registry import COSTS, load
from cocodiff.engine.assemble import AttentionWork, codec_name
from cocodiff.kernels.lossless import least_room
from cocodiff.planner.case import Case
from cocodiff.planner.decisions import decisions_of, without_seldom
from cocodiff.topology.layout import Layout

# Of a whole tensor, what a call of the lossless codec sends in a run of 50 steps, and what a layer's first one does,
# where heads are so wide that rounding to whole bytes does not count (docs/exchange.md).
TYPICAL, TYPICAL_FIRST = 0.3, 0.68
LAUNCHES_TO_CHOOSE = 41  # of V-Major's kernels: scores and what is made of them, up to packing the chosen rows


class CallKind(NamedTuple):
    """How calls of attention are made: predictions know each kind by one recording. whole: as a run's first ones, which
    have nothing to go by: tensors as they are, or as nearly as a code can. stable: the part of the tokens that stays
    behind. fine: with the bits of the last steps. displaced: names of the tensors that no call waits for, as "qkv"."""

    whole: bool = False
    stable: float = 0.0
    fine: bool = False
    displaced: str = ""


WHOLE, CODED = CallKind(whole=True), CallKind()


@dataclass(frozen=True)
class Costs:
    """Of one codec, by the engine's settings. The functions that take a `codec` (one rank's) are for benchmarks."""

    settings: Config
    steps_to_settle: ClassVar[int] = 0  # coded calls after a whole one, before those that all others are like

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        """What one token of one head takes on the wire in calls of a kind, of q, k, v or the output each."""
        return head_dim * itemsize

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """How many of its rows every rank of a group sends of q, k and v each."""
        return layout.rows

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Bytes that every rank of a group sends each other one in a call besides, of one batch row."""
        return [0.0] * topology.size

    def choosing(self, kind: CallKind, tiles: int) -> tuple[int, int, int]:
        """Launches, gathers of all ranks, and waits of the host for the device, before v is sent. tiles: of a card."""
        return 0, 0, 0

    def agrees(self) -> bool:
        """Whether ranks gather what they agree on, once in a coded call of the model, which waits for it."""
        return False

    def kinds_of_steps(self, case: Case) -> list[dict[CallKind, float]]:
        """Return of every step the parts of its calls by their kind."""
        return [{WHOLE: 1.0}] * case.steps

    def state_bytes(self, topology: Topology, layout: Layout, work: AttentionWork) -> list[Mapping[str, int]]:
        """What one layer keeps on every rank of a group of several, what is in flight between its calls as well, in
        bytes by what it is (fields of `RankMemory`). work: a call."""
        return [{} for _ in range(topology.size)]

    @staticmethod
    def hold_at(codec: Any, kind: CallKind) -> None:
        """Makes every call as one of this kind, as far as it can: one that follows no other is whole."""

    @staticmethod
    def agree(codec: Any) -> None:
        """Returns when what `begin_step` has the ranks agree on is there, for which the next call waits anyway."""

    @staticmethod
    def catch_up(codec: Any) -> None:
        """Receives what calls have sent and did not wait for."""


def costs_of(config: Config) -> Costs:
    """Of the codec that the settings name."""
    name = codec_name(config)
    found: type[Costs] = load(COSTS, name) if name in COSTS else Costs
    return found(config)


class VMajorCosts(Costs):
    """V-Major (CoCoDiff section III-D)."""

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """So large a part of the rows that may stay does, of every card in whole tokens."""
        if kind.whole:
            return layout.rows
        found = [float(rows) for rows in layout.rows]
        for ranks in topology.cards.values():
            held = sum(layout.may_stay[rank] for rank in ranks)
            for rank in ranks:
                found[rank] -= math.floor(held * kind.stable) * layout.may_stay[rank] / max(1, held)
        return found

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Scores of the own rows, by threshold their norms as well; with scoring by card what the first tile chose, a
        byte for each of the card's rows."""
        if kind.whole:
            return super().gathered(topology, layout, kind)
        if self.settings.scoring == "source":
            return [4.0 * (1 + (self.settings.schedule == "threshold")) * rows for rows in layout.may_stay]
        of_cards = [topology.cards[place.card] for place in topology.places]
        return [
            float(sum(layout.may_stay[one] for one in ranks) * (min(ranks) == rank))
            for rank, ranks in enumerate(of_cards)
        ]

    def choosing(self, kind: CallKind, tiles: int) -> tuple[int, int, int]:
        counted = tiles == 1 and self.settings.schedule != "threshold"  # see `Selection.build`
        return (0, 0, 0) if kind.whole else (LAUNCHES_TO_CHOOSE, 1, 0 if counted else 1)

    def kinds_of_steps(self, case: Case) -> list[dict[CallKind, float]]:
        schedule, found = Schedule.of(self.settings), []
        for step in range(case.steps):
            part = schedule.stable_fraction(step, case.steps)
            selective = CallKind(stable=case.stable if part is None else part)
            found.append({WHOLE if schedule.is_full(step, case.steps) else selective: 1.0})
        return found

    def state_bytes(self, topology: Topology, layout: Layout, work: AttentionWork) -> list[Mapping[str, int]]:
        """Exact. What is received are all tokens for the rank's own heads. The reference is v at the scored rows: the
        own image tokens with all heads (source), or on the first tile of a card the card's image tokens with that
        tile's plane's heads (card)."""
        found: list[Mapping[str, int]] = []
        for rank, heads in enumerate(layout.heads):
            rows, scored_heads = layout.may_stay[rank], sum(layout.heads)
            if self.settings.scoring == "card":
                card, of_plane = scored_blocks(topology, rank)
                rows = sum(layout.may_stay[other] for other in card) if card[0] == rank else 0
                scored_heads = sum(layout.heads[other] for other in of_plane)
            found.append(
                {
                    "image_cache": 3 * sum(layout.may_stay) * heads * work.cell,
                    "reference_cache": rows * scored_heads * work.cell,
                    "text_cache": 3 * (sum(layout.rows) - sum(layout.may_stay)) * heads * work.cell,
                }
            )
        return found

    @staticmethod
    def hold_at(codec: VMajor, kind: CallKind) -> None:
        codec.schedule = codec.schedule.held_at(None if kind.whole else kind.stable)


class ResidualCosts(Costs):
    """Codecs that code what tensors differ by from a prediction, and displacement, with any of them or none. Sizes of
    the lossless one, which depend on the data, are those of a typical run."""

    steps_to_settle = 2  # in which there is no continuation, no comparison with it, and nothing is in flight

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        if self.settings.codec == "lossless":
            whole, share = head_dim * itemsize, TYPICAL_FIRST if kind.whole else TYPICAL
            return whole if itemsize != 2 else max(least_room(head_dim), math.ceil(share * whole))
        return width_of(head_dim, itemsize, bits_of(self.settings.codec, kind.whole, kind.fine))

    def agrees(self) -> bool:
        return bool(self.settings.codec != "none" or self.settings.arrival == "adaptive")

    def kinds_of_steps(self, case: Case) -> list[dict[CallKind, float]]:
        """Return of every step the parts of its calls by their kind. The first step is whole, the last ones are fine;
        what is displaced in the others is told by a recorded run, or all tensors are."""
        bits, recorded = BITS.get(self.settings.codec), decisions_of(case.config, case.steps, case.decisions)
        finer = CallKind(fine=bits is not None and bits < FINEST)
        displaced = "".join(TENSORS) if self.settings.arrival == "displaced" else ""
        sets_of_steps = without_seldom(recorded.over(case.steps)) if recorded else [{displaced: 1.0}] * case.steps
        found = [{WHOLE: 1.0}, *[{finer: 1.0}] * (case.steps - 1)]
        for step in range(1, case.steps - self.settings.fine_steps):
            found[step] = {CallKind(displaced=names): part for names, part in sets_of_steps[step].items()}
        return found

    def state_bytes(self, topology: Topology, layout: Layout, work: AttentionWork) -> list[Mapping[str, int]]:
        """Exact. What is kept: see `kept_cells`. In flight where calls do not wait: what a call has sent of every
        tensor until it has left, and what came until the next call takes it, as wide as it travels."""
        if self.settings.codec == "lossless" and self.settings.arrival == "now" and work.itemsize != 2:
            return super().state_bytes(topology, layout, work)  # such numbers are not coded
        S, H, width = sum(layout.rows), sum(layout.heads), self.sent_bytes(work.head_dim, work.itemsize)
        late = len(TENSORS) * work.batch * width if self.settings.arrival != "now" else 0
        return [
            {"reconstructions": kept_cells(self.settings, L, S, G, H) * work.cell, "in_flight": late * (L * H + S * G)}
            for L, G in zip(layout.rows, layout.heads, strict=True)
        ]

    @staticmethod
    def hold_at(codec: Lossless | Residual | Displaced, kind: CallKind) -> None:
        if isinstance(codec, Displaced):
            codec.fixed_kind = FixedKind(kind.whole, displaced=frozenset(kind.displaced))
        inner = codec.inner if isinstance(codec, Displaced) else codec
        if isinstance(inner, Residual):
            inner.fixed_kind = FixedKind(kind.whole, kind.fine)
        elif isinstance(inner, Lossless):
            inner.fixed_kind = FixedKind(kind.whole, share=TYPICAL_FIRST if kind.whole else TYPICAL)

    @staticmethod
    def agree(codec: Lossless | Residual | Displaced) -> None:
        if codec.notes is not None:
            codec.notes.hand_out()

    @staticmethod
    def catch_up(codec: Lossless | Residual | Displaced) -> None:
        if isinstance(codec, Displaced):
            codec.catch_up()


def kept_cells(settings: Config, L: int, S: int, G: int, H: int) -> int:
    """Tokens times heads that a rank with L of S rows and G of H heads keeps of q, k, v and the output: with a codec
    the reconstructions of both ends; else what the last call received, where calls do not wait, and the rows by which
    the sender measures how they change."""
    if settings.codec != "none":
        return len(TENSORS) * values_kept(settings) * (L * H + S * G)
    received, sampled = 3 * S * G + L * H, 3 * -(-L // SAMPLING) * H + -(-S // SAMPLING) * G
    return received + (sampled if settings.arrival == "adaptive" else 0)

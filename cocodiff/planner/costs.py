"""The costs of each codec: bytes on the wire, kinds of calls in every step, and memory kept between calls.

This is the planner's side of a codec. `Costs` describes codecs that send whole tensors and keep nothing. The table
`COSTS` of the registry names the class of any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from cocodiff.attention.displaced import SAMPLING, Displaced
from cocodiff.attention.lossless import Lossless
from cocodiff.attention.residual import BITS, FINEST, Residual, bits_of, width_of
from cocodiff.attention.stateful import TENSORS, FixedKind, values_kept
from cocodiff.attention.v_major.codec import VMajor
from cocodiff.attention.v_major.selection import Schedule, scored_blocks
from cocodiff.config.config import Config
from cocodiff.config.registry import COSTS, load
from cocodiff.engine.assemble import AttentionWork, codec_name
from cocodiff.kernels.lossless import least_room
from cocodiff.planner.case import Case
from cocodiff.planner.decisions import decisions_of, without_seldom
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout

# The part of a tensor's bytes that a call of the lossless codec sends: the mean of a run of 50 steps, and a layer's
# first call. Heads are wide enough that rounding to whole bytes does not matter (docs/exchange.md).
TYPICAL, TYPICAL_FIRST = 0.3, 0.68
# Launches with which V-Major chooses rows, by `scoring` and `reference`: of kernels, a copy to the host, and one of the
# rank's own part of what is gathered (tests/attention/test_launches.py counts them).
LAUNCHES_TO_CHOOSE = {("source", "prev"): 6, ("source", "sent"): 6, ("card", "prev"): 8, ("card", "sent"): 9}


class CallKind(NamedTuple):
    """A kind of attention calls that cost the same: by the codec's state, and by the tensors that are displaced."""

    whole: bool = False  # True for a run's first calls, without a prediction: tensors whole, or coded in most bits
    stable: float = 0.0  # the fraction of tokens that V-Major does not send
    fine: bool = False  # True for calls of the last steps, whose code has twice the bits
    displaced: str = ""  # names of the tensors that no call waits for, as "qkv"


WHOLE, CODED = CallKind(whole=True), CallKind()


@dataclass(frozen=True)
class Costs:
    """The costs of one codec with the engine's settings. This base class is for codecs that send whole tensors and keep
    nothing.

    Functions that take a rank's `codec` are for benchmarks.
    """

    settings: Config  # the engine's settings
    steps_to_settle: ClassVar[int] = 0  # coded calls after a whole one until all further calls cost the same

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        """Return the bytes on the wire of one token for one head, for each of q, k, v and the output.

        Args:
            head_dim: channels of a head.
            itemsize: bytes of an element.
            kind: the kind of attention call.
        """
        return head_dim * itemsize

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the number of rows that each rank of a Ulysses group sends of each of q, k and v, by rank.

        Args:
            topology: the ranks of the group.
            layout: the tokens and heads of each rank in the call.
            kind: the kind of attention call.
        """
        return layout.rows

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the bytes that each rank of a Ulysses group sends every other rank in a call besides tensors, for one
        batch row, by rank.

        Args:
            topology: the ranks of the group.
            layout: the tokens and heads of each rank in the call.
            kind: the kind of attention call.
        """
        return [0.0] * topology.size

    def choosing(self, kind: CallKind, tiles: int) -> tuple[int, int, int]:
        """Count what a call does before v is sent, to choose its rows. Return (kernel launches, gathers of all ranks,
        waits of the host for the device).

        Args:
            kind: the kind of attention call.
            tiles: number of tiles of a card.
        """
        return 0, 0, 0

    def agrees(self) -> bool:
        """Return True if ranks gather decisions, once in each call of the model whose tensors are coded, and wait for
        them."""
        return False

    def kinds_of_steps(self, case: Case) -> list[dict[CallKind, float]]:
        """Return, for every step, the share of its attention calls that is of each kind.

        Args:
            case: the run, with its number of steps.
        """
        return [{WHOLE: 1.0}] * case.steps

    def state_bytes(self, topology: Topology, layout: Layout, work: AttentionWork) -> list[Mapping[str, int]]:
        """Return the bytes that one layer keeps between calls on each rank of a Ulysses group, including what is in
        flight between them.

        Each rank's mapping has fields of `RankMemory` as keys. It is only asked for groups of several ranks.

        Args:
            topology: the ranks of the group.
            layout: the tokens and heads of each rank in the call.
            work: the sizes of one attention call.
        """
        return [{} for _ in range(topology.size)]

    @staticmethod
    def hold_at(codec: Any, kind: CallKind) -> None:
        """Make every later call of a codec one of the given kind, as far as possible, so that a benchmark can time it.

        A call that follows no other is always whole.

        Args:
            codec: a rank's codec, which is changed.
            kind: the kind of attention calls.
        """

    @staticmethod
    def agree(codec: Any) -> None:
        """Wait for the decisions that a codec's ranks gather from `begin_step` on. The next call would wait for them
        anyway; benchmarks time them apart."""

    @staticmethod
    def catch_up(codec: Any) -> None:
        """Receive what calls of a codec have sent without waiting for it. Benchmarks call it at the end of a
        measurement."""


def costs_of(config: Config) -> Costs:
    """Return the costs of the codec that the settings choose, as the planner counts them."""
    name = codec_name(config)
    found: type[Costs] = load(COSTS, name) if name in COSTS else Costs
    return found(config)


class VMajorCosts(Costs):
    """The costs of V-Major (CoCoDiff section III-D), which sends only the tokens whose v changed most."""

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the number of rows that each rank of a Ulysses group sends of each of q, k and v, by rank.

        Of the rows of a card that may stay unsent, the stable fraction does, in whole tokens.
        """
        if kind.whole:
            return layout.rows
        found = [float(rows) for rows in layout.rows]
        for ranks in topology.cards.values():
            held = sum(layout.may_stay[rank] for rank in ranks)
            for rank in ranks:
                found[rank] -= math.floor(held * kind.stable) * layout.may_stay[rank] / max(1, held)
        return found

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the bytes that each rank sends every other rank besides tensors: scores of its rows, and with a
        threshold their norms.

        With scoring by card the first tile sends its choice instead, a byte for each of the card's rows.
        """
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
        """Count what a call does before v is sent, to choose its rows: (kernel launches, gathers of all ranks, waits of
        the host). Whole calls choose nothing."""
        counted = tiles == 1 and self.settings.schedule != "threshold"  # see `Selection.build`
        launches = LAUNCHES_TO_CHOOSE[self.settings.scoring, self.settings.reference]
        return (0, 0, 0) if kind.whole else (launches, 1, 0 if counted else 1)

    def kinds_of_steps(self, case: Case) -> list[dict[CallKind, float]]:
        """Return, for every step, its kind of attention calls with the share 1: whole, or with the schedule's fraction
        of tokens unsent."""
        schedule, found = Schedule.of(self.settings), []
        for step in range(case.steps):
            part = schedule.stable_fraction(step, case.steps)
            selective = CallKind(stable=case.stable if part is None else part)
            found.append({WHOLE if schedule.is_full(step, case.steps) else selective: 1.0})
        return found

    def state_bytes(self, topology: Topology, layout: Layout, work: AttentionWork) -> list[Mapping[str, int]]:
        """Return the bytes that one layer keeps between calls on each rank of a Ulysses group, exactly.

        A cache has all received tokens for the rank's own heads, of q, k and v. The reference has v at the scored rows.
        With scoring by source these are the rank's image tokens with all heads; by card, on the card's first tile, the
        card's image tokens with the heads of that tile's plane.
        """
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
        """Make every later call of the codec whole, or one that leaves a fixed fraction of tokens unsent."""
        codec.schedule = codec.schedule.held_at(None if kind.whole else kind.stable)


class ResidualCosts(Costs):
    """The costs of codecs that send differences from a prediction, and of displaced exchange with or without them.

    Sizes of the lossless codec depend on the data; here they are those of a typical run.
    """

    steps_to_settle = 2  # in these there is no linear prediction, no comparison with it, and nothing in flight

    def sent_bytes(self, head_dim: int, itemsize: int, kind: CallKind = CODED) -> int:
        """Return the bytes on the wire of one token for one head, for each of q, k, v and the output. For the lossless
        codec it is what a typical run sends."""
        if self.settings.codec == "lossless":
            whole, share = head_dim * itemsize, TYPICAL_FIRST if kind.whole else TYPICAL
            return whole if itemsize != 2 else max(least_room(head_dim), math.ceil(share * whole))
        return width_of(head_dim, itemsize, bits_of(self.settings.codec, kind.whole, kind.fine))

    def agrees(self) -> bool:
        """Return True if ranks gather decisions, once in each call of the model whose tensors are coded: with a codec,
        and with `arrival: adaptive`."""
        return bool(self.settings.codec != "none" or self.settings.arrival == "adaptive")

    def kinds_of_steps(self, case: Case) -> list[dict[CallKind, float]]:
        """Return, for every step, the share of its attention calls that is of each kind.

        The first step is whole, the last ones are fine. Displaced tensors of the other steps are taken from a recorded
        run with `arrival: adaptive`; with `displaced` they are all tensors.
        """
        bits, recorded = BITS.get(self.settings.codec), decisions_of(case.config, case.steps, case.decisions)
        finer = CallKind(fine=bits is not None and bits < FINEST)
        displaced = "".join(TENSORS) if self.settings.arrival == "displaced" else ""
        sets_of_steps = without_seldom(recorded.over(case.steps)) if recorded else [{displaced: 1.0}] * case.steps
        found = [{WHOLE: 1.0}, *[{finer: 1.0}] * (case.steps - 1)]
        for step in range(1, case.steps - self.settings.fine_steps):
            found[step] = {CallKind(displaced=names): part for names, part in sets_of_steps[step].items()}
        return found

    def state_bytes(self, topology: Topology, layout: Layout, work: AttentionWork) -> list[Mapping[str, int]]:
        """Return the bytes that one layer keeps between calls on each rank of a Ulysses group, exactly: the tensors of
        `kept_cells`, and with displacement what is in flight.

        In flight, in the width of the wire, are a call's sent tensors until they have left, and received ones until the
        next call takes them.
        """
        if self.settings.codec == "lossless" and self.settings.arrival == "now" and work.itemsize != 2:
            return super().state_bytes(topology, layout, work)  # elements of this size are not coded
        S, H, width = sum(layout.rows), sum(layout.heads), self.sent_bytes(work.head_dim, work.itemsize)
        late = len(TENSORS) * work.batch * width if self.settings.arrival != "now" else 0
        return [
            {"reconstructions": kept_cells(self.settings, L, S, G, H) * work.cell, "in_flight": late * (L * H + S * G)}
            for L, G in zip(layout.rows, layout.heads, strict=True)
        ]

    @staticmethod
    def hold_at(codec: Lossless | Residual | Displaced, kind: CallKind) -> None:
        """Make every later call of the codec one of the given kind: whole, fine, or with fixed tensors displaced."""
        if isinstance(codec, Displaced):
            codec.fixed_kind = FixedKind(kind.whole, displaced=frozenset(kind.displaced))
        inner = codec.inner if isinstance(codec, Displaced) else codec
        if isinstance(inner, Residual):
            inner.fixed_kind = FixedKind(kind.whole, kind.fine)
        elif isinstance(inner, Lossless):
            inner.fixed_kind = FixedKind(kind.whole, share=TYPICAL_FIRST if kind.whole else TYPICAL)

    @staticmethod
    def agree(codec: Lossless | Residual | Displaced) -> None:
        """Wait for the decisions that the codec's ranks gather from `begin_step` on, if there are any."""
        if codec.notes is not None:
            codec.notes.hand_out()

    @staticmethod
    def catch_up(codec: Lossless | Residual | Displaced) -> None:
        """Receive what displaced calls have sent without waiting for it."""
        if isinstance(codec, Displaced):
            codec.catch_up()


def kept_cells(settings: Config, L: int, S: int, G: int, H: int) -> int:
    """Return how much a rank keeps of one layer's q, k, v and output, as tokens times heads summed over the kept
    tensors.

    With a codec these are the reconstructions of both ends. Without one they are the tensors that the last call
    received, and with `adaptive` the sender's sampled rows.

    Args:
        settings: the engine's settings.
        L: rows (tokens) of the rank.
        S: rows of all ranks.
        G: heads of the rank.
        H: heads of all ranks.
    """
    if settings.codec != "none":
        return len(TENSORS) * values_kept(settings) * (L * H + S * G)
    received, sampled = 3 * S * G + L * H, 3 * -(-L // SAMPLING) * H + -(-S // SAMPLING) * G
    return received + (sampled if settings.arrival == "adaptive" else 0)

"""V-Major (CoCoDiff section III-D): only tokens whose v changed are sent. For the others every rank uses the values
that were sent last.

Each rank keeps, for every layer, the q, k and v it received: whole sequences of its own heads (`LayerState.last`). A
selective step gathers the active rows, sends them through the same exchange that carries full ones, and writes what
arrives into these caches. All rows of the output are always sent. Scores compare v with a reference, v of the scored
rows (`LayerState.compared`).

Tokens are scored by source or by card. By source, each rank scores its own tokens over all heads before they are sent.
By card is the paper's order: all rows of v take the first phase. Then the first tile of every card scores the card's
tokens with its plane's heads, and the cards' selections are gathered while q and k are made. That needs TAPA's two
phases, so this module runs them itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from cocodiff.attention.stateful import StatefulCall, StatefulCodec
from cocodiff.attention.v_major.selection import Cards, DriftNotes, Schedule, Selection, scored_blocks
from cocodiff.comm.transport import LaneFuture, RankContext
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.exchange.codec import WHOLE, CallKind, StateBytes, StepInfo, StepKinds, StepNotes, TensorSets
from cocodiff.exchange.exchange import Exchange
from cocodiff.exchange.messages import BlockSet, Payload
from cocodiff.exchange.outgoing import OUTPUT, Encoded, Outgoing, TensorFuture
from cocodiff.exchange.transfer import Transfer, arriving_whole
from cocodiff.kernels import Rows
from cocodiff.topology import Topology
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Block

# Launches that choose rows, by `scoring` and `reference`: kernels, a copy to the host, one of the rank's own part
# of what is gathered (tests/attention/test_launches.py counts them).
LAUNCHES_TO_CHOOSE = {("source", "prev"): 6, ("source", "sent"): 6, ("card", "prev"): 8, ("card", "sent"): 9}


class VMajor(StatefulCodec):
    """The codec that sends active tokens only. On one rank nothing is sent, and nothing is selected."""

    agrees = False
    steps_to_settle = 0

    def __init__(self, settings: Config, exchange: Exchange | None = None, everyone: RankContext | None = None) -> None:
        """Create the codec.

        Args:
            settings: the schedule (see `Schedule.of`), and:

                scoring    "source": each rank scores its own tokens over all heads before they are sent;
                           "card": after v's first phase the card's first tile scores the card's tokens (TAPA only);
                reference  "prev": v at the call before;
                           "sent": v as it was last sent.
        """
        super().__init__(settings, exchange, everyone)
        self.schedule, self.reference = Schedule.of(settings), settings.reference
        self.drift = DriftNotes()
        self.transfer = SourceCall if settings.scoring == "source" else CardCall
        self._cards: dict[tuple[Layout, int, torch.device], Cards] = {}

    def begin_step(self, step_info: StepInfo) -> None:
        if step_info.steps is None and self._exchange is not None:
            raise UserError("V-Major needs to know how many steps run: parallelize(..., steps=N)")
        if step_info.run != self.step_info.run:
            self.drift.sync_to_host()
        super().begin_step(step_info)

    def report(self) -> Mapping[int, StepNotes]:
        return self.drift.by_step()

    def forget_report(self) -> None:
        super().forget_report()
        self.drift.clear()

    @property
    def fraction(self) -> float | None:
        """The stable fraction r(t) of this step; None if a threshold decides."""
        return self.schedule.stable_fraction(self.step_info.step, self.step_info.steps or 0)

    @property
    def columns(self) -> int:
        """The number of values that decide on a token: its change, and for a threshold its norm."""
        return 2 if self.schedule.kind == "threshold" else 1

    def cards(self, layout: Layout, batch: int, device: torch.device) -> Cards:
        """Return the tokens of every card that may stay, computed once for each layout, batch size and device."""
        assert self._exchange is not None, "one rank alone selects nothing"
        key, by_card = (layout, batch, device), self.transfer is CardCall
        if key not in self._cards:
            arguments = self._exchange.topology, layout, batch, self.columns, device, by_card, self._exchange.rank
            self._cards[key] = Cards.build(*arguments)
        return self._cards[key]

    # For plans and recordings -----------------------------------------------------------------------------------------

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the rows that every rank sends. Of the rows that may stay on a card, the stable fraction does, in
        whole tokens."""
        if kind.whole:
            return layout.rows
        found = [float(rows) for rows in layout.rows]
        for ranks in topology.cards.values():
            held = sum(layout.may_stay[rank] for rank in ranks)
            for rank in ranks:
                found[rank] -= math.floor(held * kind.stable) * layout.may_stay[rank] / max(1, held)
        return found

    def gathered(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the bytes that every rank additionally sends: scores of its rows, and with a threshold their norms.

        With scoring by card the first tile sends its choice, a byte for each of the card's rows.
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
        counted = tiles == 1 and self.settings.schedule != "threshold"  # see `Selection.build`
        launches = LAUNCHES_TO_CHOOSE[self.settings.scoring, self.settings.reference]
        return (0, 0, 0) if kind.whole else (launches, 1, 0 if counted else 1)

    def kinds_of_steps(self, steps: int, stable: float, displaced: TensorSets) -> StepKinds:
        found = StepKinds()
        for step in range(steps):
            part = self.schedule.stable_fraction(step, steps)
            selective = CallKind(stable=stable if part is None else part)
            found.append({WHOLE if self.schedule.is_full(step, steps) else selective: 1.0})
        return found

    def state_bytes(self, topology: Topology, layout: Layout, batch: int, head_dim: int, itemsize: int) -> StateBytes:
        """Return the bytes that a layer keeps, exactly.

        Received: all tokens for the rank's own heads. Reference: v at the scored rows. With scoring by source these are
        the rank's image tokens with all heads; by card, on the card's first tile, the card's image tokens with the
        heads of that tile's plane.
        """
        found, cell, image = StateBytes(), batch * head_dim * itemsize, sum(layout.may_stay)
        for rank, heads in enumerate(layout.heads):
            rows, scored_heads = layout.may_stay[rank], sum(layout.heads)
            if self.settings.scoring == "card":
                card, of_plane = scored_blocks(topology, rank)
                rows = sum(layout.may_stay[other] for other in card) if card[0] == rank else 0
                scored_heads = sum(layout.heads[other] for other in of_plane)
            kept = {"image_cache": 3 * image * heads, "reference_cache": rows * scored_heads}
            kept["text_cache"] = 3 * (sum(layout.rows) - image) * heads
            found.append({name: cells * cell for name, cells in kept.items()})
        return found

    def hold_at(self, kind: CallKind) -> None:
        self.schedule = self.schedule.held_at(None if kind.whole else kind.stable)


# One call, for both kinds of scoring ----------------------------------------------------------------------------------


class SelectiveCall(StatefulCall, ABC):
    """An attention call of V-Major. Subclasses score.

    An order has to send v before or together with q and k, because it decides which of their rows are sent.
    """

    _codec: VMajor
    full = True  # True if all tokens are sent; set by `begin`

    @abstractmethod
    def selection(self) -> Selection:
        """Return the rows that are sent in a selective call, once they are chosen."""

    def open(self, tensors_BLHD: Mapping[str, Tensor]) -> None:
        """Begin the call. Raise RuntimeError if an order sends q or k before v: all rows of these would be sent, and
        only some of v."""
        if "v" not in tensors_BLHD:
            raise RuntimeError("V-Major chooses tokens by v: an order has to send v before or together with q and k")
        super().open(tensors_BLHD)

    def begin(self, like_BLHD: Tensor) -> None:
        codec, state, step = self._codec, self.state, self._codec.step_info.step
        codec.drift.ensure_step(step)
        state.begin(like_BLHD, self.layout, codec.step_info, anew=state.last_step != step - 1)
        self.full = not state.follows or codec.schedule.is_full(step, codec.step_info.steps or 0)

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        if self.full or OUTPUT in tensors:
            return super().encode(tensors, rows, ranks)
        selection = self.selection()
        own = selection.of_rank[self.rank]
        return Encoded([self.chosen_rows(name, x, own) for name, x in tensors.items()], selection.layout)

    def chosen_rows(self, name: str, x_BLHD: Tensor, index_N: Tensor) -> Rows:
        """Return the chosen rows, with the batch flattened: [1, N, H, D]. They are gathered when they are packed."""
        return Rows(x_BLHD.flatten(0, 1), index_N)

    def decode(self, received: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        """Write q, k and v to the caches: all rows, or in one launch the rows that arrived. Return the caches."""
        caches = self.state.last
        if OUTPUT in received:
            return super().decode(received, rows, ranks)
        if self.full:
            caches |= received
        else:
            here = [x_1NGD[0, rows] for x_1NGD in received.values()]
            into = [caches[name].flatten(0, 1) for name in received]
            self.kernels.scatter_rows(here, self.selection().arriving[rows], into)
        return [caches[name] for name in received]

    def renew_reference(self, v_BNHD: Tensor) -> None:
        """Make v the reference at a full step. It is scored if there is a reference to compare with."""
        if "v" in self.state.compared:
            self.score(v_BNHD)
        else:
            self.state.compared["v"] = v_BNHD.clone(memory_format=torch.contiguous_format)

    def score(self, v_BNHD: Tensor) -> Tensor:
        """Return the change and norm of every token against the reference, float32 [2, B, N], and record them in the
        profile.

        At full steps, and if the reference is "prev", the same pass makes v the reference.
        """
        with self.exchange.trace.span("score", "select", self.layer):
            renew = self.full or self._codec.reference == "prev"
            scores_2BN = self.kernels.l1_score(v_BNHD, self.state.compared["v"], renew)
        self._codec.drift.scored(self._codec.step_info.step, scores_2BN)
        return scores_2BN

    def choose_tokens(self, scores: Tensor, cards: Cards) -> Tensor:
        """Return which of this rank's candidates are sent, see `Kernels.choose`."""
        schedule = self._codec.schedule
        return self.kernels.choose(scores.flatten(), cards.among, self._codec.fraction, schedule.threshold)

    def gather(self, own_N: Tensor, parts_N: Sequence[Tensor]) -> None:
        """Gather every rank's scores or selection, on the calling lane. The bytes count as bytes of attention."""
        with self.exchange.trace.span("gather selection", "select", self.layer):
            self.exchange.transport.world.all_gather(own_N, list(parts_N)).wait()
        for peer in range(len(parts_N)):
            self.exchange.count(peer, own_N.nbytes)

    def select(self, active_T: Tensor, batch: int, cards: Cards, noted: Sequence[int]) -> Selection:
        """Return the rows that are sent, and record the choice among the tokens of some ranks in the profile."""
        codec, layout = self._codec, self.layout
        selection = Selection.build(active_T, layout, batch, cards, codec.fraction, self.kernels)
        stable = sum(batch * layout.rows[rank] - len(selection.of_rank[rank]) for rank in noted)
        codec.drift.chosen(codec.step_info.step, batch * sum(layout.may_stay[rank] for rank in noted), stable)
        return selection


# Scoring by source ----------------------------------------------------------------------------------------------------


class SourceCall(SelectiveCall):
    """An attention call in which every rank scores its own tokens. Scores are gathered while q and k are made."""

    chosen: LaneFuture[Selection] | None = None

    def post(self, tensors_BLHD: Mapping[str, Tensor]) -> dict[str, TensorFuture]:
        """Start sending tensors. Before v, score this rank's tokens; in a selective call in the background."""
        if "v" in tensors_BLHD:
            own_BNHD = tensors_BLHD["v"][:, self.layout.may_stay_slices[self.rank]]
            if self.full:
                self.renew_reference(own_BNHD)
            else:
                self.chosen = self.exchange.transport.control.submit(self._choose, own_BNHD)
        return super().post(tensors_BLHD)

    def selection(self) -> Selection:
        assert self.chosen is not None, "v is sent before or together with what depends on it"
        return self.chosen.wait()

    def _choose(self, own_BNHD: Tensor) -> Selection:
        """Score, gather all ranks' scores, and choose the rows to send."""
        batch, device, columns = len(own_BNHD), own_BNHD.device, self._codec.columns
        sent = self.score(own_BNHD)[:columns].flatten()
        sizes = [columns * batch * tokens for tokens in self.layout.may_stay]
        of_all = sent.new_empty(sum(sizes))
        self.gather(sent, of_all.split(sizes))
        cards = self._codec.cards(self.layout, batch, device)
        return self.select(self.choose_tokens(of_all, cards), batch, cards, [self.rank])

    def chosen_rows(self, name: str, x_BLHD: Tensor, index_N: Tensor) -> Rows:
        """Return the chosen rows. If the reference is "sent", packing v also writes the chosen rows to the
        reference."""
        if name != "v" or self._codec.reference != "sent":
            return super().chosen_rows(name, x_BLHD, index_N)
        reference_BNHD, kept_N = self.state.compared["v"], self.selection().kept[self.rank]
        return Rows(x_BLHD.flatten(0, 1), index_N, reference_BNHD.flatten(0, 1), kept_N)


# Scoring by card ------------------------------------------------------------------------------------------------------


class CardCall(SelectiveCall):
    """An attention call in which v decides, between its two phases, which rows of q, k and v are sent."""

    def begin(self, like_BLHD: Tensor) -> None:
        self.chosen: Future[LaneFuture[Selection]] = Future()
        super().begin(like_BLHD)

    def post(self, tensors_BLHD: Mapping[str, Tensor]) -> dict[str, TensorFuture]:
        """Start sending tensors: v alone, with the choice between its two phases."""
        others = {name: x_BLHD for name, x_BLHD in tensors_BLHD.items() if name != "v"}
        if "v" not in tensors_BLHD:
            return super().post(others)
        outgoing, lanes = Outgoing(self, {"v": tensors_BLHD["v"]}), self.exchange.lanes
        first, second = self.exchange.plans["tapa"]  # also those without messages for this rank
        swapped = lanes["sibling"].submit(partial(self.exchange.phase, first, outgoing.blocks), outgoing)
        chosen = partial(self.choose, swapped, outgoing)
        v = arriving_whole(outgoing, lanes["plane"].submit(partial(self.exchange.last_phase, second, chosen), outgoing))
        return v | super().post(others) if others else v

    def encode(self, tensors: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> Encoded:
        """Return the payloads. v is sent alone, with all rows in its first phase."""
        encode = Transfer.encode if "v" in tensors else SelectiveCall.encode
        return encode(self, tensors, rows, ranks)

    def selection(self) -> Selection:
        return self.chosen.result().wait()

    def choose(self, swapped: LaneFuture[BlockSet], outgoing: Outgoing) -> BlockSet:
        """Wait for v's first phase, and return the blocks that take the second one."""
        on_card = swapped.wait()
        if not self.full:
            active = self._active_rows(on_card)
            outgoing.layout = active.layout
            return active
        scored_BNHD = self._scored_rows(on_card)
        if scored_BNHD is not None:
            self.renew_reference(scored_BNHD)
        return on_card

    def _scored_rows(self, on_card: BlockSet) -> Tensor | None:
        """Return the card's tokens that may stay, with the heads of its first tile's plane, [B, N, H_k, D]; None on
        other tiles."""
        card, heads = scored_blocks(self.exchange.topology, self.rank)
        if card[0] != self.rank:
            return None
        layout, parts, places = self.layout, list[Tensor](), list[Tensor]()
        some = dense(on_card.blocks[Block(card[0], heads[0])][0])
        sizes = [layout.may_stay[rank] for rank in card], [layout.heads[head] for head in heads]
        scored_BNHD = some.new_empty(len(some), *map(sum, sizes), some.shape[-1])
        for rank, rows_BNHD in zip(card, scored_BNHD.split(sizes[0], 1), strict=True):
            places += rows_BNHD.split(sizes[1], 2)
            parts += [dense(on_card.blocks[Block(rank, head)][0])[:, layout.may_stay_slices[rank]] for head in heads]
        self.kernels.unpack(parts, places)
        return scored_BNHD

    def _active_rows(self, on_card: BlockSet) -> BlockSet:
        """Choose rows, and return the blocks of v with active rows for the second phase."""
        try:
            self.chosen.set_result(self.exchange.transport.control.submit(self._choose, on_card))
        except BaseException as error:
            self.chosen.set_exception(error)
            raise
        selection, topology = self.selection(), self.exchange.topology
        served = topology.served_planes[self.rank]
        blocks = {
            block: [self.chosen_rows("v", dense(x), selection.of_rank[block.rows]) for x in parts]
            for block, parts in on_card.blocks.items()
            if topology.places[block.heads].plane in served
        }
        return BlockSet(blocks, selection.layout, on_card.whole)

    def _choose(self, on_card: BlockSet) -> Selection:
        """Score this card's tokens, gather all cards' selections, and return the rows to send."""
        codec, layout = self._codec, self.layout
        some = dense(next(iter(on_card.blocks.values()))[0])
        cards, scored_BNHD = codec.cards(layout, len(some), some.device), self._scored_rows(on_card)
        # At last a 1 for the rows that are always sent, see `Selection.build`.
        active_T = torch.ones(len(some) * sum(layout.may_stay) + 1, dtype=torch.uint8, device=some.device)
        own_N, noted = active_T[:0], list[int]()
        if scored_BNHD is not None:
            own_N = self.choose_tokens(self.score(scored_BNHD), cards)[:-1]
            noted, _ = scored_blocks(self.exchange.topology, self.rank)
            if codec.reference == "sent":
                chosen_BN11 = own_N.view(torch.bool).view(len(some), -1, 1, 1)
                reference_BNHD = self.state.compared["v"]
                torch.where(chosen_BN11, scored_BNHD, reference_BNHD, out=reference_BNHD)
        self.gather(own_N, active_T[:-1].split([len(some) * tokens for tokens in cards.tokens]))
        return self.select(active_T, len(some), cards, noted)


def dense(x_BLHD: Payload) -> Tensor:
    """Return a payload as it is, once it is checked to be a tensor with all rows, and not `Rows` that were chosen.

    Blocks of v are such tensors until TAPA's first phase is over.
    """
    assert isinstance(x_BLHD, Tensor), "these rows were chosen already"
    return x_BLHD

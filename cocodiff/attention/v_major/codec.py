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
from cocodiff.comm.lane import LaneFuture
from cocodiff.comm.transport import RankContext
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

# Number of launches on the device that choose the rows to send, by the settings `scoring` and `reference`: kernels, a
# copy to the host, one of the rank's own part of what is gathered (tests/attention/test_launches.py counts them).
LAUNCHES_TO_CHOOSE = {("source", "prev"): 6, ("source", "sent"): 6, ("card", "prev"): 8, ("card", "sent"): 9}


class VMajor(StatefulCodec):
    """The codec that sends only the tokens whose v changed most (V-Major). For others ranks use the values sent last.

    On one rank nothing is sent, and nothing is selected.
    """

    agrees = False
    steps_to_settle = 0

    def __init__(self, settings: Config, exchange: Exchange | None = None, everyone: RankContext | None = None) -> None:
        """Create the codec of one rank.

        Args:
            settings: the engine's settings. `scoring` is "source" (each rank scores its own tokens over all heads
                before they are sent) or "card" (after v's first phase the card's first tile scores the card's tokens;
                TAPA only). Scores compare v with its `reference`: "prev" is v at the call before, "sent" is v as it was
                last sent. For the schedule see `Schedule`.
            exchange: the exchange of this rank's Ulysses group; None for one rank, or for questions that need no
                messages.
            everyone: this rank among all ranks that share the sequence; None for one rank.
        """
        super().__init__(settings, exchange, everyone)
        self.schedule, self.reference = Schedule(settings), settings.reference
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
        """The fraction of tokens that stay unsent at the current step, r(t) in the paper; None if a threshold
        decides."""
        return self.schedule.stable_fraction(self.step_info.step, self.step_info.steps or 0)

    @property
    def columns(self) -> int:
        """The number of values of each token that decide if it is sent: 1 (its change), or with a threshold 2 (also its
        norm)."""
        return 2 if self.settings.schedule == "threshold" else 1

    def cards(self, layout: Layout, batch: int, device: torch.device) -> Cards:
        """Return the places of the tokens that may stay unsent, card by card. They are computed once for each set of
        arguments.

        Args:
            layout: the tokens and heads of every rank in the call.
            batch: rows of the batch.
            device: the device that index tensors are on.
        """
        assert self._exchange is not None, "one rank alone selects nothing"
        key, by_card = (layout, batch, device), self.transfer is CardCall
        if key not in self._cards:
            arguments = self._exchange.topology, layout, batch, self.columns, device, by_card, self._exchange.rank
            self._cards[key] = Cards.build(*arguments)
        return self._cards[key]

    # For plans and recordings -----------------------------------------------------------------------------------------

    def rows_sent(self, topology: Topology, layout: Layout, kind: CallKind) -> Sequence[float]:
        """Return the mean number of rows of q, k and v that each rank sends in a call, by rank: for plans.

        Of the rows of a card that may stay unsent, the fraction `kind.stable` does, in whole tokens.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads.
            kind: the kind of attention calls.
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
        """Return the bytes that each rank sends every other rank in a call to agree on the tokens to send, by rank: for
        plans.

        Scoring by source these are the scores of its rows, and with a threshold also their norms. Scoring by card the
        card's first tile sends its choice, a byte for each of the card's rows. They are those of one row of the batch.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads.
            kind: the kind of attention calls.
        """
        if kind.whole:
            return super().gathered(topology, layout, kind)
        if self.settings.scoring == "source":
            return [4.0 * self.columns * rows for rows in layout.may_stay]
        of_cards = [topology.cards[place.card] for place in topology.places]
        return [
            float(sum(layout.may_stay[one] for one in ranks) * (min(ranks) == rank))
            for rank, ranks in enumerate(of_cards)
        ]

    def choosing(self, kind: CallKind, tiles: int) -> tuple[int, int, int]:
        counted = tiles == 1 and self.columns == 1  # see `Selection.build`
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
        """Return the bytes that a layer keeps on every rank between calls, exactly: one dictionary a rank.

        "image_cache" and "text_cache" are q, k and v as they were received: tokens that may stay unsent, and other
        tokens, for the rank's own heads. "reference_cache" is v that scores compare with. Scoring by source it has the
        rank's image tokens with all heads. Scoring by card it has, on the card's first tile, the card's image tokens
        with the heads of that tile's plane.

        Args:
            topology: the ranks of the Ulysses group.
            layout: their tokens and heads.
            batch: rows of the batch.
            head_dim: channels of a head.
            itemsize: bytes of an element.
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
    """The base of V-Major's attention calls. Subclasses differ in where tokens are scored.

    An order has to send v before or together with q and k, because v decides which rows of all three are sent.
    """

    _codec: VMajor
    full = True  # True if all tokens are sent; set by `begin`

    @abstractmethod
    def selection(self) -> Selection:
        """Wait until the rows to send were chosen, and return them. For calls in which not all tokens are sent."""

    def open(self, tensors_BLHD: Mapping[str, Tensor]) -> None:
        """Begin the call by the first tensors that are sent.

        Raise RuntimeError if v is not among them: all rows of q or k would then be sent, and only some of v.

        Args:
            tensors_BLHD: the tensors, by name.
        """
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
        """Return chosen rows of a tensor, with the batch flattened: [1, N, H, D]. They are copied only when they are
        packed.

        Args:
            name: "q", "k" or "v".
            x_BLHD: the tensor with all of a rank's rows.
            index_N: indices of the N chosen rows in the flattened [B * L].
        """
        return Rows(x_BLHD.flatten(0, 1), index_N)

    def decode(self, received: Mapping[str, Tensor], rows: slice, ranks: Sequence[int]) -> list[Tensor]:
        """Write received rows of q, k and v to the layer's kept tensors, in one launch. Return these, with all rows,
        [B, S, G, D] each.

        If all rows were sent, the received tensors become the kept ones. Attention's output is returned as it is.

        Args:
            received: the received payloads, by name.
            rows: the rows of the payloads that have arrived since the last call.
            ranks: the ranks whose rows these are.
        """
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
        """Make v the reference of its tokens, in a call that sends all tokens.

        Later calls send the tokens whose v differs most from it. If there was a reference already, the change from
        it is added to the drift profile (how far v moves from step to step).

        Args:
            v_BNHD: v of the N tokens that this rank scores.
        """
        if "v" in self.state.compared:
            self.score(v_BNHD)
        else:
            self.state.compared["v"] = v_BNHD.clone(memory_format=torch.contiguous_format)

    def score(self, v_BNHD: Tensor) -> Tensor:
        """Return how much every token's v differs from the reference, and the reference's norm: float32 [2, B, N]. Add
        both to the drift profile.

        In calls that send all tokens, and if the reference is "prev", the same pass makes v the new reference.

        Args:
            v_BNHD: v of the N tokens that this rank scores.
        """
        with self.exchange.trace.span("score", "select", self.layer):
            renew = self.full or self._codec.reference == "prev"
            scores_2BN = self.kernels.l1_score(v_BNHD, self.state.compared["v"], renew)
        self._codec.drift.scored(self._codec.step_info.step, scores_2BN)
        return scores_2BN

    def choose_tokens(self, scores: Tensor, cards: Cards) -> Tensor:
        """Return which of the tokens that this rank chooses among are sent: uint8 [tokens + 1], see
        `kernels.residual.choose`.

        Args:
            scores: their scores, and with a threshold their norms.
            cards: the places of the tokens.
        """
        codec = self._codec
        return self.kernels.choose(scores.flatten(), cards.among, codec.fraction, codec.settings.threshold)

    def gather(self, own_N: Tensor, parts_N: Sequence[Tensor]) -> None:
        """Gather every rank's scores or choice, and wait for them. Their bytes count as attention's. A thread that
        sends calls it.

        Args:
            own_N: this rank's part.
            parts_N: the memory for every rank's part, which is filled.
        """
        with self.exchange.trace.span("gather selection", "select", self.layer):
            self.exchange.transport.world.all_gather(own_N, list(parts_N)).wait()
        for peer in range(len(parts_N)):
            self.exchange.count(peer, own_N.nbytes)

    def select(self, active_T: Tensor, batch: int, cards: Cards, noted: Sequence[int]) -> Selection:
        """Return the rows that all ranks send, and add the choice to the drift profile.

        Args:
            active_T: uint8, 1 for tokens to send, see `Selection.build`.
            batch: rows of the batch.
            cards: the places of the tokens.
            noted: the ranks whose tokens this rank adds to the profile.
        """
        codec, layout = self._codec, self.layout
        selection = Selection.build(active_T, layout, batch, cards, codec.fraction, self.kernels)
        stable = sum(batch * layout.rows[rank] - len(selection.of_rank[rank]) for rank in noted)
        codec.drift.chosen(codec.step_info.step, batch * sum(layout.may_stay[rank] for rank in noted), stable)
        return selection


# Scoring by source ----------------------------------------------------------------------------------------------------


class SourceCall(SelectiveCall):
    """An attention call in which every rank scores its own tokens. Scores are gathered while q and k are computed."""

    chosen: LaneFuture[Selection] | None = None  # the rows to send; None before v is sent, or if all are sent

    def post(self, tensors_BLHD: Mapping[str, Tensor]) -> dict[str, TensorFuture]:
        """Start sending tensors, and return their futures by name. Before v is sent, score this rank's tokens.

        In calls that send only some tokens, scoring and choosing run in the background.

        Args:
            tensors_BLHD: the tensors, by name.
        """
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
        """Score this rank's tokens, gather all ranks' scores, and return the rows to send. A background thread runs it.

        Args:
            own_BNHD: v of this rank's N tokens that may stay unsent.
        """
        batch, device, columns = len(own_BNHD), own_BNHD.device, self._codec.columns
        sent = self.score(own_BNHD)[:columns].flatten()
        sizes = [columns * batch * tokens for tokens in self.layout.may_stay]
        of_all = sent.new_empty(sum(sizes))
        self.gather(sent, of_all.split(sizes))
        cards = self._codec.cards(self.layout, batch, device)
        return self.select(self.choose_tokens(of_all, cards), batch, cards, [self.rank])

    def chosen_rows(self, name: str, x_BLHD: Tensor, index_N: Tensor) -> Rows:
        """Return chosen rows of a tensor, see `SelectiveCall.chosen_rows`.

        If the reference is "sent", packing the rows of v also writes them to the reference.

        Args:
            name: "q", "k" or "v".
            x_BLHD: the tensor with all of this rank's rows.
            index_N: indices of the N chosen rows in the flattened [B * L].
        """
        if name != "v" or self._codec.reference != "sent":
            return super().chosen_rows(name, x_BLHD, index_N)
        reference_BNHD, kept_N = self.state.compared["v"], self.selection().kept[self.rank]
        return Rows(x_BLHD.flatten(0, 1), index_N, reference_BNHD.flatten(0, 1), kept_N)


# Scoring by card ------------------------------------------------------------------------------------------------------


class CardCall(SelectiveCall):
    """An attention call in which the first tile of each card scores the card's tokens, between TAPA's two phases of
    sending v.

    The scores decide which rows of v's second phase, and of q and k, are sent.
    """

    def begin(self, like_BLHD: Tensor) -> None:
        self.chosen: Future[LaneFuture[Selection]] = Future()
        super().begin(like_BLHD)

    def post(self, tensors_BLHD: Mapping[str, Tensor]) -> dict[str, TensorFuture]:
        """Start sending tensors, and return their futures by name. v is sent in TAPA's two phases, apart from q and k.

        First the tiles of a card swap all rows of v. Then the rows of tokens whose v changed are chosen. Only these go
        on to other cards, and q and k send the same rows. A call that sends all tokens chooses nothing.

        Args:
            tensors_BLHD: the tensors, by name.
        """
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
        """Return the payloads to send. v has all its rows, since they are chosen after its first phase; q and k have
        the chosen ones.

        Args:
            tensors: the tensors to send, by name.
            rows: the place of the given rows.
            ranks: the ranks that blocks are sent to.
        """
        encode = Transfer.encode if "v" in tensors else SelectiveCall.encode
        return encode(self, tensors, rows, ranks)

    def selection(self) -> Selection:
        return self.chosen.result().wait()

    def choose(self, swapped: LaneFuture[BlockSet], outgoing: Outgoing) -> BlockSet:
        """Choose the rows of q, k and v to send, once TAPA's first phase of v is over. Return v's blocks for its second
        phase.

        They have the chosen rows; q and k wait for the same choice (`selection`). In a call that sends all tokens
        nothing is chosen, and the blocks are as they came. v of the tokens that this rank scores is then kept, as the
        reference that later calls' scores compare with.

        Args:
            swapped: the future of the blocks that this rank holds after the first phase.
            outgoing: v on its way; its layout is set to that of the chosen rows.
        """
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
        """Return the part of v by which this card's tokens are scored: [B, N, heads, D]; None if another tile scores.

        The card's first tile scores for all its tiles, by how far v has moved from its reference. N are the tokens of
        all these tiles that may stay unsent. The heads are those of all ranks in the first tile's plane.

        Args:
            on_card: the blocks of v that this rank holds after TAPA's first phase, between the tiles of a card.
        """
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
        """Start the choice of rows on the control lane, wait for it, and return the blocks of v for the second phase,
        with the chosen rows only.

        `self.chosen` gets the choice, or the error; q and k wait for it. Only blocks for heads of planes that this rank
        serves are returned.

        Args:
            on_card: the blocks of v that this rank holds after the first phase.
        """
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
        """Score this card's tokens, gather all cards' choices, and return the rows to send. A background thread runs
        it.

        Args:
            on_card: the blocks of v that this rank holds after the first phase.
        """
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
    """Return a block's payload as it is. Assert that it is a tensor with all rows, and not `Rows` that were chosen
    already.

    Blocks of v are such tensors until TAPA's first phase is over.
    """
    assert isinstance(x_BLHD, Tensor), "these rows were chosen already"
    return x_BLHD

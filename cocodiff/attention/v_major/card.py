"""V-Major's scoring by card, the paper's own order (CoCoDiff section III-D): v's first phase is whole; then the first
tile of every card scores the card's tokens with its plane's heads, and the cards' selections are gathered while q and k
are made. It needs TAPA's two phases, so it runs them itself."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from cocodiff.attention.strategy import Site
from cocodiff.attention.v_major.call import SelectiveCall, SelectiveTransfer, Selector, SiteCache, travelling_rows
from cocodiff.attention.v_major.selection import Selection, scored_blocks, staying
from cocodiff.comm.transport import LanePending
from cocodiff.routes.plans import Block, Phase
from cocodiff.topology.layout import Layout
from cocodiff.wire.arriving import Arriving
from cocodiff.wire.blocks import BlockSet, Payload, Target
from cocodiff.wire.coded import CodedCall, Encoded
from cocodiff.wire.exchange import Exchange
from cocodiff.wire.outgoing import TensorsToHeads
from cocodiff.wire.transfer import arriving_whole


class CardTransfer(SelectiveTransfer):
    """v goes alone, through its two phases with the choice between them."""

    coded: CardCall

    def __init__(self, coding: Selector, exchange: Exchange, layout: Layout, site: Site, cache: SiteCache) -> None:
        super().__init__(exchange, CardCall(coding, exchange, layout, site, cache), site.kind)

    def post(self, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> dict[str, Arriving]:
        others = {name: x_BLHD for name, x_BLHD in tensors_BLHD.items() if name != "v"}
        if "v" not in tensors_BLHD:
            return super().post(others, wait_next)
        outgoing, lanes = WholeFirst(self.end, {"v": tensors_BLHD["v"]}), self.exchange.lanes
        first, second = self.exchange.both_phases()
        swapped = lanes["sibling"].submit(partial(self.exchange.phase, first, None), outgoing)
        landed = lanes["plane"].submit(partial(self.coded.second_phase, second, swapped), outgoing)
        v = arriving_whole(outgoing, landed)
        return v | super().post(others, False) if others else v


class CardCall(SelectiveCall):
    """One attention call whose v decides between its two phases what of q, k and v travels on."""

    def __init__(self, coding: Selector, exchange: Exchange, layout: Layout, site: Site, cache: SiteCache) -> None:
        super().__init__(coding, exchange, layout, site, cache)
        self.chosen: Future[LanePending[Selection]] = Future()

    def selection(self) -> Selection:
        return self.chosen.result().wait()

    def second_phase(self, phase: Phase, swapped: LanePending[BlockSet], outgoing: TensorsToHeads) -> Target:
        on_card = swapped.wait()
        if self.full:
            self._update_at_full_step(on_card)
        else:
            on_card = self._active_rows(on_card)
            outgoing.layout = on_card.layout
        return self.exchange.last_phase(phase, outgoing, on_card)

    def _scored_rows(self, on_card: BlockSet) -> Tensor | None:
        """The card's image tokens with its first tile's plane's heads: on that tile, [B, N, H_k, D]; else None."""
        card, heads = scored_blocks(self.exchange.topology, self.coding.rank)
        if card[0] != self.coding.rank:
            return None
        rows = [
            torch.cat(
                [dense(on_card.blocks[Block(rank, head)][0])[:, self.layout.may_stay_slices[rank]] for head in heads], 2
            )
            for rank in card
        ]
        return torch.cat(rows, 1)

    def _update_at_full_step(self, on_card: BlockSet) -> None:
        scored_BNHD = self._scored_rows(on_card)
        if scored_BNHD is not None:
            if self.cache.reference is not None:
                self.score(scored_BNHD)
            self.update_reference(scored_BNHD, None)

    def _active_rows(self, on_card: BlockSet) -> BlockSet:
        """Scores, shares the selection, and leaves the active rows of v for the second phase."""
        try:
            self.chosen.set_result(self.coding.transport.control.submit(self._choose, on_card))
        except BaseException as error:
            self.chosen.set_exception(error)
            raise
        selection, topology = self.selection(), self.exchange.topology
        served = topology.served_planes[self.coding.rank]
        blocks = {
            block: [travelling_rows(dense(x), selection.of_rank[block.rows]) for x in parts]
            for block, parts in on_card.blocks.items()
            if topology.places[block.heads].plane in served
        }
        return BlockSet(blocks, selection.layout, on_card.whole)

    def _choose(self, on_card: BlockSet) -> Selection:
        coding, layout, topology = self.coding, self.layout, self.exchange.topology
        scored_BNHD = self._scored_rows(on_card)
        some = dense(next(iter(on_card.blocks.values()))[0])
        batch, own = len(some), torch.empty(0, dtype=torch.uint8, device=some.device)
        if scored_BNHD is not None:
            change_BN, norm_BN = self.score(scored_BNHD)
            active_BN = ~staying(change_BN, norm_BN, coding.fraction, coding.schedule.threshold, self.kernels)
            coding.drift.chosen(coding.moment.step, active_BN)
            self.update_reference(scored_BNHD, active_BN)
            own = active_BN.to(torch.uint8)
        scorers = [min(ranks) for ranks in topology.cards.values()]  # the first tile of every card
        cards = coding.cards(layout, own.device)
        of_scorer = dict(zip(scorers, cards.sizes, strict=True))
        sizes = [batch * of_scorer.get(rank, 0) for rank in range(len(layout.rows))]
        parts = list(own.new_empty(sum(sizes)).split_with_sizes(sizes))
        self.gather(own.flatten(), parts)
        active_BS = own.new_empty(batch, sum(layout.may_stay), dtype=torch.bool)
        of_cards_BN = torch.cat([parts[rank].view(batch, -1) for rank in scorers], 1)  # a launch for all cards
        active_BS[:, cards.all_S] = of_cards_BN.bool()
        return Selection.build(active_BS, layout, cards)


class WholeFirst(TensorsToHeads):
    """v, of which all rows travel in the first phase."""

    def encoded(self) -> Encoded:
        return CodedCall.encode(self.coded, self._tensors)


def dense(x_BLHD: Payload) -> Tensor:
    """A block of which all rows travel, as v's do in the first phase."""
    assert isinstance(x_BLHD, Tensor), "these rows were chosen already"
    return x_BLHD

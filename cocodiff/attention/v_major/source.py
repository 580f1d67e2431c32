"""V-Major's scoring by source: every rank scores its own tokens over all heads before they travel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cocodiff.attention.strategy import Site
from cocodiff.attention.v_major.call import SelectiveCall, SelectiveTransfer, Selector, SiteCache
from cocodiff.attention.v_major.selection import Selection
from cocodiff.comm.transport import LanePending
from cocodiff.kernels import Rows
from cocodiff.topology.layout import Layout, slices
from cocodiff.wire.arriving import Arriving
from cocodiff.wire.coded import Encoded
from cocodiff.wire.exchange import Exchange


class SourceTransfer(SelectiveTransfer):
    coded: SourceCall

    def __init__(self, coding: Selector, exchange: Exchange, layout: Layout, site: Site, cache: SiteCache) -> None:
        super().__init__(exchange, SourceCall(coding, exchange, layout, site, cache), site.kind)

    def post(self, tensors_BLHD: Mapping[str, Tensor], wait_next: bool) -> dict[str, Arriving]:
        if "v" in tensors_BLHD:
            self.coded.observe(tensors_BLHD["v"])
        return super().post(tensors_BLHD, wait_next)


class SourceCall(SelectiveCall):
    """Every rank scores its own tokens; scores are gathered while q and k are made; active rows travel in every
    phase."""

    chosen: LanePending[Selection] | None = None

    def observe(self, v_BLHD: Tensor) -> None:
        """Scores this rank's tokens, if it is a selective call in the background."""
        own_BNHD = v_BLHD[:, self.layout.may_stay_slices[self.coding.rank]]
        if not self.full:
            self.chosen = self.coding.transport.control.submit(self._choose, own_BNHD)
            return
        if self.cache.reference is not None:
            self.score(own_BNHD)
        self.update_reference(own_BNHD, None)

    def selection(self) -> Selection:
        assert self.chosen is not None, "v is sent before or together with what depends on it"
        return self.chosen.wait()

    def _choose(self, own_BNHD: Tensor) -> Selection:
        coding, layout, batch = self.coding, self.layout, len(own_BNHD)
        change_BN, norm_BN = self.score(own_BNHD)
        columns = 2 if coding.schedule.kind == "threshold" else 1
        sent = torch.stack([change_BN, norm_BN][:columns])
        parts = [sent.new_empty(columns, batch, tokens) for tokens in layout.may_stay]
        self.gather(sent, parts)
        of_all = torch.cat(parts, 2)
        cards, threshold = coding.cards(layout, of_all.device), coding.schedule.threshold
        active_BS = cards.active(of_all[0], of_all[-1], coding.fraction, threshold, self.kernels)
        coding.drift.chosen(coding.moment.step, active_BS[:, slices(layout.may_stay)[coding.rank]])
        return Selection.build(active_BS, layout, cards)

    def encode(self, tensors_BLHD: Mapping[str, Tensor]) -> Encoded:
        payloads, layout = super().encode(tensors_BLHD)
        if self.full or self.coding.reference != "sent" or "v" not in tensors_BLHD:
            return Encoded(payloads, layout)
        updating = [
            self.rows_updating_reference(rows) if name == "v" and isinstance(rows, Rows) else rows
            for name, rows in zip(tensors_BLHD, payloads, strict=True)
        ]
        return Encoded(updating, layout)

    def rows_updating_reference(self, v_KHD: Rows) -> Rows:
        """The chosen rows of v, of which those that may stay become their reference when they are packed."""
        reference_BNHD, chosen = self.cache.reference, self.layout.may_stay_slices[self.coding.rank]
        assert reference_BNHD is not None, "a selective step follows a full one"
        tokens, rows = reference_BNHD.shape[1], self.layout.rows[self.coding.rank]
        row_K = v_KHD.index_K % rows - chosen.start
        place_K = v_KHD.index_K // rows * tokens + row_K
        place_K[(row_K < 0) | (row_K >= tokens)] = -1  # what may not stay has no reference
        return Rows(v_KHD.source_RHD, v_KHD.index_K, reference_BNHD.flatten(0, 1), place_K)

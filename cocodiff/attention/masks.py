"""Which keys are attended to, in the order in which the exchange brings them."""

from __future__ import annotations

import torch
from torch import Tensor

from cocodiff.attention.strategy import LazyQKV
from cocodiff.topology.layout import Layout


def mask_in_rank_order(qkv: LazyQKV, layout: Layout) -> Tensor | None:
    """Which keys are attended to, for the sequence after the exchange, rank by rank in the layout's order:
    [B, 1, 1, S]; None for all."""
    if not qkv.masks:
        return None
    some_BT = next(iter(qkv.masks.values()))
    of_part = [
        qkv.masks.get(part.segment.name, some_BT.new_ones(len(some_BT), part.segment.tokens)) for part in layout.parts
    ]
    parts_BS = [
        mask_BT[:, part.slices[rank]]
        for rank in layout.in_sequence
        for mask_BT, part in zip(of_part, layout.parts, strict=True)
    ]
    return torch.cat(parts_BS, dim=1)[:, None, None]

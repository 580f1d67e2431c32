"""Which keys are attended to, in the order in which the exchange brings them."""

from __future__ import annotations

import torch
from torch import Tensor

from cocodiff.attention.strategy import LazyQKV
from cocodiff.topology.layout import Layout


def mask_in_rank_order(qkv: LazyQKV, layout: Layout) -> Tensor | None:
    """Which keys are attended to, for the sequence after the exchange, rank by rank in the layout's order:
    [B, 1, 1, S]; None for all."""
    if qkv.text_mask_BT is None:
        return None
    parts_BS = []
    for rank in layout.in_sequence:
        text, image = layout.text_slices[rank], layout.image[rank]
        pair = [qkv.text_mask_BT[:, text], qkv.text_mask_BT.new_ones(len(qkv.text_mask_BT), image)]
        parts_BS += pair if qkv.text_first else pair[::-1]
    return torch.cat(parts_BS, dim=1)[:, None, None]

"""How much more than attention in one piece attention merged from parts may round."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merging_error(qkv_BSHD: Sequence[Tensor], parts: int, mask_B11S: Tensor | None = None) -> float:
    """The most that merging attention's parts one by one adds to an output's error, to first order in float32's unit
    roundoff u. It follows from the values alone.

    A part's weight is w = exp(lse - L): L is the log of the sum over all keys, lse that over the part's, a float32. Its
    rounding by at most u |lse| moves the output by w (1 - w) u |lse| |part - rest|. Here |lse| <= |L| - log w, and
    w (1 - w) (|L| - log w) < (|L| + 1.05) / 4 for every w; both outputs are means of v, so |part - rest| <= 2 max |v|.
    There are 2 (parts - 1) such roundings, one for each part and one for each merged sum that is merged again. The
    output itself is rounded at parts - 1 merges, by at most u max |v|.
    """
    q, k, v = (x.double().transpose(1, 2) for x in qkv_BSHD)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask_B11S is not None:
        scores = scores.masked_fill(~mask_B11S, -math.inf)
    u = torch.finfo(torch.float32).eps / 2
    largest = scores.logsumexp(-1).abs().max().item()
    return (parts - 1) * u * (largest + 1.05 + 1) * v.abs().max().item()

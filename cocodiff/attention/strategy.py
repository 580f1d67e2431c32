"""What a model's attention asks of the engine: `attend(qkv, site) -> out_BLHD`. A strategy owns the order of one call.

Shapes are in names:

    B  batch            L  this rank's tokens (rows)      S  the tokens of all ranks
    H  all heads        G  this rank's heads              D  head dimension

so q_BLHD is sequence-parallel (some tokens, all heads) and q_BSGD head-parallel (all tokens, some heads).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class LazyQKV:
    """Queries, keys and values that are projected when asked for, so that a strategy decides when.

    Each call returns this rank's rows [B, L, H, D], image and text together, normalised and rotated. The first
    `image_rows` rows of the call are image tokens; `image_tokens` and `text_tokens` count those of all ranks.
    """

    q: Callable[[], Tensor]
    k: Callable[[], Tensor]
    v: Callable[[], Tensor]
    image_tokens: int
    text_tokens: int
    heads: int


@dataclass(frozen=True)
class Site:
    """One attention layer of one model for one guidance branch: the key of whatever is kept between steps."""

    layer: str
    branch: int = 0


class Strategy(Protocol):
    def attend(self, qkv: LazyQKV, site: Site) -> Tensor:
        """Attention of this rank's rows to all rows: [B, L, H, D]."""
        ...

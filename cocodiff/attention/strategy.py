"""The interface between a model's attention and the engine: `attend(qkv, layer) -> out_BLHD`. A strategy owns the order
of one call.

Shapes are in names:

    B  batch            L  this rank's tokens (rows)      S  the tokens of all ranks
    H  all heads        G  this rank's heads              D  head dimension

so q_BLHD is sequence-parallel (some tokens, all heads) and q_BSGD head-parallel (all tokens, some heads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from cocodiff.topology.layout import Segments


def nothing() -> None:
    """No work."""


class LazyQKV(NamedTuple):
    """Queries, keys and values that are projected when asked for, so that a strategy decides when.

    Each call returns this rank's rows [B, L, H, D] of all segments in the model's order, normalised and rotated.

    segments   what the sequence consists of, in the model's order, with the tokens of all ranks
    masks      of segments, by name, bool [B, tokens] of all ranks: which of their tokens are attended to; all tokens of
               the segments that are not there
    meanwhile  work of the layer that needs no attention, to be done while something travels; called once"""

    q: Callable[[], Tensor]
    k: Callable[[], Tensor]
    v: Callable[[], Tensor]
    segments: Segments
    heads: int
    masks: Mapping[str, Tensor] = MappingProxyType({})
    meanwhile: Callable[[], object] = nothing


@dataclass(frozen=True)
class LayerKey:
    """One attention layer of one model for one guidance branch: the key of whatever is kept between steps."""

    layer: str
    branch: int = 0

    @cached_property
    def kind(self) -> str:
        """The layer's name without its number: what layers are summed up by, e.g. "transformer_blocks.attn"."""
        return ".".join(part for part in self.layer.split(".") if not part.isdigit())

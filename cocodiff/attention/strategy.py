"""The interface between a model's attention and the engine: `attend(qkv, layer) -> out_BLHD`. A strategy determines the
order of one call.

Shapes are in names:

    B  batch            L  this rank's tokens (rows)      S  the tokens of all ranks;
    H  all heads        G  this rank's heads              D  head dimension.

So q_BLHD is sequence-parallel (some tokens, all heads) and q_BSGD head-parallel (all tokens, some heads).
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
    """Do nothing."""


class LazyQKV(NamedTuple):
    """The queries, keys and values of a call. They are projected when they are asked for, so that a strategy decides on
    the order.

    Calls of `q`, `k` and `v` return this rank's rows [B, L, H, D] of all segments in the model's order, normalised and
    rotated.
    """

    q: Callable[[], Tensor]
    k: Callable[[], Tensor]
    v: Callable[[], Tensor]
    segments: Segments  # the parts of the sequence, in the model's order, with the tokens of all ranks
    heads: int  # number of all heads
    # By segment name, the tokens that are attended to: bool [B, tokens] of all ranks. Without a mask, all of them.
    masks: Mapping[str, Tensor] = MappingProxyType({})
    # work of the layer that needs no attention, done once while messages are in flight
    meanwhile: Callable[[], object] = nothing


@dataclass(frozen=True)
class LayerKey:
    """The key of everything that is kept between steps: one attention layer of one model, for one guidance branch."""

    layer: str  # name of the layer's module
    branch: int = 0  # index of the guidance branch

    @cached_property
    def kind(self) -> str:
        """The layer's name without numbers, which groups layers in sums, e.g. "transformer_blocks.attn"."""
        return ".".join(part for part in self.layer.split(".") if not part.isdigit())

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
    """Do nothing: the default for a function that a caller may give, such as `LazyQKV.meanwhile`."""


class LazyQKV(NamedTuple):
    """The queries, keys and values of one attention call, each computed when its function is called.

    So attention decides in which order they are projected and sent. The functions `q`, `k` and `v` return this rank's
    rows [B, L, H, D] of all segments in the model's order, normalised and rotated.
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
    """The key under which a codec keeps tensors of an attention layer between denoising steps.

    It stands for one layer of one model, for one guidance branch.
    """

    layer: str  # name of the layer's module
    branch: int = 0  # index of the guidance branch

    @cached_property
    def kind(self) -> str:
        """The layer's name without numbers, such as "transformer_blocks.attn". Times and bytes of all layers with the
        same one are summed."""
        return ".".join(part for part in self.layer.split(".") if not part.isdigit())

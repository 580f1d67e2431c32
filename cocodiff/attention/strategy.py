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

    q: Callable[[], Tensor]  # computes the queries
    k: Callable[[], Tensor]  # computes the keys
    v: Callable[[], Tensor]  # computes the values
    segments: Segments  # the parts of the sequence, in the model's order, with the tokens of all ranks
    heads: int  # number of all heads
    # By name of the segment, bool [B, tokens] of all ranks: True for tokens that are attended to.
    masks: Mapping[str, Tensor] = MappingProxyType({})  # by segment, the tokens to attend to; all without a mask
    meanwhile: Callable[[], object] = nothing  # other work of the layer, called once while messages are sent


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

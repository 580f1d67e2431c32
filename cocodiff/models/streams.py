"""What the families' attention has in common: text and image streams that are projected, normalised, rotated and
concatenated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cocodiff.kernels import Kernels
from cocodiff.models.norm_rope import Rotary, norm_rope


class Stream(NamedTuple):
    """This rank's tokens of one kind, and how their q, k and v come about."""

    x_BLC: Tensor
    to_q: Callable[[Tensor], Tensor]
    to_k: nn.Module
    to_v: nn.Module
    norm_q: nn.Module | None = None
    norm_k: nn.Module | None = None
    rotary: Rotary = Rotary()


class Streams(NamedTuple):
    """Streams in the order in which the model concatenates them; `q`, `k` and `v` compute [B, L, H, D] when called."""

    streams: Sequence[Stream]
    heads: int
    kernels: Kernels

    def q(self) -> Tensor:
        return self._join([self._rotated(s, s.to_q, s.norm_q) for s in self.streams])

    def k(self) -> Tensor:
        return self._join([self._rotated(s, s.to_k, s.norm_k) for s in self.streams])

    def v(self) -> Tensor:
        return self._join([heads_of(s.to_v(s.x_BLC), self.heads) for s in self.streams])

    def _rotated(self, stream: Stream, to: Callable[[Tensor], Tensor], norm: nn.Module | None) -> Tensor:
        return norm_rope(heads_of(to(stream.x_BLC), self.heads), norm, stream.rotary, self.kernels)

    def _join(self, parts_BLHD: list[Tensor]) -> Tensor:
        return parts_BLHD[0] if len(parts_BLHD) == 1 else torch.cat(parts_BLHD, dim=1)


def heads_of(x_BLC: Tensor, heads: int) -> Tensor:
    """[B, L, H, D], a view."""
    B, L, C = x_BLC.shape
    return x_BLC.view(B, L, heads, C // heads)


class Once:
    """A tensor that is computed when it is first asked for. Unlike functools.cache, torch.compile follows it."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._computed: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._computed is None:
            self._computed = self._compute()
        return self._computed


class FusedLinear:
    """One linear layer whose output channels are wanted at different times.

    Channels that are asked for before the first ones are computed alone, through a view of the layer's weight, and so
    are all others from then on. That needs a plain layer: with LoRA, quantised weights or hooks on it, its whole output
    is computed at the first call and kept.
    """

    def __init__(self, layer: nn.Module, x_BLC: Tensor) -> None:
        self._layer, self._x_BLC = layer, x_BLC
        self._whole_BLC: Tensor | None = None
        self._apart = False

    def channels(self, start: int, end: int | None) -> Tensor:
        """Output channels from `start` up to `end`, [B, L, end - start]."""
        if self._whole_BLC is None and (start > 0 or self._apart) and is_plain(self._layer):
            self._apart = True
            layer: Any = self._layer
            bias = None if layer.bias is None else layer.bias[start:end]
            return functional.linear(self._x_BLC, layer.weight[start:end], bias)
        if self._whole_BLC is None:
            self._whole_BLC = self._layer(self._x_BLC)
        return self._whole_BLC[..., start:end]


def is_plain(layer: nn.Module) -> bool:
    """A linear layer that does nothing but multiply with its own dense weight."""
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        and "forward" not in vars(layer)
    )

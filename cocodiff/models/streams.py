"""The common part of the families' attention: text and image streams that are projected, normalised, rotated and
concatenated. q and k are normalised and rotated in one pass by our fused kernel, if it is faster and equals the model's
modules; else by these modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cocodiff.kernels import Kernels

WORTH_A_GRAPH = 2**18  # bytes of a q or k from which a compiled norm without rotation is faster than the module


class Rotary(NamedTuple):
    """The rotary embedding of some rows (tokens): the angles by which channels of q and k are rotated."""

    layout: str = "none"  # the pairing of channels, as for `TorchOps.qk_norm_rope`
    tables: tuple[Tensor, ...] = ()  # cos and sin, or one complex table, as it takes them

    def rows(self, rows: slice) -> Rotary:
        """Return the embedding of some of these rows."""
        return Rotary(self.layout, tuple(table[rows] for table in self.tables))

    def turn(self, x_BLHD: Tensor) -> Tensor:
        """Return a q or k, rotated by diffusers' own function."""
        if self.layout == "complex":
            from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

            return apply_rotary_emb_qwen(x_BLHD, self.tables[0], use_real=False)
        from diffusers.models.embeddings import apply_rotary_emb

        return apply_rotary_emb(x_BLHD, self.tables, sequence_dim=1)


UNTURNED = Rotary()


class Norm(NamedTuple):
    """The parameters of a RMS normalisation of q or k over a head's channels, as the fused kernel takes them."""

    weight_D: Tensor | None = None  # the learnt weight; None for none
    epsilon: float | None = None  # None: no normalisation
    round_before_weight: bool = False  # round also before the weight, as diffusers' RMSNorm does


def norm_rope(x_BLHD: Tensor, norm: nn.Module | None, rotary: Rotary, kernels: Kernels) -> Tensor:
    """Return a q or k, normalised and rotated, [B, L, H, D]: by the fused kernel if it can do this and is faster, else
    by the model's modules.

    Args:
        norm: the model's module for the normalisation; None if there is none.
        rotary: the rotation, which may be none.
    """
    if not x_BLHD.shape[1]:  # a rank may have no text, and diffusers' rotation fails on empty tensors
        return x_BLHD
    known = as_data(norm, x_BLHD)
    if known is not None and _in_one_pass(x_BLHD, known, rotary) and kernels.by_sycl("qk_norm_rope", x_BLHD):
        weight_D, epsilon, round_before_weight = known
        return kernels.qk_norm_rope(x_BLHD, weight_D, epsilon, rotary.tables, rotary.layout, round_before_weight)
    known_to_compilers = UNTURNED if rotary.layout == "complex" else rotary
    small = known_to_compilers.layout == "none" and (norm is None or x_BLHD.nbytes < WORTH_A_GRAPH)
    x_BLHD = (_by_modules if small else kernels.compiled(_by_modules))(x_BLHD, norm, known_to_compilers)
    return x_BLHD if known_to_compilers is rotary else rotary.turn(x_BLHD)


def _by_modules(x_BLHD: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
    """Return a q or k, normalised and rotated by the model's own modules.

    Args:
        norm: the module for the normalisation; None for none.
        rotary: the rotation, which may be none.
    """
    x_BLHD = x_BLHD if norm is None else norm(x_BLHD)
    return x_BLHD if rotary.layout == "none" else rotary.turn(x_BLHD)


def as_data(norm: nn.Module | None, x_BLHD: Tensor) -> Norm | None:
    """Return the parameters of a module that is a plain RMSNorm over the heads' channels; None for any other module.

    Without a module, these are the parameters of no normalisation.

    Args:
        norm: the module; None for no normalisation.
        x_BLHD: the tensor to normalise, whose channels and dtype the weight has to fit.
    """
    from diffusers.models.normalization import RMSNorm

    if norm is None:
        return Norm()
    if type(norm) not in (RMSNorm, nn.RMSNorm) or _is_changed(norm):
        return None
    rms: Any = norm
    weight_D, epsilon = rms.weight, rms.eps
    if epsilon is None or getattr(rms, "bias", None) is not None:
        return None
    if weight_D is not None and (weight_D.shape, weight_D.dtype) != (x_BLHD.shape[-1:], x_BLHD.dtype):
        return None
    return Norm(weight_D, epsilon, type(norm) is RMSNorm)


def _is_changed(module: nn.Module) -> bool:
    """Return True if a module has hooks or a replaced forward, which change what it computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _in_one_pass(x_BLHD: Tensor, norm: Norm, rotary: Rotary) -> bool:
    """Return True if the fused kernel can normalise and rotate this tensor.

    There has to be a normalisation or a rotation. The rotation's tables have to be contiguous, on the tensor's device,
    and float32 (complex64 for layout "complex"). The head dimension has to be even, and no gradient wanted.
    """
    if norm.epsilon is None and rotary.layout == "none":
        return False
    table = torch.complex64 if rotary.layout == "complex" else torch.float32
    fits = all(x.dtype == table and x.is_contiguous() and x.device == x_BLHD.device for x in rotary.tables)
    return fits and x_BLHD.shape[-1] % 2 == 0 and not (torch.is_grad_enabled() and x_BLHD.requires_grad)


class Stream(NamedTuple):
    """This rank's tokens of one kind (image or text) in an attention layer, and the modules that make their q, k and
    v."""

    x_BLC: Tensor  # the tokens, with C channels
    to_q: Callable[[Tensor], Tensor]  # projection to q, which may be a cached call
    to_k: nn.Module  # projection to k
    to_v: nn.Module  # projection to v
    norm_q: nn.Module | None = None  # normalisation of q; None for none
    norm_k: nn.Module | None = None  # normalisation of k; None for none
    rotary: Rotary = UNTURNED  # rotary embedding of q and k


def image_stream(attn: Any, x_BLC: Tensor, rotary: Rotary = UNTURNED) -> Stream:
    """Return an image's tokens with the modules of diffusers' joint attention `attn` that make their q, k and v.

    Args:
        x_BLC: the tokens, with C channels.
        rotary: their rotary embedding.
    """
    return Stream(x_BLC, attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k, rotary)


def text_stream(attn: Any, x_BLC: Tensor, rotary: Rotary = UNTURNED) -> Stream:
    """Return a text's tokens with the modules of diffusers' joint attention `attn` that make their q, k and v.

    Args:
        x_BLC: the tokens, with C channels.
        rotary: their rotary embedding.
    """
    added = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
    return Stream(x_BLC, *added, attn.norm_added_q, attn.norm_added_k, rotary)


def joint_outputs(attn: Any, out_BLC: Tensor, text_rows: int) -> tuple[Tensor, Tensor]:
    """Apply the output projections of joint attention. Return the image's rows and the text's rows, each [B, L, C].

    Args:
        attn: diffusers' attention module.
        out_BLC: the result of attention, the text's rows first, with C channels.
        text_rows: number of the text's rows.
    """
    image_BLC = out_BLC[:, text_rows:].contiguous()
    for layer in attn.to_out:
        image_BLC = layer(image_BLC)
    return image_BLC, attn.to_add_out(out_BLC[:, :text_rows].contiguous())


class Streams(NamedTuple):
    """The tokens of one attention layer on this rank, image's and text's, in the order in which the model concatenates
    them.

    `q`, `k` and `v` compute its queries, keys and values, [B, L, H, D].
    """

    streams: Sequence[Stream]  # the tokens of each kind
    heads: int  # number of attention heads
    kernels: Kernels  # the operations to compute with

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
    """Return a view with the channels divided into heads: [B, L, heads, C / heads]."""
    B, L, C = x_BLC.shape
    return x_BLC.view(B, L, heads, C // heads)


class Once:
    """A function that computes a tensor at its first call and then returns it. Unlike functools.cache, torch.compile
    can trace it."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._computed: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._computed is None:
            self._computed = self._compute()
        return self._computed


class FusedLinear:
    """One linear layer whose output channels are needed at different times, such as one for q, k, v and an MLP.

    If later channels are needed before the first ones, they are computed alone, by a view of the layer's weight, and
    then so are all others. That needs a plain layer: with LoRA, quantised weights or hooks its whole output is computed
    at the first call and kept.
    """

    def __init__(self, layer: nn.Module, x_BLC: Tensor) -> None:
        self._layer, self._x_BLC = layer, x_BLC
        self._whole_BLC: Tensor | None = None
        self._apart = False

    def channels(self, start: int, end: int | None) -> Tensor:
        """Return the output channels from `start` up to `end` (None: the last one), [B, L, end - start]."""
        if self._whole_BLC is None and (start > 0 or self._apart) and is_plain(self._layer):
            self._apart = True
            layer: Any = self._layer
            bias = None if layer.bias is None else layer.bias[start:end]
            return functional.linear(self._x_BLC, layer.weight[start:end], bias)
        if self._whole_BLC is None:
            self._whole_BLC = self._layer(self._x_BLC)
        return self._whole_BLC[..., start:end]


def is_plain(layer: nn.Module) -> bool:
    """Return True for a linear layer that only multiplies with its own dense weight."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not _is_changed(layer)

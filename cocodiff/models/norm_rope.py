"""How q and k are normalised and rotated: in one pass by the engine's fused kernel where it is the faster way and does
what the model's own modules do, else by those modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocodiff.kernels import Kernels

WORTH_A_GRAPH = 2**18  # bytes of a q or k from which on a graph of the norm alone is faster than the norm as it is


class Rotary(NamedTuple):
    """The rotary embedding of some rows: how channels pair, and the tables, as `TorchOps.qk_norm_rope` takes them."""

    layout: str = "none"
    tables: tuple[Tensor, ...] = ()

    def rows(self, rows: slice) -> Rotary:
        return Rotary(self.layout, tuple(table[rows] for table in self.tables))

    def turn(self, x_BLHD: Tensor) -> Tensor:
        """The rotation alone, by diffusers."""
        if self.layout == "complex":
            from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

            return apply_rotary_emb_qwen(x_BLHD, self.tables[0], use_real=False)
        from diffusers.models.embeddings import apply_rotary_emb

        return apply_rotary_emb(x_BLHD, self.tables, sequence_dim=1)


class Norm(NamedTuple):
    """What a normalisation is to the fused kernel. round_before_weight: and after it, as diffusers' RMSNorm does."""

    weight_D: Tensor | None = None
    epsilon: float | None = None
    round_before_weight: bool = False


def norm_rope(x_BLHD: Tensor, norm: nn.Module | None, rotary: Rotary, kernels: Kernels) -> Tensor:
    """A q or k, normalised and rotated: [B, L, H, D]."""
    if not x_BLHD.shape[1]:  # a rank may have no text at all, and an empty tensor's shape is ambiguous to a rotation
        return x_BLHD
    known = as_data(norm, x_BLHD)
    if known is not None and _in_one_pass(x_BLHD, known, rotary) and kernels.by_sycl("qk_norm_rope", x_BLHD):
        weight_D, epsilon, round_before_weight = known
        return kernels.qk_norm_rope(x_BLHD, weight_D, epsilon, rotary.tables, rotary.layout, round_before_weight)
    known_to_compilers = Rotary() if rotary.layout == "complex" else rotary
    small = known_to_compilers.layout == "none" and (norm is None or x_BLHD.nbytes < WORTH_A_GRAPH)
    x_BLHD = (_by_modules if small else kernels.compiled(_by_modules))(x_BLHD, norm, known_to_compilers)
    return x_BLHD if known_to_compilers is rotary else rotary.turn(x_BLHD)


def _by_modules(x_BLHD: Tensor, norm: nn.Module | None, rotary: Rotary) -> Tensor:
    x_BLHD = x_BLHD if norm is None else norm(x_BLHD)
    return x_BLHD if rotary.layout == "none" else rotary.turn(x_BLHD)


def as_data(norm: nn.Module | None, x_BLHD: Tensor) -> Norm | None:
    """A plain RMSNorm over the heads' channels in their dtype; None for a module that is or does anything else."""
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
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _in_one_pass(x_BLHD: Tensor, norm: Norm, rotary: Rotary) -> bool:
    """Whether there is work that the kernel knows: tables of its precision, and no gradients to keep."""
    if norm.epsilon is None and rotary.layout == "none":
        return False
    table = torch.complex64 if rotary.layout == "complex" else torch.float32
    fits = all(x.dtype == table and x.is_contiguous() and x.device == x_BLHD.device for x in rotary.tables)
    return fits and x_BLHD.shape[-1] % 2 == 0 and not (torch.is_grad_enabled() and x_BLHD.requires_grad)

"""The attention on one rank to all or some of the keys, and the merging of partial results (StreamFusion, appendix C).

A partial result is its output and the log-sum-exp of its scores. These two are enough to weigh it against others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.attention.strategy import LazyQKV
from cocodiff.kernels import Kernels
from cocodiff.topology.layout import Layout

if TYPE_CHECKING:
    from cocodiff.attention.sums import Found


class Partial(NamedTuple):
    """The attention of some queries to some keys."""

    out_BLHD: Tensor  # the output; 0 for queries without keys
    lse_BLH: Tensor  # log-sum-exp of the scores, float32; -inf for queries without keys


class Keys(NamedTuple):
    """The keys and values that are attended to together."""

    k_BSHD: Tensor  # the keys
    v_BSHD: Tensor  # the values
    mask_B11S: Tensor | None  # bool: True for keys that are attended to; None for all


class AttentionCall(NamedTuple):
    """An attention call after the exchange."""

    qkv: LazyQKV
    layouts: Sequence[Layout]  # of every Ulysses group
    layer: str = ""  # kind of layer, for the trace

    @property
    def rows(self) -> list[int]:
        """The number of tokens of every Ulysses group."""
        return [sum(layout.rows) for layout in self.layouts]

    def mask(self, group: int) -> Tensor | None:
        """Return the mask of a group's keys, in its layout's order of ranks: bool [B, 1, 1, S]; None if all are
        attended to."""
        if not self.qkv.masks:
            return None
        layout, some_BT = self.layouts[group], next(iter(self.qkv.masks.values()))
        of_part = [
            self.qkv.masks.get(part.segment.name, some_BT.new_ones(len(some_BT), part.segment.tokens))
            for part in layout.parts
        ]
        parts_BS = [
            mask_BT[:, part.slices[rank]]
            for rank in layout.in_sequence
            for mask_BT, part in zip(of_part, layout.parts, strict=True)
        ]
        return torch.cat(parts_BS, dim=1)[:, None, None]


class LocalAttention:
    """The attention with this rank's heads. Predictions and benchmarks replace it."""

    # True to attend by matrix products, where `attention.trial` found the device's kernels wrong.
    in_chunks = False

    def whole(self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        """Return attention to all keys, [B, S, H, D].

        Args:
            mask_B11S: bool, True for keys that are attended to; None for all.
        """
        if self.in_chunks:
            return self.part(q_BSHD, k_BSHD, v_BSHD, mask_B11S).out_BLHD
        q_BHSD, k_BHSD, v_BHSD, mask_B11S = by_heads(q_BSHD, k_BSHD, v_BSHD, mask_B11S)
        return scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask_B11S).transpose(1, 2)

    def part(self, q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Partial:
        """Return attention to some of the keys. The caller may write to its tensors."""
        return partial_attention(q_BLHD, k_BSHD, v_BSHD, mask_B11S, self.in_chunks)


def by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors in the form that torch's kernels take, [B, H, S, D].

    A batch of queries may be larger than that of keys: groups of heads, one after the other, that share keys, values
    and mask.
    """
    groups = len(q) // len(k)
    if groups > 1:
        k, v = k.repeat(groups, 1, 1, 1), v.repeat(groups, 1, 1, 1)
        mask = None if mask is None else mask.repeat(groups, 1, 1, 1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask


def parts_kernel(device: str, dtype: torch.dtype, masked: bool, in_chunks: bool) -> Found:
    """Return a device's best kernel that also gives the log-sum-exp, or matrix products if `in_chunks`."""
    from cocodiff.attention.sums import Found, attend_in_chunks, kernel_of

    known = attend_in_chunks if in_chunks else _KERNELS.get(device)
    return (
        kernel_of(device, dtype, masked) if known is None else Found(known, "in chunks" if in_chunks else "for parts")
    )


def partial_attention(
    q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None, in_chunks: bool = False
) -> Partial:
    """Return attention to some of the keys, by the device's best kernel. A batch entry may have no keys.

    Args:
        mask_B11S: bool, True for keys that are attended to; None for all.
        in_chunks: True to attend by matrix products instead.
    """
    if not k_BSHD.shape[1]:
        return no_keys(q_BLHD)
    q_BHLD, k_BHSD, v_BHSD, mask_B11S = by_heads(q_BLHD, k_BSHD, v_BSHD, mask_B11S)
    bias = None
    if mask_B11S is not None:
        bias = torch.zeros_like(mask_B11S, dtype=q_BLHD.dtype).masked_fill_(~mask_B11S, -math.inf)
    found = parts_kernel(q_BLHD.device.type, q_BLHD.dtype, bias is not None, in_chunks)
    out_BHLD, lse_BHL = found.kernel(q_BHLD, k_BHSD, v_BHSD, bias)
    out_BLHD, lse_BLH = out_BHLD.transpose(1, 2), lse_BHL.transpose(1, 2)
    if mask_B11S is not None:
        empty_B = ~mask_B11S.flatten(1).any(1)  # kernels differ in their results for a row without keys
        out_BLHD = out_BLHD.masked_fill(empty_B[:, None, None, None], 0.0)
        lse_BLH = lse_BLH.masked_fill(empty_B[:, None, None], -math.inf)
    return Partial(out_BLHD, lse_BLH)


def no_keys(q_BLHD: Tensor) -> Partial:
    """Return the result of attention to no keys, in new memory: a start for merging."""
    shape = q_BLHD.shape
    return Partial(q_BLHD.new_zeros(shape), q_BLHD.new_full(shape[:3], -math.inf, dtype=torch.float32))


def merged(kernels: Kernels, running: Partial | None, part: Partial) -> Partial:
    """Merge a partial result into `running`, in place and in float32, and return it.

    If `running` is None, return the partial result in float32.
    """
    lse_BLH = part.lse_BLH.contiguous()
    if running is None:
        return Partial(part.out_BLHD.float(), lse_BLH)
    kernels.merge_partials(*running, part.out_BLHD, lse_BLH)
    return running


def all_merged(kernels: Kernels, parts: Iterable[Partial]) -> Partial:
    """Merge one or more partial results, in float32, into that of attention to the keys of all."""
    found = iter(parts)
    return reduce(partial(merged, kernels), found, merged(kernels, None, next(found)))


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend by torch's CPU kernel. Return the output and the log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias)
    return out, lse


def _cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend by torch's CUDA kernels. Return the output and the log-sum-exp."""
    if bias is None and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    if bias is not None:
        bias = _aligned(bias, q, k)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
    return out, lse[..., : q.shape[2]]  # padded to the kernel's tile


def _aligned(bias_B11S: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Expand the bias to every query, with a row stride that is a multiple of eight, as the kernel requires."""
    B, H, L, _ = q.shape
    S = k.shape[2]
    padded = bias_B11S.new_zeros(len(bias_B11S), 1, 1, -(-S // 8) * 8)
    padded[..., :S] = bias_B11S
    return padded[..., :S].expand(B, H, L, S)


# meta: predictions have shapes only; they price this as the single kernel that it is on a device
_KERNELS = {"cpu": _cpu_flash, "meta": _cpu_flash, "cuda": _cuda}

"""Attention on one rank: to all keys, or to some of them, and what it takes to merge several such parts (StreamFusion,
appendix C).

A part is its output together with the log of the sum of the exponentials of its scores: enough to weigh it against
others.
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
    """Attention of some queries to some keys. lse_BLH: float32, -inf where no key was attended to (out is 0 there)."""

    out_BLHD: Tensor
    lse_BLH: Tensor


class Keys(NamedTuple):
    """Keys and values that are attended to together, [B, S, H, D]; mask_B11S: bool, those that are, None for all."""

    k_BSHD: Tensor
    v_BSHD: Tensor
    mask_B11S: Tensor | None


class AttentionCall(NamedTuple):
    """One attention call behind the exchange. layouts: of every Ulysses group. layer: its kind, for the trace."""

    qkv: LazyQKV
    layouts: Sequence[Layout]
    layer: str = ""

    @property
    def rows(self) -> list[int]:
        """Of every group."""
        return [sum(layout.rows) for layout in self.layouts]

    def mask(self, group: int) -> Tensor | None:
        """Which keys of a group are attended to, in its layout's order of ranks: [B, 1, 1, S]; None for all."""
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
    """Attention with the heads that are here. Predictions and benchmarks put something else in its place.

    in_chunks: True where the device's kernels were found wrong (`attention.trial`): matrix products stand in."""

    in_chunks = False

    def whole(self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        """Attention to all keys: [B, S, H, D]. mask_B11S: bool, the keys that are attended to."""
        if self.in_chunks:
            return self.part(q_BSHD, k_BSHD, v_BSHD, mask_B11S).out_BLHD
        q_BHSD, k_BHSD, v_BHSD, mask_B11S = by_heads(q_BSHD, k_BSHD, v_BSHD, mask_B11S)
        return scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask_B11S).transpose(1, 2)

    def part(self, q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Partial:
        """Attention to these keys alone; its result is taken over."""
        return partial_attention(q_BLHD, k_BSHD, v_BSHD, mask_B11S, self.in_chunks)


def by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As torch's kernels take them, [B, H, S, D]. A batch of queries may hold groups of heads one after the other, that
    share keys, values and mask."""
    groups = len(q) // len(k)
    if groups > 1:
        k, v = k.repeat(groups, 1, 1, 1), v.repeat(groups, 1, 1, 1)
        mask = None if mask is None else mask.repeat(groups, 1, 1, 1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask


def parts_kernel(device: str, dtype: torch.dtype, masked: bool, in_chunks: bool) -> Found:
    """Return a device's best kernel that tells the sums, or matrix products instead."""
    from cocodiff.attention.sums import Found, attend_in_chunks, kernel_of

    known = attend_in_chunks if in_chunks else _KERNELS.get(device)
    return (
        kernel_of(device, dtype, masked) if known is None else Found(known, "in chunks" if in_chunks else "for parts")
    )


def partial_attention(
    q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None, in_chunks: bool = False
) -> Partial:
    """Attention to these keys alone, by the device's best kernel that tells the sums; a batch row may have no keys.
    in_chunks: by matrix products instead."""
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
        empty_B = ~mask_B11S.flatten(1).any(1)  # kernels differ in what they say of a row without keys
        out_BLHD = out_BLHD.masked_fill(empty_B[:, None, None, None], 0.0)
        lse_BLH = lse_BLH.masked_fill(empty_B[:, None, None], -math.inf)
    return Partial(out_BLHD, lse_BLH)


def no_keys(q_BLHD: Tensor) -> Partial:
    """The result of attention to nothing, in memory of its own: a start for merging."""
    shape = q_BLHD.shape
    return Partial(q_BLHD.new_zeros(shape), q_BLHD.new_full(shape[:3], -math.inf, dtype=torch.float32))


def merged(kernels: Kernels, running: Partial | None, part: Partial) -> Partial:
    """Attention to the keys of both: `running`, in float32, to which the part was added; without one the part alone."""
    lse_BLH = part.lse_BLH.contiguous()
    if running is None:
        return Partial(part.out_BLHD.float(), lse_BLH)
    kernels.merge_partials(*running, part.out_BLHD, lse_BLH)
    return running


def all_merged(kernels: Kernels, parts: Iterable[Partial]) -> Partial:
    """Attention to the keys of all parts, of which there is one, in float32."""
    found = iter(parts)
    return reduce(partial(merged, kernels), found, merged(kernels, None, next(found)))


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias)
    return out, lse


def _cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if bias is None and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    if bias is not None:
        bias = _aligned(bias, q, k)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
    return out, lse[..., : q.shape[2]]  # padded to the kernel's tile


def _aligned(bias_B11S: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias expanded to every query, of rows whose stride is the multiple of eight that the kernel asks for."""
    B, H, L, _ = q.shape
    S = k.shape[2]
    padded = bias_B11S.new_zeros(len(bias_B11S), 1, 1, -(-S // 8) * 8)
    padded[..., :S] = bias_B11S
    return padded[..., :S].expand(B, H, L, S)


# meta: sizes alone, as plans have them, which price it as the one kernel that it is on a device
_KERNELS = {"cpu": _cpu_flash, "meta": _cpu_flash, "cuda": _cuda}

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
    """A partial result of attention: that of some queries to some of the keys. It can be merged with those to other
    keys."""

    out_BLHD: Tensor  # the output; 0 for queries without keys
    lse_BLH: Tensor  # log-sum-exp of the scores, float32; -inf for queries without keys


class Keys(NamedTuple):
    """The keys and values of some tokens, which queries attend to in one step."""

    k_BSHD: Tensor  # the keys
    v_BSHD: Tensor  # the values
    mask_B11S: Tensor | None  # bool: True for keys that are attended to; None for all


class AttentionCall(NamedTuple):
    """One attention call of a layer on this rank, once q, k and v have been exchanged."""

    qkv: LazyQKV  # the model's tensors before the exchange, with segments and masks
    layouts: Sequence[Layout]  # tokens and heads of every rank, one layout for each Ulysses group
    layer: str = ""  # kind of layer, such as "transformer_blocks.attn", for the trace

    @property
    def rows(self) -> list[int]:
        """The number of tokens that the ranks of each Ulysses group have together, by group."""
        return [sum(layout.rows) for layout in self.layouts]

    def mask(self, group: int) -> Tensor | None:
        """Return the mask of the keys of one Ulysses group: bool [B, 1, 1, S], True for keys that are attended to; None
        if all are.

        Keys are in the order in which the ranks' rows lie in the group's sequence.

        Args:
            group: index of the Ulysses group.
        """
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
    """The attention that this rank computes by itself, for its own heads. Predictions and benchmarks replace it."""

    in_chunks = False  # True to attend by matrix products, if the device's kernels were found to be wrong

    def whole(self, q_BSHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Tensor:
        """Return attention of queries to all keys, [B, S, H, D].

        Args:
            q_BSHD: the queries of all tokens, for this rank's heads.
            k_BSHD: the keys.
            v_BSHD: the values.
            mask_B11S: bool, True for keys that are attended to; None for all.
        """
        if self.in_chunks:
            return self.part(q_BSHD, k_BSHD, v_BSHD, mask_B11S).out_BLHD
        q_BHSD, k_BHSD, v_BHSD, mask_B11S = by_heads(q_BSHD, k_BSHD, v_BSHD, mask_B11S)
        return scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask_B11S).transpose(1, 2)

    def part(self, q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None) -> Partial:
        """Return attention of queries to some of the keys, with its log-sum-exp, to be merged with other parts.

        The result is new memory that the caller may overwrite.

        Args:
            q_BLHD: L queries.
            k_BSHD: S of the keys.
            v_BSHD: their values.
            mask_B11S: bool, True for keys that are attended to; None for all.
        """
        return partial_attention(q_BLHD, k_BSHD, v_BSHD, mask_B11S, self.in_chunks)


def by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return queries, keys, values and mask with heads before tokens, [B, H, S, D], as torch's attention kernels take
    them.

    Queries may have a batch n times that of the keys: n groups of heads one after the other, which share keys, values
    and mask. Keys, values and mask are then repeated n times.

    Args:
        q: queries, [n * B, L, H, D].
        k: keys, [B, S, H, D].
        v: values, [B, S, H, D].
        mask: bool [B, 1, 1, S], True for keys that are attended to; None for all.
    """
    groups = len(q) // len(k)
    if groups > 1:
        k, v = k.repeat(groups, 1, 1, 1), v.repeat(groups, 1, 1, 1)
        mask = None if mask is None else mask.repeat(groups, 1, 1, 1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask


def parts_kernel(device: str, dtype: torch.dtype, masked: bool, in_chunks: bool) -> Found:
    """Return the attention kernel to use for parts of the keys: one that also gives the log-sum-exp.

    Args:
        device: type of the device, such as "xpu".
        dtype: dtype of q, k and v.
        masked: True if a mask is given.
        in_chunks: True for matrix products in place of the device's kernel.
    """
    from cocodiff.attention.sums import Found, attend_in_chunks, kernel_of

    known = attend_in_chunks if in_chunks else _KERNELS.get(device)
    return (
        kernel_of(device, dtype, masked) if known is None else Found(known, "in chunks" if in_chunks else "for parts")
    )


def partial_attention(
    q_BLHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, mask_B11S: Tensor | None = None, in_chunks: bool = False
) -> Partial:
    """Return attention of queries to some of the keys with its log-sum-exp, by the best kernel of the device.

    A batch entry whose keys are all masked has output 0 and log-sum-exp -inf.

    Args:
        q_BLHD: L queries.
        k_BSHD: S of the keys; S may be 0.
        v_BSHD: their values.
        mask_B11S: bool, True for keys that are attended to; None for all.
        in_chunks: True to attend by matrix products in place of the device's kernel.
    """
    if not k_BSHD.shape[1]:
        shape = q_BLHD.shape
        return Partial(q_BLHD.new_zeros(shape), q_BLHD.new_full(shape[:3], -math.inf, dtype=torch.float32))
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


def merged(kernels: Kernels, running: Partial | None, part: Partial) -> Partial:
    """Merge a partial result of attention into `running`, in place and in float32, and return `running`.

    Args:
        kernels: the operations, of which `merge_partials` is used.
        running: float32 result for the same queries and the keys so far; None to start with `part`, in float32.
        part: result for the same queries and other keys, which is not changed.
    """
    lse_BLH = part.lse_BLH.contiguous()
    if running is None:
        return Partial(part.out_BLHD.float(), lse_BLH)
    kernels.merge_partials(*running, part.out_BLHD, lse_BLH)
    return running


def all_merged(kernels: Kernels, parts: Iterable[Partial]) -> Partial:
    """Merge partial results of attention into one, that to the keys of all of them, and return it in float32.

    Args:
        kernels: the operations, of which `merge_partials` is used.
        parts: one or more results for the same queries and different keys, merged in this order.
    """
    found = iter(parts)
    return reduce(partial(merged, kernels), found, merged(kernels, None, next(found)))


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, L, D] and its log-sum-exp [B, H, L], computed by torch's CPU kernel.

    Args:
        q: queries, [B, H, L, D].
        k: keys, [B, H, S, D].
        v: values, [B, H, S, D].
        bias: added to the scores, [B, 1, 1, S]; None for none.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias)
    return out, lse


def _cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, L, D] and its log-sum-exp [B, H, L], computed by torch's CUDA kernels.

    Args:
        q: queries, [B, H, L, D].
        k: keys, [B, H, S, D].
        v: values, [B, H, S, D].
        bias: added to the scores, [B, 1, 1, S]; None for none.
    """
    if bias is None and q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    if bias is not None:
        bias = _aligned(bias, q, k)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)
    return out, lse[..., : q.shape[2]]  # padded to the kernel's tile


def _aligned(bias_B11S: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the bias of scores expanded to all heads and queries, [B, H, L, S], with rows that begin at multiples of
    eight elements.

    torch's memory-efficient CUDA kernel requires that.

    Args:
        bias_B11S: added to the scores, the same for every head and query.
        q: queries, [B, H, L, D], for the shape.
        k: keys, [B, H, S, D], for the shape.
    """
    B, H, L, _ = q.shape
    S = k.shape[2]
    padded = bias_B11S.new_zeros(len(bias_B11S), 1, 1, -(-S // 8) * 8)
    padded[..., :S] = bias_B11S
    return padded[..., :S].expand(B, H, L, S)


# meta: predictions have shapes only; they price this as the single kernel that it is on a device
_KERNELS = {"cpu": _cpu_flash, "meta": _cpu_flash, "cuda": _cuda}

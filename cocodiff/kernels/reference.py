"""The operations in torch, which define the result on any device and run where no SYCL kernel does.

Shapes are in names (see attention/strategy.py). K is the number of chosen rows, R the number of rows of a flattened [B
* L].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from cocodiff_sycl.parts import Rows
from torch import Tensor


def _of(codec: str, op: str) -> Callable[..., Any]:
    """Return a method of `TorchOps` that calls a function of the same name in another module, which is imported at its
    first call.

    An exact run without a codec imports neither of these modules that way.

    Args:
        codec: the module, "residual" or "lossless" of `cocodiff.kernels`.
        op: name of the operation.
    """

    def run(_: TorchOps, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module(f"cocodiff.kernels.{codec}"), op)(*arguments, **options)

    return run


class TorchOps:
    """The engine's operations on tensors, computed by torch. `cocodiff_sycl.ops.SyclOps` has the same signatures and
    results."""

    def pack(self, messages: Sequence[Sequence[Tensor]], buffers: Sequence[Tensor]) -> None:
        """Copy each message's tensors, one after the other, into its contiguous one-dimensional send buffer.

        Args:
            messages: for each message its tensors, of one to four dimensions and any strides, except that the last
                stride is 1.
            buffers: one buffer for each message, which is filled.
        """
        self.gather_pack(messages, buffers)

    def gather_pack(self, messages: Sequence[Sequence[Tensor | Rows]], buffers: Sequence[Tensor]) -> None:
        """Copy each message's tensors, or chosen rows of tensors, one after the other into its send buffer, as `pack`
        does.

        Args:
            messages: for each message its tensors. Those given as `Rows` are gathered, and also written to their
                reference if they have one.
            buffers: one buffer for each message, which is filled.
        """
        for pieces, buffer in zip(messages, buffers, strict=True):
            start = 0
            for piece in pieces:
                end = start + math.prod(piece.shape)
                _copy(piece, buffer[start:end].view(piece.shape))
                start = end

    def unpack(self, parts: Sequence[Tensor | Rows], targets: Sequence[Tensor]) -> None:
        """Copy the parts of received buffers to their places in larger tensors.

        Args:
            parts: views of received buffers, or `Rows` of them.
            targets: for each part the slice that it is written to, of the part's shape.
        """
        for part, target in zip(parts, targets, strict=True):
            _copy(part, target)

    def scatter_rows(self, rows: Sequence[Tensor], index_K: Tensor, caches: Sequence[Tensor]) -> None:
        """Write rows of several tensors to given rows of their caches, as received tokens of q, k and v to V-Major's
        caches.

        Args:
            rows: tensors of K rows, [K, H, D].
            index_K: the K rows of a cache that are written, int64, each row at most once.
            caches: for each tensor its cache of R rows, [R, H, D].
        """
        for rows_KHD, cache_RHD in zip(rows, caches, strict=True):
            cache_RHD.index_copy_(0, index_K, rows_KHD)

    def l1_score(self, v_BLHD: Tensor, reference_BLHD: Tensor, renew: bool = False) -> Tensor:
        """Return the change and the norm of every token of v for V-Major's choice, float32 [2, B, L] (CoCoDiff section
        III-D).

        The change is the L1 distance of v to its reference, the norm is the L1 norm of the reference. Both are sums
        over heads and channels in float64, rounded once.

        Args:
            v_BLHD: the values of this call.
            reference_BLHD: the values that v is compared with.
            renew: True to copy v into `reference_BLHD` after the comparison.
        """
        scores_2BL = torch.empty(2, *v_BLHD.shape[:2], device=v_BLHD.device)
        scores_2BL[0] = v_BLHD.double().sub_(reference_BLHD).abs_().sum((-2, -1))
        scores_2BL[1] = reference_BLHD.abs().sum((-2, -1), dtype=torch.float64)
        if renew:
            reference_BLHD.copy_(v_BLHD)
        return scores_2BL

    def qk_norm_rope(
        self,
        x_BLHD: Tensor,
        weight_D: Tensor | None,
        epsilon: float | None,
        rotary: Sequence[Tensor],
        layout: str,
        round_before_weight: bool = True,
    ) -> Tensor:
        """Return q or k after RMSNorm over each head's channels, its weight and the rotary embedding: [B, L, H, D],
        contiguous.

        Results are rounded to the dtype after the weight and after the rotation. The mean square is summed in float64
        and rounded to float32.

        Args:
            x_BLHD: q or k.
            weight_D: the weight of RMSNorm; None for none.
            epsilon: the epsilon of RMSNorm; None for no normalisation.
            rotary: the tables that `layout` takes, float32 [L, D] (complex64 [L, D / 2] for "complex").
            layout: "pairs" (cos, sin): rotates channels 2i and 2i + 1 together, as FLUX; "halves" (cos, sin): rotates
                channels i and i + D / 2 together; "complex" (one table, cos + i sin): as pairs, as Qwen-Image; "none"
                (no table): no rotation, as SD3.
            round_before_weight: True to round before the weight too, as diffusers' RMSNorm does and torch's does not.
        """
        if epsilon is not None:
            mean_BLH1 = x_BLHD.double().square_().mean(-1, keepdim=True).float()
            dtype, normed_BLHD = x_BLHD.dtype, x_BLHD.float() * torch.rsqrt(mean_BLH1 + epsilon)
            if weight_D is not None:
                normed_BLHD = (normed_BLHD.to(dtype) if round_before_weight else normed_BLHD) * weight_D
            x_BLHD = normed_BLHD.to(dtype)
        if layout == "none":
            return x_BLHD.clone(memory_format=torch.contiguous_format) if epsilon is None else x_BLHD.contiguous()
        if layout == "complex":
            cos_LD, sin_LD = (part.repeat_interleave(2, -1) for part in (rotary[0].real, rotary[0].imag))
        else:
            cos_LD, sin_LD = rotary
        x = x_BLHD.float()
        if layout == "halves":
            first, second = x.chunk(2, -1)
            turned = torch.cat([-second, first], dim=-1)
        else:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return (x * cos_LD[:, None] + turned * sin_LD[:, None]).to(x_BLHD.dtype)

    def merge_partials(self, out_BLHD: Tensor, lse_BLH: Tensor, part_BLHD: Tensor, part_lse_BLH: Tensor) -> None:
        """Merge a partial attention result into a running one, in place (StreamFusion, appendix C).

        `out_BLHD` and `lse_BLH` become those of attention over the keys of both. They are computed in float64 and
        rounded once. A log-sum-exp of -inf stands for no keys.

        Args:
            out_BLHD: the running result, in the dtype of `part_BLHD`, or in float32 so that many parts are rounded
                once.
            lse_BLH: its log-sum-exp, float32.
            part_BLHD: the result to merge.
            part_lse_BLH: its log-sum-exp, float32.
        """
        known, fresh = lse_BLH.double(), part_lse_BLH.double()
        merged = torch.logaddexp(known, fresh)
        weight = torch.sigmoid(fresh - known).nan_to_num_(0.0).unsqueeze(-1)
        out_BLHD.copy_(out_BLHD.double() * (1 - weight) + part_BLHD.double() * weight)
        lse_BLH.copy_(merged)

    choose = _of("residual", "choose")
    compact = _of("residual", "compact")
    # x and reconstructions may be views with any strides, except that the last stride is 1.
    encode_residual = _of("residual", "encode_residual")
    note_change = _of("residual", "note_change")
    decode_residual = _of("residual", "decode_residual")
    continue_linearly = _of("residual", "continue_linearly")
    encode_lossless = _of("lossless", "encode_lossless")
    stream_lengths = _of("lossless", "stream_lengths")
    decode_lossless = _of("lossless", "decode_lossless")


def _copy(piece: Tensor | Rows, target: Tensor) -> None:
    """Copy a tensor, or gather chosen rows of one, into `target`. Chosen rows are also written to their reference if
    they have one."""
    if isinstance(piece, Tensor):
        target.copy_(piece)
        return
    if piece.source_RHD.is_contiguous() and target.is_contiguous():
        torch.index_select(piece.source_RHD, 0, piece.index_K, out=target[0])
    else:
        target[0].copy_(piece.source_RHD.index_select(0, piece.index_K))
    if piece.reference_RHD is not None and piece.reference_index_K is not None:
        kept = piece.reference_index_K >= 0
        piece.reference_RHD[piece.reference_index_K[kept]] = target[0][kept]

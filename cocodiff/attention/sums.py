"""The attention kernels that also give the log-sum-exp of each row, for XPU, where they depend on the version of torch.

docs/exchange.md, "Attention in parts", describes them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("cocodiff.attention.sums")
# Takes q, k, v [B, H, L or S, D] and a bias; returns the output [B, H, L, D] and the log-sum-exp [B, H, L].
SumsKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, L, D] and its log-sum-exp [B, H, L], by Intel's newer kernel, of sycl-tla (torch-xpu-ops,
    `mha_fwd.cpp`).

    Raise NotImplementedError if there is a bias.

    Args:
        q: queries, [B, H, L, D].
        k: keys, [B, H, S, D].
        v: values, [B, H, S, D].
        bias: added to the scores; has to be None.
    """
    if bias is not None:
        raise NotImplementedError("it takes no mask")
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return out, lse[..., : q.shape[2]]


def _overrideable(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, L, D] and its log-sum-exp [B, H, L], by Intel's older kernel, of oneDNN.

    Many versions of torch give the log-sum-exp only for training. Without gradients it is None or empty there, which
    `_fault` finds.

    Args:
        q: queries, [B, H, L, D].
        k: keys, [B, H, S, D].
        v: values, [B, H, S, D].
        bias: added to the scores, [B, 1, 1, S]; None for none.
    """
    if bias is not None:
        bias = bias.expand(len(q), q.shape[1], q.shape[2], k.shape[2])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(q, k, v, bias, 0.0, False)
    return out, lse[..., : q.shape[2]].reshape(q.shape[:3])


def attend_in_chunks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention [B, H, L, D] in the queries' dtype and its log-sum-exp [B, H, L] in float32, computed by matrix
    products.

    It is for devices without a kernel that gives the log-sum-exp. Products are in the tensors' dtype, softmax and sums
    in float32. At most CHUNK scores are in memory at a time, so that they stay in a large GPU's cache.

    Args:
        q: queries, [B, H, L, D].
        k: keys, [B, H, S, D].
        v: values, [B, H, S, D].
        bias: added to the scores, [B, 1, 1, S]; None for none.
    """
    side = max(1, math.isqrt(CHUNK // (q.shape[0] * q.shape[1])))
    q_NTD, k_NSD, v_NSD = (x.flatten(0, 1) for x in (q, k, v))
    if bias is None:
        bias = q.new_zeros(())
    # Finite, so that a chunk whose keys are all masked has a softmax; its weight then is 0.
    of_all = bias.clamp_min(torch.finfo(q.dtype).min / 2).expand(*q.shape[:3], k.shape[2])
    found = [
        _rows_in_chunks(rows_NTD, k_NSD, v_NSD, of_rows, side)
        for rows_NTD, of_rows in zip(q_NTD.split(side, 1), of_all.split(side, 2), strict=True)
    ]
    out, lse = (torch.cat(parts, 1).unflatten(0, q.shape[:2]) for parts in zip(*found, strict=True))
    return out.to(q.dtype), lse


def _rows_in_chunks(q: Tensor, k: Tensor, v: Tensor, bias_BHTS: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return attention of some queries and its log-sum-exp, both in float32, computed `side` keys at a time.

    Args:
        q: queries, [B * H, L, D].
        k: keys, [B * H, S, D].
        v: values, [B * H, S, D].
        bias_BHTS: added to the scores, [B, H, L, S].
        side: number of keys whose scores are in memory at a time.
    """
    out = q.new_zeros(q.shape, dtype=torch.float32)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    for start in range(0, k.shape[1], side):
        at, before, of_keys = slice(start, start + side), lse, bias_BHTS[..., start : start + side].flatten(0, 1)
        scores = torch.baddbmm(of_keys, q, k[:, at].transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))
        weights = scores.softmax(-1, dtype=torch.float32)
        of_chunk = scores.amax(-1).float() - weights.amax(-1).log_()  # the largest weight is exp(largest score - lse)
        lse = torch.logaddexp(before, of_chunk)
        part = (weights.to(v.dtype) @ v[:, at]).float()
        out = out.mul_((before - lse).exp_()[..., None]).addcmul_(part, (of_chunk - lse).exp_()[..., None])
    return out, lse


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp, computed in float32 with all scores in memory: the reference for other
    kernels.

    The attention is in the dtype of `q`.

    Args:
        q: queries, [B, H, L, D].
        k: keys, [B, H, S, D].
        v: values, [B, H, S, D].
        bias: added to the scores, [B, 1, 1, S]; None for none.
    """
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.float()
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


# Costs of `attend_in_chunks` with 16-bit tensors: memory traffic for each score, launches for each chunk.
SCORE_BYTES, CHUNK_LAUNCHES = 24, 10
CHUNK = 2**23  # scores: 32 MiB of weights in float32, and twice 16 MiB in a dtype of 16 bits
# Kernels by type of device, where they may give no log-sum-exp.
TRIED = {"xpu": {"flash": _flash, "overrideable": _overrideable}}
CLOSE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # largest error of a kernel that is right


class Found(NamedTuple):
    """The attention kernel to use on a device for parts of the keys, with its name."""

    kernel: SumsKernel
    told: str  # its name, or why the others are not used


@cache
def kernel_of(device: str, dtype: torch.dtype, masked: bool) -> Found:
    """Return the first of torch's kernels for a type of device that gives attention and its log-sum-exp correctly.

    If there is none, return `attend_in_chunks`. Kernels are tried on small tensors, once for all arguments of equal
    value; that waits for the device.

    Args:
        device: type of the device, such as "xpu".
        dtype: dtype of q, k and v.
        masked: True if a mask is given.
    """
    lacking = []
    for name, kernel in TRIED.get(device, {}).items():
        fault = _fault(kernel, device, dtype, masked)
        if not fault:
            return Found(kernel, name)
        lacking.append(f"{name}: {fault}")
    told = f"in chunks of {CHUNK >> 20} Mi scores ({'; '.join(lacking) or 'torch has no kernel'})"
    log.info("parts of attention on %s in %s%s are computed %s", device, dtype, " with masks" * masked, told)
    return Found(attend_in_chunks, told)


def _fault(kernel: Any, device: str, dtype: torch.dtype, masked: bool) -> str:
    """Try an attention kernel on small random tensors. Return the reason not to use it; "" if its results are right.

    Args:
        kernel: the kernel, see `SumsKernel`.
        device: type of the device.
        dtype: dtype of q, k and v.
        masked: True to try it with a bias.
    """
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 64, generator=drawn).to(dtype).to(device).transpose(1, 2) for n in (9, 70, 70))
    bias = None
    if masked:
        bias = torch.zeros(2, 1, 1, 70, dtype=dtype)
        bias[:, ..., 50:] = -math.inf
        bias = bias.to(device)
    try:
        found = kernel(q, k, v, bias)
    except (RuntimeError, TypeError, AttributeError) as error:  # also raised for None instead of a tensor
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for name, x, expected in zip(("output", "sums"), found, attend_plainly(q, k, v, bias), strict=True):
        if x is None or x.shape != expected.shape:
            return f"{name} of shape {None if x is None else list(x.shape)}"
        difference = float((x.float() - expected.float()).abs().max())
        if not difference <= CLOSE[dtype]:
            return f"{name} that are off by {difference:.2g}"
    return ""

"""l1_score and select: the bits of torch. qk_norm_rope and merge_partials: within 1 ulp of the dtype, 4 in float32."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import (
    DTYPES,
    allowed_ulps,
    batches,
    dtypes,
    even_dims,
    forms,
    head_dims,
    heads,
    quick,
    random_BLHD,
    same_as_torch,
    seeds,
    tokens,
)

rows = st.tuples(batches, tokens, heads)


@given(shape=rows, D=head_dims, dtype=dtypes, seed=seeds, form=forms, renew=st.booleans())
@quick
def test_l1_score(sycl: SyclOps, shape, D, dtype, seed, form, renew):
    same_as_torch(sycl, "l1_score", *(random_BLHD(seed + n, (*shape, D), dtype, form) for n in range(2)), renew)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l1_score_of_huge_rows(sycl: SyclOps, dtype):
    same_as_torch(sycl, "l1_score", *(random_BLHD(n, (1, 2, 3, 100_003), dtype) for n in range(2)))


@given(data=st.data(), B=batches, N=st.integers(1, 600), distinct=st.integers(1, 50), seed=seeds)
@quick
def test_select(sycl: SyclOps, data, B, N, distinct, seed):
    score_BN = torch.randint(-distinct, distinct, (B, N), generator=torch.Generator().manual_seed(seed)).float() / 3
    for special in data.draw(st.lists(st.sampled_from((float("nan"), float("inf"), -0.0, 1e-42)), max_size=3)):
        score_BN[:, data.draw(st.integers(0, N - 1))] = special
    same_as_torch(sycl, "select", score_BN, data.draw(st.integers(0, N)))


def test_select_takes_the_later_of_equal_scores(sycl: SyclOps):
    assert sycl.select(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), 2).tolist() == [[1, 3]]
    assert sycl.select(torch.zeros(1, 5), 3).tolist() == [[2, 3, 4]]
    same_as_torch(sycl, "select", torch.rand(2, 70_000).round(decimals=3), 30_000)


@given(
    shape=rows,
    D=even_dims,
    dtype=dtypes,
    seed=seeds,
    form=forms,
    weighted=st.booleans(),
    epsilon=st.sampled_from((1e-6, 1e-5, None)),
    layout=st.sampled_from(("pairs", "halves", "complex", "none")),
    round_before_weight=st.booleans(),
)
@quick
def test_qk_norm_rope(sycl: SyclOps, shape, D, dtype, seed, form, weighted, epsilon, layout, round_before_weight):
    x_BLHD = random_BLHD(seed, (*shape, D), dtype, form)
    weight_D = random_BLHD(seed + 1, (1, 1, 1, D), dtype)[0, 0, 0] if weighted else None
    how = weight_D, epsilon, tables(shape[1], D, seed, layout), layout, round_before_weight
    found, *_ = same_as_torch(sycl, "qk_norm_rope", x_BLHD, *how, ulps=allowed_ulps(dtype))
    assert found.dtype == dtype and found.is_contiguous()


def tables(L: int, D: int, seed: int, layout: str) -> tuple[torch.Tensor, ...]:
    angle_LD = torch.rand(L, D // 2, generator=torch.Generator().manual_seed(seed)) * 6
    if layout == "none":
        return ()
    if layout == "complex":
        return (torch.polar(torch.ones_like(angle_LD), angle_LD),)
    angle_LD = torch.cat([angle_LD, angle_LD], -1) if layout == "halves" else angle_LD.repeat_interleave(2, -1)
    return angle_LD.cos(), angle_LD.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["pairs", "halves", "complex"])
@pytest.mark.parametrize("round_before_weight", [True, False], ids=["diffusers_norm", "torch_norm"])
def test_qk_norm_rope_is_what_models_do(sycl: SyclOps, layout, dtype, round_before_weight):
    """Their own modules, whose mean square is summed in float32: within a few roundings of the dtype."""
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.normalization import RMSNorm
    from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

    x_BLHD, rotary = random_BLHD(0, (2, 9, 3, 64), dtype), tables(9, 64, 1, layout)
    norm = (RMSNorm if round_before_weight else torch.nn.RMSNorm)(64, 1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        normed = norm(x_BLHD)
        if layout == "complex":
            expected = apply_rotary_emb_qwen(normed, rotary[0], use_real=False)
        else:
            pair_dim = -1 if layout == "pairs" else -2
            expected = apply_rotary_emb(normed, rotary, use_real_unbind_dim=pair_dim, sequence_dim=1)
    found = sycl.qk_norm_rope(x_BLHD, norm.weight.detach(), 1e-6, rotary, layout, round_before_weight)
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@given(shape=rows, D=head_dims, dtype=dtypes, seed=seeds, form=forms, widened=st.booleans())
@quick
def test_merge_partials(sycl: SyclOps, shape, D, dtype, seed, form, widened):
    """widened: the running result is in float32, whatever its parts are."""
    generator = torch.Generator().manual_seed(seed)
    lses = [torch.randn(shape, generator=generator) * 20 for _ in range(2)]
    for lse in lses:
        lse[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
    out_BLHD = random_BLHD(seed, (*shape, D), torch.float32 if widened else dtype, form)
    part_BLHD = random_BLHD(seed + 1, (*shape, D), dtype, form)
    same_as_torch(sycl, "merge_partials", out_BLHD, lses[0], part_BLHD, lses[1], ulps=allowed_ulps(out_BLHD.dtype))


def test_merged_partials_are_whole_attention(sycl: SyclOps):
    q, k, v = (random_BLHD(n, (2, 12, 3, 16), torch.float32).double().transpose(1, 2) for n in range(3))
    score = q @ k.transpose(-1, -2)
    out_BLHD, lse_BLH = torch.zeros(2, 12, 3, 16), torch.full((2, 12, 3), -torch.inf)
    for keys in (slice(0, 5), slice(5, 6), slice(6, 12)):
        part = torch.softmax(score[..., keys], -1) @ v[:, :, keys]
        part_lse = score[..., keys].logsumexp(-1)
        sycl.merge_partials(
            out_BLHD, lse_BLH, part.transpose(1, 2).float(), part_lse.transpose(1, 2).float().contiguous()
        )
    torch.testing.assert_close(out_BLHD, (torch.softmax(score, -1) @ v).transpose(1, 2).float())
    torch.testing.assert_close(lse_BLH, score.logsumexp(-1).transpose(1, 2).float())

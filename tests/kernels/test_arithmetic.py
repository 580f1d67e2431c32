"""l1_score and select: the bits of torch. qk_norm_rope and merge_partials: within 1 ulp of the dtype, 4 in float32."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import HealthCheck, given, settings
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
    random_BLHD,
    seeds,
    tokens,
    ulps,
)

from cocodiff.kernels import TorchOps

TORCH = TorchOps()
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
rows = st.tuples(batches, tokens, heads)


@given(shape=rows, D=head_dims, dtype=dtypes, seed=seeds, form=forms, renew=st.booleans())
@quick
def test_l1_score(sycl: SyclOps, shape, D, dtype, seed, form, renew):
    v_BLHD = random_BLHD(seed, (*shape, D), dtype, form)
    references = [random_BLHD(seed + 1, (*shape, D), dtype, form) for _ in range(2)]
    found = sycl.l1_score(v_BLHD, references[0], renew)
    expected = TORCH.l1_score(v_BLHD, references[1], renew)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(*references)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l1_score_of_huge_rows(sycl: SyclOps, dtype):
    v_BLHD, reference_BLHD = (random_BLHD(n, (1, 2, 3, 100_003), dtype) for n in range(2))
    expected = TORCH.l1_score(v_BLHD, reference_BLHD)
    assert all(map(torch.equal, sycl.l1_score(v_BLHD, reference_BLHD), expected))


@given(data=st.data(), B=batches, N=st.integers(1, 600), distinct=st.integers(1, 50), seed=seeds)
@quick
def test_select(sycl: SyclOps, data, B, N, distinct, seed):
    score_BN = torch.randint(-distinct, distinct, (B, N), generator=torch.Generator().manual_seed(seed)).float() / 3
    for special in data.draw(st.lists(st.sampled_from((float("nan"), float("inf"), -0.0, 1e-42)), max_size=3)):
        score_BN[:, data.draw(st.integers(0, N - 1))] = special
    k = data.draw(st.integers(0, N))
    assert torch.equal(sycl.select(score_BN, k), TORCH.select(score_BN, k))


def test_select_takes_the_later_of_equal_scores(sycl: SyclOps):
    assert sycl.select(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), 2).tolist() == [[1, 3]]
    assert sycl.select(torch.zeros(1, 5), 3).tolist() == [[2, 3, 4]]
    score_BN = torch.rand(2, 70_000).round(decimals=3)
    assert torch.equal(sycl.select(score_BN, 30_000), TORCH.select(score_BN, 30_000))


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
    rotary = tables(shape[1], D, seed, layout)
    found = sycl.qk_norm_rope(x_BLHD, weight_D, epsilon, rotary, layout, round_before_weight)
    expected = TORCH.qk_norm_rope(x_BLHD, weight_D, epsilon, rotary, layout, round_before_weight)
    assert found.dtype == dtype and found.is_contiguous()
    assert ulps(found, expected) <= allowed_ulps(dtype)


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
    of_out = torch.float32 if widened else dtype
    generator = torch.Generator().manual_seed(seed)
    part_BLHD = random_BLHD(seed + 1, (*shape, D), dtype, form)
    lses = [torch.randn(shape, generator=generator) * 20 for _ in range(2)]
    for lse in lses:
        lse[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
    outs = [random_BLHD(seed, (*shape, D), of_out, form) for _ in range(2)]
    running = [lses[0].clone() for _ in range(2)]
    for ops, out_BLHD, lse_BLH in zip((sycl, TORCH), outs, running, strict=True):
        ops.merge_partials(out_BLHD, lse_BLH, part_BLHD, lses[1])
    assert ulps(*outs) <= allowed_ulps(of_out)
    assert ulps(*running) <= 4


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.l1_score(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)), "reference is [1, 2, 3, 5]"),
        (lambda s: s.l1_score(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4).half()), "reference is torch.float16"),
        (lambda s: s.l1_score(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), "3 dimensions"),
        (lambda s: s.select(torch.zeros(1, 4), 5), "k is 5 of 4"),
        (lambda s: s.select(torch.zeros(1, 4).half(), 1), "float16"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 4), None, None, (), "twisted"), "unknown layout 'twisted'"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 5), None, None, (), "none"), "5 numbers"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 4), None, None, (torch.zeros(2, 4),), "pairs"), "1 rotary"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 4), torch.zeros(3), 1e-6, (), "none"), "weight is [3]"),
        (
            lambda s: s.merge_partials(
                torch.zeros(1, 2, 3, 4), torch.zeros(2), torch.zeros(1, 2, 3, 4), torch.zeros(2)
            ),
            "lse is [2], not [1, 2, 3]",
        ),
    ],
)
def test_errors_come_before_a_launch(sycl: SyclOps, call, words):
    with pytest.raises(ValueError) as error:
        call(sycl)
    assert words in str(error.value)

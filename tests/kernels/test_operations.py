"""Movement, l1_score and select with the very bits of torch, whatever the shapes and strides; qk_norm_rope and
merge_partials within 1 ulp of the dtype, 4 in float32."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import DTYPES, dtypes, forms, placed, quick, random_BLHD, same_as_torch, seeds, shapes_of

from cocodiff.kernels import Rows

head_dims = st.sampled_from((1, 2, 3, 7, 8, 16, 18, 31, 32, 64, 72, 130))
even_dims = st.sampled_from((2, 6, 14, 16, 18, 32, 34, 64, 72, 128, 130))
shapes = shapes_of(head_dims)


@given(data=st.data(), dtype=dtypes, seed=seeds)
@quick
def test_pack_and_unpack(sycl: SyclOps, data, dtype, seed):
    messages = [
        [
            random_BLHD(seed + n, data.draw(shapes), dtype, data.draw(forms))
            for n in range(data.draw(st.integers(1, 4), label="pieces"))
        ]
        for _ in range(data.draw(st.integers(1, 4), label="messages"))
    ]
    spare = data.draw(st.integers(0, 3), label="numbers left over")
    buffers = [torch.zeros(sum(x.numel() for x in message) + spare, dtype=dtype) for message in messages]
    same_as_torch(sycl, "pack", messages, buffers)
    parts = [piece.clone(memory_format=torch.contiguous_format) for message in messages for piece in message]
    form = data.draw(forms)
    same_as_torch(sycl, "unpack", parts, [placed(torch.zeros_like(part), form) for part in parts])


@given(data=st.data(), dtype=dtypes, seed=seeds, D=head_dims, count=st.integers(1, 40))
@quick
def test_gather_and_scatter(sycl: SyclOps, data, dtype, seed, D, count):
    H = data.draw(st.integers(1, 5))
    source_RHD = random_BLHD(seed, (1, count, H, D), dtype, data.draw(forms))[0]
    index_K = torch.tensor(data.draw(st.lists(st.integers(0, count - 1))), dtype=torch.int64)
    reference_RHD = random_BLHD(seed + 1, (1, count + 2, H, D), dtype)[0]
    kept = torch.randperm(count + 2, generator=torch.Generator().manual_seed(seed)).repeat(1 + len(index_K))
    kept = torch.where(torch.arange(len(index_K)) < count, kept[: len(index_K)], -1)
    parts = [H // 2, H - H // 2]
    pieces = [[piece] for piece in Rows(source_RHD, index_K, reference_RHD, kept).split_with_sizes(parts, 2)]
    same_as_torch(sycl, "gather_pack", pieces, [torch.zeros(len(index_K) * part * D, dtype=dtype) for part in parts])
    unique_K = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: data.draw(st.integers(0, count))]
    rows_KHD = random_BLHD(seed + 2, (1, len(unique_K), H, D), dtype, data.draw(forms))[0]
    caches = [random_BLHD(seed + n, (1, count, H, D), dtype)[0] for n in range(3)]
    same_as_torch(sycl, "scatter_rows", [rows_KHD] * 3, unique_K, caches)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_rows(sycl: SyclOps, dtype):
    """Rows of more than a chunk, and more chunks than one."""
    x_BLHD = random_BLHD(1, (1, 2, 3, 100_001), dtype)
    same_as_torch(sycl, "pack", [[x_BLHD, x_BLHD[:, :, :2]]], [torch.zeros(2 * x_BLHD.numel(), dtype=dtype)])


def test_many_slices_are_one_launch(sycl: SyclOps, monkeypatch):
    launches = []
    real = sycl.library.move
    monkeypatch.setattr(sycl.library, "move", lambda *words: (launches.append(words[0]), real(*words)))
    x_BLHD = random_BLHD(0, (2, 5, 24, 8), torch.float32)
    messages = [[x_BLHD[:, :, n : n + 2]] * 3 for n in range(0, 24, 2)]
    same_as_torch(sycl, "pack", messages, [torch.zeros(3 * 2 * 5 * 2 * 8) for _ in messages])
    assert {*launches} == {"pack"} and len(launches) <= 2  # in one of its forms the product takes this library as well


def test_nothing_to_move(sycl: SyclOps):
    sycl.pack([], [])
    sycl.unpack([], [])
    same_as_torch(
        sycl, "scatter_rows", [torch.empty(0, 2, 4)], torch.empty(0, dtype=torch.int64), [torch.ones(3, 2, 4)]
    )
    sycl.pack([[torch.empty(1, 0, 2, 4)]], [torch.empty(0)])


@given(shape=shapes, dtype=dtypes, seed=seeds, form=forms, renew=st.booleans())
@quick
def test_l1_score(sycl: SyclOps, shape, dtype, seed, form, renew):
    same_as_torch(sycl, "l1_score", *(random_BLHD(seed + n, shape, dtype, form) for n in range(2)), renew)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_l1_score_of_huge_rows(sycl: SyclOps, dtype):
    same_as_torch(sycl, "l1_score", *(random_BLHD(n, (1, 2, 3, 100_003), dtype) for n in range(2)))


@given(data=st.data(), B=st.integers(1, 3), N=st.integers(1, 600), distinct=st.integers(1, 50), seed=seeds)
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
    shape=shapes_of(even_dims),
    dtype=dtypes,
    seed=seeds,
    form=forms,
    weighted=st.booleans(),
    epsilon=st.sampled_from((1e-6, 1e-5, None)),
    layout=st.sampled_from(("pairs", "halves", "complex", "none")),
    round_before_weight=st.booleans(),
)
@quick
def test_qk_norm_rope(sycl: SyclOps, shape, dtype, seed, form, weighted, epsilon, layout, round_before_weight):
    x_BLHD = random_BLHD(seed, shape, dtype, form)
    weight_D = random_BLHD(seed + 1, (1, 1, 1, shape[-1]), dtype)[0, 0, 0] if weighted else None
    how = weight_D, epsilon, tables(shape[1], shape[-1], seed, layout), layout, round_before_weight
    found, *_ = same_as_torch(sycl, "qk_norm_rope", x_BLHD, *how, rounds=True)
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


@given(shape=shapes, dtype=dtypes, seed=seeds, form=forms, widened=st.booleans())
@quick
def test_merge_partials(sycl: SyclOps, shape, dtype, seed, form, widened):
    """widened: the running result is in float32, whatever its parts are."""
    generator = torch.Generator().manual_seed(seed)
    lses = [torch.randn(shape[:3], generator=generator) * 20 for _ in range(2)]
    for lse in lses:
        lse[torch.rand(shape[:3], generator=generator) < 0.2] = -torch.inf
    out_BLHD = random_BLHD(seed, shape, torch.float32 if widened else dtype, form)
    part_BLHD = random_BLHD(seed + 1, shape, dtype, form)
    same_as_torch(sycl, "merge_partials", out_BLHD, lses[0], part_BLHD, lses[1], rounds=True)

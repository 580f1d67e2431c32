"""Movement, l1_score, choose and compact with the very bits of torch, whatever the shapes and strides; qk_norm_rope and
merge_partials within 1 ulp of the dtype, 4 in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import DTYPES, dtypes, forms, placed, quick, random_BLHD, same_as_torch, seeds, shapes_of

from cocodiff.kernels import Rows
from cocodiff.kernels.residual import Candidates, RowOrder

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
    x_BLHD, other_BLHD = (random_BLHD(n, (1, 2, 3, 100_003), dtype) for n in range(2))
    same_as_torch(sycl, "pack", [[x_BLHD, x_BLHD[:, :, :2]]], [torch.zeros(2 * x_BLHD.numel(), dtype=dtype)])
    same_as_torch(sycl, "l1_score", x_BLHD, other_BLHD)


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
    none = torch.empty(0, dtype=torch.int64)
    same_as_torch(sycl, "scatter_rows", [torch.empty(0, 2, 4)], none, [torch.ones(3, 2, 4)])
    sycl.pack([[torch.empty(1, 0, 2, 4)]], [torch.empty(0)])


@given(shape=shapes, dtype=dtypes, seed=seeds, form=forms, renew=st.booleans())
@quick
def test_l1_score(sycl: SyclOps, shape, dtype, seed, form, renew):
    same_as_torch(sycl, "l1_score", *(random_BLHD(seed + n, shape, dtype, form) for n in range(2)), renew)


@given(
    data=st.data(),
    cards=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    B=st.integers(1, 3),
    distinct=st.integers(1, 50),
    share=st.none() | st.floats(0, 1),
    threshold=st.floats(0, 2),
    seed=seeds,
)
@quick
def test_choose(sycl: SyclOps, data, cards, B, distinct, share, threshold, seed):
    """Of cards with like and unlike numbers of tokens, whose scores and norms lie anywhere among others."""
    generator, columns = torch.Generator().manual_seed(seed), 2 if share is None else data.draw(st.integers(1, 2))
    count = columns * B * sum(cards) + 3
    scores = torch.randint(-distinct, distinct, (count,), generator=generator).float() / 3
    for special in data.draw(st.lists(st.sampled_from((float("nan"), float("inf"), -0.0, 1e-42)), max_size=3)):
        scores[data.draw(st.integers(0, count - 1))] = special
    sizes, start = [columns * B * tokens for tokens in cards], torch.randperm(count, generator=generator)
    places = [x.view(columns, B, tokens) for x, tokens in zip(start[:-3].split(sizes), cards, strict=True)]
    choose(sycl, scores, places, share, threshold)


def choose(sycl: SyclOps, scores: torch.Tensor, places: list[torch.Tensor], *how: float | None) -> torch.Tensor:
    """What is chosen, after a comparison."""
    among = Candidates.of_sets(places, scores.device)
    tensors = scores, among.place_CT, among.begin_M

    def run(ops: Any, scores: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        return ops.choose(scores, Candidates(*tables, among.sizes), *how)

    return same_as_torch(sycl, run, *tensors)[0]


def test_choose_takes_the_later_of_equal_scores(sycl: SyclOps):
    places = [torch.tensor([[[0, 1, 2, 3]]]), torch.tensor([[[4, 5, 6]]])]
    chosen = choose(sycl, torch.tensor([1.0, 2.0, 1.0, 1.0, 0, 0, 0]), places, 0.5, 0.0)
    assert chosen.tolist() == [0, 1, 0, 1, 0, 1, 1, 1]
    many = torch.rand(140_000, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    choose(sycl, many, [torch.arange(140_000).view(1, 2, 70_000)], 0.6, 0.0)
    choose(sycl, many, [torch.arange(140_000).view(2, 2, 35_000)], None, 0.9)


@given(
    data=st.data(), rows=st.lists(st.integers(1, 400), min_size=1, max_size=5), columns=st.integers(1, 3), seed=seeds
)
@quick
def test_compact(sycl: SyclOps, data, rows, columns, seed):
    """Rows of several ranks, of which any number travels."""
    generator, total = torch.Generator().manual_seed(seed), sum(rows)
    active_T = torch.randint(0, 2, (total + 1,), generator=generator).mul(data.draw(st.integers(0, 1))).to(torch.uint8)
    active_T[-1] = 1
    token_N = torch.randint(0, total + data.draw(st.integers(0, 1)), (total,), generator=generator)
    table_KN = torch.randint(-9, 99, (columns, total), generator=generator)

    def run(ops: Any, active_T: torch.Tensor, *tables: torch.Tensor) -> list[torch.Tensor]:
        chosen_KN, end_R = ops.compact(active_T, RowOrder(*tables))
        return [end_R, chosen_KN[:, : int(end_R[-1])]]

    last_R = torch.tensor(rows).cumsum(0) - 1
    end_R, chosen_KN, *_ = same_as_torch(sycl, run, active_T, token_N, last_R, table_KN)
    assert chosen_KN.T.tolist() == [table_KN[:, row].tolist() for row in range(total) if active_T[token_N[row]]]
    assert end_R.tolist() == [int(active_T[token_N[: last + 1]].sum()) for last in last_R.tolist()]


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

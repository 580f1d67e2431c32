"""pack, unpack, gather_pack, scatter_rows: the very bits of torch's copies, whatever the shapes and strides."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import (
    DTYPES,
    batches,
    dtypes,
    forms,
    head_dims,
    heads,
    placed,
    quick,
    random_BLHD,
    same_as_torch,
    seeds,
    tokens,
)

from cocodiff.kernels import Rows

shapes = st.tuples(batches, tokens, heads, head_dims)


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


@given(data=st.data(), dtype=dtypes, seed=seeds, D=head_dims, rows=st.integers(1, 40))
@quick
def test_gather_and_scatter(sycl: SyclOps, data, dtype, seed, D, rows):
    H = data.draw(heads)
    source_RHD = random_BLHD(seed, (1, rows, H, D), dtype, data.draw(forms))[0]
    index_K = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1))), dtype=torch.int64)
    reference_RHD = random_BLHD(seed + 1, (1, rows + 2, H, D), dtype)[0]
    kept = torch.randperm(rows + 2, generator=torch.Generator().manual_seed(seed)).repeat(1 + len(index_K))
    kept = torch.where(torch.arange(len(index_K)) < rows, kept[: len(index_K)], -1)
    parts = [H // 2, H - H // 2]
    pieces = [[piece] for piece in Rows(source_RHD, index_K, reference_RHD, kept).split_with_sizes(parts, 2)]
    same_as_torch(sycl, "gather_pack", pieces, [torch.zeros(len(index_K) * part * D, dtype=dtype) for part in parts])
    unique_K = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: data.draw(st.integers(0, rows))]
    rows_KHD = random_BLHD(seed + 2, (1, len(unique_K), H, D), dtype, data.draw(forms))[0]
    caches = [random_BLHD(seed + n, (1, rows, H, D), dtype)[0] for n in range(3)]
    same_as_torch(sycl, "scatter_rows", [rows_KHD] * 3, unique_K, caches)


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_rows(sycl: SyclOps, dtype):
    """Rows of more than a chunk, and more chunks than one."""
    x_BLHD = random_BLHD(1, (1, 3, 7, 100_001), dtype)
    same_as_torch(sycl, "pack", [[x_BLHD, x_BLHD[:, :, :3]]], [torch.zeros(2 * x_BLHD.numel(), dtype=dtype)])


def test_many_slices_are_one_launch(sycl: SyclOps, monkeypatch):
    launches = []
    real = sycl.library.move
    monkeypatch.setattr(sycl.library, "move", lambda *words: (launches.append(words[0]), real(*words)))
    x_BLHD = random_BLHD(0, (2, 5, 24, 8), torch.float32)
    messages = [[x_BLHD[:, :, n : n + 2]] * 3 for n in range(0, 24, 2)]
    same_as_torch(sycl, "pack", messages, [torch.zeros(3 * 2 * 5 * 2 * 8) for _ in messages])
    assert launches == ["pack"]


def test_nothing_to_move(sycl: SyclOps):
    sycl.pack([], [])
    sycl.unpack([], [])
    same_as_torch(
        sycl, "scatter_rows", [torch.empty(0, 2, 4)], torch.empty(0, dtype=torch.int64), [torch.ones(3, 2, 4)]
    )
    sycl.pack([[torch.empty(1, 0, 2, 4)]], [torch.empty(0)])

"""pack, unpack, gather_pack, scatter_rows: the very bits of torch's copies, whatever the shapes and strides."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl.ops import SyclOps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import DTYPES, batches, dtypes, forms, head_dims, heads, random_BLHD, seeds, tokens

from cocodiff.kernels import Rows, TorchOps

TORCH = TorchOps()
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    found, expected = (
        [torch.zeros(sum(x.numel() for x in message) + spare, dtype=dtype) for message in messages] for _ in range(2)
    )
    sycl.pack(messages, found)
    TORCH.pack(messages, expected)
    assert all(map(torch.equal, found, expected))

    parts = [piece.clone(memory_format=torch.contiguous_format) for message in messages for piece in message]
    form = data.draw(forms)
    placed, wanted = ([random_BLHD(seed, tuple(part.shape), dtype, form) for part in parts] for _ in range(2))
    sycl.unpack(parts, placed)
    TORCH.unpack(parts, wanted)
    assert all(map(torch.equal, placed, wanted))


@given(data=st.data(), dtype=dtypes, seed=seeds, D=head_dims, rows=st.integers(1, 40))
@quick
def test_gather_and_scatter(sycl: SyclOps, data, dtype, seed, D, rows):
    H = data.draw(heads)
    source_RHD = random_BLHD(seed, (1, rows, H, D), dtype, data.draw(forms))[0]
    index_K = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1))), dtype=torch.int64)
    references = [random_BLHD(seed + 1, (1, rows + 2, H, D), dtype)[0] for _ in range(2)]
    kept = torch.randperm(rows + 2, generator=torch.Generator().manual_seed(seed)).repeat(1 + len(index_K))
    kept = torch.where(torch.arange(len(index_K)) < rows, kept[: len(index_K)], -1)
    chosen = [Rows(source_RHD, index_K, reference, kept) for reference in references]
    parts = [H // 2, H - H // 2]
    sizes = [len(index_K) * part * D for part in parts]
    found, expected = ([torch.zeros(size, dtype=dtype) for size in sizes] for _ in range(2))
    sycl.gather_pack([[piece] for piece in chosen[0].split_with_sizes(parts, 2)], found)
    TORCH.gather_pack([[piece] for piece in chosen[1].split_with_sizes(parts, 2)], expected)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(*references)

    unique_K = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: data.draw(st.integers(0, rows))]
    rows_KHD = random_BLHD(seed + 2, (1, len(unique_K), H, D), dtype, data.draw(forms))[0]
    caches = [[random_BLHD(seed + n, (1, rows, H, D), dtype)[0] for n in range(3)] for _ in range(2)]
    sycl.scatter_rows([rows_KHD] * 3, unique_K, caches[0])
    TORCH.scatter_rows([rows_KHD] * 3, unique_K, caches[1])
    assert all(map(torch.equal, *caches))


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_rows(sycl: SyclOps, dtype):
    """Rows of more than a chunk, and more chunks than one."""
    x_BLHD = random_BLHD(1, (1, 3, 7, 100_001), dtype)
    found, expected = (torch.empty(2 * x_BLHD.numel(), dtype=dtype) for _ in range(2))
    sycl.pack([[x_BLHD, x_BLHD[:, :, :3]]], [found])
    TORCH.pack([[x_BLHD, x_BLHD[:, :, :3]]], [expected])
    end = x_BLHD.numel() // 7 * 10
    assert torch.equal(found[:end], expected[:end])


def test_many_slices_are_one_launch(sycl: SyclOps, monkeypatch):
    launches = []
    real = sycl.library.move
    monkeypatch.setattr(sycl.library, "move", lambda *words: (launches.append(words[0]), real(*words)))
    x_BLHD = random_BLHD(0, (2, 5, 24, 8), torch.float32)
    messages = [[x_BLHD[:, :, n : n + 2]] * 3 for n in range(0, 24, 2)]
    buffers = [torch.empty(3 * 2 * 5 * 2 * 8) for _ in messages]
    sycl.pack(messages, buffers)
    assert launches == ["pack"]
    expected = [torch.empty_like(buffer) for buffer in buffers]
    TORCH.pack(messages, expected)
    assert all(map(torch.equal, buffers, expected))


def test_nothing_to_move(sycl: SyclOps):
    sycl.pack([], [])
    sycl.unpack([], [])
    sycl.scatter_rows([torch.empty(0, 2, 4)], torch.empty(0, dtype=torch.int64), [torch.ones(3, 2, 4)])
    sycl.pack([[torch.empty(1, 0, 2, 4)]], [torch.empty(0)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.pack([[torch.zeros(4, dtype=torch.int32)]], [torch.zeros(4, dtype=torch.int32)]), "no kernel"),
        (lambda s: s.pack([[torch.zeros(4).half()]], [torch.zeros(4)]), "float16, not torch.float32"),
        (lambda s: s.pack([[torch.zeros(9)]], [torch.zeros(8)]), "9 numbers"),
        (lambda s: s.pack([[torch.zeros(4, 4).t()]], [torch.zeros(16)]), "stride 4"),
        (lambda s: s.pack([[torch.zeros(4)]], [torch.zeros(2, 2)]), "contiguous and of one dimension"),
        (lambda s: s.pack([[torch.zeros(4, device="meta")]], [torch.zeros(4)]), "is on meta"),
        (lambda s: s.pack([[torch.zeros(1, 1, 1, 1, 4)]], [torch.zeros(4)]), "5 dimensions"),
        (lambda s: s.unpack([torch.zeros(4)], [torch.zeros(5)]), "[4] for a target of [5]"),
        (lambda s: s.unpack([torch.zeros(4, 2)], [torch.zeros(1, 2).expand(4, 2)]), "expanded"),
        (lambda s: s.gather_pack([[Rows(torch.zeros(3, 1, 2), torch.tensor([3]))]], [torch.zeros(2)]), "3 to 3 for 3"),
        (lambda s: s.gather_pack([[Rows(torch.zeros(3, 1, 2), torch.tensor([-1]))]], [torch.zeros(2)]), "-1"),
        (lambda s: s.gather_pack([[Rows(torch.zeros(3, 1, 2), torch.tensor([1.0]))]], [torch.zeros(2)]), "int64"),
        (lambda s: s.scatter_rows([torch.zeros(2, 1, 2)], torch.tensor([0, 9]), [torch.zeros(3, 1, 2)]), "9 for 3"),
        (lambda s: s.scatter_rows([torch.zeros(2, 1, 2)], torch.tensor([0]), [torch.zeros(3, 1, 2)]), "1 places"),
    ],
)
def test_errors_come_before_a_launch(sycl: SyclOps, call, words):
    with pytest.raises((ValueError, TypeError)) as error:
        call(sycl)
    assert words in str(error.value) and "\n" not in str(error.value)

"""Parts of attention merged equal attention to all keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.attention.local import _plain, no_keys, partial_attention
from cocodiff.kernels import Kernels


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(sum),
    queries=st.integers(1, 33),
    heads=st.integers(1, 5),
    dim=st.sampled_from((8, 24, 64)),
    masked=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_merged_parts_are_whole_attention(sizes, queries, heads, dim, masked, dtype, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, n, heads, dim, generator=draw).to(dtype) for n in (queries, sum(sizes), sum(sizes)))
    mask_BS = torch.rand(2, sum(sizes), generator=draw) < 0.5 if masked else None
    if mask_BS is not None:
        mask_BS[:, -1] = True
    out, lse = no_keys(q)
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        mask = None if mask_BS is None else mask_BS[:, None, None, part]
        Kernels("torch").merge_partials(out, lse, *partial_attention(q, k[:, part], v[:, part], mask))
        start += size
    mask = None if mask_BS is None else mask_BS[:, None, None]
    q64, k64, v64 = (x.double().transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(q64, k64, v64, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 3e-2)
    scores = (q64 @ k64.transpose(-1, -2)) / math.sqrt(dim)
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    expected_lse = scores.logsumexp(-1).transpose(1, 2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_rows_without_keys_weigh_nothing():
    q, k, v = torch.randn(3, 2, 5, 3, 8).unbind()
    mask = torch.tensor([[True] * 5, [False] * 5])[:, None, None]
    out, lse = partial_attention(q, k, v, mask)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all() and lse[0].isfinite().all()
    before = out.clone()
    Kernels("torch").merge_partials(out, lse, *partial_attention(q, k[:, :0], v[:, :0]))
    assert torch.equal(out, before)


@pytest.mark.parametrize("masked", [False, True])
def test_the_plain_kernel_says_the_same(masked):
    q, k, v = torch.randn(3, 2, 3, 5, 8).unbind()
    bias = torch.zeros(2, 1, 1, 5).masked_fill(torch.rand(2, 1, 1, 5) < 0.3, -math.inf) if masked else None
    out, lse = _plain(q, k, v, bias)
    expected, expected_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)

"""Parts of attention merged equal attention to all keys."""

import math

import pytest
import torch
from seams import kernels_of_parts

from cocodiff.attention import local, sums
from cocodiff.attention.local import partial_attention
from cocodiff.attention.sums import attend_in_chunks, attend_plainly, kernel_of
from cocodiff.attention.trial import Shape, try_device
from cocodiff.kernels import Kernels


def test_rows_without_keys_weigh_nothing():
    q, k, v = torch.randn(3, 2, 5, 3, 8).unbind()
    mask = torch.tensor([[True] * 5, [False] * 5])[:, None, None]
    out, lse = partial_attention(q, k, v, mask)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all() and lse[0].isfinite().all()
    before = out.clone()
    Kernels("torch").merge_partials(out, lse, *partial_attention(q, k[:, :0], v[:, :0]))
    assert torch.equal(out, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", ["no", "keys", "causal"])
@pytest.mark.parametrize("attend", [attend_in_chunks, attend_plainly])
def test_kernels_err_no_more_than_the_definition_in_the_same_dtype(monkeypatch, attend, masked, dtype):
    """At most twice as much as all scores at once, whose products are in the dtype too; also chunk by chunk."""
    monkeypatch.setattr(sums, "CHUNK", 2 * 3 * 40 * 40)
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, n, 64).to(dtype) for n in (130, 170, 170))
    bias = None
    if masked == "causal":
        bias = torch.full((1, 1, 130, 170), -math.inf, dtype=dtype).triu(1)
    if masked == "keys":
        bias = torch.zeros(2, 1, 1, 170, dtype=dtype)
        bias[0, ..., 80:125], bias[1, ..., :60] = -math.inf, -math.inf  # whole chunks of 40 among them
    wide = [x.double() for x in (q, k, v)]
    scores = wide[0] @ wide[1].transpose(-1, -2) / 8 + (0.0 if bias is None else bias.double())
    expected, expected_lse = scores.softmax(-1) @ wide[2], scores.logsumexp(-1)
    out, lse = attend(q, k, v, bias)
    rounded = (q @ k.transpose(-1, -2) / 8 + (0.0 if bias is None else bias)).softmax(-1) @ v
    plain = (rounded.double() - expected).abs().max()
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert (out.double() - expected).abs().max() <= 2 * plain + torch.finfo(dtype).eps
    largest = scores[scores.isfinite()].abs().max()
    assert (lse.double() - expected_lse).abs().max() <= 4 * torch.finfo(dtype).eps * largest


def no_sums(*qkv_bias):
    return attend_plainly(*qkv_bias)[0], None


def empty_sums(*qkv_bias):
    return attend_plainly(*qkv_bias)[0], torch.empty(0)


def padded_sums(*qkv_bias):
    out, lse = attend_plainly(*qkv_bias)
    return out, torch.nn.functional.pad(lse, (0, 7))


def fewer_keys(q, k, v, bias):
    return attend_plainly(q, k[:, :, 1:], v[:, :, 1:], None if bias is None else bias[..., 1:])


def no_mask(q, k, v, bias):
    if bias is not None:
        raise NotImplementedError("it takes no mask")
    return attend_plainly(q, k, v, bias)


@pytest.fixture
def tried(monkeypatch):
    """A function that has kernels tried for the CPU, as if it were not known to have one."""
    monkeypatch.delitem(kernels_of_parts(), "cpu")
    kernel_of.cache_clear()
    yield lambda kernels: monkeypatch.setitem(sums.TRIED, "cpu", kernels)
    kernel_of.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernels", "masked", "taken"),
    [
        ((), False, "in chunks of 8 Mi scores (torch has no kernel)"),
        ((no_sums,), False, "in chunks of 8 Mi scores (no_sums: sums of shape None)"),
        ((empty_sums, attend_plainly), False, "attend_plainly"),
        ((padded_sums, attend_plainly), True, "attend_plainly"),
        ((fewer_keys,), True, "in chunks of 8 Mi scores (fewer_keys: output that are off by"),
        ((no_mask, attend_plainly), True, "attend_plainly"),
        ((no_mask, attend_plainly), False, "no_mask"),
    ],
)
def test_a_devices_kernel_is_the_first_that_gives_right_sums(tried, kernels, masked, taken, dtype):
    """With stand-ins for what versions of torch have on XPU. A trial of the device names it, and finds it right."""
    tried({kernel.__name__: kernel for kernel in kernels})
    told = kernel_of("cpu", dtype, masked).told
    q, k, v = torch.randn(3, 2, 9, 3, 64).to(dtype).unbind()
    mask = torch.arange(9)[None, None, None].expand(2, 1, 1, 9) < 6 if masked else None
    out, _ = partial_attention(q, k, v, mask)
    here = (x.transpose(1, 2) for x in (q, *(x[:, :6] if masked else x for x in (k, v))))
    torch.testing.assert_close(out.transpose(1, 2), attend_plainly(*here, None)[0], rtol=0, atol=2e-2)
    at = Shape((1, 90, 2, 64), (90, 128), dtype, masked, parts=True)
    found = try_device(local.LocalAttention(), at, torch.device("cpu"), Kernels("torch"))
    assert told.startswith(taken) and told in found.attention and found.error < 1


@pytest.mark.parametrize("masked", [False, True])
def test_the_older_kernel_of_xpu_gives_none_without_gradients(monkeypatch, tried, masked):
    """An undefined tensor, which Python sees as None: it used to end every ring, Torus and streaming call there."""
    out = torch.ones(2, 3, 9, 64)
    for name in ("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention"):
        monkeypatch.setattr(torch.ops.aten, name, lambda *_: (out, None, None, None))
    tried(sums.TRIED["xpu"])
    assert kernel_of("cpu", torch.bfloat16, masked).told.startswith("in chunks")


@pytest.mark.parametrize("masked", [False, True])
def test_groups_of_heads_share_the_keys_of_their_own_batch_row(masked):
    """A batch of queries that holds groups of heads one after the other, each of all batch rows."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(6, 5, 3, 8, generator=draw)  # three groups of a batch of two
    k, v = (torch.randn(2, 7, 3, 8, generator=draw) for _ in range(2))
    mask = torch.rand(2, 1, 1, 7, generator=draw) < 0.6 if masked else None
    local_attention = local.LocalAttention()
    for call in (local_attention.whole, lambda *all_: local_attention.part(*all_).out_BLHD):
        torch.testing.assert_close(call(q, k, v, mask), torch.cat([call(one, k, v, mask) for one in q.split(2)]))

"""The trial of a device at a run's own shapes finds attention, copies and repeated operations that are wrong there, on
stand-ins that are right on small and even tensors; and the engine then works without them, or says so. Parts of
attention, merged, equal attention to all keys."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from seams import kernels_of_parts
from tiny_models import FAMILIES
from torch import Tensor

from cocodiff.attention import local, sums, trial
from cocodiff.attention.local import LocalAttention, partial_attention
from cocodiff.attention.sums import attend_in_chunks, attend_plainly, kernel_of
from cocodiff.attention.trial import DeviceTrial, Shape, try_device, wrong_copies
from cocodiff.comm import loopback
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.kernels import Kernels

CPU = torch.device("cpu")
SDPA = local.scaled_dot_product_attention
SMALL, LARGE = 90, 1300  # tokens
SAME = 0.5  # of the error that may be: kernels that are right stay well below


def shape(tokens: int, dtype: torch.dtype, head_dim: int = 64, **more: Any) -> Shape:
    return Shape((1, tokens, 2, head_dim), (tokens, 2 * head_dim), dtype, **more)


def without_late_keys(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    """As a kernel whose counter of tiles is too narrow."""
    return SDPA(q, k[:, :, :1024], v[:, :, :1024], None if attn_mask is None else attn_mask[..., :1024])


def with_a_tile_of_zeros(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    """As a kernel that leaves out the queries of its last tile, where that is not full."""
    out = SDPA(q, k, v, attn_mask)
    if q.shape[2] > 128:
        out[:, :, q.shape[2] // 128 * 128 :] = 0
    return out


def without_pitch(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    """As a kernel that takes rows to lie one behind the other."""
    B, H, S, D = k.shape
    k = k.as_strided((B, H, S, D), (H * S * D, D, H * D, 1), k.storage_offset())
    return SDPA(q, k, v, attn_mask)


def for_even_heads(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    """As oneDNN's of some versions, for other head sizes than 64 and 128."""
    return SDPA(q, k, v, attn_mask) * (1 if q.shape[-1] in (64, 128) else 1.3)


def not_a_number(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
    return SDPA(q, k, v, attn_mask) * float("nan")


def failing(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("could not create a primitive")


def tried(at: Shape, attention: LocalAttention | None = None) -> DeviceTrial:
    return try_device(attention or LocalAttention(), at, CPU, Kernels("torch"))


@pytest.mark.sample(18)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("attend", "tokens", "head_dim", "wrong"),
    [
        (SDPA, SMALL, 64, False),
        (SDPA, LARGE, 64, False),
        (SDPA, LARGE, 40, False),
        (without_late_keys, SMALL, 64, False),
        (without_late_keys, LARGE, 64, True),
        (with_a_tile_of_zeros, SMALL, 64, False),
        (with_a_tile_of_zeros, LARGE, 64, True),
        (without_pitch, SMALL, 64, True),
        (for_even_heads, SMALL, 64, False),
        (for_even_heads, SMALL, 40, True),
        (not_a_number, SMALL, 64, True),
        (failing, SMALL, 64, True),
    ],
)
def test_attention_that_is_wrong_at_the_runs_shape_alone(attend, tokens, head_dim, wrong, dtype, monkeypatch):
    monkeypatch.setattr(local, "scaled_dot_product_attention", attend)
    for masked in (False, True):
        at, attention = shape(tokens, dtype, head_dim, masked=masked), LocalAttention()
        error = tried(at, attention).error
        assert error > 2 if wrong else error < SAME
        attention.in_chunks = True
        assert tried(at, attention).error < 1  # what stands in is right


@pytest.mark.parametrize("which", ["output", "sums", "sums of many keys"])
def test_parts_that_are_wrong_are_found_where_rings_or_chunks_need_them(which, monkeypatch):
    known = kernels_of_parts()["cpu"]

    def stand_in(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> tuple[Tensor, Tensor]:
        out, lse = known(q, k, v, bias)
        many = which == "sums of many keys" and k.shape[2] > 1024
        return out * (1.5 if which == "output" else 1), lse + (0.3 if which == "sums" or many else 0)

    monkeypatch.setitem(kernels_of_parts(), "cpu", stand_in)
    for parts, tokens in ((False, LARGE), (True, LARGE), (True, SMALL)):
        error = tried(shape(tokens, torch.bfloat16, parts=parts)).error
        assert error > 2 if parts and (tokens == LARGE or which != "sums of many keys") else error < SAME


def test_a_trial_names_the_kernel_that_was_taken():
    """With the other one where heads are those that torch's fused kernel does not take."""
    at = shape(SMALL, torch.bfloat16)
    assert "flash_attention" in tried(at).attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = tried(at)
    assert "math" in found.attention and found.attention in str(found)


def test_the_generators_are_left_as_they_are():
    before = torch.get_rng_state()
    tried(shape(SMALL, torch.float32, parts=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_worst_of_all_ranks_is_what_all_go_by():
    of_ranks = DeviceTrial("a", 0.1, (), ("convolutions",)), DeviceTrial("b", 3.0, ("pack",)), DeviceTrial("a", 0.2)
    assert DeviceTrial.merged(of_ranks) == DeviceTrial("a, b", 3.0, ("pack",), ("convolutions",))


def test_packing_that_loses_a_row_is_found():
    class Losing(Kernels):
        def pack(self, messages: Any, buffers: Any) -> None:
            super().pack(messages, buffers)
            buffers[0][-1] += 1

    found = [wrong_copies(kernels("torch"), shape(SMALL, torch.bfloat16), CPU) for kernels in (Kernels, Losing)]
    assert found == [(), ("unpack", "pack")]


# Parts of attention, merged -------------------------------------------------------------------------------------------


def test_rows_without_keys_weigh_nothing():
    q, k, v = torch.randn(3, 2, 5, 3, 8).unbind()
    out, lse = partial_attention(q, k, v, torch.tensor([[True] * 5, [False] * 5])[:, None, None])
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
def stands_in(monkeypatch):
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
def test_a_devices_kernel_is_the_first_that_gives_right_sums(stands_in, kernels, masked, taken, dtype):
    """With stand-ins for what versions of torch have on XPU. A trial of the device names it, and finds it right."""
    stands_in({kernel.__name__: kernel for kernel in kernels})
    told = kernel_of("cpu", dtype, masked).told
    q, k, v = torch.randn(3, 2, 9, 3, 64).to(dtype).unbind()
    mask = torch.arange(9)[None, None, None].expand(2, 1, 1, 9) < 6 if masked else None
    out, _ = partial_attention(q, k, v, mask)
    here = (x.transpose(1, 2) for x in (q, *(x[:, :6] if masked else x for x in (k, v))))
    torch.testing.assert_close(out.transpose(1, 2), attend_plainly(*here, None)[0], rtol=0, atol=2e-2)
    found = tried(shape(SMALL, dtype, masked=masked, parts=True))
    assert told.startswith(taken) and told in found.attention and found.error < 1


@pytest.mark.parametrize("masked", [False, True])
def test_the_older_kernel_of_xpu_gives_none_without_gradients(monkeypatch, stands_in, masked):
    """An undefined tensor, which Python sees as None: it used to end every ring, Torus and streaming call there."""
    out = torch.ones(2, 3, 9, 64)
    for name in ("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_flash_attention"):
        monkeypatch.setattr(torch.ops.aten, name, lambda *_: (out, None, None, None))
    stands_in(sums.TRIED["xpu"])
    assert kernel_of("cpu", torch.bfloat16, masked).told.startswith("in chunks")


@pytest.mark.parametrize("masked", [False, True])
def test_groups_of_heads_share_the_keys_of_their_own_batch_row(masked):
    """A batch of queries that holds groups of heads one after the other, each of all batch rows."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(6, 5, 3, 8, generator=draw)  # three groups of a batch of two
    k, v = (torch.randn(2, 7, 3, 8, generator=draw) for _ in range(2))
    mask = torch.rand(2, 1, 1, 7, generator=draw) < 0.6 if masked else None
    local_attention = LocalAttention()
    for call in (local_attention.whole, lambda *all_: local_attention.part(*all_).out_BLHD):
        torch.testing.assert_close(call(q, k, v, mask), torch.cat([call(one, k, v, mask) for one in q.split(2)]))


# Engines on simulated devices ----------------------------------------------------------------------------------------


@cache
def tiny() -> Any:
    return FAMILIES["sd3"][0](6).requires_grad_(False)


def inputs_of(text: int = 3) -> dict[str, Tensor]:
    return FAMILIES["sd3"][1](1, 4, 5, text)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    device = pytest.importorskip("simulated_device")
    tiny(), inputs_of()  # once, before there are threads
    monkeypatch.setitem(kernels_of_parts(), "sim", kernels_of_parts()["cpu"])
    return device


def outputs(transport: Any, texts: Sequence[int] = (3,), **settings: Any) -> tuple[Tensor, DeviceTrial | None]:
    """The last output of a tiny model on a rank, with texts of so many tokens, and the trial of its devices."""
    own, device = copy.deepcopy(tiny()).to(transport.device), transport.device
    with parallelize(own, transport=transport, kernels="torch", **settings) as engine:
        for text in texts:
            out = own(**{name: x.to(device) for name, x in inputs_of(text).items()}, return_dict=False)[0]
        return out.cpu(), engine.device_trial


@pytest.mark.parametrize("settings", [{}, {"ring": 2}, {"chunks": 2}])
def test_all_ranks_go_without_a_kernel_that_is_wrong_on_one_of_them(settings, simulated, monkeypatch, recwarn):
    from simulated_device.ranks import run_ranks

    faulty = set[int]()

    def stand_in(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None) -> Tensor:
        return SDPA(q, k, v, attn_mask) * (2 if threading.get_ident() in faulty else 1)

    def parts(q: Tensor, k: Tensor, v: Tensor, bias: Any) -> tuple[Tensor, Tensor]:
        out, lse = kernels_of_parts()["cpu"](q, k, v, bias)
        return out * (2 if threading.get_ident() in faulty else 1), lse

    def work(fault: bool, transport: Any) -> Any:
        faulty.discard(threading.get_ident())
        if fault and transport.rank == 1:
            faulty.add(threading.get_ident())
        return outputs(transport, **settings)

    monkeypatch.setattr(local, "scaled_dot_product_attention", stand_in)
    monkeypatch.setitem(kernels_of_parts(), "sim", parts)
    with simulated.devices(3) as found:
        of_ranks, wrong = (run_ranks(2, partial(work, fault)) for fault in (False, True))
    assert found.reports == []
    errors = [told.error for _, told in of_ranks]
    assert errors[0] == errors[1] < SAME and all(told.copies == told.wandering == () for _, told in of_ranks)
    assert wrong[0][1] == wrong[1][1] and wrong[0][1].error > 2 and len(recwarn) >= 1
    for out, _ in wrong:
        torch.testing.assert_close(out, of_ranks[0][0])
        assert torch.equal(out, wrong[0][0])


def test_a_device_whose_strided_copies_are_wrong_is_refused_by_all_ranks(simulated):
    from simulated_device.ranks import run_ranks

    with simulated.devices(1, pitch_lost=True) as found:
        names = wrong_copies(Kernels("torch"), shape(SMALL, torch.bfloat16), found[0])
    assert "from a pitch" in names and "pack" in names and "transposed" in names

    def of_rank(transport: Any) -> str:
        with pytest.raises(UserError) as error:
            outputs(transport)
        return str(error.value)

    with simulated.devices(2, pitch_lost=True):
        said = run_ranks(2, of_rank)
    assert said[0] == said[1] and "from a pitch" in said[0] and "--device cpu" in said[0]


def test_a_cpu_is_not_tried_and_a_device_once_for_each_shape(simulated, monkeypatch):
    from simulated_device.ranks import run_ranks

    assert loopback.run_ranks(2, outputs)[0][1] is None
    counted = Mock(wraps=try_device)
    monkeypatch.setattr(trial, "try_device", counted)
    with simulated.devices(1):
        run_ranks(1, partial(outputs, texts=(3, 3, 5)))
    tokens = [call.args[1].qkv[1] for call in counted.call_args_list]
    assert tokens == [4 * 5 + 3, 4 * 5 + 5]

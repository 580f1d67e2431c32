"""The trial of a device at a run's own shapes finds attention, copies and repeated operations that are wrong there, on
stand-ins that are right on small and even tensors; and the engine then works without them, or says so."""

from __future__ import annotations

import copy
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

from cocodiff.attention import local, trial
from cocodiff.attention.local import LocalAttention
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

"""Tensors for the tests of operations, and one comparison of an operation with torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, settings, strategies
from torch import Tensor

from cocodiff.kernels import Kernels, Rows, TorchOps

TORCH = TorchOps()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
dtypes = strategies.sampled_from(DTYPES)
seeds = strategies.integers(0, 2**31)
forms = strategies.sampled_from(("contiguous", "sliced rows", "sliced heads", "transposed"))


def shapes_of(head_dims: strategies.SearchStrategy[int]) -> strategies.SearchStrategy[tuple[int, ...]]:
    """[B, L, H, D] of a few batch rows and heads, without tokens too."""
    return strategies.tuples(strategies.integers(1, 3), strategies.integers(0, 9), strategies.integers(1, 5), head_dims)


def random_BLHD(seed: int, shape: tuple[int, ...], dtype: torch.dtype, form: str = "contiguous") -> Tensor:
    """Random numbers in one of several memory layouts."""
    generator = torch.Generator().manual_seed(seed)
    B, L, H, D = shape
    if form == "sliced rows":
        return torch.randn(B, L + 3, H, D, generator=generator).to(dtype)[:, 2 : L + 2]
    if form == "sliced heads":
        return torch.randn(B, L, H + 2, D, generator=generator).to(dtype)[:, :, 1 : H + 1]
    if form == "transposed":
        return torch.randn(B, H, L, D, generator=generator).to(dtype).transpose(1, 2)
    return torch.randn(shape, generator=generator).to(dtype)


def placed(x_BLHD: Tensor, form: str) -> Tensor:
    """The same numbers in another memory layout."""
    return random_BLHD(0, tuple(x_BLHD.shape), x_BLHD.dtype, form).copy_(x_BLHD)


def same_as_torch(sycl: Any, call: str | Callable[..., Any], *arguments: Any, rounds: bool = False) -> list[Tensor]:
    """Has implementations do a call, by its name or as a function of the operations, each with copies of the arguments
    in memory of the same layout: torch's, SYCL's, and whatever the product takes where SYCL is asked for, which is the
    latter. Afterwards results and all memory are the same, also what lies around the tensors; of NaN: that it is one.
    rounds: numbers may differ by 1 ulp of the dtype, 4 in float32. Returns SYCL's results, then its arguments."""
    of_ops, ran = [], list[str]()
    for ops in (TORCH, Kernels("sycl", lambda _, path: ran.append(path)), sycl):
        given = copy.deepcopy(arguments)
        results = getattr(ops, call)(*given) if isinstance(call, str) else call(ops, *given)
        of_ops.append([*tensors_in(results), *map(all_memory, tensors_in(given))])
    assert {*ran} == {"sycl"}
    for expected, *others in zip(*of_ops, strict=True):
        allowed = (4 if expected.dtype == torch.float32 else 1) if rounds else 0
        for found in others:
            assert found.shape == expected.shape and found.dtype == expected.dtype
            assert distance(found, expected) <= allowed
    return [*tensors_in(results), *tensors_in(given)]


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Rows):
        return tensors_in([*vars(value).values()])
    return [x for one in value for x in tensors_in(one)] if isinstance(value, list | tuple) else []


def all_memory(x: Tensor) -> Tensor:
    """Everything in the memory that a tensor is a view of."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())


def distance(found: Tensor, expected: Tensor) -> int:
    """The largest distance in steps of the dtype, 0 between NaN; same signs are assumed where numbers differ."""
    if not found.numel():
        return 0
    if not found.is_floating_point():
        return int(not torch.equal(found, expected))
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    ordered = [
        torch.where(i < 0, -(i & torch.iinfo(bits).max), i)
        for i in (x.contiguous().view(bits).long() for x in (found, expected))
    ]
    apart, zeros = (ordered[0] - ordered[1]).abs(), (found == 0) & (expected == 0)
    apart = torch.where(zeros & (found.signbit() != expected.signbit()), 1, apart)
    return int(torch.where(found.isnan() & expected.isnan(), 0, apart).max())

"""encode_lossless, stream_lengths and decode_lossless: tensors as they were, and torch's very streams."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cocodiff_sycl.parts import BlockCut, most_bytes, stream_places
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import TORCH, forms, placed, quick, same_as_torch, seeds
from torch import Tensor

from cocodiff.kernels import Kernels
from cocodiff.kernels.lossless import CODED, PARTS, Known, least_room, room_of

shapes = st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(1, 6), st.sampled_from((8, 16, 24, 32, 64, 128)))
odd_shapes = st.tuples(st.integers(1, 2), st.integers(0, 9), st.integers(1, 4), st.sampled_from((1, 8, 20, 44)))
kinds = st.sampled_from(("near", "noise", "still", "far", "mixed"))


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def noise(shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits: infinities, NaN of all kinds, denormal numbers."""
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype)


def case(shape, dtype: torch.dtype, kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, the last values and those before."""
    generator = torch.Generator().manual_seed(seed)
    before, drift, further = (torch.randn(shape, generator=generator) for _ in range(3))
    last = (before + 0.05 * drift).to(dtype)
    x = (before + 0.1 * drift + 0.01 * further).to(dtype)
    if kind == "noise":
        return tuple(noise(shape, dtype, generator) for _ in range(3))
    if kind == "still":
        return last.clone(), last, before.to(dtype)
    if kind == "mixed":
        x = torch.where(torch.rand(shape, generator=generator) < 0.02, noise(shape, dtype, generator), x)
        last = torch.where(torch.rand(shape, generator=generator) < 0.02, noise(shape, dtype, generator), last)
    return (x * 1e4 if kind == "far" else x).to(dtype), last, before.to(dtype)


def cut_of(shape, dim: int, seed: int) -> BlockCut:
    """Some blocks, empty ones too."""
    places = sorted(torch.randint(0, shape[dim] + 1, (3,), generator=torch.Generator().manual_seed(seed)).tolist())
    edges = [0, *places, shape[dim]]
    return BlockCut(dim, tuple(stop - start for start, stop in pairwise(edges)))


def known_of(last: Tensor, before: Tensor, form: str, what: str, factor: float) -> Known:
    """What one end knows: nothing; the last values, which the next are written over, or beside older ones; two."""
    if what == "nothing":
        return Known(placed(torch.zeros_like(last), form))
    last, before = placed(last, form), placed(before, form)
    if what == "one":
        return Known(last, last)
    return Known(before, last, before, factor) if what == "two" else Known(before, last)


def arguments_of(given, cut: BlockCut, factor: float, room: int, form: str, what: str):
    """What `there_and_back` takes. room: bytes for a token and head of the first part, of what is needed."""
    x, last, before = given
    width = max(least_room(x.shape[-1]), min(room, 2 * x.shape[-1]))
    code = torch.full((*x.shape[:3], width), 7, dtype=torch.uint8)
    return placed(x, form), [known_of(last, before, form, what, factor) for _ in range(2)], cut, code


def there_and_back(ops, x: Tensor, ends: list[Known], cut: BlockCut, code: Tensor):
    """Streams, lengths and what is needed; and both ends know the tensor then, bit by bit."""
    cells, D, width = cut.cells(x.shape), x.shape[-1], code.shape[-1]
    places = stream_places(cells, D)
    streams, needed_1 = torch.full((places[-1],), 255, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    lengths_N, found_N = (torch.full((len(cells),), -1) for _ in range(2))
    ops.encode_lossless(x, ends[0], cut, streams, lengths_N, needed_1)
    whole = [streams[place : place + length] for place, length in zip(places, lengths_N.tolist(), strict=False)]
    rests = []
    parts = code.view(-1).split_with_sizes([count * width for count in cells])
    for part, stream, count in zip(parts, whole, cells, strict=True):
        room_here = room_of(count, width)
        part[: min(len(stream), room_here)] = stream[:room_here]
        rests.append(stream[room_here:])
        assert len(stream) <= most_bytes(count, D) and len(stream) * PARTS <= int(needed_1) * count
    found = ops.stream_lengths(code, cut, x, found_N)
    assert torch.equal(found_N, lengths_N)
    ops.decode_lossless(code, torch.cat(rests), found_N, found, ends[1], cut)
    assert all(torch.equal(bits_of(end.written), bits_of(x)) for end in ends)
    return whole, lengths_N, needed_1


of_tensors = {
    "dtype": st.sampled_from(CODED),
    "kind": kinds,
    "dim": st.sampled_from((1, 2)),
    "factor": st.floats(0, 2),
    "room": st.integers(0, 300),
    "seed": seeds,
    "what": st.sampled_from(("nothing", "one", "beside", "two")),
}


@given(shape=st.one_of(shapes, odd_shapes), **of_tensors)
@quick
def test_tensors_come_back_as_they_were(shape, dtype, kind, dim, factor, room, seed, what):
    given, cut = case(shape, dtype, kind, seed), cut_of(shape, dim, seed)
    there_and_back(TORCH, *arguments_of(given, cut, factor, room, "contiguous", what))


@given(shape=shapes, form=forms, **of_tensors)
@quick
def test_streams_have_the_same_bits(sycl, shape, dtype, kind, dim, factor, room, seed, form, what):
    given, cut = case(shape, dtype, kind, seed), cut_of(shape, dim, seed)
    same_as_torch(sycl, there_and_back, *arguments_of(given, cut, factor, room, form, what))


@pytest.mark.full
def test_large_blocks_have_the_same_streams(sycl):
    """Of more tiles than a launch adds up by itself where each begins."""
    given, cut = case((1, 1100, 31, 128), torch.bfloat16, "mixed", 0), BlockCut(1, (1090, 0, 10))
    same_as_torch(sycl, there_and_back, *arguments_of(given, cut, 0.5, 90, "contiguous", "two"))


@pytest.mark.parametrize(("channels", "path"), [(20, "torch"), (24, "sycl")])
def test_heads_of_odd_sizes_are_torchs(sycl_on_cpu, channels, path):
    noted = []
    kernels = Kernels("sycl", lambda op, path: noted.append((op, path)))
    given, cut = case((1, 4, 2, channels), torch.bfloat16, "near", 0), BlockCut(1, (4,))
    there_and_back(kernels, *arguments_of(given, cut, 0.5, 30, "contiguous", "two"))
    assert noted == [(op, path) for op in ("encode_lossless", "stream_lengths", "decode_lossless")]

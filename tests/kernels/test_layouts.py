"""What is told from layouts once: a later call with another layout is checked anew, however alike it looks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cocodiff_sycl.library import KEPT, Layouts, look, numbers_of
from cocodiff_sycl.ops import SyclOps
from hypothesis import given
from hypothesis import strategies as st
from seams import kept_by

from cocodiff.kernels import Rows


@pytest.fixture(params=["c", "python"])
def looking(request: pytest.FixtureRequest, sycl_on_cpu: SyclOps):
    """Both ways of looking; C's is there with the torch that the project pins."""
    if request.param == "python":
        return look
    assert sycl_on_cpu.library.look is not look, "torch's table of C functions was not found"
    return sycl_on_cpu.library.look


def test_a_result_is_made_once_for_layouts_and_words(looking):
    made = []

    def make():
        made.append(len(made))
        return len(made)

    layouts: Layouts[int] = Layouts(looking)
    x = torch.zeros(4, 4)
    first, addresses = layouts.of("a", (x, None), make)
    assert first == layouts.of("a", (x + 1, None), make)[0] == 1
    assert numbers_of(2).unpack(addresses) == (x.data_ptr(), 0)
    others = ((x.t(), None), (x, x), (x[:2], None), (x.half(), None), (x.bfloat16(), None), (x[None], None), (None, x))
    for tensors in others:
        assert layouts.of("a", tensors, make)[0] == len(made)
    assert layouts.of("b", (x, None), make)[0] == len(made) == 9


def test_what_is_kept_has_an_end(looking):
    layouts: Layouts[int] = Layouts(looking)
    for word in range(KEPT + 3):
        layouts.of(word, (), lambda: 1)
    assert len(kept_by(layouts)) == 3


tensors = st.builds(
    lambda shape, dtype, turned, start: torch.zeros(60, dtype=dtype)[start:].as_strided(
        shape, sorted(range(1, len(shape) + 1), reverse=not turned)
    ),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64)),
    st.booleans(),
    st.integers(0, 5),
)


@given(st.lists(st.none() | tensors, max_size=5), st.lists(st.none() | tensors, max_size=5))
def test_c_tells_apart_what_python_tells_apart_and_finds_the_same_places(sycl_on_cpu: SyclOps, some, others):
    in_c = sycl_on_cpu.library.look
    (addresses, layouts), (other_addresses, other_layouts) = in_c(tuple(some)), in_c(tuple(others))
    assert (layouts == other_layouts) == (look(tuple(some))[1] == look(tuple(others))[1])
    assert (addresses, other_addresses) == (look(tuple(some))[0], look(tuple(others))[0])


def test_threads_look_by_themselves(looking):
    xs = [torch.zeros(4, n) for n in range(1, 9)]
    expected = [looking((x,) * n) for n, x in enumerate(xs, 1)]
    meet = threading.Barrier(8)

    def work(n: int) -> bool:
        meet.wait()
        return all(looking((xs[n],) * (n + 1)) == expected[n] for _ in range(300))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_errors_come_again_and_after_a_call_that_was_right(sycl: SyclOps):
    v = torch.ones(1, 2, 3, 4)
    buffer = torch.zeros(24)
    for _ in range(2):
        sycl.l1_score(v, v)
        sycl.pack([[v]], [buffer])
        sycl.gather_pack([[Rows(v[0], torch.tensor([1]))]], [buffer])
        with pytest.raises(ValueError, match=r"reference is \[1, 2, 3, 5\]"):
            sycl.l1_score(v, torch.ones(1, 2, 3, 5))
        with pytest.raises(ValueError, match="expanded"):
            sycl.l1_score(v, torch.ones(1, 1, 3, 4).expand(1, 2, 3, 4), renew=True)
        with pytest.raises(ValueError, match="24 numbers and more for a buffer of 23"):
            sycl.pack([[v]], [buffer[1:]])
        with pytest.raises(ValueError, match=r"not torch\.float32"):
            sycl.pack([[v.half()]], [buffer])
        with pytest.raises(ValueError, match="index from 2 to 2 for 2 rows"):
            sycl.gather_pack([[Rows(v[0], torch.tensor([2]))]], [buffer])
    half = torch.zeros(24, dtype=torch.float16)
    sycl.pack([[v.half()]], [half])  # the layout that was wrong for float32 is right here
    assert half.tolist() == [1] * 24

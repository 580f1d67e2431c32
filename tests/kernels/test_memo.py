"""What is told from layouts once: a later call with another layout is checked anew, however alike it looks."""

from __future__ import annotations

import pytest
import torch
from cocodiff_sycl import SyclOps
from cocodiff_sycl.memo import KEPT, known

from cocodiff.kernels import Rows


def test_a_result_is_made_once_for_a_layout_and_words():
    made = []

    def make(x, y, word):
        made.append(word)
        return len(made)

    kept: dict = {}
    x = torch.zeros(4, 4)
    assert known(kept, make, (x, None), ("a",)) == known(kept, make, (x + 1, None), ("a",)) == 1
    for others in ((x.t(), None), (x, x), (x[:2], None), (x.half(), None), (x.to("meta"), None)):
        assert known(kept, make, others, ("a",)) == len(made)
    assert known(kept, make, (x, None), ("b",)) == len(made) == 7


def test_what_is_kept_has_an_end():
    kept: dict = {}
    for word in range(KEPT + 3):
        known(kept, lambda word: word + 1, (), (word,))
    assert len(kept) == 3


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

"""Calls of operations that cannot be: told before a launch, in one line."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cocodiff_sycl.ops import SyclOps

from cocodiff.kernels import Rows
from cocodiff.kernels.lossless import Known
from cocodiff.kernels.residual import NOTES, Candidates, Prediction, Reconstructions, RowOrder

X_BLHD, CODE_BLHW = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 5, dtype=torch.uint8)
LAST, NOTES_N = Reconstructions(torch.zeros_like(X_BLHD)), torch.zeros(NOTES, dtype=torch.int64)
AMONG = Candidates.of_sets([torch.arange(4).view(1, 2, 2)], X_BLHD.device)
ORDER, ACTIVE = RowOrder(torch.arange(4), torch.tensor([3]), torch.zeros(2, 4).long()), torch.zeros(5).byte()


def row(index: float, rows: int = 3) -> Rows:
    return Rows(torch.zeros(rows, 1, 2), torch.tensor([index]))


def encoded(s: SyclOps, known: Reconstructions = LAST, bits: int = 4, notes_N: torch.Tensor = NOTES_N) -> None:
    s.encode_residual(X_BLHD, known, Prediction(), bits, CODE_BLHW, notes_N)


def losslessly(s: SyclOps, x_BLHD: torch.Tensor) -> None:
    numbers, streams = torch.zeros(1, dtype=torch.int64), torch.zeros(9999, dtype=torch.uint8)
    s.encode_lossless(x_BLHD, Known(x_BLHD.clone()), (1, (2,)), streams, numbers, numbers)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.l1_score(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)), "reference is [1, 2, 3, 5]"),
        (lambda s: s.l1_score(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4).half()), "reference is torch.float16"),
        (lambda s: s.l1_score(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), "3 dimensions"),
        (lambda s: s.l1_score(X_BLHD, X_BLHD.to("meta")), "is on meta"),
        (lambda s: s.choose(torch.zeros(4), AMONG, 1.5, 0.0), "share of 1.5"),
        (lambda s: s.choose(torch.zeros(4), AMONG, None, 0.5), "two columns"),
        (lambda s: s.choose(torch.zeros(4).half(), AMONG, 0.5, 0.0), "float16"),
        (lambda s: s.choose(torch.zeros(8)[::2], AMONG, 0.5, 0.0), "stride 2"),
        (lambda s: s.compact(torch.zeros(5), ORDER), "active is torch.float32"),
        (lambda s: s.compact(ACTIVE, ORDER._replace(token_N=torch.zeros(3, dtype=torch.int64))), "token is [3]"),
        (lambda s: s.compact(ACTIVE, ORDER._replace(last_R=torch.zeros(1))), "last is torch.float32"),
        (lambda s: s.compact(ACTIVE, ORDER._replace(token_N=torch.arange(8)[::2])), "token must be contiguous"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 4), None, None, (), "twisted"), "unknown layout 'twisted'"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 5), None, None, (), "none"), "5 numbers"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 4), None, None, (torch.zeros(2, 4),), "pairs"), "1 rotary"),
        (lambda s: s.qk_norm_rope(torch.zeros(1, 2, 3, 4), torch.zeros(3), 1e-6, (), "none"), "weight is [3]"),
        (lambda s: s.merge_partials(X_BLHD, torch.zeros(2), X_BLHD, torch.zeros(2)), "lse is [2], not [1, 2, 3]"),
        (lambda s: s.pack([[torch.zeros(4, dtype=torch.int32)]], [torch.zeros(4, dtype=torch.int32)]), "no kernel"),
        (lambda s: s.pack([[torch.zeros(4).half()]], [torch.zeros(4)]), "float16, not torch.float32"),
        (lambda s: s.pack([[torch.zeros(9)]], [torch.zeros(8)]), "9 numbers"),
        (lambda s: s.pack([[torch.zeros(4, 4).t()]], [torch.zeros(16)]), "stride 4"),
        (lambda s: s.pack([[torch.zeros(4)]], [torch.zeros(2, 2)]), "contiguous and of one dimension"),
        (lambda s: s.pack([[torch.zeros(4, device="meta")]], [torch.zeros(4)]), "is on meta"),
        (lambda s: s.pack([[torch.zeros(1, 1, 1, 1, 4)]], [torch.zeros(4)]), "5 dimensions"),
        (lambda s: s.unpack([torch.zeros(4)], [torch.zeros(5)]), "[4] for a target of [5]"),
        (lambda s: s.unpack([torch.zeros(4, 2)], [torch.zeros(1, 2).expand(4, 2)]), "expanded"),
        (lambda s: s.gather_pack([[row(3)]], [torch.zeros(2)]), "3 to 3 for 3"),
        (lambda s: s.gather_pack([[row(2), row(2, 2)]], [torch.zeros(4)]), "2 to 2 for 2"),
        (lambda s: s.gather_pack([[row(-1)]], [torch.zeros(2)]), "-1"),
        (lambda s: s.gather_pack([[row(1.0)]], [torch.zeros(2)]), "int64"),
        (lambda s: s.scatter_rows([torch.zeros(2, 1, 2)], torch.tensor([0, 9]), [torch.zeros(3, 1, 2)]), "9 for 3"),
        (lambda s: s.scatter_rows([torch.zeros(2, 1, 2)], torch.tensor([0]), [torch.zeros(3, 1, 2)]), "1 places"),
        (partial(encoded, bits=3), "3 bits: ... 2, 4, 8"),
        (lambda s: s.decode_residual(CODE_BLHW, LAST, None, 2), "code is [1, 2, 3, 5], not [1, 2, 3, 3]"),
        (partial(encoded, notes_N=torch.zeros(2)), "notes are torch.float32"),
        (lambda s: s.note_change(X_BLHD, LAST.last, NOTES_N[:2]), "notes are torch.int64 [2]"),
        (lambda s: s.note_change(X_BLHD[:, ::2], LAST.last, NOTES_N), "last is [1, 2, 3, 8], not [1, 1, 3, 8]"),
        (partial(encoded, known=Reconstructions(X_BLHD.half())), "last is torch.float16"),
        (lambda s: losslessly(s, torch.zeros(1, 2, 1, 32)), "float32 travels whole"),
        (lambda s: losslessly(s, torch.zeros(1, 2, 1, 20).bfloat16()), "20 numbers: ... 8"),
    ],
)
def test_refused_before_a_launch(sycl: SyclOps, call, words):
    with pytest.raises((ValueError, TypeError)) as error:
        call(sycl)
    assert all(one in str(error.value) for one in words.split(" ... ")) and "\n" not in str(error.value)

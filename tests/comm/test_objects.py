"""Values between ranks: what they are, and that reading one runs nothing that it brings."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strangers import Bomb

from cocodiff.cli.doctor.facts import Card, Nic
from cocodiff.comm.objects import LENGTH, as_bytes, as_value
from cocodiff.exchange.codec import CallKind


@dataclass
class Foreign:
    number: int


VALUES = [
    None,
    {"text": "ä\ud800", "numbers": [1, -(2**70), 0.1, float("inf"), True], 3: ("tuple", ()), ("a", 1): {1, 2}},
    Counter({"": 2, "qkv": 1}),
    [Nic("cxi0", (0, 1)), Card("0000:18", (0,)), CallKind(stable=0.5), frozenset({"x"})],
    [b"\0\x80\n", torch.bfloat16],
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_as_it_went(value: Any) -> None:
    found = as_value(as_bytes(value))
    assert found == value and repr(found) == repr(value)


def test_tensors_and_arrays_come_with_their_bits() -> None:
    tensors = [torch.randn(2, 3).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool)]
    sent = [*tensors, torch.tensor(5), torch.empty(0, 4), torch.arange(6).view(2, 3).t(), torch.ones(2) + 1j]
    for old, new in zip(sent, as_value(as_bytes(sent)), strict=True):
        assert torch.equal(old, new) and old.dtype == new.dtype
    array, number = as_value(as_bytes([np.arange(6, dtype=">u2").reshape(2, 3), np.float64(0.1)]))
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]] and array.dtype == np.dtype(">u2") and number == 0.1


@pytest.mark.parametrize("value", [object(), Foreign(1), Path("x"), {"deep": [print]}, np.array([object()])])
def test_what_is_no_plain_data_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="not sent between ranks"):
        as_bytes(value)


def framed(found: Any) -> bytes:
    text = json.dumps(found).encode()
    return LENGTH.pack(len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Bomb()),
        LENGTH.pack(10**12) + pickle.dumps(Bomb()),
        b"",
        framed({"record": ["pathlib", "Path", ["exploded"]]}),
        framed({"record": ["cocodiff.config.files", "os", []]}),
        framed({"record": ["cocodiff.cli.doctor.facts", "Card", [1]]}),
        framed({"record": [["unhashable"], "Card", []]}),
        framed({"dtype": "load"}),
        framed({"tensor": ["float32", [10**9], 4]}),
        framed({"array": ["O", [1], 8]}),
        framed({"tuple": 5, "set": 5}),
    ],
)
def test_a_strangers_message_is_refused_and_runs_nothing(content: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no value of ours"):
        as_value(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte())
    assert list(tmp_path.iterdir()) == []

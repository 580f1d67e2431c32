"""What strangers can reach: no message is unpickled, reading a value of another rank runs nothing that it brings, and
sockets listen where the other ranks need them, and no more. That weights are safetensors alone stands in
tests/commands/test_model_folders.py."""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from launching import assert_succeeded
from strangers import Bomb
from test_start import needs_ipv6
from value_tables import beside
from warm import Started, forked
from warm_ranks import warm_mpiexec

from cocodiff.cli.doctor.facts import Card, Nic
from cocodiff.comm.connect import EVERY_INTERFACE, listening_socket
from cocodiff.comm.objects import LENGTH, as_bytes, as_value
from cocodiff.exchange.codec import CallKind

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("strangers.py")
UNPICKLE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Of torch.distributed and of mpi4py's communicators: they unpickle what comes.
OBJECT_CALLS = {
    *(f"{call}_object" for call in ("all_gather", "gather", "scatter")),
    *(f"{call}_object_list" for call in ("broadcast", "recv", "scatter", "send")),
    *("bcast", "irecv", "isend", "sendrecv"),
}


def unsafe(path: Path) -> list[str]:
    """Imports and calls that may unpickle what others have written."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in modules if name.split(".")[0] in UNPICKLE]
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        whole, keywords = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
        if node.func.attr in OBJECT_CALLS:
            found.append(whole)
        if whole == "torch.load" and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only")
        if whole == "np.load" and keywords.get("allow_pickle", "False") != "False":
            found.append("np.load with pickles")
        if node.func.attr == "from_pretrained" and keywords.get("use_safetensors") != "True":
            found.append(f"{whole} without use_safetensors")
    return found


def test_nothing_of_ours_unpickles() -> None:
    tops = ("cocodiff", "eval", "sycl_kernels")
    sources = [path for top in tops for path in (ROOT / top).rglob("*.py")]
    assert len(sources) > 100 and {path: found for path in sources if (found := unsafe(path))} == {}


def as_torchruns(host: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks as torchrun's, where rank 0 makes the store."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        where = {"MASTER_ADDR": host, "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    files, ranks = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(2)], list[Started]()
    for rank, of_rank in enumerate(files):
        with mock.patch.dict(os.environ, where | {"RANK": str(rank)}):
            ranks.append(Started(["gloo"], *of_rank, module="strangers"))
    ended = [(rank.wait(120), *(file.read_text() for file in of)) for rank, of in zip(ranks, files, strict=True)]
    return [subprocess.CompletedProcess([host], *one) for one in ended]


@pytest.mark.sample(3)
@pytest.mark.parametrize("started", ["forked", "mpiexec", "127.0.0.3", pytest.param("::1", marks=needs_ipv6)])
def test_strangers_reach_loopback_alone_and_change_nothing(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rank 0 alone listens where a launcher says that ranks meet: they may be in network namespaces of their own,
    which share no loopback."""
    monkeypatch.chdir(tmp_path)
    if started == "forked":
        ranks = [forked("gloo", "2", folder=tmp_path, module="strangers")]
    elif started == "mpiexec":
        ranks = [warm_mpiexec(2, PROGRAM, "gloo")]
    else:
        ranks = as_torchruns(started, tmp_path)
    for rank in ranks:
        assert_succeeded(rank)
    addresses = json.loads(ranks[0].stdout)
    where = {"127.0.0.1", started} if started not in ("forked", "mpiexec") else {"127.0.0.1"}
    assert [{ip for ip, _ in of_rank} for of_rank in addresses] == [where, {"127.0.0.1"}]
    assert not (tmp_path / "exploded").exists()


def test_all_interfaces_only_where_the_name_tells_none() -> None:
    for host, one_host, interface in (
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", False, EVERY_INTERFACE[0]),  # others know this host by another address
        ("name.invalid", False, EVERY_INTERFACE[0]),
    ):
        with listening_socket(host, 0, one_host, 2) as listener:
            assert listener.getsockname()[0] == interface


# Values between ranks -------------------------------------------------------------------------------------------------


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


BOMB = pickle.dumps(Bomb())


@pytest.mark.parametrize("content", [BOMB, LENGTH.pack(10**12) + BOMB, b"", *map(framed, beside(__file__))])
def test_a_strangers_message_is_refused_and_runs_nothing(content: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no value of ours"):
        as_value(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte())
    assert list(tmp_path.iterdir()) == []

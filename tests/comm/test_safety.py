"""What strangers can reach: no message is unpickled, and sockets listen where the other ranks need them, and no more.
That weights are safetensors alone stands in tests/commands/test_model_folders.py."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import assert_succeeded
from warm import forked
from warm_ranks import warm_mpiexec

from cocodiff.comm.connect import EVERY_INTERFACE, listening_socket

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("strangers.py")
SOURCES = sorted(path for top in ("cocodiff", "eval", "sycl_kernels") for path in (ROOT / top).rglob("*.py"))
UNPICKLE = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Of torch.distributed and of mpi4py's communicators: they unpickle what comes.
OBJECT_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "bcast",
    "irecv",
    "isend",
    "sendrecv",
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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_of_ours_unpickles(path: Path) -> None:
    assert unsafe(path) == []


def under_a_launcher_without_a_store(folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks as torchrun's, where rank 0 makes the store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    words = [sys.executable, str(PROGRAM), "gloo"]
    ranks = [
        subprocess.Popen(
            words,
            env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [subprocess.CompletedProcess(words, rank.returncode, *of) for rank, of in zip(ranks, said, strict=True)]


@pytest.mark.sample(2)
@pytest.mark.processes
@pytest.mark.parametrize("started", ["forked", "mpiexec", "environment"])
def test_strangers_reach_loopback_alone_and_change_nothing(
    started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if started == "forked":
        ranks = [forked("gloo", "2", folder=tmp_path, module="strangers")]
    elif started == "mpiexec":
        ranks = [warm_mpiexec(2, PROGRAM, "gloo")]
    else:
        ranks = under_a_launcher_without_a_store(tmp_path)
    for rank in ranks:
        assert_succeeded(rank)
    addresses = json.loads(ranks[0].stdout)
    assert len(addresses) >= 2 and {ip for ip, _ in addresses} == {"127.0.0.1"}
    assert not (tmp_path / "exploded").exists()


def test_all_interfaces_only_where_the_name_tells_none() -> None:
    for host, one_host, interface in (
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", False, EVERY_INTERFACE[0]),  # others know this host by another address
        ("name.invalid", False, EVERY_INTERFACE[0]),
    ):
        with listening_socket(host, 0, one_host, 2) as listener:
            assert listener.getsockname()[0] == interface

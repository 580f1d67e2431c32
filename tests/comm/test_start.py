"""A start that is never complete: it ends in time, and who is missing is named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from cocodiff.comm import connect, mpi
from cocodiff.comm.launch import Launch
from cocodiff.config.errors import UserError

pytestmark = pytest.mark.processes

WAITS = """
    import time
    from cocodiff.comm.connect import limited_start

    with limited_start(1.0):
        time.sleep(60)
"""
JOINS = """
    import sys
    import torch
    from cocodiff.comm.connect import connect
    from cocodiff.comm.health import Limits
    from cocodiff.comm.launch import detect
    from cocodiff.config.errors import PeerLost

    try:
        connect(detect(), "gloo", torch.device("cpu"), {}, Limits(start_s=4.0))
    except PeerLost as error:
        sys.exit(str(error))
"""


def started(program: str, *words: object, **environment: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, words)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_a_meeting_that_takes_too_long_is_ended() -> None:
    code, said = end_of(started(WAITS))
    assert code == 1 and said.startswith("Timeout (0:00:01)!")


def environment_of(rank: int) -> dict[str, object]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.full
def test_peers_that_never_come_are_named_without_an_agent() -> None:
    alone = started(JOINS, **environment_of(0))
    lost = started(JOINS, **environment_of(2))
    assert end_of(alone) == (1, "rank 1 did not start within 4 s, nor did rank 2\n")
    code, said = end_of(lost)
    assert code == 1 and "rank 0 does not answer at 127.0.0.1:" in said and "within 4 s" in said


def test_ranks_of_one_host_meet_on_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    with connect._listen(True, 2) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert connect._on_one_host(Launch("torchrun", 0, 2), 2)
    monkeypatch.setenv("MASTER_ADDR", "node0.cluster")
    assert connect._on_one_host(Launch("torchrun", 0, 2, 0, 2), 2)
    assert not connect._on_one_host(Launch("torchrun", 0, 4, 0, 2), 4)


def test_ranks_meet_where_their_launcher_says_also_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be in network namespaces of their own, which share no loopback."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.3")
    with connect._listen(True, 2) as listener:
        host, port, _ = json.loads(connect._invitation(listener, True))
        assert (host, port) == listener.getsockname() and host == "127.0.0.3"


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this kernel has no IPv6 loopback (::1)")


def test_mpi_is_not_started_where_shared_memory_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"KiB": 64}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free["KiB"] << 10))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(mpi, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    with pytest.raises(UserError, match=r"has 64 KiB free, and MPI needs 6144 for 2 ranks .*--shm-size"):
        mpi.initialised_mpi()
    monkeypatch.setenv("I_MPI_FABRICS", "ofi")
    assert "MPI needs 256 for 12 ranks" in mpi.lacking_shared_memory(12)
    free["KiB"] = 300
    assert mpi.lacking_shared_memory(12) == ""
    monkeypatch.setattr(mpi, "SHARED_MEMORY", tmp_path / "absent")  # a system without one
    monkeypatch.delenv("I_MPI_FABRICS")
    assert mpi.lacking_shared_memory(2) == ""


@needs_ipv6
def test_ranks_meet_at_an_ipv6_address() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        port = probe.getsockname()[1]
    where = {"WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": port}
    ranks = [started(JOINS, RANK=rank, **where) for rank in range(2)]
    assert [end_of(rank) for rank in ranks] == [(0, "")] * 2


@needs_ipv6
@pytest.mark.parametrize(("one_host", "interface"), [(True, "::1"), (False, "::")])
def test_rank_0_answers_itself_at_an_ipv6_address(
    one_host: bool, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every interface it can be reached at those of IPv4 as well."""
    monkeypatch.setenv("MASTER_ADDR", "::1")
    assert connect._on_one_host(Launch("torchrun", 0, 2), 2)
    with connect._listen(one_host, 2) as listener:
        meeting = connect._accepted(0, 2, connect._invitation(listener, one_host), listener, None)
        port = listener.getsockname()[1]
        assert (meeting.interface, meeting.address, meeting.on_loopback) == (interface, ("::1", port), True)
        for address in [meeting.address, ("127.0.0.1", port)][: 1 if one_host else 2]:
            socket.create_connection(address, timeout=5.0).close()

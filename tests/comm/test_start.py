"""A start that is never complete: it ends in time, and who is missing is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from cocodiff.comm import connect, mpi
from cocodiff.comm.health import Limits
from cocodiff.comm.launch import Launch
from cocodiff.comm.presence import Presence
from cocodiff.config.errors import PeerLost, UserError

pytestmark = pytest.mark.processes

WAITS = """
    import sys, time
    from pathlib import Path
    from cocodiff.comm.health import Limits
    from cocodiff.comm.presence import Presence, limited_start

    folder, ranks, start_s, rank = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    presence = Presence(folder, rank, ranks)
    presence.announce()
    with limited_start(Limits(timeout_s=1.0, start_s=start_s), rank, presence, "MPI_Init"):
        print("waits", flush=True)
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


def waiting_rank(folder: Path, ranks: int, start_s: float, rank: int = 0) -> subprocess.Popen[str]:
    return started(WAITS, folder, ranks, start_s, rank)


def started(program: str, *words: object, **environment: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, words)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )


@pytest.fixture
def sibling() -> Iterator[subprocess.Popen[bytes]]:
    """Another rank's process."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder, in one that is this user's alone."""
    tmp_path.chmod(0o700)
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_ranks_of_this_host_that_never_came_are_named(folder: Path) -> None:
    code, said = end_of(waiting_rank(folder, 3, 1.0))
    assert code == -signal.SIGKILL
    assert "[rank 0] the ranks did not meet within 1 s in MPI_Init; of this host's 3 ranks there are 0" in said


def test_a_rank_that_hangs_in_the_meeting_is_ended(folder: Path, sibling: subprocess.Popen[bytes]) -> None:
    (folder / "1").write_text(str(sibling.pid))
    code, said = end_of(waiting_rank(folder, 2, 1.0))
    assert code == -signal.SIGKILL and "all 2 ranks of this host are there: one of them hangs" in said


def test_a_stopped_rank_is_named_before_the_limit(folder: Path, sibling: subprocess.Popen[bytes]) -> None:
    (folder / "1").write_text(str(sibling.pid))
    sibling.send_signal(signal.SIGSTOP)
    code, said = end_of(waiting_rank(folder, 2, 60.0))
    assert code == -signal.SIGKILL and "[rank 0] rank 1 has been stopped for 1 s" in said


def test_a_rank_that_died_is_named_at_once(folder: Path, sibling: subprocess.Popen[bytes]) -> None:
    (folder / "1").write_text(str(sibling.pid))
    waiting = waiting_rank(folder, 2, 60.0)
    assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n"
    sibling.kill()
    sibling.wait()
    code, said = end_of(waiting)
    assert code == -signal.SIGKILL and "[rank 0] rank 1 died before the ranks had met" in said


@pytest.mark.parametrize(
    ("fault", "said"),
    [(signal.SIGKILL, "rank 1 died before the ranks had met"), (signal.SIGSTOP, "rank 1 has been stopped for 1 s")],
)
def test_a_late_rank_names_the_one_that_others_were_ended_for(
    folder: Path, sibling: subprocess.Popen[bytes], fault: signal.Signals, said: str
) -> None:
    (folder / "1").write_text(str(sibling.pid))
    sibling.send_signal(fault)
    if fault == signal.SIGKILL:
        sibling.wait()
    for rank in (0, 2):  # each begins when the one before it is dead
        assert end_of(waiting_rank(folder, 3, 60.0, rank)) == (-signal.SIGKILL, f"cocodiff: [rank {rank}] {said}\n")


def test_what_killed_jobs_left_is_cleared_and_others_folders_are_not_used(folder: Path, tmp_path: Path) -> None:
    (folder / "1").write_text("999999999")
    Presence(tmp_path / "new", 0, 1).announce()
    assert not folder.exists() and (tmp_path / "new/0").read_text() == str(os.getpid())
    Presence(tmp_path / "new", 0, 1).withdraw()
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o777)
    Presence(tmp_path / "new", 0, 1).announce()
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o700)


def test_who_has_come_is_told_and_not_who_is_missing(folder: Path) -> None:
    here = Presence(folder, 0, 3)
    assert here.describe_present() == "of this host's 3 ranks there are none"
    for rank in (2, 0):
        Presence(folder, rank, 3).announce()
    assert here.describe_present() == "of this host's 3 ranks there are 0, 2"
    Presence(folder, 1, 3).announce()
    assert here.describe_present().startswith("all 3 ranks of this host are there: one of them hangs")


def test_a_job_is_known_by_what_its_launcher_says() -> None:
    launch = Launch("mpi", 3, 24, 3, 12)
    names = {Presence.of_job(launch, {"PALS_APID": word}).folder for word in ("a", "b", "a")}  # type: ignore[union-attr]
    assert len(names) == 2
    assert Presence.of_job(Launch("torchrun", 0, 2), {}) is None
    assert Presence.of_job(Launch("mpi", 0, None), {}) is None


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


def test_a_port_that_another_program_has_is_named() -> None:
    told = environment_of(0)
    with socket.create_server(("127.0.0.1", int(str(told["MASTER_PORT"])))):
        code, said = end_of(started(JOINS, **told))
    assert code == 1 and f"UserError: MASTER_PORT={told['MASTER_PORT']}: rank 0 cannot listen there (Address" in said
    assert "give a port that is free on 127.0.0.1" in said and "within" not in said


def test_a_store_that_falls_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a rank 0 that is stopped once it listens: connections to it are made all the same."""
    before = {*threading.enumerate()}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        with pytest.raises(PeerLost, match=r"rank 0 did not answer within 0\.5 s of the start"):
            connect._meet(Launch("torchrun", 1, 2), Limits(start_s=0.5))
    for left_behind in {*threading.enumerate()} - before:
        left_behind.join(30)  # the library says on stderr that its connection has closed


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


def test_a_rank_that_begins_a_run_when_rank_0_has_ended_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    connect.environment_store(1, 2, 5.0, True).add("opened/1", 1)  # the run before
    address = f"127.0.0.1:{store.port}"
    del store
    with pytest.raises(PeerLost, match=rf"^rank 0 does not answer at {address} within [\d.]+ s \(.*\)$"):
        connect._meet(Launch("torchrun", 1, 2, local_size=2), Limits(start_s=5.0))

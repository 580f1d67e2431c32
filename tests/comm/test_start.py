"""A start that is never complete: it ends in time, and who is missing is named. And where ranks meet."""

from __future__ import annotations

import os
import re
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
import torch
import torch.distributed as dist
from warm import forked

from cocodiff.comm import mpi_start
from cocodiff.comm.connect import connect, environment_store, listening_socket
from cocodiff.comm.health import Limits
from cocodiff.comm.launch import Launch
from cocodiff.comm.presence import Presence
from cocodiff.config.errors import PeerLost, UserError

WAITS = """
    import sys, time
    from pathlib import Path
    from cocodiff.comm.health import Limits
    from cocodiff.comm.presence import Presence, limited_start

    folder, ranks, start_s, rank = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    presence = Presence(folder, rank, ranks)
    presence.announce()
    with limited_start(Limits(timeout_s=1.0, start_s=start_s), rank, presence):
        print("waits", flush=True)
        time.sleep(60)
"""


def started(*words: object) -> subprocess.Popen[str]:
    """A rank that waits for the others."""
    program = [sys.executable, "-c", textwrap.dedent(WAITS), *map(str, words)]
    return subprocess.Popen(program, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder, in one that is this user's alone."""
    tmp_path.chmod(0o700)
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.fixture
def sibling(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another rank's process, which has announced itself as rank 1."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (folder / "1").write_text(str(process.pid))
    yield process
    process.kill()
    process.wait()


UNMET = "the ranks did not meet within 1 s in MPI_Init"


@pytest.mark.parametrize(
    ("ranks", "start_s", "fault", "said"),
    [
        (2, 1.0, 0, rf"{UNMET}; .*\b2 ranks "),
        (3, 1.0, 0, rf"{UNMET}; .*\b3 ranks .* 0, 1$"),
        (3, 60.0, signal.SIGSTOP, "rank 1 has been stopped for 1 s"),
        (3, 60.0, signal.SIGKILL, "rank 1 died before the ranks had met"),
    ],
)
def test_a_start_that_is_never_complete_ends_with_its_reason(
    folder: Path, sibling: subprocess.Popen[bytes], ranks: int, start_s: float, fault: int, said: str
) -> None:
    """A rank that comes when the first one is dead tells the same reason."""
    waiting = started(folder, ranks, start_s, 0)
    assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n"
    sibling.send_signal(fault)
    for rank, process in ((0, waiting), (2, None)):
        ended = process or started(folder, ranks, 60.0, rank)
        _, told = ended.communicate(timeout=60)
        assert ended.returncode == -signal.SIGKILL
        assert re.match(rf"cocodiff: \[rank {rank}\] {said}", told) and told.count("\n") == 1


def test_what_killed_jobs_left_is_cleared_and_others_folders_are_not_used(folder: Path, tmp_path: Path) -> None:
    (folder / "1").write_text("999999999")
    Presence(tmp_path / "new", 0, 1).announce()
    assert not folder.exists() and (tmp_path / "new/0").read_text() == str(os.getpid())
    Presence(tmp_path / "new", 0, 1).withdraw()
    assert not (tmp_path / "new").exists()
    assert Presence(tmp_path / "new", 0, 3).describe_present() == "of this host's 3 ranks there are none"
    tmp_path.chmod(0o777)
    Presence(tmp_path / "new", 0, 1).announce()
    assert not (tmp_path / "new").exists()
    tmp_path.chmod(0o700)


def test_a_job_is_known_by_what_its_launcher_says() -> None:
    launch = Launch("mpi", 3, 24, 3, 12)
    jobs = [{"PALS_APID": "a"}, {"PALS_APID": "b"}, {"PMIX_NAMESPACE": "c"}, {"I_MPI_HYDRA_UUID": "d"}]
    jobs += [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in "78" for step in "01"]
    names = {Presence.of_job(launch, job).folder for job in jobs * 2}  # type: ignore[union-attr]
    assert len(names) == len(jobs)
    assert Presence.of_job(Launch("torchrun", 0, 2), {}) is None
    assert Presence.of_job(Launch("mpi", 0, None), {}) is None


def test_ranks_that_torchrun_starts_again_find_nothing_of_the_first_start() -> None:
    """In its agent's store, which outlives them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    first, again = (environment_store(0, 1, 9.0, True, there | {"TORCHELASTIC_RESTART_COUNT": n}) for n in "01")
    first.set("meeting", "old")
    assert first.check(["meeting"]) and not again.check(["meeting"])


def test_a_port_that_another_program_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        done = forked("gloo", folder=tmp_path, module="strangers")
    assert done.returncode == 2 and f"MASTER_PORT={port}: rank 0 cannot listen there (Address" in done.stderr
    assert " 127.0.0.1" in done.stderr and "within" not in done.stderr


def error_of(rank: int, monkeypatch: pytest.MonkeyPatch, port: int, start_s: float) -> str:
    """The error of one of two ranks, in this process, which do not meet at a port."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(PeerLost) as caught:
        connect(Launch("torchrun", rank, 2, local_size=2), "gloo", torch.device("cpu"), {}, Limits(start_s=start_s))
    assert caught.value.rank == 1 - rank
    return str(caught.value)


def test_peers_that_never_come_are_named_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert error_of(0, monkeypatch, port, 0.5) == "rank 1 did not start within 0.5 s"


def test_a_store_that_falls_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a rank 0 that is stopped once it listens: connections to it are made all the same."""
    before = {*threading.enumerate()}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = error_of(1, monkeypatch, port, 0.5)
        assert said == f"rank 0 does not answer at 127.0.0.1:{port} within 0.5 s of the start"
    for left_behind in {*threading.enumerate()} - before:
        left_behind.join(30)  # the library says on stderr that its connection has closed


def test_a_rank_that_begins_a_run_when_rank_0_has_ended_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment_store(1, 2, 5.0, True, where).add("opened/1", 1)  # the run before
    del store
    assert f"rank 0 does not answer at 127.0.0.1:{port} within " in error_of(1, monkeypatch, port, 5.0)


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this kernel has no IPv6 loopback (::1)")


@needs_ipv6
@pytest.mark.parametrize(("one_host", "interface"), [(True, "::1"), (False, "::")])
def test_rank_0_answers_at_an_ipv6_address(one_host: bool, interface: str) -> None:
    """Sockets on every interface, where others know rank 0 by another address, are reached by IPv4 as well."""
    with listening_socket("::1", 0, one_host, 2) as listener:
        found, port, *_ = listener.getsockname()
        assert found == interface
        for host in ["::1", "127.0.0.1"][: 1 if one_host else 2]:
            socket.create_connection((host, port), timeout=5.0).close()


def test_mpi_is_not_started_where_shared_memory_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"KiB": 64}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free["KiB"] << 10))
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(mpi_start, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    with pytest.raises(UserError, match=r"has 64 KiB free, .*6144 .*2 ranks .*--shm-size"):
        mpi_start.initialised_mpi()
    monkeypatch.setenv("I_MPI_FABRICS", "ofi")
    assert "MPI needs 256 for 12 ranks" in mpi_start.lacking_shared_memory(12)
    free["KiB"] = 300
    assert mpi_start.lacking_shared_memory(12) == ""
    monkeypatch.setattr(mpi_start, "SHARED_MEMORY", tmp_path / "absent")  # a system without one
    monkeypatch.delenv("I_MPI_FABRICS")
    assert mpi_start.lacking_shared_memory(2) == ""

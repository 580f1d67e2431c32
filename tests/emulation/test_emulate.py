"""`cocodiff emulate` with real namespaces: what runs in them, and that nothing of it stays. Needs root and tc."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cocodiff_studies.network import Network, stream_rate
from launching import assert_succeeded, find_mpiexec, run
from worlds import topology_of

from cocodiff.config.config import load_machine

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("emulation")]
SHOW = "readlink /proc/self/ns/net"
MACHINE = Path(__file__).with_name("small.yaml").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(MACHINE)
    return str(path)


def emulate(*words: str) -> list[str]:
    return [sys.executable, "-m", "cocodiff", "emulate", *words]


def found_in_processes(path: str, read: Callable[[Path], Any]) -> list[Any]:
    """Contents of a file or link that each process has in /proc."""
    found = []
    for one in Path("/proc").glob(f"[0-9]*/{path}"):
        with contextlib.suppress(OSError):
            found.append(read(one))
    return found


def namespaces() -> set[str]:
    """The network namespaces that some process is in."""
    return {str(link) for link in found_in_processes("ns/net", Path.readlink)}


def processes(word: str) -> int:
    """How many processes have a word of their command line."""
    return sum(word.encode() in line.split(b"\0") for line in found_in_processes("cmdline", Path.read_bytes))


def test_programs_run_in_namespaces_of_their_own_and_leave_nothing(machine: str) -> None:
    before = namespaces()
    done = run(emulate("--machine", machine, "--nodes", "2", "--", "sh", "-c", f"echo rank=$RANK; {SHOW}"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("rank=")) == [f"rank={rank}" for rank in range(8)]
    own = {line for line in lines if line.startswith("net:")}
    assert len(own) == 8 and not own & before
    assert not own & namespaces()
    for kind in ("sibling", "plane", "cross_plane", "node"):
        assert any(line.split()[:1] == [kind] and "Mbit/s of" in line for line in lines)


def test_a_bad_rank_ends_all(machine: str) -> None:
    for bad, code, said in (
        ("exit 7", 7, "rank 2 left with code 7"),
        ("kill -9 $$", 1, "rank 2 was killed by SIGKILL"),
    ):
        done = run(emulate("--machine", machine, "--", "sh", "-c", f"{SHOW}; test $RANK != 2 || {bad}; sleep 70.25"))
        assert done.returncode == code and said in done.stderr
        wait_until_gone({line for line in done.stdout.splitlines() if line.startswith("net:")}, "70.25")


@contextlib.contextmanager
def started(machine: str, script: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """An emulation whose ranks run a shell script, once the first of them does, and that rank's namespace."""
    words = emulate("--machine", machine, "--", "sh", "-c", f"{SHOW}; {script}")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, next(line.strip() for line in process.stdout if line.startswith("net:"))
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupt_ends_all(
    machine: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with started(machine, "sleep 71.25 & sleep 71.25") as (process, space):
        process.send_signal(number)
        assert process.wait(timeout=30) == 130
        wait_until_gone({space}, "71.25")
    assert list(tmp_path.glob("cocodiff-emulation-*")) == []


def test_the_next_start_ends_what_a_killed_one_left_and_no_other(machine: str) -> None:
    with started(machine, "sleep 73.25") as (other, others_space):  # runs all the while
        with started(machine, "sleep 72.25 & sleep 72.25") as (process, space):
            assert space != others_space
            wait_until(lambda: processes("72.25") > 0)
            process.kill()
            process.wait()
        assert_succeeded(run(emulate("--machine", machine, "--", "true")))
        wait_until(lambda: processes("72.25") == 0 and space not in namespaces())
        assert other.poll() is None and others_space in namespaces()
        other.send_signal(signal.SIGTERM)
        assert other.wait(timeout=30) == 130
    wait_until_gone({others_space}, "73.25")


def wait_until_gone(spaces: set[str], word: str) -> None:
    """Until the kernel has ended what was killed, which is no child of the emulation."""
    wait_until(lambda: not spaces & namespaces() and processes(word) == 0)


def wait_until(holds: Callable[[], bool], within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def bench(out: Path, how: list[str], kind: str, *words: str) -> list[dict[str, Any]]:
    """The rows of a benchmark that runs on an emulated machine. RANK and WORLD_SIZE are of some other job, and tests of
    MPI set I_MPI_FABRICS to shm."""
    job = ["cocodiff", "bench", kind, "--repeats", "1", "--quiet", "--overwrite", "--out", str(out), *words]
    assert_succeeded(run(["env", "-u", "I_MPI_FABRICS", "RANK=0", "WORLD_SIZE=1", *emulate(*how, "--", *job)]))
    return json.loads((out / "bench.json").read_text())["rows"]


def variants(rows: list[dict[str, Any]]) -> list[str]:
    return [row["variant"] for row in rows]


def test_alltoall_of_every_exchange_is_right_and_compared_with_the_bound(machine: str, tmp_path: Path) -> None:
    words = (tmp_path / "bench", ["--machine", machine], "alltoall", "--sizes_mb", "0.2")
    bench(*words, "--tune")
    rows = bench(*words, "--exchange_table", str(tmp_path / "bench" / "exchange.yaml"))
    assert variants(rows) == ["flat", "flat_serial", "library", "tapa", "split", "auto", "bound"]
    assert all(row["efficiency"] == pytest.approx(rows[6]["median_s"] / row["median_s"]) for row in rows)
    assert rows[3]["phase1_s"] > 0 and rows[3]["phase2_s"] > 0


@pytest.mark.full
def test_tiles_have_even_shares_of_a_nic() -> None:
    """Four streams come to tile 12. One has come through a NIC that tiles 0 and 4 share, with four streams too."""
    with Network.open(topology_of("aurora", 24, 12), 3000.0) as network, ThreadPoolExecutor(7) as pool:
        rates = [*pool.map(stream_rate, 7 * [network], (2, 3, 6, 0, 4, 0, 4), (12, 12, 12, 12, 17, 18, 19))]
    assert max(rates) < 1.3 * min(rates), rates


def test_doctor_measures_the_rate_of_each_kind_of_link(tmp_path: Path) -> None:
    """And three ranks of a node that share a NIC are counted as such. A busy host makes links slower; what its token
    buckets saved while it was busy makes a few messages faster by up to a quarter."""
    path, scale = tmp_path / "small.yaml", 1000
    path.write_text(MACHINE.partition("device:")[0].replace("185", "60"))
    how = emulate("--machine", str(path), "--nodes", "2", "--scale", str(scale))
    words = ["--kernels", "torch", "--machine", str(path), "--out", str(tmp_path / "doctor")]
    assert_succeeded(run([*how, "--", sys.executable, "-m", "cocodiff", "doctor", *words]))
    nominal, measured = (load_machine(str(file)).links for file in (path, tmp_path / "doctor" / "machine.yaml"))
    for name in ("sibling_gb_s", "plane_gb_s", "nic_gb_s"):
        assert 0.4 < scale * getattr(measured, name) / getattr(nominal, name) < 1.6, name
    assert 0.4 < measured.link_share <= 1


def test_mpi_runs_over_the_emulated_links(tmp_path: Path) -> None:
    find_mpiexec()
    how = ["--machine", "local", "--ranks", "2", "--launcher", "mpiexec"]
    rows = bench(tmp_path / "bench", how, "alltoall", "--sizes_mb", "0.05", "--variants", "mpi,split")
    assert variants(rows) == ["mpi", "split"]  # no figures, no bound


def test_a_step_of_a_models_shape(machine: str, tmp_path: Path) -> None:
    words = ["--model", "sd3.5", "--size", "64", "--link_efficiency", "0.5"]
    words += ["--variants", "flat_serial", "flat", "cocodiff", "ring", "token_ring"]
    rows = bench(tmp_path / "step", ["--machine", machine, "--scale", "100"], "step", *words)
    assert variants(rows) == ["flat_serial", "flat", "cocodiff", "ring", "token ring"]
    for row in rows:
        assert 0 < row["communication_share"] < 1
        assert row["communication_share"] == pytest.approx(1 - row["compute_s"] / row["median_s"])
        assert row["planned_s"] > row["compute_s"]


@pytest.mark.full
def test_weights_that_cards_share_travel_beside_tokens(machine: str, tmp_path: Path) -> None:
    """And it is told how much of their way is hidden."""
    model = tmp_path / "tiny.yaml"
    model.write_text("name: tiny\nfamily: FLUX.1\nheads: 4\nhead_dim: 64\njoint_layers: 2\nparameters: 1000000\n")
    words = ["--model", str(model), "--size", "64", "--link_efficiency", "1"]
    words += ["--variants", "split", "split_card", "cocodiff_card"]
    whole, *shared = bench(tmp_path / "step", ["--machine", machine, "--scale", "1000"], "step", *words)
    assert variants([whole, *shared]) == ["split", "split card", "cocodiff card"]
    assert whole["hidden_share"] is None and all(0 <= row["hidden_share"] <= 1 for row in shared)


@pytest.mark.full
def test_a_campaign_that_is_killed_goes_on_to_its_page(machine: str, tmp_path: Path) -> None:
    """The course of launch/campaign.pbs on one emulated node, then on two, with a small model."""
    (tmp_path / "toy.yaml").write_text(
        "{name: toy, family: FLUX.1, heads: 8, head_dim: 32, joint_layers: 1, parallel_layers: 1, mlp_ratio: 4, "
        "parameters: 1000000, text_tokens: 16}"
    )
    own = {"LAUNCHER": "emulate", "NODES": "1", "SCALE": "300", "MACHINE": machine, "VENV": sys.prefix, "SWEEP": "none"}
    own |= {"MODELS": str(tmp_path / "toy.yaml"), "SIZES": "128", "BATCHES": "1", "LARGE": "128", "SIZES_MB": "0.5"}
    out = tmp_path / "campaign"
    own |= {"STEPS": "6", "REPEATS": "1", "OUT": str(out)}
    script = ["bash", str(Path(__file__).parents[2] / "launch/campaign.pbs")]
    first = subprocess.Popen(script, env=os.environ | own, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until((out / "step-1-toy-128-1/bench.json").exists, within_s=300)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done_before = {path: path.stat().st_mtime_ns for path in out.glob("*/bench.json")}
    for nodes in ("1", "2"):
        given = os.environ | own | {"NODES": nodes}
        done = subprocess.run(script, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in done_before} == done_before
    measured = {path.parent.name for path in out.glob("*/bench.json")}
    assert measured == {"alltoall-1", "alltoall-2", "step-1-toy-128-1", "step-1-toy-128-0", "step-2-toy-128-0"}
    page = (out / "paper/papers.md").read_text()
    assert page.count("mean of what was measured |") == 12 and "planned, `plan`" in page

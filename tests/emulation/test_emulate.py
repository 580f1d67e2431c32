"""`cocodiff emulate` with real namespaces: what runs in them, and that nothing of it stays. Needs root and tc."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cocodiff_studies.namespaces import Namespace
from launching import find_mpiexec, run


def lacking() -> str:
    """Why emulations cannot run here, "" where they can."""
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("ip") is None:
        return "emulation needs root, ip and tc (iproute2)"
    try:
        Namespace().close()
    except PermissionError:
        return "this root may not make network namespaces"
    return ""


pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.skipif(bool(lacking()), reason=lacking() or "runs")]
SHOW = "readlink /proc/self/ns/net"
MACHINE = """
name: small
cards: 2
tiles: 2
planes: [0, 1, 1, 0]
links: {sibling_gb_s: 185, plane_gb_s: 15, nic_gb_s: 25, nics: 2, nic_of: [0, 1, 0, 0]}
device: {memory_gib: 64, memory_gb_s: 1000, bf16_tflop_s: 256}
"""


@pytest.fixture
def machine(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(MACHINE)
    return str(path)


def emulate(*words):
    return [sys.executable, "-m", "cocodiff", "emulate", *words]


def namespaces() -> set[str]:
    """The network namespaces that some process is in."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return found


def processes(word: str) -> int:
    """How many processes have a word of their command line."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += word.encode() in path.read_bytes().split(b"\0")
    return found


def test_programs_run_in_namespaces_of_their_own_and_leave_nothing(machine):
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


def test_a_bad_rank_ends_all(machine):
    for bad, code, said in (
        ("exit 7", 7, "rank 2 left with code 7"),
        ("kill -9 $$", 1, "rank 2 was killed by SIGKILL"),
    ):
        done = run(emulate("--machine", machine, "--", "sh", "-c", f"{SHOW}; test $RANK != 2 || {bad}; sleep 70.25"))
        assert done.returncode == code and said in done.stderr
        assert not {line for line in done.stdout.splitlines() if line.startswith("net:")} & namespaces()
        assert processes("70.25") == 0


def started(machine, script):
    """An emulation whose ranks run a shell script, once the first of them does, and that rank's namespace."""
    process = subprocess.Popen(
        emulate("--machine", machine, "--", "sh", "-c", f"{SHOW}; {script}"), stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("net:"):
            return process, line.strip()
    raise AssertionError("the ranks did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_an_interrupt_ends_all(machine, number, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process, space = started(machine, "sleep 71.25 & sleep 71.25")
    process.send_signal(number)
    assert process.wait(timeout=30) == 130
    process.stdout.close()
    assert space not in namespaces() and processes("71.25") == 0
    assert list(tmp_path.glob("cocodiff-emulation-*")) == []


def test_the_next_start_ends_what_a_killed_one_left_and_no_other(machine):
    other, others_space = started(machine, "sleep 73.25")  # runs all the while
    process, space = started(machine, "sleep 72.25 & sleep 72.25")
    assert space != others_space
    wait_until(lambda: processes("72.25") > 0)
    process.kill()
    process.wait()
    process.stdout.close()
    done = run(emulate("--machine", machine, "--", "true"))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: processes("72.25") == 0 and space not in namespaces())
    assert other.poll() is None and others_space in namespaces()
    other.send_signal(signal.SIGTERM)
    assert other.wait(timeout=30) == 130
    other.stdout.close()
    assert others_space not in namespaces() and processes("73.25") == 0


def wait_until(holds, within_s=20):
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_alltoall_of_every_exchange_is_right_and_compared_with_the_bound(machine, tmp_path):
    words = ["--sizes_mb", "0.2", "--repeats", "1", "--quiet", "--out", str(tmp_path / "bench")]
    done = run(emulate("--machine", machine, "--", "cocodiff", "bench", "alltoall", *words, "--tune"))
    assert done.returncode == 0, done.stdout + done.stderr
    table = str(tmp_path / "bench" / "exchange.yaml")
    more = ["--exchange_table", table, "--overwrite"]
    done = run(emulate("--machine", machine, "--", "cocodiff", "bench", "alltoall", *words, *more))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    found = [row["variant"] for row in rows]
    assert found == ["flat", "flat_serial", "library", "tapa", "split", "auto", "bound"]
    assert all(row["efficiency"] == pytest.approx(rows[6]["median_s"] / row["median_s"]) for row in rows[:7])
    tapa = next(row for row in rows if row["variant"] == "tapa")
    assert tapa["phase1_s"] > 0 and tapa["phase2_s"] > 0


def test_mpi_runs_over_the_emulated_links(tmp_path):
    find_mpiexec()
    words = ["--sizes_mb", "0.05", "--repeats", "1", "--quiet", "--variants", "mpi,split", "--out", str(tmp_path / "b")]
    ours = emulate(
        "--machine", "local", "--ranks", "2", "--launcher", "mpiexec", "--", "cocodiff", "bench", "alltoall", *words
    )
    # The tests of MPI set I_MPI_FABRICS to shm; RANK and WORLD_SIZE are of some other job.
    done = run(["env", "-u", "I_MPI_FABRICS", "RANK=0", "WORLD_SIZE=1", *ours])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "b" / "bench.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["mpi", "split"]  # no figures, no bound


def test_a_step_of_a_models_shape(machine, tmp_path):
    words = ["--model", "sd3.5", "--size", "64", "--repeats", "1", "--link_efficiency", "0.5", "--quiet"]
    words += ["--variants", "flat_serial", "flat", "cocodiff", "ring", "token_ring"]
    out = ["--out", str(tmp_path / "step")]
    done = run(emulate("--machine", machine, "--scale", "100", "--", "cocodiff", "bench", "step", *words, *out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step" / "bench.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["flat_serial", "flat", "cocodiff", "ring", "token ring"]
    assert all(0 < row["communication_share"] < 1 for row in rows)
    assert all(row["communication_share"] == pytest.approx(1 - row["compute_s"] / row["median_s"]) for row in rows)


@pytest.mark.full
def test_weights_that_cards_share_travel_beside_tokens(machine, tmp_path):
    """And it is told how much of their way is hidden."""
    model = tmp_path / "tiny.yaml"
    text = "name: tiny\nfamily: FLUX.1\nheads: 4\nhead_dim: 64\njoint_layers: 2\nparameters: 1000000\n"
    model.write_text(text)
    words = ["--model", str(model), "--size", "64", "--repeats", "1", "--link_efficiency", "1", "--quiet"]
    words += ["--variants", "split", "split_card", "cocodiff_card", "--out", str(tmp_path / "step")]
    done = run(emulate("--machine", machine, "--scale", "1000", "--", "cocodiff", "bench", "step", *words))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "step" / "bench.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["split", "split card", "cocodiff card"]
    whole, *shared = rows
    assert whole["hidden_share"] is None and all(0 <= row["hidden_share"] <= 1 for row in shared)


@pytest.mark.full
def test_a_campaign_that_is_killed_goes_on_to_its_page(machine, tmp_path):
    """The course of launch/campaign.pbs on two emulated nodes with a small model."""
    (tmp_path / "toy.yaml").write_text(
        "{name: toy, family: FLUX.1, heads: 8, head_dim: 32, joint_layers: 1, parallel_layers: 1, mlp_ratio: 4, "
        "parameters: 1000000, text_tokens: 16}"
    )
    own = {"LAUNCHER": "emulate", "NODES": "2", "SCALE": "300", "MACHINE": machine, "VENV": sys.prefix, "SWEEP": "none"}
    own |= {"MODELS": str(tmp_path / "toy.yaml"), "SIZES": "128", "BATCHES": "1", "LARGE": "128", "SIZES_MB": "0.5"}
    out = tmp_path / "campaign"
    own |= {"STEPS": "6", "REPEATS": "1", "OUT": str(out)}
    script = ["bash", str(Path(__file__).parents[2] / "launch/campaign.pbs")]
    first = subprocess.Popen(script, env=os.environ | own, stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until((out / "step-1-toy-128-1/bench.json").exists, within_s=300)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done_before = {path: path.stat().st_mtime_ns for path in out.glob("*/bench.json")}
    done = subprocess.run(script, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in done_before} == done_before
    measured = {path.parent.name for path in out.glob("*/bench.json")}
    assert measured == {"alltoall-1", "alltoall-2", "step-1-toy-128-1", "step-1-toy-128-0", "step-2-toy-128-0"}
    page = (out / "paper/papers.md").read_text()
    assert page.count("mean of what was measured |") == 12 and "planned, `plan`" in page

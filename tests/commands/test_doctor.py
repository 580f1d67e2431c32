"""`cocodiff doctor` as a user starts it: alone, on forked ranks, under mpiexec; and what a faulty environment does."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from launching import fake, run
from warm_ranks import warm_mpiexec

from cocodiff.cli.doctor import command as doctor
from cocodiff.cli.doctor import facts as doctor_facts
from cocodiff.cli.doctor import trials
from cocodiff.cli.main import main
from cocodiff.comm.health import Health
from cocodiff.comm.launch import Launch
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import load_machine
from cocodiff.config.errors import OwnRankError

# Trials are small, and other packages are not tried in a process of their own.
QUICK = "import sys; from cocodiff.cli.doctor import facts, trials; from cocodiff.cli.main import main; "
QUICK += "facts.unimported, trials.SIDE = lambda *_: {}, 64; "


def report(out: Path) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """doctor.json, and the severities of each check's findings."""
    document = json.loads((out / "doctor.json").read_text())
    found: dict[str, set[str]] = {}
    for finding in document["findings"]:
        found.setdefault(finding["check"], set()).add(finding["severity"])
    return document, found


def test_a_rank_alone_imports_no_diffusers(tmp_path: Path) -> None:
    words = ["doctor", "--out", str(tmp_path / "d"), "--kernels", "torch"]
    heavy = "any(name in sys.modules for name in ('diffusers', 'transformers'))"
    done = run([sys.executable, "-c", f"{QUICK}sys.exit(main({words!r}) or {heavy})"])
    assert done.returncode == 0, done.stdout + done.stderr
    document, _ = report(tmp_path / "d")
    assert document["healthy"] and [rank["rank"] for rank in document["facts"]["ranks"]] == [0]
    assert "healthy: 1 rank(s) looked at" in done.stdout and "torch was asked for" in done.stdout


@pytest.mark.alone
def test_ranks_under_mpiexec_are_healthy(tmp_path: Path) -> None:
    done = warm_mpiexec(3, "-m", "cocodiff", "doctor", "--out", str(tmp_path / "d"), "--kernels", "torch")
    assert done.returncode == 0, done.stdout + done.stderr
    document, found = report(tmp_path / "d")
    facts = document["facts"]
    assert document["healthy"] and [rank["library"] for rank in facts["ranks"]] == ["mpi"] * 3
    assert len(facts["alltoalls"]) == 15 and not any(trial["wrong"] for trial in facts["alltoalls"])
    assert facts["overlap"]["communication_s"] > 0
    assert done.stdout.count("healthy: 3 rank(s)") == 1
    calls = {(one["call"], one["bytes"]) for one in facts["issues"]}
    assert len(calls) == 12 and {size for _, size in calls} == {2**12, 2**16, 2**20, 2**24}
    assert all(0 < one["returns_s"] < one["complete_s"] for one in facts["issues"])
    assert found["host"] == found["order"] == found["messages"] == {"note"} and facts["order_rounds"] is None
    assert facts["pair"] == facts["op_sync"] == [[], []]
    measured = load_machine(str(tmp_path / "d/machine.yaml"))
    assert measured.device.overlap_share == pytest.approx(facts["overlap"]["hidden"])
    assert measured.links.blocked_us == pytest.approx(facts["blocked_us"])


@pytest.mark.alone
def test_a_faulty_environment_ends_with_1_and_remedies(tmp_path: Path) -> None:
    """Another plane map, a second MPI, a NIC that is not there, kernels that cannot be built; and CCL_OP_SYNC."""
    fake(tmp_path / "bin" / "mpiexec")
    wheel = tmp_path / "site" / "impi_rt-2021.17.2.dist-info"
    wheel.mkdir(parents=True)
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: impi-rt\nVersion: 2021.17.2\n")
    faulty = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]),
        "CCL_TOPO_COLOR": "card:{0,1},{2,3};plane:{0,3},{1,2}",
        "FI_CXI_DEVICE_NAME": "cxi77",
        "COCODIFF_CACHE": "/proc/none",
        "CCL_OP_SYNC": "1",
    }
    words = ["doctor", "--ranks", "4", "--kernels", "sycl", "--out", str(tmp_path / "d")]
    program = [sys.executable, "-c", f"{QUICK}sys.exit(main({words!r}))"]
    done = run(["env", *(f"{k}={v}" for k, v in faulty.items()), *program])
    assert done.returncode == 1, done.stdout + done.stderr
    document, found = report(tmp_path / "d")
    assert {check for check, of in found.items() if "fault" in of} == {"planes", "mpi", "nics", "sycl"}
    assert found["settings"] == {"warning"} and found["all-to-all"] == {"ok"} and not document["healthy"]
    assert "not healthy: 4 rank(s)" in done.stdout and "-> unset FI_CXI_DEVICE_NAME" in done.stdout
    places = [(one["launcher"], one["local_rank"], one["local_size"]) for one in document["facts"]["ranks"]]
    assert places == [("forked", rank, 4) for rank in range(4)]


def test_what_doctor_writes_gives_access_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"PMI_SHARED_SECRET": "s3cret", "AWS_ID": "1", "https_proxy": "http://me:s3cret@proxy:3128"}
    secrets |= {"PYTORCH_XPU_ALLOC_CONF": "expandable_segments:True"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    told = doctor_facts.environment()
    assert told["https_proxy"] == "http://...@proxy:3128" and "s3cret" not in str(told) and "AWS_ID" not in told
    assert told["PYTORCH_XPU_ALLOC_CONF"] == "expandable_segments:True", "a check reads it"


class Enough(Exception):
    """Ends what is looked at."""


def test_kernels_are_compiled_once_a_node_in_a_time_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait for them longer than for any other step."""
    opened: list[str] = []
    steps: dict[str, set[tuple[int, float, bool]]] = defaultdict(set)

    @contextmanager
    def noted(seconds: float, rank: int, _: Any, what: str, remedy: str = "") -> Iterator[None]:
        steps[what].add((rank, seconds, "--kernels torch" in remedy))
        yield

    monkeypatch.setattr(doctor, "patience", noted)
    monkeypatch.setattr(doctor, "ask", Mock(side_effect=Enough))
    monkeypatch.setattr(doctor, "replace", Mock())
    monkeypatch.setattr(doctor_facts, "sycl_path", lambda _, kernels: opened.append(kernels))
    monkeypatch.setattr(doctor_facts, "gather_rank", Mock())
    for name in ("compute", "rates"):
        monkeypatch.setattr(trials, name, lambda *_: (None, None))
    given = {"machine": "local", "patience_s": 12.0, "compile_s": 33.0, "kernels": "auto", "model": None, "size": 64}

    def work(transport: Any) -> None:
        with pytest.raises(Enough):
            doctor.gather(given, Launch("forked", transport.rank, 4, transport.rank % 2, 2), transport)

    run_ranks(4, work)
    assert opened == ["auto"] * 2 and steps.pop("compiling SYCL kernels") == {(0, 33, True), (2, 33, True)}
    assert steps.pop("waiting for the nodes' SYCL kernels") == {(rank, 45, True) for rank in range(4)}
    assert len(steps) > 1 and all(found == {(rank, 12, False) for rank in range(4)} for found in steps.values())


@pytest.mark.parametrize(
    ("words", "free", "code", "said"),
    [
        ((), 2**28, 0, "0.25 GiB free on rank 0"),
        ((), 2**28 - 1, 1, "any run needs 0.25 GiB on rank 0"),
        (("--model", "qwen-image"), 2**30, 1, "the model needs"),
    ],
)
def test_too_little_memory_is_a_fault(words, free, code, said, tmp_path, capsys, monkeypatch):
    """It ends with 1, and is written down. Trials are small, and nothing is computed."""
    monkeypatch.setattr(doctor_facts, "free_memory", lambda *_: free)
    monkeypatch.setattr(doctor_facts, "unimported", lambda *_: {})
    monkeypatch.setattr(doctor_facts, "try_operations", lambda *_: [])
    monkeypatch.setattr(trials, "SIDE", 64)
    assert main(["doctor", *words, "--kernels", "torch", "--out", str(tmp_path / "d")]) == code
    assert said in capsys.readouterr().out and report(tmp_path / "d")[0]["healthy"] is (code == 0)


def test_a_step_that_fails_or_hangs_is_named_and_one_that_ends_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    said: list[bytes] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(os, "write", lambda _, text: said.append(text))
    with pytest.raises(OwnRankError, match="a step: 45 bytes"), doctor.patience(0.3, 0, Health(), "a step"):
        raise ValueError("45 bytes")
    with doctor.patience(0.3, 3, Health(), "nothing"):
        pass
    time.sleep(0.5)
    assert ended == []
    with doctor.patience(0.01, 3, Health(), "all-to-alls"):
        for _ in range(500):
            if ended:
                break
            time.sleep(0.01)
    assert ended == [1] and b"rank 3 hangs since 0.01 s at all-to-alls" in said[0]

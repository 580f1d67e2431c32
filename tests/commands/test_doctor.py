"""`cocodiff doctor` as a user starts it: alone, on forked ranks, under mpiexec; and what a faulty environment does."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import mpiexec, run

from cocodiff.cli.doctor import command as doctor
from cocodiff.cli.doctor.facts import environment
from cocodiff.cli.main import main
from cocodiff.comm.health import Health
from cocodiff.config.errors import OwnRankError

pytestmark = pytest.mark.processes


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "doctor.json").read_text())


def severities(document: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for finding in document["findings"]:
        found.setdefault(finding["check"], set()).add(finding["severity"])
    return found


def test_one_rank_alone(tmp_path, capsys):
    assert main(["doctor", "--out", str(tmp_path / "d"), "--kernels", "torch"]) == 0
    document, shown = report(tmp_path / "d"), capsys.readouterr().out
    assert document["healthy"] and document["facts"]["ranks"][0]["rank"] == 0
    assert "healthy: 1 rank(s) looked at" in shown and "torch was asked for" in shown


@pytest.mark.alone
def test_ranks_under_mpiexec_are_healthy(tmp_path):
    done = mpiexec(3, "-m", "cocodiff", "doctor", "--out", str(tmp_path / "d"), "--kernels", "torch")
    assert done.returncode == 0, done.stdout + done.stderr
    document = report(tmp_path / "d")
    facts = document["facts"]
    assert document["healthy"] and [rank["library"] for rank in facts["ranks"]] == ["mpi"] * 3
    assert len(facts["alltoalls"]) == 15 and not any(trial["wrong"] for trial in facts["alltoalls"])
    assert facts["overlap"]["communication_s"] > 0
    assert done.stdout.count("healthy: 3 rank(s)") == 1
    calls = {(one["call"], one["bytes"]) for one in facts["issues"]}
    assert len(calls) == 12 and {size for _, size in calls} == {2**12, 2**16, 2**20, 2**24}
    assert all(0 < one["returns_s"] < one["complete_s"] for one in facts["issues"])
    assert severities(document)["host"] == severities(document)["order"] == {"note"} and facts["order_rounds"] is None


@pytest.mark.alone
def test_a_faulty_environment_ends_with_1_and_remedies(tmp_path):
    """Another plane map, a second MPI, a NIC that is not there, kernels that cannot be built; and CCL_OP_SYNC."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mpiexec").chmod(0o755)
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
    done = run(["env", *(f"{k}={v}" for k, v in faulty.items()), sys.executable, "-m", "cocodiff", *words])
    assert done.returncode == 1, done.stdout + done.stderr
    document = report(tmp_path / "d")
    found = severities(document)
    assert {check for check, of in found.items() if "fault" in of} == {"planes", "mpi", "nics", "sycl"}
    assert found["settings"] == {"warning"} and found["all-to-all"] == {"ok"} and not document["healthy"]
    assert "not healthy: 4 rank(s)" in done.stdout and "-> unset FI_CXI_DEVICE_NAME" in done.stdout
    assert all(rank["launcher"] == "forked" for rank in document["facts"]["ranks"])


def test_what_doctor_writes_gives_access_to_nothing(monkeypatch):
    for name, value in (
        ("PMI_SHARED_SECRET", "s3cret"),
        ("https_proxy", "http://me:s3cret@proxy:3128"),
        ("AWS_ID", "1"),
    ):
        monkeypatch.setenv(name, value)
    told = environment()
    assert told["https_proxy"] == "http://...@proxy:3128" and "s3cret" not in str(told) and "AWS_ID" not in told


def test_a_step_that_fails_is_named(tmp_path):
    with (
        pytest.raises(OwnRankError, match="all-to-alls: a message of 45 bytes"),
        doctor.patience(60, 0, Health(), "all-to-alls"),
    ):
        raise ValueError("a message of 45 bytes is no value of ours")


def test_a_model_that_does_not_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("cocodiff.cli.doctor.facts.free_memory", lambda *_: 2**30)
    words = ["--model", "qwen-image", "--kernels", "torch", "--out", str(tmp_path / "d")]
    assert main(["doctor", *words]) == 1
    assert "the model needs" in capsys.readouterr().out


def test_a_step_that_hangs_is_named(monkeypatch):
    ended: list[int] = []
    said: list[bytes] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(os, "write", lambda _, text: said.append(text))
    with doctor.patience(0.01, 3, Health(), "all-to-alls"):
        for _ in range(500):
            if ended:
                break
            time.sleep(0.01)
    assert ended == [1] and b"rank 3 hangs since 0.01 s at all-to-alls" in said[0]
    with doctor.patience(60, 3, Health(), "nothing"):
        pass
    assert ended == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--patience_s", "0"], "--patience_s 0.0: give a number"),
        (["--machine", "auroa"], "did you mean aurora?"),
        (["--ranks", "0"], "--ranks 0: at least 1"),
        (["--machine", "aurora"], "machine aurora has nodes of 12 ranks"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, capsys):
    assert main(["doctor", *words, "--kernels", "torch", "--out", str(tmp_path / "d")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "d").exists()


def test_doctor_never_imports_diffusers(tmp_path):
    program = (
        "import sys; from cocodiff.cli.main import main; "
        f"code = main(['doctor', '--kernels', 'torch', '--out', {str(tmp_path / 'd')!r}]); "
        "sys.exit(code or any(name in sys.modules for name in ('diffusers', 'transformers')))"
    )
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stdout + done.stderr

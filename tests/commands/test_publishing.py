"""Results of whole runs: two at a time, killed ones, faults while publishing, full disks, and the user's own files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import tifffile
from test_faults import Run
from warm import forked
from warm_ranks import warm_mpiexec

from cocodiff.cli.main import main
from cocodiff.comm.launch import detect
from cocodiff.config.config import Config
from cocodiff.config.errors import OwnRankError
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.ranks import run_holding

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
COCODIFF = HERE.parents[1] / "cocodiff" / "__main__.py"


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "scan.tif"
    tifffile.imwrite(path, np.random.default_rng(0).integers(0, 60000, (96, 96), dtype=np.uint16))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_run_is_refused_and_the_next_start_clears_what_a_kill_left(
    scan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(scan, tmp_path, "--ranks", "2").ready()
    words = ["inpaint", "--input", str(scan), "--steps", "1", "--quiet", "--no-exact", "--out", str(run.out)]
    ranks = run.ranks(2)
    hidden = run.out / ".cocodiff.partial" / "images"
    try:
        while not hidden.is_dir():  # which the run makes after it has said that it is ready
            assert run.process.poll() is None, run.text()
            time.sleep(0.02)
        assert main(words) == 2
        assert f"another run (pid {run.process.pid} on " in capsys.readouterr().err
        assert hidden.is_dir()
    finally:
        run.process.kill()
        run.end(10)
    psutil.wait_procs(ranks, timeout=10)
    assert names(run.out) == [".cocodiff.lock", ".cocodiff.partial"]
    assert main(words) == 0
    assert names(tmp_path) == ["log", "out"]


@pytest.mark.parametrize("fault", ["afterwards", "in the way"])
def test_a_fault_while_publishing_says_where_the_results_are(tmp_path: Path, fault: str) -> None:
    out = tmp_path / "out"
    if fault == "in the way":
        out.mkdir()
    done = forked(fault, out, folder=tmp_path, module="publishing_rank")
    assert done.returncode == 1
    found = out if fault == "afterwards" else out / ".cocodiff.partial"
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"the results are finished, in {found}") and "nothing was written" not in done.stderr
    assert (found / "report.html").read_text() == "whole"
    if fault == "in the way":
        assert (out / "report.html").read_text() == "the user's"
        assert len(done.stderr.splitlines()) == 1 and "report.html is in the way" in last


def test_any_fault_while_results_move_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = OutputFolder(str(tmp_path / "out"), overwrite=False)

    def work(_: object) -> None:
        (out.open() / "report.html").write_text("whole")
        out.publish()

    def burns(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    run = partial(run_holding, out, {"ranks": None}, detect(), Config(), work, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr("cocodiff.jobs.folder._move", burns)
        assert run() == 1
    *_, fault, told = capsys.readouterr().err.splitlines()
    assert fault == "cocodiff: RuntimeError: the disk is on fire"
    assert told == f"cocodiff: the results are finished, in {out.partial}"
    with OutputFolder(str(tmp_path / "out"), overwrite=True).held():  # the next run puts them in place
        assert (tmp_path / "out" / "report.html").read_text() == "whole"


def test_a_journal_that_cannot_be_removed_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = OutputFolder(str(tmp_path / "out"), overwrite=False)
    (out.open() / "report.html").write_text("whole")
    out.journals.begin({}, 1, "slices", overwrite=False)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        with pytest.raises(OwnRankError, match="could not be put into"):
            out.publish()
    assert names(tmp_path / "out") == [".cocodiff.partial"]
    out.publish()
    assert names(tmp_path / "out") == [".cocodiff-files.json", "report.html"]


@pytest.mark.full
def test_a_full_disk_is_one_line_and_leaves_earlier_results(scan: Path, tmp_path: Path) -> None:
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a full disk: needs root and unshare, to mount a small one")
    earlier = (
        "import sys; from cocodiff.jobs.folder import OutputFolder; out = OutputFolder(sys.argv[1], False); "
        "(out.open() / 'run.yaml').write_text('earlier'); out.publish()"
    )
    script = f"""
        mount -t tmpfs -o size=100k none {tmp_path}
        {sys.executable} -c "{earlier}" {tmp_path}/out
        {sys.executable} -m cocodiff inpaint --input {scan} --steps 1 --quiet --overwrite --out {tmp_path}/out
        echo code $?
        cd {tmp_path}/out && cat run.yaml && echo && find . -type f -not -path "./.cocodiff.partial/*"
    """
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, check=False)
    files = {"./run.yaml", "./.cocodiff-files.json"}
    assert done.stdout.splitlines()[-4:-2] == ["code 1", "earlier"] and set(done.stdout.splitlines()[-2:]) == files
    line, kept = done.stderr.splitlines()
    assert "could not be written: No space left on device" in line and "choose another --out" in line
    assert kept == "cocodiff: 1 of 1 slices are kept: go on with --resume"


def test_under_mpi_the_whole_job_hears_that_the_folder_is_taken(scan: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".cocodiff.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = ["inpaint", "--input", str(scan), "--steps", "1", "--quiet", "--out", str(tmp_path / "out")]
        done = warm_mpiexec(2, COCODIFF, *words)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "cocodiff: " in line] == [
        f"cocodiff: --out {tmp_path / 'out'}: another run (another process) writes there: wait for its end, or choose "
        f"another folder"
    ]


def test_a_folder_of_the_users_and_its_settings_stay(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scan.tif").write_bytes(scan.read_bytes())
    (tmp_path / "run.yaml").write_text("steps: 1\nquiet: true\nexact: false\n")
    words = ["inpaint", "--config", "run.yaml", "--input", "scan.tif"]
    assert main([*words, "--out", ".", "--overwrite"]) == 2
    assert "not ours to overwrite" in capsys.readouterr().err and names(tmp_path) == ["run.yaml", "scan.tif"]
    assert main([*words, "--out", "restored"]) == 0
    (tmp_path / "restored" / "scan.tif").write_bytes(scan.read_bytes())
    again = ["inpaint", "--config", "restored/run.yaml"]
    assert main([*again, "--input", "restored/scan.tif", "--overwrite"]) == 0
    assert (tmp_path / "restored" / "scan.tif").read_bytes() == scan.read_bytes()
    assert main([*again, "--input", "restored/images/scan_block_tapa.tif", "--overwrite"]) == 2
    assert "restored/images/scan_block_tapa.tif is among the results" in capsys.readouterr().err


def test_readmes_way_to_repeat_a_run(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["inpaint", "--input", str(scan), "--steps", "1", "--quiet", "--no-exact", "--overwrite"]
    assert main(words) == 0
    before = (tmp_path / "restored" / "report.html").stat().st_mtime_ns
    assert main(["inpaint", "--config", "restored/run.yaml"]) == 0
    assert "into restored-2;" in capsys.readouterr().out
    first, second = (tmp_path / folder / "images" / "scan_block_tapa.tif" for folder in ("restored", "restored-2"))
    assert first.read_bytes() == second.read_bytes()
    assert (tmp_path / "restored" / "report.html").stat().st_mtime_ns == before
    old = (tmp_path / "restored" / "run.yaml").read_text() + "overwrite: true\n"  # as older versions recorded it
    assert "overwrite" not in (tmp_path / "restored-2" / "run.yaml").read_text()
    (tmp_path / "restored" / "run.yaml").write_text(old)
    assert main(["inpaint", "--config", "restored/run.yaml"]) == 0
    assert (tmp_path / "restored" / "run.yaml").read_text() == old and (tmp_path / "restored-3").is_dir()


def test_something_is_said_before_anything_is_read_or_imported(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def stop(*_: object) -> None:
        said.append("".join(capsys.readouterr()))
        raise KeyboardInterrupt

    words = ["inpaint", "--input", str(scan), "--out", str(tmp_path / "out")]
    for name in ("cli.inpaint.find_tasks", "harness.session.import_before_fork", "harness.session.load_requested"):
        monkeypatch.setattr(f"cocodiff_eval.{name}", stop)
        assert main(words) == 130
        monkeypatch.undo()
    reading, importing, loading = said
    assert "reading 1 input(s)" in reading
    assert importing.splitlines()[-1] == "importing torch and diffusers"
    assert loading.splitlines()[-1] == "loading the model: embedded"
    assert not any(tmp_path.iterdir())

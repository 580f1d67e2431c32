"""Runs that do not end, and go on: to every bit of a run that nothing happened to, and with nothing made twice."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tifffile
from campaign.struck_jobs import ALONE, FORMATS, INPAINT, OF_ONE, Job, Jobs, choose_all
from warm_ranks import warm_mpiexec

from cocodiff.cli.main import main
from cocodiff.jobs.folder import LOCK, Manifest, shown

COCODIFF = Path(__file__).parents[2] / "cocodiff" / "__main__.py"
WALKS = choose_all(ALONE, OF_ONE)
MORE = 30  # walks with --full; --all takes every one


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture
def scan(jobs: Jobs) -> Path:
    return jobs.inputs / "scan.tif"


def contents(folder: Path) -> dict[Path, Any]:
    found = (path for path in folder.rglob("*") if path.name != LOCK)  # which a kill leaves, and any start removes
    return {path: path.read_bytes() if path.is_file() else None for path in found}


def changes(job: Job) -> dict[tuple[object, ...], str]:
    """List options that change results, and how a refusal names each."""
    steps = 3 if job.kind.words[0] == "sweep" else 2
    found: dict[tuple[object, ...], str] = {("--seed", 1): "seed: 0 there, 1 now"}
    found["--steps", 5] = f"steps: {steps} there, 5 now"
    if "--exact_slices" in job.kind.words:
        found["--exact_slices", 2] = "exact_slices: 1 there, 2 now"
        found["--range", "0,50000"] = "range: None there, 0,50000 now"
        found["--preset", "tapa", "split"] = "presets: 1 of them there, 2 of them now"
    return found


def ask_unfinished(job: Job, chance: random.Random) -> None:
    """Check that a run that would mix with what is kept, or lose it, is refused and changes nothing."""
    kept, before = job.store.kept(), contents(job.out)
    if kept is None or Manifest.read(job.partial) is not None:
        return
    if job.kind.words[0] != "sweep" and "--overwrite" not in job.kind.words:  # a sweep goes on by itself
        done = job.run()
        told = (f"finished {kept} there: ", "--resume", "--overwrite", str(job.out))
        assert done.code == 2 and all(value in done.said for value in told)
    options, told = chance.choice([*changes(job).items()])
    done = job.run("--resume", *options)
    assert done.code == 2 and all(one in done.said for one in ("other settings", *re.split(r": | there, | now", told)))
    assert contents(job.out) == before


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("number", "command", "fault", "moment"),
    [
        pytest.param(number, *chosen, marks=pytest.mark.exhaustive if number >= MORE else (), id=" ".join(chosen))
        for number, chosen in enumerate(WALKS)
    ],
)
def test_a_job_to_which_something_happens_goes_on_to_the_same_results(
    jobs: Jobs, number: int, command: str, fault: str, moment: str
) -> None:
    chance = random.Random(f"walk {number}")
    told, job = jobs.struck(number, chance, (command, fault, moment))
    assert not job.wrong, (told, job.wrong)
    ask_unfinished(job, chance)
    job.go_on()
    assert not job.wrong, (told, job.wrong)


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["inpaint, one rank", "sweep, one rank", "generate, one rank", "volume"])
def test_a_job_that_is_finished_has_nothing_left_to_do_and_other_results_are_refused(jobs: Jobs, command: str) -> None:
    job = jobs.job(f"finished {command}", command)
    assert job.run().code == 0
    noted, before = job.noted(), contents(job.out)
    for more in ((), ("--timeout_s", 9, "--check_messages")):  # which change no result
        done = job.run("--resume", *more)
        assert done.code == 0 and "nothing is left to do" in done.out and str(job.out) in done.out
    for options, told in changes(job).items():
        done = job.run("--resume", *options)
        assert done.code == 2 and f"are finished, with other settings ({told})" in done.said
    if job.input.suffix == ".tif":
        tifffile.imwrite(job.input, tifffile.imread(job.input) ^ 1, photometric="minisblack")
        done = job.run("--resume")
        assert done.code == 2 and "with other settings (inputs: voxels" in done.said
        job.input.unlink()
        job.restore_input()
    if job.kind.words[0] != "generate":
        result = next(job.out.rglob("*.png"))
        for option in ("--input", "--mask", "--truth"):
            done = job.run("--overwrite", option, result)
            assert done.code == 2 and f"{result.name} is among the results" in done.said
    if job.kind.words[0] != "sweep":
        done = job.run()
        assert done.code == 2 and f"{shown(str(job.out))} exists already" in done.said
    assert contents(job.out) == before
    (job.out / "report.html").unlink()
    done = job.run("--resume")
    assert done.code == 2 and "1 of its files are gone (report.html)" in done.said and "--overwrite" in done.said
    assert job.noted() == noted and not job.wrong


# What an unfinished job has lost --------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def purged(partial: Path) -> None:
    for path in (partial / ".progress").glob("*.npz"):
        path.unlink()


def first(pattern: str, harm: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda partial: harm(min(partial.glob(pattern)))


# What is done to a job of which three batches are finished, and how many of these are there and damaged then.
HARMS = {purged: (0, 0), **{first(".progress/*.npz", harm): (2, 1) for harm in (cut, zeroed)}}
HARMS |= {first(".progress/*.npz", Path.unlink): (2, 0)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("command", "word"),
    [*(("inpaint, one rank", word) for word in FORMATS), ("samples", ""), ("generate, one rank", "")],
)
def test_what_is_damaged_or_gone_is_made_again_and_no_more(jobs: Jobs, command: str, word: str) -> None:
    job = jobs.job(f"harmed {command} {word}", command, *(("--format", word) if word else ()))
    job.kill_when_noted(3)
    shutil.copytree(job.out, job.folder / "saved")
    for harm, (kept, damaged) in HARMS.items():
        shutil.rmtree(job.out)
        shutil.copytree(job.folder / "saved", job.out)
        harm(job.partial)
        said = job.go_on(harmed=True)
        assert ("1 finished batch(es) are damaged" in said) is bool(damaged)
        assert (f"going on: {kept} of " if kept else "nothing to resume") in said
        assert not job.wrong, job.wrong


def test_what_methods_without_a_model_have_made_for_a_test_is_kept(jobs: Jobs) -> None:
    job = jobs.job("tested", "volume")
    job.kill_when_noted(3)
    assert "going on: 0 of " in job.go_on() and not job.wrong


def test_a_disk_with_too_little_room_is_named_before_anything_is_made(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    out = tmp_path / "out"
    assert main([*INPAINT, "--input", str(scan), "--steps", "1", "--no_exact", "--quiet", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert re.search(rf" take 0\.0 GiB .*{re.escape(str(out))} .*0\.0 GiB", said)


# How a run says it, and where it writes -------------------------------------------------------------------------------


def test_under_mpi_the_whole_job_hears_that_the_folder_is_taken(scan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = ["inpaint", "--input", str(scan), "--steps", "1", "--quiet", "--out", str(out)]
        done = warm_mpiexec(2, COCODIFF, *words)
    (line,) = [line for line in done.stderr.splitlines() if "cocodiff: " in line]
    assert done.returncode == 2 and f"--out {shown(str(out))}: another run (another process)" in line


def test_something_is_said_before_anything_is_read_or_imported(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def stop(*_: object) -> None:
        said.append("".join(capsys.readouterr()))
        raise KeyboardInterrupt

    words = ["inpaint", "--input", str(scan), "--out", str(tmp_path / "out")]
    for name in ("harness.tasks.find_tasks", "harness.session.import_before_fork", "harness.session.load_requested"):
        monkeypatch.setattr(f"cocodiff_eval.{name}", stop)
        assert main(words) == 130
        monkeypatch.undo()
    reading, importing, loading = said
    assert "reading 1 input(s)" in reading
    assert importing.splitlines()[-1] == "importing torch and diffusers"
    assert loading.splitlines()[-1] == "loading the model: embedded"
    assert not any(tmp_path.iterdir())

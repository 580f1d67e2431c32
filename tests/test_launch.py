"""The two commands of the README, as far as they can be tested without installing everything again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import fake
from value_tables import beside

ROOT = Path(__file__).parents[1]
CASES = beside(__file__)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the scripts read, with fake tools in `.venv` that say what they were asked."""
    for name in ("launch/demo", "launch/test", "launch/environment.sh", "launch/constraints.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def launch(checkout: Path, script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / script, *words], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("python", "said"), CASES["pythons"])
def test_a_python_without_venv_or_an_old_one_is_refused_in_a_line(checkout: Path, python: str, said: str) -> None:
    fake(checkout / "python", python)
    done = launch(checkout, "launch/demo", COCODIFF_PYTHON=str(checkout / "python"))
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1


def installed(checkout: Path, mpi: bool = True) -> Path:
    """A fake environment whose pip writes down its arguments. Returns that record. mpi: mpi4py finds a library."""
    record = checkout / "pip.record"
    loads = f'case "$*" in *mpi4py*) exit {int(not mpi)};; esac'
    fake(checkout / ".venv/bin/python", f'{loads}; echo "$*" >>"{record}"')
    fake(checkout / ".venv/bin/cocodiff", 'echo "cocodiff $*"')
    (checkout / "cocodiff/demo_model/samples").mkdir(parents=True)
    for name in ("one.tif", "tooth.tif"):
        (checkout / "cocodiff/demo_model/samples" / name).touch()
    return record


@pytest.mark.parametrize("torch", ["torch", "torch-xpu.whl"])
def test_the_environment_is_made_once_and_the_size_is_said_first(checkout: Path, torch: str) -> None:
    """Another torch replaces the pinned one."""
    record, chosen = installed(checkout), {"COCODIFF_TORCH": torch} if torch != "torch" else {}
    first = launch(checkout, "launch/demo", **chosen)
    assert first.returncode == 0, first.stderr
    assert "to download" in first.stdout.splitlines()[0]
    assert "cocodiff inpaint --input cocodiff/demo_model/samples/tooth.tif --mask block" in first.stdout
    calls = record.read_text().splitlines()
    assert calls[0].endswith(f" {torch}") and "--constraint" not in calls[0] and "-c .venv/constraints.txt" in calls[0]
    assert ("torch==" in (checkout / ".venv/constraints.txt").read_text()) == (torch == "torch")
    second = launch(checkout, "launch/demo", "--samples", "3", **chosen)
    assert second.stdout.startswith("cocodiff inpaint") and second.stdout.rstrip().endswith("--overwrite --samples 3")
    assert "--samples 8" in first.stdout and "--samples 8" not in second.stdout
    assert record.read_text().splitlines() == calls


@pytest.mark.parametrize("mpi", [True, False])
def test_an_mpi_is_brought_where_no_library_loads_whatever_mpiexec_is_on_the_path(checkout: Path, mpi: bool) -> None:
    """An activated environment's mpiexec tells nothing. Where the system has a library PyPI's must not be beside it."""
    record = installed(checkout, mpi)
    fake(checkout / "another/bin/mpiexec", "true")
    path = f"{checkout / 'another/bin'}:{os.environ['PATH']}"
    done = launch(checkout, "launch/demo", PATH=path)
    assert done.returncode == 0, done.stderr
    calls = record.read_text().splitlines()
    assert ".[test" in calls[1] and "local-mpi" not in calls[1]
    assert [call for call in calls[2:] if "pip install" in call and call.endswith(" .[local-mpi]")] == calls[2:]
    assert len(calls) == (2 if mpi else 3)
    assert launch(checkout, "launch/demo", PATH=path).returncode == 0 and record.read_text().splitlines() == calls


def test_the_full_demo_restores_all_bundled_slices(checkout: Path) -> None:
    installed(checkout)
    launch(checkout, "launch/demo")
    done = launch(checkout, "launch/demo", "--full", "--ranks=4")
    assert "samples/one.tif cocodiff/demo_model/samples/tooth.tif --mask block center" in done.stdout
    assert "--samples" not in done.stdout and done.stdout.count("--ranks") == 1


def test_a_failed_installation_is_not_taken_for_done(checkout: Path) -> None:
    installed(checkout)
    fake(checkout / ".venv/bin/python", "echo no such version >&2; exit 1")
    done = launch(checkout, "launch/demo")
    assert done.returncode == 1
    assert "no such version" in done.stderr and ".venv/install.log" in done.stderr
    assert not (checkout / ".venv/ready").exists()


@pytest.mark.parametrize(("words", "beside", "alone", "types", "code", "runs"), CASES["ends"])
def test_the_tests_end_with_what_failed(
    checkout: Path, words: list[str], beside: int, alone: int, types: int, code: int, runs: int
) -> None:
    installed(checkout)
    launch(checkout, "launch/demo")
    ends = f'case "$*" in *"not alone"*) exit {beside};; *pytest*) exit {alone};; esac'
    fake(checkout / ".venv/bin/python", f'echo "$*" >>runs; {ends}')
    fake(checkout / ".venv/bin/ruff", "true")
    fake(checkout / ".venv/bin/mypy", f"echo types; exit {types}")
    done = launch(checkout, "launch/test", *words)
    assert (done.returncode, done.stdout.count("types")) == (code, 1), done.stderr
    started = (checkout / "runs").read_text().splitlines()
    assert len(started) == runs and all(line.endswith(" ".join(words)) for line in started)


@pytest.mark.parametrize(("user", "may", "required"), [(0, 0, "1"), (1000, 0, ""), (0, 1, "")])
def test_emulations_are_required_of_a_root_who_may_make_them(
    checkout: Path, user: int, may: int, required: str
) -> None:
    installed(checkout)
    for name, body in {"id": f"echo {user}", "unshare": f"exit {may}", "ip": "true", "tc": "true"}.items():
        fake(checkout / "bin" / name, body)
    for name in ("ruff", "mypy"):
        fake(checkout / ".venv/bin" / name, "true")
    fake(checkout / ".venv/bin/python", 'echo "required: $COCODIFF_REQUIRE_EMULATION" >>runs')
    launch(checkout, "launch/test", PATH=f"{checkout / 'bin'}:{os.environ['PATH']}", COCODIFF_REQUIRE_EMULATION="")
    assert (checkout / "runs").read_text().splitlines()[-1] == f"required: {required}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("letter", ["a", "b", "c", "d"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_value_is_among_the_cases_that_the_first_tier_takes(
    letter: str, number: int, request: pytest.FixtureRequest
) -> None:
    name = request.node.originalname
    taken = [item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == name]
    if len(taken) == 4:  # neither all of them nor one that was asked for
        assert {case["letter"] for case in taken} == {*"abcd"} and {case["number"] for case in taken} == {1, 2, 3}

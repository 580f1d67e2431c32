"""What `cocodiff emulate` and its benchmarks refuse, and what they compute from rows. Needs no root."""

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cocodiff_bench import oneccl
from cocodiff_bench.alltoall import tuned_rows
from cocodiff_bench.model_step import FITTED
from cocodiff_bench.step_rows import over_schedule
from cocodiff_studies.emulate import processes
from cocodiff_studies.emulate.command import cocodiff_of, is_this_one
from launching import assert_succeeded
from warm import forked

from cocodiff.cli.bench import module_of
from cocodiff.cli.main import main
from cocodiff.config import Config, load_exchange_table
from cocodiff.errors import UserError
from cocodiff.planning.costs import WHOLE, CallKind, Typical, costs_of
from cocodiff.processes.emulated import emulated
from cocodiff.processes.job_folder import OWNER

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "has no command to run"),
        (("--",), "has no command to run"),
        (("--", ""), "has no command to run"),
        (("--machine", "aurrora", "--", "true"), "did you mean aurora?"),
        (("--nodes", "0", "--", "true"), "at least 1 is needed"),
        (("--scale", "0", "--", "true"), "give a number above 0"),
        (("--machine", "local", "--", "true"), "has no fixed size: add --ranks N"),
        (("--ranks", "5", "--", "true"), "1 node(s) of aurora have 12"),
        (("--", "cocodiff"), "add a subcommand"),
        (("--", "cocodiff", "plan"), "runs on no ranks"),
        (("--", "cocodiff", "bench", "alltoall", "--machine", "local"), "on an emulated aurora: leave it away"),
        (("--", sys.executable, "-m", "cocodiff", "plan"), "runs on no ranks"),
        (("--", str(Path(sys.executable).with_name("cocodiff")), "plan"), "runs on no ranks"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert main(["emulate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and len(captured.err.splitlines()) == 1


def test_cocodiff_is_known_by_its_path_and_as_a_module_too(tmp_path, capsys):
    """Each of these gets the machine; only what runs here is forked from here."""
    ours, others = Path(sys.executable).parent, tmp_path / "other" / "bin"
    (tmp_path / "link").symlink_to(ours / "cocodiff")
    (others / "python3").parent.mkdir(parents=True)
    (others / "python3").symlink_to(sys.executable)
    (others / "cocodiff").write_text("#!/bin/sh\n")
    (others / "cocodiff").chmod(0o755)
    forked = [
        ["cocodiff"],
        [str(ours / "cocodiff")],
        [str(tmp_path / "link")],
        [sys.executable, "-m", "cocodiff"],
        [str(ours / "python3"), "-m", "cocodiff"],
    ]
    executed = [
        [str(others / "cocodiff")],
        [str(others / "python3"), "-m", "cocodiff"],
        [sys.executable, "-u", "-m", "cocodiff"],
    ]
    for program in forked + executed:
        assert cocodiff_of([*program, "bench", "alltoall"]) == program
        assert is_this_one(program) == (program in forked), program
        assert main(["emulate", "--", *program, "bench", "alltoall", "--machine", "local"]) == 2
        assert "--machine local on an emulated aurora: leave it away" in capsys.readouterr().err
    (tmp_path / "folder" / "cocodiff").mkdir(parents=True)
    for other in (
        ["true"],
        [str(tmp_path / "folder" / "cocodiff")],
        ["python3", "x.py"],
        ["python3", "-m", "cocodiff_eval"],
        ["sh", "-m", "cocodiff"],
    ):
        assert cocodiff_of(other) == []


def test_what_is_missing_is_said_all_at_once(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["emulate", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "root" in said and "ip (Debian: apt install iproute2)" in said and "tc (Debian" in said


def test_what_others_have_put_there_is_no_record_of_an_emulation(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended: list[str] = []
    monkeypatch.setattr(processes, "kill_all", lambda token, namespaces: ended.append(token))
    for name in ("killed", "another's"):
        (tmp_path / f"{processes.PREFIX}{name}").mkdir()
        (tmp_path / f"{processes.PREFIX}{name}" / OWNER).touch()
    (tmp_path / f"{processes.PREFIX}link").symlink_to(tmp_path / f"{processes.PREFIX}killed")
    (tmp_path / f"{processes.PREFIX}file").touch()
    if os.geteuid() == 0:  # only root can give a folder to another user
        os.chown(tmp_path / f"{processes.PREFIX}another's", 12345, 12345)
    with processes.registered() as token:
        assert (tmp_path / token).stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / token).exists()
    names = ["killed"] if os.geteuid() == 0 else ["another's", "killed"]
    assert sorted(ended) == [f"{processes.PREFIX}{name}" for name in names]


def test_emulations_that_start_together_keep_their_records(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start_often(_: int) -> bool:
        found = []
        for _ in range(30):
            with processes.registered() as token:
                found.append((tmp_path / token).exists())
        return all(found)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(start_often, range(8)))
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_there_is_told_before_anything_is_built(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in ("ip", "tc") else None)
    for program in ("no-such-program", str(tmp_path)):
        assert main(["emulate", "--machine", "local", "--ranks", "2", "--", program]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err == (
            f"cocodiff: emulate cannot run {program}: there is no such program, or it is not executable\n"
        )


def test_shared_memory_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setenv("I_MPI_FABRICS", "shm:ofi")
    assert main(["emulate", "--launcher", "mpiexec", "--", "true"]) == 2
    assert "past the emulated links: unset it" in capsys.readouterr().err


def test_oneccl_needs_mpi_and_its_libraries(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COCODIFF_ONECCL", str(tmp_path))
    words = ["bench", "alltoall", "--variants", "oneccl", "--ranks", "2", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "start the ranks with MPI, and name oneCCL's libraries in COCODIFF_ONECCL" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"lacks libccl\.so\.2, libccl\.so\.1.*launch/oneccl"):
        oneccl.library()


def test_a_models_shape_needs_an_emulation(capsys, tmp_path):
    words = ["bench", "step", "--model", "qwen-image", "--out", str(tmp_path / "out"), "--ranks", "12"]
    assert main([*words, "--machine", "aurora"]) == 2
    assert "inside cocodiff emulate" in capsys.readouterr().err
    assert main(words) == 2
    assert "does not say how fast its device is" in capsys.readouterr().err


def test_only_names_of_shapes_are_benched_as_shapes():
    assert module_of(["step", "--model", "qwen-image"]) == module_of(["step", "--model=flux.1"]) == "model_step"
    assert module_of(["step"]) == module_of(["step", "--model", "some/folder"]) == "step"


def test_one_card_has_one_phase(tmp_path):
    words = ["--ranks", "2", "--sizes_mb", "0.01", "--repeats", "1", "--quiet", "--variants", "tapa"]
    done = forked("bench", "alltoall", *words, "--out", tmp_path / "out", folder=tmp_path)
    assert_succeeded(done)
    assert "phase 1" in done.stdout and "phase 2" not in done.stdout


def test_what_emulate_tells_its_ranks_is_not_set_by_hand(monkeypatch):
    monkeypatch.setenv("COCODIFF_EMULATED", "abc")
    with pytest.raises(UserError, match="COCODIFF_EMULATED='abc': cocodiff emulate alone sets it: unset it"):
        emulated()


def test_limits_lie_between_sizes():
    times = {0.25: (1, 2, 3), 1: (2, 3, 1), 4: (3, 9, 1)}
    rows = [
        {"case": f"{size:g}MB", "variant": name, "median_s": t}
        for size, of in times.items()
        for name, t in zip(("flat", "tapa", "split"), of, strict=True)
    ]
    assert tuned_rows([*rows, {"case": "4MB", "variant": "bound", "median_s": 0.1}]) == [(0.5, "flat"), (None, "split")]


def test_the_schedule_is_averaged_between_fractions():
    config = Config(selection="v_major")
    steps = costs_of(config).kinds_of_steps(config, 50, Typical())
    (kinds,) = zip(*steps, strict=True)
    assert kinds[:6] == (*[WHOLE] * 5, CallKind()) and kinds[15] == WHOLE and kinds[-1].stable == 1.0
    mean = sum(kind.stable for kind in kinds) / 50
    half, all_ = CallKind(stable=0.5), CallKind(stable=1.0)
    assert over_schedule({WHOLE: 2.0, half: 1.0, all_: 0.0}, steps) == pytest.approx(2 - 2 * mean)
    assert over_schedule({WHOLE: 3.0, half: 3.0, all_: 3.0}, steps) == 3.0
    assert 0.1 < FITTED < 0.12


def test_auto_needs_a_table_of_the_machine(tmp_path):
    assert load_exchange_table("aurora", 1)[-1] == (float("inf"), "split")
    with pytest.raises(UserError, match=r"no table for machine local on 1 node\(s\) but for aurora on 1"):
        load_exchange_table("local", 1)
    path = tmp_path / "t.yaml"
    for text, said in (
        ("local: {1: [[1, tapa]]}", "end with no limit"),
        ("local: {1: [[null, tappa]]}", "did you mean tapa?"),
        ("local: [1]", "not a table"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            load_exchange_table("local", 1, str(path))
    path.write_text("local: {1: [[0.5, tapa], [null, flat]]}")
    assert load_exchange_table("local", 1, str(path)) == [(0.5, "tapa"), (float("inf"), "flat")]
    assert Config(exchange="auto", exchange_table=str(path)).exchange == "auto"

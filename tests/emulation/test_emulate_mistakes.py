"""What `cocodiff emulate` and its benchmarks refuse, and what they compute from rows. Needs no root."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cocodiff_bench.alltoall import bound_s, tuned_rows
from cocodiff_bench.command import module_of
from cocodiff_bench.model_step import FITTED, over_schedule, parts_of, planned_s
from cocodiff_studies import emulate as emulation
from cocodiff_studies.emulate import is_this_cocodiff
from cocodiff_studies.namespaces import Namespace
from launching import assert_succeeded, fake
from warm import forked

from cocodiff.cli.main import main
from cocodiff.comm.launch import emulated
from cocodiff.config.config import Config, load_exchange_table, load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine
from cocodiff.exchange.codec import WHOLE, CallKind
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.planner.case import Case, ModelShape
from cocodiff.planner.choice import Division
from cocodiff.planner.layers import kinds_of_steps
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes, Mesh, Partition

MISTAKES = Path(__file__).with_name("mistakes.txt").read_text().splitlines()


@pytest.mark.parametrize("line", [line for line in MISTAKES if " -> " in line])
def test_mistakes_are_one_line(line, capsys):
    words, _, said = line.partition(" -> ")
    assert main(["emulate", *shlex.split(words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert all(value in captured.err for value in said.split(" ... ")), captured.err


def test_the_cocodiff_that_runs_here_is_known_by_its_path_too(tmp_path, capsys):
    """It gets the machine, and is forked from here; all others are executed as they stand."""
    ours = Path(sys.executable).parent
    (tmp_path / "link").symlink_to(ours / "cocodiff")
    fake(tmp_path / "cocodiff")
    for program in ("cocodiff", str(ours / "cocodiff"), str(tmp_path / "link")):
        assert is_this_cocodiff(program), program
        assert main(["emulate", "--", program, "bench", "alltoall", "--machine", "local"]) == 2
        assert "--machine local on an emulated aurora" in capsys.readouterr().err
    assert not any(map(is_this_cocodiff, ["true", "python3", sys.executable, str(tmp_path / "cocodiff"), "none"]))


@pytest.mark.parametrize(
    ("user", "tools", "words", "values"),
    [
        (1000, (), ("--", "true"), "root ip tc iproute2"),  # all that is missing at once
        (0, ("ip",), ("--", "true"), "tc"),
        (0, ("ip", "tc"), ("--", "no-such-program"), "cannot run no-such-program:"),
        (0, ("ip", "tc"), ("--", "/"), "cannot run /:"),
        (0, ("ip", "tc", "true"), ("--launcher", "mpiexec", "--", "true"), "I_MPI_FABRICS names shm"),
    ],
)
def test_what_is_missing_is_told_before_anything_is_built(user, tools, words, values, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setenv("I_MPI_FABRICS", "shm:ofi")
    assert main(["emulate", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert [value for value in values.split() if value not in said.err] == [], said.err
    assert ("root" in said.err) is (user != 0)


def test_what_a_killed_emulation_left_is_ended_and_a_running_one_is_left_alone():
    running = emulation.new_token()
    ended = running.replace("-", "-9")  # this process's number was another one's before
    of_both = {token: subprocess.Popen(["sleep", "60"], env={emulation.TOKEN: token}) for token in (running, ended)}
    try:
        for token, process in of_both.items():  # Popen returns when the program is found, before it has its variables
            while token not in Path(f"/proc/{process.pid}/environ").read_text():
                time.sleep(0.01)
        assert emulation.new_token() == running
        assert of_both[ended].wait(60) == -signal.SIGKILL and of_both[running].poll() is None
    finally:
        assert emulation.kill_all(running, ()) == 1
        assert of_both[running].wait(60) == -signal.SIGKILL


def test_a_large_models_shape_needs_an_emulation(capsys, tmp_path):
    """Here: a random model of that shape is too large for a rank of this host."""
    words = ["bench", "step", "--model", "qwen-image", "--out", str(tmp_path / "out"), "--ranks", "12"]
    assert main([*words, "--machine", "aurora", "--variants", "flat"]) == 2
    assert "qwen-image: random weights take " in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["refused"]


def test_only_names_of_shapes_are_benched_as_shapes():
    assert module_of(["step", "--model", "qwen-image"]) == module_of(["step", "--model=flux.1"]) == "model_step"
    assert module_of(["step"]) == module_of(["step", "--model", "some/folder"]) == "step"


def test_ranks_of_a_machine_without_a_size_are_divided_among_the_nodes() -> None:
    topology = emulation.topology_of({"machine": "local", "nodes": 2, "ranks": 4, "scale": 1.0})
    assert (topology.nodes, topology.size) == (2, 4)


def test_one_card_has_one_phase(tmp_path):
    words = ["--ranks", "2", "--sizes_mb", "0.01", "--repeats", "1", "--quiet", "--variants", "tapa"]
    done = forked("bench", "alltoall", *words, "--out", tmp_path / "out", folder=tmp_path)
    assert_succeeded(done)
    assert "phase 1" in done.stdout and "phase 2" not in done.stdout


def test_what_emulate_tells_its_ranks_is_not_set_by_hand(monkeypatch):
    monkeypatch.setenv("COCODIFF_EMULATED", "abc")
    with pytest.raises(UserError, match="COCODIFF_EMULATED='abc': cocodiff emulate alone sets it"):
        emulated()


def test_the_bound_of_an_all_to_all_is_as_slow_as_the_emulated_links(monkeypatch):
    topology = Topology.build(load_machine("aurora"), 12)
    real_s = bound_s(topology, 10**6)
    monkeypatch.setenv("COCODIFF_EMULATED", '{"machine": "aurora", "nodes": 1, "scale": 50}')
    assert bound_s(topology, 10**6) == 50 * real_s


def test_limits_lie_between_sizes():
    times = {1: (2, 3, 1), 4: (3, 9, 1), 0.25: (1, 2, 3)}  # as they were asked for
    rows = [
        {"case": f"{size:g}MB", "variant": name, "median_s": t}
        for size, of in times.items()
        for name, t in zip(("flat", "tapa", "split"), of, strict=True)
    ]
    assert tuned_rows([*rows, {"case": "4MB", "variant": "bound", "median_s": 0.1}]) == [(0.5, "flat"), (None, "split")]


def test_the_schedule_is_averaged_between_fractions():
    shape = ModelShape("a layer", 24, 128, 1, 1)
    steps = kinds_of_steps(
        Case(shape, Topology.build(Machine(name="m", tiles=1, planes=(0,)), 2), Config(selection="v_major"), ())
    )
    (kinds,) = zip(*steps, strict=True)
    assert kinds[:6] == (*[WHOLE] * 5, CallKind()) and kinds[15] == WHOLE and kinds[-1].stable == 1.0
    mean = sum(kind.stable for kind in kinds) / 50
    half, all_ = CallKind(stable=0.5), CallKind(stable=1.0)
    assert over_schedule({WHOLE: 2.0, half: 1.0, all_: 0.0}, steps) == pytest.approx(2 - 2 * mean)
    assert over_schedule({WHOLE: 3.0, half: 3.0, all_: 3.0}, steps) == 3.0


@pytest.mark.parametrize("name", ["split v_first", "guidance split v_first"])
def test_the_plan_beside_a_measured_step_is_that_of_a_job_without_latencies(name):
    shape, parts, everyone = load_shape("qwen-image"), parts_of(name), Topology.build(load_machine("aurora"), 12)
    own = everyone.part(Axes.build(everyone, guidance=parts).branches[0][0])
    config, mesh = Config(exchange="split", order="v_first"), Mesh.build(own)
    case = Case(shape, own, config, shape.segments(1536), known_mesh=mesh)
    links = {"link_share": 0.25, "latency_us": 0.0, "message_us": 0.0, "blocked_us": 0.0}
    machine = everyone.machine.with_value("launch_us", 0.0).with_value("sums_kernel", True)
    machine = replace(machine, links=replace(machine.links, **links))
    job = replace(case, topology=replace(everyone, machine=machine), branches=2, known_mesh=None)
    step_s = Division(Partition(1, parts), [job]).steps[0].step_s
    assert planned_s(name, case, everyone, 0.25) == pytest.approx(step_s)


def test_the_share_of_figure_11_is_of_the_machine_file():
    """At 48 MB TAPA moves 24 MB over siblings' links, then 8 MB over each Xe Link, in 6.4 ms there. The low end of what
    is believed is the same."""
    of_tapa = (24e6 / 134e9 + 8e6 / 11.5e9) / 6.4e-3
    assert of_tapa < FITTED < 1.1 * of_tapa
    (believed,) = (one for one in load_machine("aurora").beliefs if one.name == "link_share")
    assert believed.low == round(FITTED, 2)


def test_auto_needs_a_table_of_the_machine(tmp_path):
    assert load_exchange_table("aurora", 1)[-1] == (float("inf"), "split")
    with pytest.raises(UserError, match=r"no table for machine local on 1 node\(s\) but for aurora on 1"):
        load_exchange_table("local", 1)
    path = tmp_path / "t.yaml"
    for text, said in (
        ("local: {1: [[1, tapa]]}", "rows of local on 1 node"),
        ("local: {1: [[2, tapa], [1, flat], [null, split]]}", "local on 1 node"),
        ("local: {1: [[null, tappa]]}", "tappa.*tapa"),
        ("local: [1]", "not a table"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            load_exchange_table("local", 1, str(path))
    path.write_text("local: {1: [[0.5, tapa], [null, flat]]}")
    assert load_exchange_table("local", 1, str(path)) == [(0.5, "tapa"), (float("inf"), "flat")]
    assert Config(exchange="auto", exchange_table=str(path)).exchange == "auto"


@pytest.mark.usefixtures("emulation")
def test_a_namespace_that_is_left_keeps_no_file_open() -> None:
    def opened() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before, namespace = opened(), Namespace()
    for _ in range(3):
        with namespace.inside():
            pass
    namespace.close()
    assert opened() == before

"""What doctor asks of a device's library: how it takes a batch, and what CCL_OP_SYNC changes, each in a job of its own.
On a simulated library of either habit, whatever is believed of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import mpiexec
from warm import forked

from cocodiff.cli.doctor import command, facts, trials
from cocodiff.cli.doctor.checks import Finding, examine
from cocodiff.comm import launch
from cocodiff.comm.health import Health
from cocodiff.comm.launch import Launch
from cocodiff.config.config import read_yaml

# A rank under mpiexec: what a job of its own says, in which ranks meet and tell their numbers.
NESTED = """
import json, sys
from cocodiff.cli.doctor import command
from cocodiff.comm import launch
from cocodiff.comm.health import Health
from cocodiff.config.config import Config
from cocodiff.jobs.ranks import run_ranks

STAND_IN = "from cocodiff.cli.doctor import trials"
STAND_IN += "; trials.report_pair = lambda ranks, *_: [ranks.library, ranks.all_gather_values(ranks.rank)]"
command.python_words = lambda code: launch.python_words(f"{STAND_IN}; {code}")
VALUES = {"device": "cpu", "messages": "auto", "patience_s": 100.0, "timeout_s": 60.0}

def work(transport):
    transport.one_thread = True
    found = command.ask("pair", transport, launch.detect(), VALUES)
    if transport.rank == 0:
        print(json.dumps(found), flush=True)

sys.exit(run_ranks(None, launch.detect(), Config(device="cpu"), {}, work))
"""
VALUES = {"machine": "local", "device": "auto", "kernels": "torch", "messages": "auto", "model": None, "size": 64}
NODES = read_yaml(Path(__file__).with_name("nodes.yaml"))
LIMITS = {"patience_s": 60.0, "compile_s": 60.0, "timeout_s": 60.0}

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def messages_found(
    simulated: Any, folder: Path, patch: pytest.MonkeyPatch, each_alone: bool, believed: bool
) -> tuple[facts.Facts, list[Finding]]:
    """Rank 0's facts, and the check's findings, on a library that makes a group of each message or not, as the
    transport believes it does or not. Jobs of their own are processes, in which ranks are threads as they are here.
    folder: takes files of their output for so long."""
    from simulated_device.ranks import SimulatedTransport, run_ranks

    class Library(SimulatedTransport):
        library = "xccl"

    Library.each_alone, Library.one_by_one = each_alone, believed

    def work(transport: Any) -> facts.Facts:
        return command.gather(VALUES | LIMITS, Launch("forked", transport.rank, 2, transport.rank, 2), transport)

    def run(words: list[str], env: dict[str, str], timeout: float, **_: Any) -> Any:
        given = json.dumps(env | {"SIMULATED_EACH_ALONE": str(int(each_alone))}), words[-1]
        done = forked(*given, folder=folder, module="simulated_device.apart", timeout_s=timeout)
        return SimpleNamespace(stdout=(done.stdout + done.stderr).encode())

    patch.setattr(command.subprocess, "run", run)
    patch.setattr(facts, "unimported", lambda *_: {})
    patch.setattr(facts, "try_operations", lambda *_: [])
    patch.setattr(trials, "SIDE", 64)  # it computes on one core
    patch.setitem(trials.SIZES, "other", (64, 4096))
    patch.setattr(trials, "ISSUE_BYTES", (4096,))
    with simulated.devices(2) as found:
        of_all = run_ranks(2, work, Library)[0]
    assert found.reports == []
    return of_all, [one for one in examine(of_all) if one.check == "messages"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("each_alone", "believed", "here", "wrong_with", "verdict"),
    [
        (False, False, "1", "0", "rank 0 got other numbers"),
        (True, True, "0", "none", "right"),
        (False, True, "1", "none", "right"),
        (True, False, "0", "none", "right"),
    ],
)
def test_trials_tell_how_a_library_takes_batches_and_what_ccl_op_sync_changes(
    simulated, tmp_path, monkeypatch, each_alone, believed, here, wrong_with, verdict
):
    """A batch that both ranks begin with a send hangs the job of its own where each message is a group. Doctor's own
    messages, between streams and to all, are right with either habit. Where `auto` is not what is needed it says so.
    All-to-alls are tried with the other value of CCL_OP_SYNC: what they bring, and how long they take, is told."""
    monkeypatch.setenv("CCL_OP_SYNC", here)
    monkeypatch.setenv("SIMULATED_WRONG", wrong_with)
    found, (of_pair, of_sync) = messages_found(simulated, tmp_path, monkeypatch, each_alone, believed)
    assert found.stopped == "" and found.order == trials.ROUNDS
    assert [set(rank.rates) for rank in found.ranks] == [{"bf16_tflop_s", "launch_us", "wait_us"}] * 2
    assert all(rank.rates["bf16_tflop_s"] > 0 < rank.rates["launch_us"] for rank in found.ranks)
    assert len(found.alltoalls) == 10 and not any(one.wrong for one in found.alltoalls)
    assert found.pair[0] == (["met"] if each_alone else ["met", []])
    needed = "alltoall" if each_alone else "batch"
    assert of_pair.severity == ("ok" if each_alone == believed else "warning")
    assert of_pair.remedy == f"--messages {needed}" and needed in of_pair.text
    ((other, told),) = [(name, value) for name, value in found.op_sync[0][0].items() if name.startswith("CCL")]
    assert other == f"CCL_OP_SYNC={1 - int(here)}" and told.startswith(verdict)
    assert other in of_sync.text and told in of_sync.text and of_sync.severity == "ok"
    assert f'"{other}": "right"' in json.dumps(found.op_sync) or told != "right", "launch/ranks.sh looks for it"
    assert found.op_sync[0][0]["seconds"] > 0 and 0 <= found.op_sync[0][0]["hidden"] <= 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("in_one_order", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_messages_around_a_ring_keep_their_order_where_each_is_a_group(simulated, monkeypatch, ranks, in_one_order):
    """Doctor's trial between busy streams ends there, and would not were all ranks to list their sends first."""
    from simulated_device.ranks import NeverEnds, SimulatedTransport, run_ranks

    class Library(SimulatedTransport):
        each_alone, late_s, timeout_s = True, 0.004, 60.0 if in_one_order else 2.0

    def work(transport: Any) -> int | None:
        group = transport.group(range(ranks), together=False)
        group.in_one_order = in_one_order
        return trials.order(transport, group)

    monkeypatch.setattr(trials, "SIDE", 64)
    with simulated.devices(ranks):
        if in_one_order:
            assert run_ranks(ranks, work, Library) == [trials.ROUNDS] * ranks
        else:
            with pytest.raises(NeverEnds):
                run_ranks(ranks, work, Library)


@pytest.mark.full
def test_ranks_of_mpiexec_start_a_job_of_its_own_by_mpiexec() -> None:
    done = mpiexec(3, "-c", NESTED)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [["mpi", [0, 1]], []]


def asked(trial: str, how: Launch, size: int, rank: int = 0, **of_transport: Any) -> Any:
    """The answer of a trial on some rank of a job that was started so."""
    transport = SimpleNamespace(size=size, rank=rank, library="xccl", one_thread=True, health=Health())
    transport.all_gather_values = lambda *_: None
    for name, value in of_transport.items():
        setattr(transport, name, value)
    return command.ask(trial, transport, how, VALUES | LIMITS)


@pytest.mark.parametrize(("trial", "how", "environment", "started", "sync"), NODES["own jobs"])
def test_a_job_of_its_own_is_started_as_this_one_was(monkeypatch, trial, how, environment, started, sync):
    """Where a launcher's other process would be no rank of it: forked."""
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(words: list[str], env: dict[str, str], **_: Any) -> Any:
        ran.append((words, env))
        return SimpleNamespace(stdout=b"noise\ndoctor's report: 1\n[0] doctor's report: [2]\nlast\n")

    monkeypatch.setattr(command.subprocess, "run", run)
    monkeypatch.setattr(command, "find_mpiexec", lambda: "mpiexec")
    for name in ("CCL_OP_SYNC", "PALS_RANKID", "MPIEXEC_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    how = Launch(*how)
    assert asked(trial, how, 24) == ([1, [2]], ["last"])
    ((words, env),) = ran
    assert env.get("CCL_OP_SYNC") == sync and not {"PALS_RANKID", "PALS_LOCAL_SIZE", "RANK"} & env.keys()
    *start, code = (word for word in words if word not in (sys.executable, "-c"))
    assert env["COCODIFF_RANKS"] == (started if how.kind != "mpi" else started.split()[-3])
    assert " ".join(start) == (started if how.kind == "mpi" else "")
    assert f"answer(*('{trial}', {None if how.kind == 'mpi' else started}," in code and "'transport': 'xccl'" in code


def test_a_job_that_cannot_be_started_or_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_mpiexec", lambda: "/nowhere/mpiexec")
    assert asked("pair", Launch("mpi", 0, 2, 0, 2), 2) == ([], ["No such file or directory"])
    monkeypatch.setattr(command, "python_words", lambda _: launch.python_words("import time; time.sleep(60)"))
    monkeypatch.setitem(LIMITS, "patience_s", 0.5)
    assert asked("pair", Launch("forked", 0, 2, 0, 2), 2) == ([], ["no end within 0.5 s"])


@pytest.mark.parametrize(("trial", "of_transport"), NODES["none of its own"])
def test_nothing_is_started_by_other_ranks_and_for_other_libraries(monkeypatch, trial, of_transport):
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert asked(trial, Launch("forked", 0, 2, 0, 2), 2, **of_transport) == ([], [])

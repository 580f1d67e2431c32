"""What is understood of a launcher's environment, and what is refused."""

from __future__ import annotations

import os

import pytest
from launching import fake
from value_tables import beside

from cocodiff.cli.main import main
from cocodiff.comm.connect import environment_store
from cocodiff.comm.launch import Launch, detect, find_mpiexec, system_mpiexec, without_launcher
from cocodiff.config.errors import UserError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


def test_launchers_are_known_by_what_they_set():
    assert detect(TORCHRUN) == Launch("torchrun", 1, 2, 1, None)
    assert detect({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}) == Launch("mpi", 0, 4)
    assert detect({"PMIX_RANK": "3"}) == Launch("mpi", 3, None)
    assert detect(TORCHRUN | {"PMI_RANK": "0", "PMI_SIZE": "2"}).kind == "torchrun"  # as a script may tell its ranks
    assert detect(TORCHRUN | {"PMI_SIZE": "4", "PMI_RANK": "0", "TORCHELASTIC_RUN_ID": "job"}).size == 2
    assert detect({}) == detect({"PMI_RANK": "", "LOCAL_RANK": "abc", "PMI_SIZE": "abc", "RANK": "abc"}) == Launch()


SLURM = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7"}


def test_tasks_of_srun_are_ranks_and_a_batch_script_is_none():
    for step in ("SLURM_STEP_ID", "SLURM_STEPID"):
        assert detect(SLURM | {step: "0"}) == Launch("torchrun", 2, 3, 1, None)
        assert detect(SLURM | {step: "4294967291", "SLURM_PROCID": "0"}) == Launch()  # a batch script's, salloc's shell
    assert detect(SLURM) == detect(SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == Launch()
    assert detect(SLURM | {"SLURM_STEP_ID": "0", "PMI_RANK": "2", "PMI_SIZE": "3"}) == Launch("mpi", 2, 3, 1)
    assert detect(SLURM | {"SLURM_STEP_ID": "0"} | TORCHRUN) == Launch("torchrun", 1, 2, 1)


PALS = {"PALS_RANKID": "13", "PMIX_RANK": "13", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "12"}  # all that it sets


def test_pals_tells_no_size_and_none_is_taken_for_one():
    for missing in ({}, {"PBS_NODEFILE": ""}, {"PBS_NODEFILE": "absent"}, {"PBS_NODEFILE": "/"}):
        assert detect(PALS | missing) == Launch("mpi", 13, None, 1, 12)


@pytest.mark.parametrize("lines", ["x1\nx2\n", "x1\n" * 12 + "\n" + "x2\n" * 12, "x1\r\nx2"])
def test_nodes_of_a_pbs_job_times_ranks_of_this_one_are_a_guess(tmp_path, lines):
    (tmp_path / "nodes").write_text(lines)
    job = {"PBS_NODEFILE": str(tmp_path / "nodes")}
    assert detect(PALS | job) == Launch("mpi", 13, 24, 1, 12, guessed=True)
    assert detect(PALS | job | {"PALS_RANKID": "25"}).size is None  # which shows that it is wrong
    assert detect({"PMIX_RANK": "13"} | job) == Launch("mpi", 13, None)
    assert detect(PALS | job | {"PMI_SIZE": "14"}) == detect(PALS | {"PMI_SIZE": "14"}) == Launch("mpi", 13, 14, 1, 12)
    assert detect(PALS | job | {"COCODIFF_RANKS": "36"}) == Launch("mpi", 13, 36, 1, 12)
    for content in (b"", b"\xff\xfe"):
        (tmp_path / "nodes").write_bytes(content)
        assert detect(PALS | job).size is None


def test_a_jobs_script_may_tell_ranks_how_many_they_are():
    told = {"COCODIFF_RANKS": "24"}
    assert detect(PALS | told) == Launch("mpi", 13, 24, 1, 12) and detect({"PMIX_RANK": "3"} | told).size == 24
    assert detect(told) == detect(told | SLURM) == Launch()  # of a process that no launcher has started
    assert detect(PALS | told | {"PMI_SIZE": "14"}).size == 14 and detect(TORCHRUN | told).size == 2
    assert detect(PALS | {"COCODIFF_RANKS": "13"}) == Launch("mpi", 13, None, 1, 12)  # it is wrong: there is a rank 13
    assert detect(without_launcher(PALS | told)) == Launch() and "COCODIFF_RANKS" not in without_launcher(told)


def test_tasks_of_srun_that_know_no_address_are_told_how_to_meet():
    with pytest.raises(UserError, match=r"MASTER_ADDR is None, MASTER_PORT .*--mpi=pmi2"):
        environment_store(2, 3, 1.0, False, SLURM | {"SLURM_STEP_ID": "0"})


def test_a_process_that_is_no_rank_hears_of_no_launcher():
    own = {"PATH": "/bin", "I_MPI_FABRICS": "ofi", "OMP_NUM_THREADS": "2", "FRANK": "1", "OMPI_MCA_btl": "tcp"}
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
    others = {"PALS_RANKID": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": "job"}
    told = TORCHRUN | hydra | others | SLURM | {"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}
    left = without_launcher(own | told)
    assert left == own and detect(left) == Launch()


REFUSED = beside(__file__)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        *((TORCHRUN | changed, said) for changed, said in REFUSED["under torchrun"]),
        *REFUSED["alone"],
        (TORCHRUN | {"RANK": "9" * 5000}, "RANK='9999999999999999999999999999999999999999' in"),
    ],
)
def test_an_environment_that_no_launcher_makes_is_refused(environment, said):
    with pytest.raises(UserError) as error:
        detect(environment)
    assert all(value in str(error.value) for value in said.split(" ... ")) and "\n" not in str(error.value)


def test_another_environments_mpiexec_is_passed_over(tmp_path, monkeypatch):
    """Ours comes first, then the system's; an activated environment, or conda's, may bring one that is not for us."""
    folders = [tmp_path / name for name in ("venv", "conda", "system", "ours")]
    for folder in folders:
        fake(folder / "bin" / "mpiexec")
    venv, conda, system, ours = folders
    (venv / "pyvenv.cfg").touch()
    (conda / "conda-meta").mkdir()
    (system / "linked").symlink_to(venv / "bin")
    paths = [str(venv / "bin"), "", str(conda / "bin"), str(system / "linked"), str(system / "bin")]
    monkeypatch.setenv("PATH", ":".join(paths))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "without"))
    assert find_mpiexec() == system_mpiexec() == str(system / "bin" / "mpiexec")
    monkeypatch.setattr("sys.base_prefix", str(conda))
    assert system_mpiexec() == str(conda / "bin" / "mpiexec")
    monkeypatch.setattr("sys.prefix", str(ours))
    assert find_mpiexec() == str(ours / "bin" / "mpiexec")
    monkeypatch.setenv("PATH", str(ours / "bin"))
    assert system_mpiexec() is None


def test_the_command_line_says_it_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", TORCHRUN | {"RANK": "abc"})
    assert main(["plan"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("cocodiff: RANK='abc'") and len(said.err.splitlines()) == 1

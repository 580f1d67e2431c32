"""`cocodiff inpaint` under mpiexec and torchrun: one voice, one result, and faults that are named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from launching import mpiexec, run, with_options
from tiny_models import sd3_inpaint_pipeline

pytestmark = pytest.mark.processes

FAULTY = Path(__file__).with_name("faulty_rank.py")
RANKS = 3


def torchrun(*words: object) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    return [*launcher, *(str(word) for word in words)]


@pytest.fixture(scope="module")
def request_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small request: a random model in diffusers' layout and a slice of its size."""
    folder = tmp_path_factory.mktemp("request")
    sd3_inpaint_pipeline().save_pretrained(folder / "model")
    tifffile.imwrite(folder / "scan.tif", np.random.default_rng(0).random((64, 64), dtype=np.float32))
    options = {"--input": folder / "scan.tif", "--model": folder / "model", "--steps": 2}
    return ["inpaint", *(str(word) for pair in options.items() for word in pair), "--quiet"]


@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_launcher_gives_the_restoration_of_one_process(
    request_words: list[str], tmp_path: Path, launcher: str
) -> None:
    words = ["-m", "cocodiff", *request_words, "--out", str(tmp_path / "out")]
    done = mpiexec(RANKS, *words) if launcher == "mpiexec" else run(torchrun(*words))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{RANKS} rank(s) ready" in done.stdout and done.stdout.count("report.html") == 1
    alone = run([sys.executable, "-m", "cocodiff", *request_words, "--out", str(tmp_path / "alone")])
    assert alone.returncode == 0, alone.stdout + alone.stderr
    together, single = (tifffile.imread(tmp_path / name / "images/scan_block_tapa.tif") for name in ("out", "alone"))
    assert np.abs(together - single).max() < 1e-4


def test_a_mistake_is_said_once_under_a_launcher(request_words: list[str], tmp_path: Path) -> None:
    done = mpiexec(
        RANKS, "-m", "cocodiff", *with_options(request_words, "--steps", "0"), "--out", str(tmp_path / "out")
    )
    assert done.returncode != 0
    assert done.stderr.count("at least 1 is needed") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("transport", "fault"), [("mpi", "exception"), ("mpi", "killed"), ("gloo", "killed")])
def test_a_lost_rank_is_named_by_the_survivors_under_mpiexec(transport: str, fault: str) -> None:
    done = mpiexec(RANKS, FAULTY, fault, transport)
    assert done.returncode != 0
    reason = "failed: RuntimeError: the disk is on fire" if fault == "exception" else "died: its connection closed"
    for survivor in (0, 2):
        assert done.stderr.count(f"[rank {survivor}] rank 1 {reason}") == 1


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_ranks_started_differently_are_refused_under_mpiexec(transport: str) -> None:
    done = mpiexec(RANKS, FAULTY, "settings", transport)
    assert done.returncode != 0
    said = "was started differently from rank 0: steps is 50 there and 20 on rank 0; start every rank alike"
    assert done.stderr.count(said) == 1

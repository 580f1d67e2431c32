"""`cocodiff inpaint` under mpiexec and torchrun: one voice, one result, and faults that are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
from diffusers import StableDiffusion3InpaintPipeline
from launching import mpiexec, run, with_options
from tiny_models import sd3_inpaint_pipeline
from tiny_pipelines import TEXT_WIDTH, clip_text, sd3_pipeline
from transformers import T5Config, T5EncoderModel
from warm_ranks import warm_mpiexec

from cocodiff.cli.main import main

pytestmark = pytest.mark.processes

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


def test_a_mistake_is_said_once_under_a_launcher(request_words: list[str], tmp_path: Path) -> None:
    done = warm_mpiexec(
        RANKS, "-m", "cocodiff", *with_options(request_words, "--steps", "0"), "--out", str(tmp_path / "out")
    )
    assert done.returncode != 0
    assert done.stderr.count("at least 1 is needed") == 1
    assert not (tmp_path / "out").exists()


LEAVES = "left the run"
HANGS = "has not gone on from broadcast_object"
DIES = "died: its connection closed"


@pytest.mark.parametrize(
    ("fault", "transport", "said"),
    [
        ("killed", "mpi", DIES),
        pytest.param("exception", "mpi", "failed: RuntimeError: the disk is on fire", marks=pytest.mark.full),
        pytest.param("killed", "mpi-rma", DIES, marks=pytest.mark.full),
        pytest.param("killed", "gloo", DIES, marks=pytest.mark.full),
        pytest.param("killed at the start", "mpi", "died before the ranks had met", marks=pytest.mark.full),
        pytest.param("leaves", "mpi", LEAVES, marks=pytest.mark.full),
        pytest.param("leaves", "mpi-rma", LEAVES, marks=pytest.mark.full),
        pytest.param("leaves", "gloo", LEAVES, marks=pytest.mark.exhaustive),
        pytest.param("sleeps", "mpi", HANGS, marks=pytest.mark.full),
        pytest.param("sleeps", "mpi-rma", HANGS, marks=pytest.mark.full),
    ],
)
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
    done = mpiexec(RANKS, FAULTY, fault, "mpi", str(tmp_path), timeout_s=100)
    assert done.returncode != 0
    for survivor in range(1, RANKS):
        said = (tmp_path / str(survivor)).read_text()
        assert said.count("said before") == said.count(f"PeerLost: rank 0 failed: {error}") == 1, said


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=pytest.mark.exhaustive)])
def test_ranks_started_differently_are_refused_under_mpiexec(transport: str) -> None:
    done = warm_mpiexec(RANKS, FAULTY, "settings", transport)
    assert done.returncode != 0
    said = "was started differently from rank 0: steps is 50 there and 20 on rank 0; start every rank alike"
    assert done.stderr.count(said) == 1

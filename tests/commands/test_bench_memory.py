"""`cocodiff bench memory` on a small random model: what it measures and what it compares that with."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from cocodiff_bench.memory import HEAD_DIM, LAYERS, Sampler, check, heads_of, proportional
from cocodiff_bench.vae import decoding
from launching import run

from cocodiff.comm.loopback import run_ranks
from cocodiff.errors import UserError
from cocodiff.planning.memory import LIBRARIES, MIB, RankMemory, node_memory

pytestmark = pytest.mark.processes


def test_a_random_model_of_two_ranks(tmp_path):
    words = ["--ranks", "2", "--billions", "0.02", "--size", "64", "--text_tokens", "8", "--out", str(tmp_path / "m")]
    done = run([sys.executable, "-m", "cocodiff", "bench", "memory", *words])
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "m" / "bench.json").read_text())["rows"]
    foreseen, measured = row["predicted_parts_mib"], row["measured_parts_mib"]
    assert row["predicted_mib"] == pytest.approx(sum(foreseen.values()))
    assert row["measured_mib"] == pytest.approx(sum(measured.values()), abs=5)
    assert foreseen["libraries"] == 2 * LIBRARIES / MIB and foreseen["cache"] == 0 < foreseen["activations"]
    assert 0 < measured["Pss_File"] < 1.5 * foreseen["weights"]  # mapped once, not once a rank
    assert "predicted" in done.stdout and row["case"].startswith("random, 2 rank(s)")


def test_proportional_sizes_are_read_and_the_largest_moment_is_kept():
    own = proportional(os.getpid())
    assert own["Pss"] > MIB and abs(own["Pss"] - own["Pss_Anon"] - own["Pss_File"] - own["Pss_Shmem"]) < MIB
    sampler = Sampler([os.getpid()])
    with sampler.open():
        block = bytearray(64 * MIB)
        sampler.sample()
        del block
    assert sampler.peak >= own["Pss"] + 60 * MIB and sampler.seen[0]["Pss"] == sampler.peak


def test_a_node_on_cpu_holds_weights_once_and_libraries_for_each_rank():
    ranks = [RankMemory(100, 10, 1, 2, 3), RankMemory(100, 20, 1, 2, 3)]
    assert node_memory(ranks, on_cpu=False).total == 200 + 30 + 12
    assert node_memory(ranks, on_cpu=True) == RankMemory(100, 30, 2, 4, 6, 2 * LIBRARIES)


def test_sizes_and_mistakes():
    for billions in (0.02, 0.3, 1.0):
        width = heads_of(billions) * HEAD_DIM
        assert 36 * LAYERS * width**2 == pytest.approx(billions * 1e9, rel=0.35)
    values = {
        "size": 64,
        "tile": 256,
        "batch": 1,
        "steps": 1,
        "ranks": 40,
        "preset": "tapa",
        "billions": 0.02,
        "model": "random",
        "machine": "local",
        "transport": "auto",
        "device": "cpu",
        "kernels": "auto",
        "timeout_s": 1.0,
    }
    with pytest.raises(UserError, match="40 ranks and 3 heads"):
        check(values, 40)
    with pytest.raises(UserError, match=r"--billions 0: give a number above 0"):
        check(values | {"billions": 0.0}, 2)
    with pytest.raises(UserError, match=r"--tile 40: the VAE's tiles need a multiple of 32 pixels"):
        check(values | {"model": "vae", "tile": 40}, 2)


def test_decoding_in_tiles_with_the_real_vae(one_thread_a_rank):
    values = {"vae": "tiled", "dtype": "bf16", "size": 64, "tile": 32, "batch": 1, "machine": "local"}

    def work(transport: Any) -> RankMemory:
        call, predicted = decoding(values, transport)
        call()
        return predicted

    (predicted,) = run_ranks(1, work)
    tiles = 3 * 9 * 32**2  # nine of them
    assert predicted == RankMemory(2 * 83819683, 2 * (960 * 32**2 + tiles), libraries=LIBRARIES)

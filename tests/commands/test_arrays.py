"""`cocodiff.restore`: arrays in, arrays out, its ranks behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import cocodiff
from cocodiff import PeerLost, UserError, arrays

pytestmark = pytest.mark.processes

QUICK = {"steps": 2, "progress": False, "device": "cpu"}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the function keeps what it works with: nothing is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def volume() -> np.ndarray:
    return np.random.default_rng(0).integers(1000, 60000, (4, 48, 40), dtype=np.uint16)


@pytest.fixture
def mask() -> np.ndarray:
    mask = np.zeros((48, 40), bool)
    mask[20:30, 15:25] = True
    return mask


def test_a_volume_is_restored(volume: np.ndarray, mask: np.ndarray, temporary: Path) -> None:
    found = cocodiff.restore(volume, mask, samples=2, **QUICK)
    assert (found.mean.dtype, found.mean.shape) == (volume.dtype, volume.shape)
    assert (found.mean[:, ~mask] == volume[:, ~mask]).all() and (found.mean[:, mask] != volume[:, mask]).any()
    assert found.spread is not None and (found.spread[:, ~mask] == 0).all() and (found.spread[:, mask] > 0).any()
    samples = np.stack(found.samples).astype(float)
    assert np.abs(samples.mean(0) - found.mean).max() <= 1
    assert [*temporary.iterdir()] == []


def test_the_example_of_the_pages_runs() -> None:
    script = Path(__file__).parent.parent.parent / "docs" / "restore.py"
    done = subprocess.run([sys.executable, str(script), "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "hidden regions of this volume" in done.stdout and "% of the truth between" in done.stdout


def test_other_arrays_give_the_same_bits(volume: np.ndarray, mask: np.ndarray, tmp_path: Path) -> None:
    stored = zarr.create_array(str(tmp_path / "a.zarr"), shape=volume.shape, chunks=(2, 24, 40), dtype=volume.dtype)
    stored[:] = volume
    one, other = (cocodiff.restore(given, mask, samples=1, seed=3, **QUICK) for given in (volume, stored))
    assert (one.mean == other.mean).all() and one.spread is None and one.verdict is None
    flat = cocodiff.restore(volume[0], mask, samples=1, seed=3, **QUICK)
    assert flat.mean.shape == mask.shape and (flat.mean[~mask] == volume[0][~mask]).all()


class Chunked:
    """An array that is decoded chunk by chunk, and counts the voxels that this takes, as Zarr's and Dask's are."""

    def __init__(self, values: np.ndarray, chunks: tuple[Any, ...], sides: tuple[int, ...]) -> None:
        """chunks: as the library tells them; sides: of a chunk."""
        self.values, self.chunks, self.sides, self.decoded = values, chunks, sides, 0
        self.shape, self.ndim, self.dtype, self.largest = values.shape, values.ndim, values.dtype, 0

    def __getitem__(self, key: tuple[slice, ...]) -> np.ndarray:
        part = self.values[key]
        whole = 1
        for n, side in enumerate(self.sides):
            start, stop, _ = (key[n] if n < len(key) else slice(None)).indices(self.shape[n])
            whole *= min(-(-stop // side) * side, self.shape[n]) - start // side * side
        self.decoded, self.largest = self.decoded + whole, max(self.largest, part.size)
        return part


@pytest.mark.parametrize("chunks", [(2, 24, 16), ((2, 2), (24, 24), (16, 16, 8))], ids=["zarr", "dask"])
def test_each_chunk_is_read_once(volume: np.ndarray, chunks: tuple[Any, ...], tmp_path: Path) -> None:
    array = Chunked(volume, chunks, (2, 24, 16))
    arrays._save(array, tmp_path / "a.npy")
    assert (np.load(tmp_path / "a.npy") == volume).all()
    assert (array.decoded, array.largest) == (volume.size, 2 * 24 * 40)


def test_replicas_of_several_ranks_restore_axes() -> None:
    volume = np.random.default_rng(0).integers(1000, 60000, (16, 20, 24), dtype=np.uint16)
    mask = np.zeros(volume.shape, bool)
    mask[5:9, 6:10, 8:12] = True
    along = {"samples": 2, "axes": ["z", "x"], "hidden_test": False, **QUICK}
    one, two = (cocodiff.restore(volume, mask, ranks=2 * n, replicas=n, **along) for n in (1, 2))
    assert (one.mean == two.mean).all() and (one.mean[mask] != volume[mask]).any()
    assert (one.mean[~mask] == volume[~mask]).all() and [*one.metrics["volumes"][0]["axes"]] == ["z", "x"]
    for found in (one, two):  # two ranks share each slice
        assert sum(sum(row["bytes"].values()) for row in found.metrics["images"]) > 0


def test_what_cannot_be_restored_is_a_line(volume: np.ndarray, mask: np.ndarray) -> None:
    with pytest.raises(UserError, match="the mask is empty"):
        cocodiff.restore(volume, np.zeros_like(mask), **QUICK)
    with pytest.raises(UserError, match="1 dimensions"):
        cocodiff.restore(volume[0, 0], mask, **QUICK)
    with pytest.raises(UserError, match="out cannot be given"):
        cocodiff.restore(volume, mask, out="here", **QUICK)
    with pytest.raises(UserError, match="unknown option"):
        cocodiff.restore(volume, mask, colour="red", **QUICK)


def ranks_of(job: subprocess.Popen[Any]) -> list[int]:
    """The processes of a job's ranks, when there are two."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while len(found := [*map(int, children.read_text().split())]) < 2:
        time.sleep(0.05)
    return found


def test_a_rank_that_dies_is_named(volume: np.ndarray, mask: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def killing(job: subprocess.Popen[Any], *_: Any) -> None:
        os.kill(ranks_of(job)[1], signal.SIGKILL)
        job.wait()

    monkeypatch.setattr(arrays, "_watch", killing)
    with pytest.raises(PeerLost, match="rank 1 was killed by SIGKILL") as lost:
        cocodiff.restore(volume, mask, ranks=2, **QUICK | {"steps": 500})
    assert lost.value.rank == 1


def test_an_interrupt_leaves_nothing(
    volume: np.ndarray, mask: np.ndarray, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    ranks: list[int] = []

    def interrupted(job: subprocess.Popen[Any], *_: Any) -> None:
        ranks.extend(ranks_of(job))
        raise KeyboardInterrupt

    monkeypatch.setattr(arrays, "_watch", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as where a script starts it with `&`
    try:
        with pytest.raises(KeyboardInterrupt):
            cocodiff.restore(volume, mask, ranks=2, **QUICK | {"steps": 500})
    finally:
        signal.signal(signal.SIGINT, before)
    assert [*temporary.iterdir()] == []
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)

"""`cocodiff.restore`: arrays in, arrays out, its ranks behind it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import zarr
from launching import end_group
from seams import error_of_restore, save_as_restore, words_of_restore

import cocodiff
from cocodiff import PeerLost, UserError
from cocodiff.jobs import arrays
from cocodiff.jobs.children import dependent_words

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
    assert found.low_90 is not None and found.high_90 is not None and (found.low_90 <= found.mean).all()
    assert (found.low_90[:, mask] < found.high_90[:, mask]).any() and (found.high_90 >= found.mean).all()
    assert [*temporary.iterdir()] == []


@pytest.mark.full
def test_the_example_of_the_pages_runs() -> None:
    script = Path(__file__).parent.parent.parent / "docs" / "restore.py"
    done = subprocess.run([sys.executable, str(script), "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "hidden regions of this volume" in done.stdout and "% of the truth between" in done.stdout


@pytest.mark.full
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
    save_as_restore(array, tmp_path / "volume.npy")
    assert (np.load(tmp_path / "volume.npy") == volume).all()
    assert (array.decoded, array.largest) == (volume.size, 2 * 24 * 40)


@pytest.mark.full
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


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_launchers_variables_are_not_those_of_its_ranks(
    volume: np.ndarray, mask: np.ndarray, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may be a rank of mpiexec's, or have the variables of another job left over."""
    for name in ("PMI_RANK", "MPI_LOCALRANKID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name, value in {"PMI_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    assert cocodiff.restore(volume[:1], mask, samples=1, ranks=ranks, **QUICK).mean.shape == (1, 48, 40)


WRONG: list[tuple[Callable[[Any, Any], dict[str, Any]], str]] = [
    # Found before a job begins:
    (lambda v, m: {"volume": v[0, 0]}, "volume is a ndarray of 1 dimensions and type uint16: give integers or floats"),
    (lambda v, m: {"volume": v[None]}, "volume is a ndarray of 4 dimensions"),
    (lambda v, m: {"volume": None}, "volume is a NoneType of 0 dimensions"),
    (lambda v, m: {"volume": "scan.tif"}, "volume is a str of 0 dimensions"),
    (lambda v, m: {"volume": [[1, 2], [3]]}, "volume is a list that NumPy makes no array of"),
    (lambda v, m: {"volume": torch.from_numpy(v.astype("f4")).bfloat16()}, "volume is a Tensor that NumPy makes no"),
    (lambda v, m: {"volume": v > 9}, "volume is a ndarray of 3 dimensions and type bool: give integers or floats"),
    (lambda v, m: {"volume": v.astype("c8")}, "volume is a ndarray of 3 dimensions and type complex64"),
    (lambda v, m: {"volume": v.astype(object)}, "volume is a ndarray of 3 dimensions and type object"),
    (lambda v, m: {"volume": np.ma.masked_less(v, 9000)}, "volume is a MaskedArray of 3 dimensions and type uint16"),
    (lambda v, m: {"mask": m[0]}, "mask is a ndarray of 1 dimensions"),
    (lambda v, m: {"mask": m.astype("U5")}, "mask is a ndarray of 2 dimensions and type <U5: give True and False"),
    (lambda v, m: {"mask": m.astype("c8")}, "mask is a ndarray of 2 dimensions and type complex64"),
    (lambda v, m: {"out": "here"}, "out cannot be given: the function decides it"),
    (lambda v, m: {"dry_run": True}, "dry_run cannot be given: the function decides it"),
    (lambda v, m: {"preset": "flat,tapa"}, "preset is 'flat,tapa': give the name of one"),
    (lambda v, m: {"truth": v}, "truth is an array: only volume and mask can be"),
    # Told by the job:
    (lambda v, m: {"mask": m & False}, "mask: the mask is empty"),
    (lambda v, m: {"mask": m[:20]}, "mask: the mask has shape 20 x 40 but volume has 4 x 48 x 40"),
    (
        lambda v, m: {"volume": np.where(np.arange(40) == 3, np.nan, v)},
        "volume: 192 NaN or Inf voxels outside the mask 'mask', the first at slice 0, row 0",
    ),
    (lambda v, m: {"colour": "red"}, "unknown option colour"),
    (lambda v, m: {"steps": "-1"}, "steps -1: at least 1 is needed"),
    (lambda v, m: {"device": "gpu"}, "device: invalid choice: 'gpu' (choose from"),
    (lambda v, m: {"range": (-3000, -1000)}, "range -3000,-1000: no voxel of volume outside the mask"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_mistake_is_one_line_in_words_of_python(
    volume: np.ndarray, mask: np.ndarray, case: int, temporary: Path
) -> None:
    change, said = WRONG[case]
    with pytest.raises(UserError) as error:
        cocodiff.restore(**{"volume": volume, "mask": mask, **QUICK, **change(volume, mask)})
    line = str(error.value)
    assert line.startswith(f"restore: {said}") and "--" not in line and ".npy" not in line and "\n" not in line, line
    assert [*temporary.iterdir()] == []


@pytest.mark.parametrize(
    "as_given",
    [
        lambda v: v.tolist(),
        lambda v: [*v],
        lambda v: torch.from_numpy(v.astype("i4")),
        lambda v: torch.from_numpy(v.astype("f4")).requires_grad_(),
        lambda v: v.astype(">u2"),
        np.asfortranarray,
        lambda v: np.repeat(v, 2, axis=2)[:, :, ::2],
        np.ma.masked_array,
    ],
)
def test_whatever_numpy_makes_an_array_of_is_taken(
    volume: np.ndarray, as_given: Callable[[Any], Any], tmp_path: Path
) -> None:
    for name, values, wanted in (("volume", volume, volume), ("mask", (volume > 30000) * np.uint16(2), volume > 30000)):
        save_as_restore(as_given(values), tmp_path / f"{name}.npy")
        assert (np.load(tmp_path / f"{name}.npy") == wanted).all()


def test_options_are_words_of_the_command_line() -> None:
    given = {"axes": ("z", "y"), "exact": False, "hidden_test": np.True_, "range": (-1.5, 3000), "prompt": "--a"}
    words = ["--axes=z", "--axes=y", "--exact=false", "--hidden_test=true", "--range=-1.5,3000", "--prompt=--a"]
    assert words_of_restore({**given, "fps": None}) == words
    assert words_of_restore({"range": "-1,2"}) == ["--range=-1,2"]


def ranks_of(job: subprocess.Popen[Any]) -> list[int]:
    """The processes of a job's ranks, when there are two."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while len(found := [*map(int, children.read_text().split())]) < 2:
        time.sleep(0.05)
    return found


FAILING = """
from cocodiff.jobs import ranks
run = ranks._run_rank
def run_failing(config, settings, work, launch, *more):
    def work_failing(transport):
        if launch.rank == 1:
            raise OSError("the disk is on fire")
        work(transport)
    return run(config, settings, work_failing, launch, *more)
ranks._run_rank = run_failing
"""


@pytest.mark.parametrize(
    ("number", "ready", "ranks", "said"),
    [
        (signal.SIGKILL, "", 2, "rank 1 was killed by SIGKILL"),
        (signal.SIGKILL, "", 1, "rank 0 was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, "", 2, "rank [01] was stopped for more than 4 s", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, "ready after", 2, "rank 1 has been silent for 4 s", marks=pytest.mark.full),
        (None, "", 2, "rank 1 failed: OSError: the disk is on fire"),
    ],
    ids=["killed", "killed alone", "stopped", "silent", "failed"],
)
def test_a_rank_that_is_lost_is_named(
    volume: np.ndarray,
    mask: np.ndarray,
    number: signal.Signals | None,
    ready: str,
    ranks: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def strike(job: subprocess.Popen[Any], out: Path, *_: Any) -> None:
        while ready not in (out.parent / "said").read_text():
            time.sleep(0.05)
        if number is not None:
            for pid in [job.pid] if ranks == 1 else ranks_of(job)[0 if "stopped" in said else 1 :]:
                os.kill(pid, number)
        job.wait()

    if number is None:
        (tmp_path / "failing.py").write_text(FAILING)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        words = "(__import__('failing'), main(json.load(sys.stdin)))[1]"
        monkeypatch.setattr(arrays, "dependent_words", lambda _, folder: dependent_words(words, folder))
    monkeypatch.setattr(arrays, "_watch", strike)
    with pytest.raises(PeerLost) as lost:
        cocodiff.restore(volume, mask, ranks=ranks, timeout_s=4, **QUICK | {"steps": 500})
    assert re.fullmatch(said, str(lost.value)) and (lost.value.rank == ranks - 1 or "stopped" in said)
    if number is None:
        assert "in work_failing" in str(lost.value.__cause__)  # the rank's traceback


def test_a_mistake_late_in_a_job_is_what_is_told() -> None:
    said = "cocodiff: the model makes NaN\ncocodiff: 2 of 4 slices are kept: go on with --resume\n"
    assert str(error_of_restore(2, said)) == "restore: the model makes NaN"


def test_files_of_the_working_folder_are_not_run(
    volume: np.ndarray, mask: np.ndarray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("random", "signal", "copy", "json", "zarr", "cocodiff"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder was run')")
    monkeypatch.chdir(tmp_path)
    assert (cocodiff.restore(volume[:1], mask, samples=1, **QUICK).mean[:, ~mask] == volume[:1, ~mask]).all()


CALLER = """
import os, sys, time, numpy as np, cocodiff
class Slow:
    dtype, ndim, shape = np.dtype("u2"), 3, (16, 64, 64)
    def __getitem__(self, key):
        if sys.argv[1] == "saving":
            print("begun", flush=True)
            time.sleep(100)
        return np.random.default_rng(0).integers(0, 60000, self.shape, dtype="u2")[key]
mask = np.zeros((64, 64), bool)
mask[20:40, 20:40] = True
cocodiff.restore(Slow(), mask, samples=2, steps=5000, progress=False, device="cpu", ranks=int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("number", "during", "ranks"),
    [
        (signal.SIGTERM, "saving", 1),
        pytest.param(signal.SIGTERM, "running", 1, marks=pytest.mark.full),
        (signal.SIGKILL, "running", 2),
        pytest.param(signal.SIGHUP, "running", 2, marks=pytest.mark.full),
    ],
)
def test_nothing_outlives_the_caller(number: signal.Signals, during: str, ranks: int, temporary: Path) -> None:
    """Neither a process nor what it works with, wherever the caller is struck."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, during, str(ranks)],
        env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert caller.stdout is not None
    try:
        if during == "saving":
            caller.stdout.readline()
        else:
            while not any("ready after" in path.read_text() for path in temporary.glob("*/said")):
                assert caller.poll() is None
                time.sleep(0.1)
        started = [one for one in psutil.process_iter() if os.getsid(one.pid) == caller.pid]
        assert len(started) >= 2 and [*temporary.glob("cocodiff-*")]
        caller.send_signal(number)
        assert caller.wait(10) == -number
        psutil.wait_procs(started, 12)
        assert [one for one in started if one.is_running()] == [] and [*temporary.glob("cocodiff-*")] == []
    finally:
        end_group(caller.pid)


def test_a_caller_without_standard_streams(tmp_path: Path) -> None:
    caller = CALLER.replace("5000, progress=False", "1").replace("cocodiff.restore", "found = cocodiff.restore")
    (tmp_path / "caller.py").write_text(f"{caller}\nnp.save('mean.npy', found.mean)")
    words = f"exec '{sys.executable}' caller.py '' 1 <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", words], cwd=tmp_path, timeout=240).returncode == 0
    assert np.load(tmp_path / "mean.npy").shape == (16, 64, 64)


@pytest.mark.full
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

"""`cocodiff.restore`: arrays in, arrays out, its ranks behind it."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
import zarr
from cocodiff_eval.cli.inpaint import OPTIONS as INPAINT_OPTIONS
from launching import end_group
from PIL import Image
from seams import save_as_restore, watch_of_restore, words_of_restore

import cocodiff
from cocodiff import PeerLost, UserError
from cocodiff.jobs import arrays
from cocodiff.jobs.arrays import DECIDED
from cocodiff.jobs.children import STOP_S, dependent_words

QUICK = {"steps": 2, "progress": False, "device": "cpu"}


VOLUME = np.random.default_rng(0).integers(1000, 60000, (4, 48, 40), dtype=np.uint16)
MASK = np.zeros((48, 40), bool)
MASK[20:30, 15:25] = True


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the function keeps what it works with: nothing is left there by any test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_volume_is_restored(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a caller that may be a rank of mpiexec's, or have the variables of another job left over."""
    left = {"PMI_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in (left | dict.fromkeys(("PMI_RANK", "MPI_LOCALRANKID", "RANK", "LOCAL_RANK"), "1")).items():
        monkeypatch.setenv(name, value)
    known = np.ones_like(MASK)
    known[21:29, 16:24] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cocodiff.restore(VOLUME, known, samples=2, ranks=ranks, grow=1, invert=True, **QUICK)
    assert (found.mean.dtype, found.mean.shape) == (VOLUME.dtype, VOLUME.shape) and (found.mask == MASK).all()
    assert (found.mean[:, ~MASK] == VOLUME[:, ~MASK]).all() and (found.mean != VOLUME)[:, MASK].mean() > 0.9
    assert found.spread is not None and (found.spread[:, ~MASK] == 0).all() and (found.spread[:, MASK] > 0).any()
    samples = np.stack(found.samples).astype(float)
    assert np.abs(samples.mean(0) - found.mean).max() <= 1
    assert found.low_90 is not None and found.high_90 is not None and (found.low_90 <= found.mean).all()
    assert (found.low_90[:, MASK] < found.high_90[:, MASK]).any() and (found.high_90 >= found.mean).all()
    assert found.outcome.voxels >= 200 and found.outcome.kind in ("ahead", "tie", "as good", "unknown")
    assert str(found.outcome) == found.metrics["outcomes"][0]["told"] and next(iter(found.metrics)) == "outcomes"
    shown = found._repr_html_()
    pictures = [Image.open(io.BytesIO(base64.b64decode(one))) for one in re.findall('base64,([^"]+)"', shown)]
    assert [one.size for one in pictures] == [(40, 48), (40, 4), (48, 4)] and str(found.outcome) in shown
    outline = (np.asarray(pictures[0]) == (255, 176, 0)).all(axis=2)
    assert not outline[MASK].any() and outline.sum() == 40 and outline[19, 15:25].all()
    assert len(repr(found)) < 300 and "4 x 48 x 40 of uint16" in repr(found)
    assert found.uncertainty is not None
    np.testing.assert_array_equal(found.uncertainty, (found.high_90.astype(float) - found.low_90) / 2)
    told = np.mean([row["uncertainty"] for row in found.metrics["images"]])
    low, high = found.metrics["inputs"][0]["range"]
    assert told * (high - low) == pytest.approx(found.uncertainty[:, MASK].mean(), rel=1e-4)


def test_a_mask_that_is_too_small_is_told() -> None:
    """A hole of which the mask leaves the outermost voxels."""
    volume, mask, hole = VOLUME[0] // 4, np.zeros((48, 40), bool), np.zeros((48, 40), bool)
    mask[20:26, 15:21] = hole[19:27, 14:22] = True
    volume[hole] = 60000
    with pytest.warns(UserWarning, match="100% of the known voxels beside the mask .* grow 1 "):
        small = cocodiff.restore(volume, mask[None], samples=1, **QUICK | {"steps": "auto"})
    assert (small.mean[hole & ~mask] == 60000).all()
    assert small.spread is small.uncertainty is small.verdict is None
    assert small.outcome.kind == "unknown" and "--" not in str(small.outcome)
    assert small.metrics["config"]["steps"] == 10 and (small.mask == mask).all()


def test_a_region_has_a_mask_of_its_own_and_a_lost_slice_is_told() -> None:
    mask = np.broadcast_to(MASK, VOLUME.shape) | (np.arange(4) == 2)[:, None, None]
    with pytest.warns(UserWarning, match=r"slices \[2\] are masked wholly"):
        scan = np.where(mask.all(axis=(1, 2)), np.nan, VOLUME.T).T  # the lost slice is shown too
        found = cocodiff.restore(scan, mask, samples=1, slices="1:4", roi="10:40,5:40", **QUICK)
    with np.errstate(invalid="raise"):
        found._repr_html_()
    assert (found.mask == np.where(mask.all(axis=(1, 2)), False, mask.T).T[1:, 10:40, 5:40]).all()
    assert np.array_equal(found.mean[~found.mask], scan[1:, 10:40, 5:40][~found.mask], equal_nan=True)


@pytest.mark.full
def test_named_axes_along_which_nothing_can_be_restored_are_left_out() -> None:
    volume, lost = np.random.default_rng(0).normal(size=(18, 20, 24)).astype("f4"), np.zeros((18, 20, 24), bool)
    lost[[5, 10]] = True
    hole = lost.copy()
    hole[15, 3:9, 3:9] = True
    for mask in (lost, hole):
        found = cocodiff.restore(volume, mask, samples=3, axes=("z", "y", "x"), **QUICK)
        assert np.isfinite(found.mean).all() and found.outcome.regions > 0 and found.low_90 is not None


@pytest.mark.full
def test_the_example_of_the_pages_runs() -> None:
    script = Path(__file__).parent.parent.parent / "docs" / "restore.py"
    done = subprocess.run([sys.executable, str(script), "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "hidden regions of this volume" in done.stdout and "% of the truth between" in done.stdout


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
def test_each_chunk_is_read_once(chunks: tuple[Any, ...], tmp_path: Path) -> None:
    array = Chunked(VOLUME, chunks, (2, 24, 16))
    save_as_restore(array, tmp_path / "volume.npy")
    assert (np.load(tmp_path / "volume.npy") == VOLUME).all()
    assert (array.decoded, array.largest) == (VOLUME.size, 2 * 24 * 40)


TORN = np.where(np.arange(40) == 3, np.nan, VOLUME)
WRONG: list[tuple[dict[str, Any], str]] = [
    *yaml.safe_load(Path(__file__).with_name("arrays.yaml").read_text()),
    # Found before a job begins:
    ({"volume": VOLUME[0, 0]}, "volume is a ndarray of 1 dimensions and type uint16: give integers or floats"),
    ({"volume": torch.from_numpy(VOLUME.astype("f4")).bfloat16()}, "volume is a Tensor that NumPy makes no"),
    ({"volume": VOLUME > 9}, "volume is a ndarray of 3 dimensions and type bool: give integers or floats"),
    ({"volume": VOLUME.astype("c8")}, "volume is a ndarray of 3 dimensions and type complex64"),
    ({"volume": np.ma.masked_less(VOLUME, 9000)}, "volume is a MaskedArray of 3 dimensions and type uint16"),
    ({"mask": MASK[0]}, "mask is a ndarray of 1 dimensions"),
    ({"mask": MASK.astype("U5")}, "mask is a ndarray of 2 dimensions and type <U5: give True and False"),
    ({"truth": VOLUME}, "truth is an array: "),
    # Told by the job:
    ({"mask": MASK & False}, "mask: the mask is empty"),
    ({"mask": MASK[:20]}, "mask: the mask has shape 20 x 40 but volume has 4 x 48 x 40"),
    ({"volume": TORN}, "volume: 192 NaN or Inf voxels outside the mask 'mask', "),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_mistake_is_one_line_in_words_of_python(case: int) -> None:
    change, said = WRONG[case]
    with pytest.raises(UserError) as error:
        cocodiff.restore(**{"volume": VOLUME, "mask": MASK, **QUICK, **change})
    line = str(error.value)
    assert line.startswith(f"restore: {said}") and "--" not in line and ".npy" not in line and "\n" not in line, line


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
        partial(zarr.array, chunks=(2, 24, 40)),
    ],
)
def test_whatever_numpy_makes_an_array_of_is_taken(as_given: Callable[[Any], Any], tmp_path: Path) -> None:
    for name, values, wanted in (("volume", VOLUME, VOLUME), ("mask", (VOLUME > 30000) * np.uint16(2), VOLUME > 30000)):
        save_as_restore(as_given(values), tmp_path / f"{name}.npy")
        assert (np.load(tmp_path / f"{name}.npy") == wanted).all()


def test_a_folder_without_room_for_the_volume_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to the map of a file that has no blocks on a full disk would end the caller by SIGBUS."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"ndarray of 0 MiB.*TMPDIR"):
        cocodiff.restore(VOLUME, MASK, **QUICK)


def test_options_are_words_of_the_command_line() -> None:
    given = {"axes": ("z", "y"), "exact": False, "hidden_test": np.True_, "range": (-1.5, 3000), "prompt": "--a"}
    words = ["--axes=z", "--axes=y", "--exact=false", "--hidden_test=true", "--range=-1.5,3000", "--prompt=--a"]
    assert words_of_restore({**given, "fps": None}) == words
    assert words_of_restore({"range": "-1,2"}) == ["--range=-1,2"]


def test_a_job_is_given_each_option_as_the_caller_has_it_and_once(tmp_path: Path, monkeypatch: Any) -> None:
    """By a job that saves them and fails."""
    file = tmp_path / "given"
    words = f"open({str(file)!r}, 'w').write(sys.stdin.read()) and 1"
    monkeypatch.setattr(arrays, "dependent_words", lambda _, folder: dependent_words(words, folder))
    own = {"samples": 8, "model": "embedded", "steps": "auto", "ranks": 1, "preset": "tapa", "exact": "false"}
    every = {option.name: f"a {option.name}" for option in INPAINT_OPTIONS if option.name not in DECIDED.split()}
    bound = {"quality": "50dB"}
    for options, wanted in (({}, own), (bound, own | bound | {"exact": "true"}), (every | {"preset": "flat"},) * 2):
        with pytest.raises(RuntimeError):
            cocodiff.restore(VOLUME, MASK, progress=False, **options)
        given = json.loads(file.read_text())
        assert sorted(given[given.index("--keep_samples") + 1 :]) == sorted(f"--{n}={v}" for n, v in wanted.items())


def ranks_of(job: subprocess.Popen[Any]) -> list[int]:
    """The processes of a job's ranks, when there are two."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    while len(found := [*map(int, children.read_text().split())]) < 2:
        time.sleep(0.05)
    return found


FAILING = """
import os
from seams import wrap_ranks
from cocodiff.config.errors import UserError
def run_failing(run, config, settings, work, launch, *more):
    def work_failing(transport):
        if launch.rank in {of}:
            raise {error}
        work(transport)
    return run(config, settings, work_failing, launch, *more)
wrap_ranks(run_failing)
os.dup2(os.open({stderr!r}, os.O_WRONLY | os.O_APPEND), 2)
"""


STOPPED = "was stopped for more than"  # as the ranks' parent says, at about the time at which the other rank ends


@pytest.mark.parametrize(
    ("number", "ranks", "lost", "said"),
    [
        pytest.param(signal.SIGKILL, 2, 1, "was killed by SIGKILL", marks=pytest.mark.full),
        pytest.param(signal.SIGKILL, 1, 0, "was killed by SIGKILL", marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, 2, 1, f"(has been silent for|{STOPPED}) 2 s", marks=pytest.mark.full),
        (signal.SIGSTOP, 1, 0, f"{STOPPED} 2 s"),
    ],
    ids=["killed", "killed alone", "silent", "silent alone"],
)
def test_a_rank_that_is_lost_is_named(
    number: signal.Signals, ranks: int, lost: int, said: str, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    watch = watch_of_restore()

    def strike(job: subprocess.Popen[Any], *more: Any) -> None:
        while not any("ready after" in path.read_text() for path in temporary.glob("*/said")):
            time.sleep(0.05)
        os.kill(job.pid if ranks == 1 else ranks_of(job)[lost], number)
        watch(job, *more)

    monkeypatch.setattr(arrays, "_watch", strike)
    with pytest.raises(PeerLost) as error:
        cocodiff.restore(VOLUME, MASK, ranks=ranks, timeout_s=2, **QUICK | {"steps": 500})
    assert error.value.rank == lost and re.fullmatch(said, error.value.reason)


def test_a_job_that_ends_while_it_is_looked_at_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a wait that has run out and a look whether it is stopped."""
    with subprocess.Popen([sys.executable, "-c", ""]) as job:
        os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
        wait, waits = job.wait, iter([subprocess.TimeoutExpired("job", 0)])

        def run_out(limit_s: float | None = None) -> int:
            for error in waits:
                raise error
            return wait(limit_s)

        monkeypatch.setattr(job, "wait", run_out)
        watch_of_restore()(job, tmp_path, False, 5)
        assert job.returncode == 0


@pytest.mark.parametrize(
    ("of", "raised", "error"),
    [
        ([1], "OSError('the disk\\nis on fire')", PeerLost(1, "failed: OSError: the disk\nis on fire")),
        pytest.param([0], "OSError(9)", PeerLost(0, "failed: OSError: 9"), marks=pytest.mark.full),
        pytest.param([0, 1], "OSError(9)", PeerLost(0, "failed: OSError: 9"), marks=pytest.mark.full),
        pytest.param([0, 1], "UserError('--seed -1')", UserError("restore: seed -1"), marks=pytest.mark.full),
    ],
    ids=["one", "alone", "both", "mistake"],
)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.full)], ids=["room", "a full disk"])
def test_what_ranks_raise_is_raised_by_the_caller(
    of: list[int], raised: str, error: Exception, full: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the disk is so full that the job cannot write a line. Of two that fail at once either is named."""
    failing = FAILING.format(of=of, error=raised, stderr="/dev/full" if full else "/proc/self/fd/2")
    (tmp_path / "failing.py").write_text(failing)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}")
    words = "(__import__('failing'), {})[1]"
    monkeypatch.setattr(arrays, "dependent_words", lambda call, at: dependent_words(words.format(call), at))
    with pytest.raises(type(error)) as told:
        cocodiff.restore(VOLUME, MASK, ranks=max(of) + 1, **QUICK)
    expected = [error.args, *((rank, *error.args[1:]) for rank in of if isinstance(error, PeerLost))]
    assert told.value.args in expected
    if isinstance(error, PeerLost) and not full:
        assert "in work_failing" in str(told.value.__cause__)  # the rank's traceback


class Interrupting:
    dtype, ndim, shape = np.dtype("u2"), 3, (16, 64, 64)

    def __getitem__(self, key: object) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_caller_ends_its_job() -> None:
    before = {one.pid for one in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt):
        cocodiff.restore(Interrupting(), MASK)
    assert {one.pid for one in psutil.Process().children()} <= before


CALLER = """
import os, sys, time, numpy as np, cocodiff
class Slow:
    dtype, ndim, shape = np.dtype("u2"), 3, (int(sys.argv[3]), 64, 64)
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
        *(pytest.param(one, "running", 2, marks=pytest.mark.full) for one in (signal.SIGHUP, signal.SIGINT)),
    ],
)
def test_nothing_outlives_the_caller(number: signal.Signals, during: str, ranks: int, tmp_path: Path) -> None:
    """Neither a process nor what it works with, wherever the caller is struck."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, during, str(ranks), "16"],
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert caller.stdout is not None
    try:
        if during == "saving":
            caller.stdout.readline()
        else:
            while not any("ready after" in path.read_text() for path in tmp_path.glob("*/said")):
                assert caller.poll() is None
                time.sleep(0.1)
        started = [one for one in psutil.process_iter() if os.getsid(one.pid) == caller.pid]
        assert len(started) >= 2 and [*tmp_path.glob("cocodiff-*")]
        caller.send_signal(number)
        assert caller.wait(10) == -number
        psutil.wait_procs(started, 3 * STOP_S)
        assert [one for one in started if one.is_running()] == [] and [*tmp_path.glob("cocodiff-*")] == []
    finally:
        end_group(caller.pid)


@pytest.mark.full
def test_a_caller_without_standard_streams_in_a_folder_of_files_called_as_modules(tmp_path: Path) -> None:
    """None of these is run."""
    caller, here = CALLER.replace("5000, progress=False", "1"), tmp_path / "here"
    here.mkdir()
    for name in ("random", "signal", "copy", "json", "zarr", "cocodiff"):
        (here / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder was run')")
    saving = caller.replace("cocodiff.restore", "found = cocodiff.restore") + "np.save('mean.npy', found.mean)"
    (tmp_path / "caller.py").write_text(saving)
    words = f"exec '{sys.executable}' ../caller.py '' 1 1 <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", words], cwd=here, timeout=240).returncode == 0
    assert np.load(here / "mean.npy").shape == (1, 64, 64)

"""The function `restore`, which runs `cocodiff inpaint` on an array from Python.

    restored = cocodiff.restore(volume, mask, samples=8)
    restored.mean, restored.low_90, restored.verdict

The ranks are processes of their own: they take no memory and no device of a notebook that calls this, and a rank that
crashes does not end it.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise, product
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import without_launcher
from cocodiff.comm.peers import Limits
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.jobs.children import STOP_S, dependent_words
from cocodiff.jobs.ranks import read_cause
from cocodiff.jobs.store import PARTIAL, Store

if TYPE_CHECKING:
    import numpy as np

OUTLINE = (255, 176, 0)  # red, green and blue of a mask's outline
LOOK_S = 0.5  # seconds between two checks of a job's process
SAID = 2000  # characters at the end of a failed job's output that its error shows
# Options of `cocodiff inpaint` that callers of `restore` cannot give, since it sets them itself.
DECIDED = "input mask out preset format quiet keep_samples overwrite resume config dry_run"


@dataclass(frozen=True)
class Outcome:
    """The comparison of a restoration with methods without a model, measured on regions hidden in known voxels."""

    # Result: "ahead" of the best method without a model, a "tie" with it, "as good" if that method is at least as good
    # as the restoration, or "unknown".
    kind: str = "unknown"
    rival: str | None = None  # the method without a model that is best on hidden regions; None if nothing was hidden
    lead_db: float | None = None  # PSNR of the restoration minus the rival's on them, in dB; None if nothing was hidden
    expected_db: Sequence[float] | None = None  # 95 % range of that difference under the mask; None for too few regions
    regions: int = 0  # number of hidden regions
    voxels: int = 0  # number of voxels in these regions
    reason: str | None = None  # why `kind` is "unknown"; None if it is not

    def __str__(self) -> str:
        """Return the outcome as text: its kind, the lead in dB and the number of regions."""
        kinds = {"ahead": f"ahead of {self.rival}", "tie": f"a tie with {self.rival}"}
        kinds |= {"as good": f"{self.rival} is as good", "unknown": f"unknown: {self.reason}"}
        if self.lead_db is None:
            return kinds[self.kind]
        found = f"{self.lead_db:+.1f} dB on {self.regions} hidden region(s) of {self.voxels:,} voxels"
        expected = "; {:+.1f} to {:+.1f} dB expected under the mask" if self.expected_db else ""
        return f"{kinds[self.kind]}: {found}{expected.format(*self.expected_db or ())}"


@dataclass(frozen=True, repr=False)
class Restored:
    """The result of `cocodiff.restore`. All arrays have the shape of the given volume, [Z, Y, X] or [Y, X]."""

    mean: np.ndarray  # the restoration, in the volume's dtype; outside the mask the volume's voxels, bit for bit
    mask: np.ndarray  # True for voxels that were restored, after the options `grow` and `invert`
    # Standard deviation of the samples, floats, in the volume's units. It does not measure the error, since samples
    # resemble each other too much. None for a single sample.
    spread: np.ndarray | None
    # Lower ends of intervals that hold 90 % of the true values, in the volume's units. They are calibrated on hidden
    # regions of the volume; in volumes of fewer than 16 slices each slice is calibrated by itself. None for a single
    # sample, and if no region could be hidden.
    low_90: np.ndarray | None
    high_90: np.ndarray | None  # upper ends of the same intervals
    samples: Sequence[np.ndarray]  # the single restorations
    # Quality of the restoration and of methods without a model on hidden regions, as text; None without such a test.
    verdict: str | None
    outcome: Outcome  # the comparison with methods without a model, as data; `str` gives it as text
    metrics: dict[str, Any]  # content of metrics.json

    def __repr__(self) -> str:
        """Return one line: shape, dtype, number of restored voxels and of samples, and the outcome."""
        what = f"{' x '.join(map(str, self.mean.shape))} of {self.mean.dtype}, {int(self.mask.sum()):,} voxels restored"
        return f"Restored({what}, {len(self.samples)} sample(s); {self.outcome})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the outcome, and slices of the restoration with the mask's outline.

        There is one slice along each axis. All pass through one masked voxel, the nearest to the middle (the median
        position) of the mask. A restored image [Y, X] is shown as it is.
        """
        import numpy as np
        from PIL import Image
        from scipy.ndimage import binary_dilation

        low, high = self.metrics["inputs"][0]["range"]
        points_P = np.argwhere(self.mask)
        middle = points_P[np.abs(points_P - np.median(points_P, axis=0)).sum(axis=1).argmin()].tolist()
        views = [*zip("zyx", range(3), middle, strict=True)] if self.mean.ndim == 3 else [("", 0, slice(None))]
        scale, figures = max(1.0, 240 / max(self.mean.shape)), ""
        for name, axis, at in views:
            image_YX, mask_YX = (np.moveaxis(one, axis, 0)[at] for one in (self.mean, self.mask))
            grey_YX = np.clip((np.nan_to_num(image_YX.astype(float)) - low) / max(high - low, 1e-300), 0, 1) * 255
            rgb_YXC = np.repeat(grey_YX.astype(np.uint8)[..., None], 3, axis=2)
            rgb_YXC[binary_dilation(mask_YX) & ~mask_YX] = OUTLINE
            Image.fromarray(rgb_YXC).save(png := io.BytesIO(), "PNG")
            source = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
            style = f"width:{scale * image_YX.shape[1]:.0f}px;max-width:480px;image-rendering:pixelated"
            caption = f"<figcaption>{name} {at}</figcaption>" if name else ""
            figures += f'<figure style="margin:4px"><img src="{source}" style="{style}">{caption}</figure>'
        return f'<div>{html.escape(repr(self))}<div style="display:flex;flex-wrap:wrap">{figures}</div></div>'

    @property
    def uncertainty(self) -> np.ndarray | None:
        """Half the width of the 90 % intervals, as floats in the volume's units; None without intervals."""
        if self.low_90 is None or self.high_90 is None:
            return None
        return self.high_90 * 0.5 - self.low_90 * 0.5


def restore(
    volume: Any,
    mask: Any,
    samples: int = 8,
    *,
    axes: Sequence[str] | None = None,
    model: str = "embedded",
    steps: int | str = "auto",
    ranks: int = 1,
    preset: str = "tapa",
    progress: bool = True,
    **options: Any,
) -> Restored:
    """Restore the voxels of a volume where a mask is True.

    The job runs in processes of its own and in a temporary folder. The folder is removed when the function returns or
    raises, also on KeyboardInterrupt. If this process is killed, the job ends and removes it.

    Parameters
    ----------
    volume : array_like
        Integers or floats, [Z, Y, X] or [Y, X]. NumPy, Zarr and Dask arrays, and others that are sliced like these, are
        read chunk by chunk. Lists and torch tensors are converted by NumPy.
    mask : array_like
        True where to restore: an array of the volume's shape, or [Y, X] for every slice.
    samples : int
        Number of restorations whose mean is returned.
    axes : sequence of str, optional
        Axes along which slices are restored: some of "z", "y" and "x". By default chosen from the volume.
    model : str
        "embedded" or another value of `cocodiff inpaint --model`.
    steps : int or "auto"
        Number of denoising steps. "auto" takes the model's default.
    ranks : int
        Number of processes on this host. They restore different slices, if there are enough.
    preset : str
        Name of one preset of the exchange.
    progress : bool
        Show a progress bar on stderr.
    **options
        Other options of `cocodiff inpaint`, such as seed=1.

    Returns
    -------
    Restored
        The mean, the samples, the intervals, and the comparison with methods without a model.

    Raises
    ------
    UserError
        If an argument or option is wrong, or the volume cannot be restored. The message is one line.
    PeerLost
        If a rank is killed, fails, is stopped or no longer responds.
    RuntimeError
        If the job fails for another reason. The message ends with its output.

    Warns
    -----
    UserWarning
        For each remark of the job on the volume or the mask.
    """
    unknown = sorted({*options} & {*DECIDED.split()})
    if unknown:
        raise UserError(f"restore: {', '.join(unknown)} cannot be given: the function decides it")
    if not isinstance(preset, str) or "," in preset:
        raise UserError(f"restore: preset is {preset!r}: give the name of one")
    with tempfile.TemporaryDirectory(prefix="cocodiff-restore-") as name, _started(Path(name)) as (job, cause):
        folder = Path(name)
        _save(volume, folder / "volume.npy")
        _save(mask, folder / "mask.npy")
        out = folder / "out"
        given = {"samples": samples, "axes": axes, "model": model, "steps": steps, "ranks": ranks, "preset": preset}
        words = ["inpaint", "--input", str(folder / "volume.npy"), "--mask", str(folder / "mask.npy")]
        words += ["--out", str(out), "--quiet", "--keep_samples"]
        words += _words({"exact": bool(options.get("quality"))} | given | options)  # a bound needs the exact run
        assert job.stdin is not None
        with suppress(BrokenPipeError), job.stdin:  # a job that was killed is reported by its exit code
            job.stdin.write(json.dumps(words))
        _watch(job, out, progress, options.get("timeout_s", Limits.timeout_s))
        if job.returncode:
            raise _error(job.returncode, cause, folder)
        restored = _read(folder, preset)
    (told,) = restored.metrics["inputs"]
    left = f"slices {told['wholly_masked']} are masked wholly: along z they are left as they are"
    for line in [*told["remarks"], *[left] * bool(told["wholly_masked"])]:
        warnings.warn(f"restore: {line.replace('--', '')}", stacklevel=2)
    return restored


def _save(array: Any, path: Path) -> None:
    """Save the volume or the mask that a caller of `restore` gives as .npy, part by part: it may be larger than memory.

    Raise UserError if the folder has no room for the array, and for an array that cannot be restored, including one
    whose attributes declare some of its voxels missing.

    Args:
        array: NumPy, Zarr or Dask array, torch tensor or nested list
        path: file to write: volume.npy, or mask.npy, for which the array is saved as 0 and 1
    """
    import numpy as np

    from cocodiff.jobs.declared import describe, find_missing, read_declared

    about, missing = getattr(array, "attrs", None), 0
    what, as_mask = f"restore: {path.stem} is a {type(array).__name__}", path.stem == "mask"
    try:
        if not isinstance(getattr(array, "dtype", None), np.dtype):
            array = np.asarray(array.detach() if hasattr(array, "detach") else array)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of a GPU, or rows of different lengths
        raise UserError(f"{what} that NumPy makes no array of: {' '.join(str(error).split())}") from error
    kinds, wanted = ("buif", "True and False") if as_mask else ("uif", "integers or floats")
    if array.ndim not in (2, 3) or array.dtype.kind not in kinds or np.ma.is_masked(array):
        what += f" of {array.ndim} dimensions and type {array.dtype}"
        raise UserError(f"{what}: give {wanted} as [Z, Y, X], or [Y, X] of a slice, and none that a MaskedArray hides")
    if any(side != side for side in array.shape):  # NaN
        raise UserError(f"{what} of unknown length: give {path.stem}.compute(), or call compute_chunk_sizes() before")
    declared = read_declared(about if isinstance(about, Mapping) and not as_mask else {}, array.dtype, what)
    dtype, shape = np.dtype(np.uint8) if as_mask else array.dtype, tuple(map(int, array.shape))
    saved = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    try:  # without its blocks, writing to the map of a file on a full disk would end this process by SIGBUS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    except OSError as error:
        size, where = f"{saved.nbytes / 2**20:.0f} MiB", tempfile.gettempdir()
        raise UserError(f"{what} of {size}, for which {where} has no room ({error.strerror}): set TMPDIR") from error
    for piece in _pieces(array):
        one = np.asarray(array[piece])
        saved[piece] = one != 0 if as_mask else one
        missing += int(np.count_nonzero(find_missing(declared, one)))
    if missing:
        missed = f"{missing} voxels that its attributes declare missing, {' or '.join(describe(declared))}"
        raise UserError(f"{what} with {missed}: mask them, and give numpy.asarray({path.stem})")
    saved.flush()


def _pieces(array: Any) -> Iterable[tuple[slice, ...]]:
    """Return the indices by which an array is read part by part: tuples of slices, for all axes but the last.

    A part is whole along the last axis, and as long along the others as the array's chunks. So each chunk is decoded or
    computed only once. Without chunks a part is one slice of a volume, or one row of an image.
    """
    chunks = getattr(array, "chunks", None) or (1, *array.shape[1:])
    cuts = []
    # In `chunks` Zarr and HDF5 have one length per axis, Dask the lengths of all chunks along each axis.
    for sides, length in zip(chunks[:-1], array.shape, strict=False):
        cuts.append([0, *accumulate(sides)] if isinstance(sides, tuple) else [*range(0, length, max(1, sides)), length])
    return product(*([slice(*ends) for ends in pairwise(cut)] for cut in cuts))


def _words(options: dict[str, Any]) -> list[str]:
    """Return options of `cocodiff inpaint` as words of the command line, such as "--seed=1".

    An option that is None is left out. One that is a list has a word for each entry; `range` has one word, with commas.
    Raise UserError for a value that is an array.

    Args:
        options: values by the options' names
    """
    words = []
    for name, value in options.items():
        if getattr(value, "ndim", 0):
            raise UserError(f"restore: {name} is an array: only volume and mask can be")
        listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
        listed = [",".join(map(str, listed))] if name == "range" and listed else listed
        words += [f"--{name}={str(one).lower() if str(one) in ('True', 'False') else one}" for one in listed]
    return words


@contextmanager
def _started(folder: Path) -> Iterator[tuple[Popen[str], int]]:
    """Start the process that runs `cocodiff inpaint` for `restore`. End it if the block raises.

    It waits for its options, a JSON list of words, on stdin. It is started before the volume is written, since it
    removes the folder if this process is killed.

    Yield the process, and the descriptor of a file in memory into which it writes why it fails (see `read_cause`). A
    full disk does not hide that.

    Args:
        folder: temporary folder of this call of `restore`; the job's output goes to the file `said` in it
    """
    env = without_launcher(os.environ)
    with (folder / "said").open("w") as said, os.fdopen(os.memfd_create("cocodiff")) as file:
        cause = file.fileno()
        command = dependent_words(f"main(json.load(sys.stdin), Launch(cause={cause}))", str(folder))
        job = Popen(command, stdin=PIPE, stdout=said, stderr=said, env=env, text=True, pass_fds=[cause])
        try:
            yield job, cause
        except BaseException:
            job.terminate()
            try:
                job.wait(STOP_S)
            except TimeoutExpired:
                job.kill()
                job.wait()
            raise


def _watch(job: Popen[str], out: Path, progress: bool, timeout_s: float | str) -> None:
    """Wait for the end of the process that runs a job. Show a bar of the slices that it has finished.

    Raise PeerLost if the process is stopped by a signal (SIGSTOP) for more than `timeout_s`. It is killed then.

    Args:
        job: the process
        out: the job's folder of results, in which finished slices are counted
        progress: False to show no bar
        timeout_s: seconds; a number or its text
    """
    from tqdm.auto import tqdm

    store, stopped_s = Store(out / PARTIAL), 0.0
    with tqdm(desc="restoring", unit="slice", disable=not progress or sys.stderr is None) as bar:
        while True:
            with suppress(TimeoutExpired):
                job.wait(LOOK_S)
                return
            # The time is counted in looks, since this process may be stopped too (Ctrl-Z).
            # Without WEXITED a job that has just ended would be an error.
            state = os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
            is_stopped = state is not None and state.si_code == os.CLD_STOPPED
            stopped_s = stopped_s + LOOK_S if is_stopped else 0.0
            if is_stopped and stopped_s > float(timeout_s):
                job.kill()
                raise PeerLost(0, f"was stopped for more than {timeout_s} s")
            kept = store.kept() if progress else None
            if kept is not None:
                bar.total, bar.n = kept.total, kept.done
                bar.refresh()


def _error(code: int, cause: int, folder: Path) -> Exception:
    """Return the error that `restore` raises for a failed job: UserError, PeerLost, or RuntimeError with its output.

    Paths of temporary files, and `--` before options, are removed from the text of a UserError.

    Args:
        code: exit code of the job's process; below 0 minus the number of the signal that killed it
        cause: descriptor of the file into which the job may have written why it failed
        folder: the job's temporary folder, with its output in the file `said`
    """
    failed = RuntimeError(f"the restoration failed: {(folder / 'said').read_text(errors='replace')[-SAID:]}")
    error = PeerLost(0, f"was killed by {signal.Signals(-code).name}") if code < 0 else read_cause(cause)
    if isinstance(error, UserError):
        line = re.sub(rf"{re.escape(str(folder))}/(volume|mask)\.npy", r"\1", str(error))
        line = re.sub(r"(argument )?--(?=\w)", "", line.removesuffix("; see cocodiff inpaint --help"))
        return UserError(f"restore: {line}")
    if error is not None:
        error.__cause__ = failed  # its text may have the rank's traceback
    return error or failed


def _read(folder: Path, preset: str) -> Restored:
    """Return the results of a finished job from its temporary folder.

    Args:
        folder: folder with the mask (mask.npy) and the job's results (`out`)
        preset: name of the preset that the job restored with, which is in the names of its files
    """
    import numpy as np

    out = folder / "out"
    images, stem = out / "images", f"volume_mask_{preset}"

    def of(ending: str) -> Any:
        path = images / f"{stem}{ending}.npy"
        return np.load(path) if path.is_file() else None

    metrics = json.loads((out / "metrics.json").read_text())
    told = [*metrics.get("volumes", []), *metrics["images"]]
    tested = any(one.get("intervals") for one in told)  # else intervals span the whole range of the dtype
    said = [one["verdict"] for one in metrics.get("volumes", []) if one["verdict"] is not None]
    numbers = sorted(int(path.stem.rpartition("_")[2]) for path in images.glob(f"{stem}_sample_*.npy"))
    samples = [of(f"_sample_{number}") for number in numbers]
    changed, mean = images / "volume_mask_mask.npy", of("")
    mask = np.load(changed if changed.is_file() else folder / "mask.npy") != 0
    mask = np.broadcast_to(mask.reshape(mask.shape[-mean.ndim :]), mean.shape)  # a slice's may be [1, Y, X]
    ends = (of("_low_90"), of("_high_90")) if tested else ()
    low, high = (np.where(mask, end, mean) for end in ends) if ends else (None, None)  # files have 0 outside the mask
    outcome = Outcome(**{one.name: metrics["outcomes"][0][one.name] for one in fields(Outcome)})
    return Restored(mean, mask, of("_spread"), low, high, samples, said[0] if said else None, outcome, metrics)

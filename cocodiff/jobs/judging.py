"""What becomes of a restored slice: its voxels in the input's dtype, its row of metrics.json, its pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cocodiff_eval.baseline import biharmonic
from cocodiff_eval.fusing import Intervals, coverage, spread_native
from cocodiff_eval.intensity import IntensityRange, compose_native, prepare_slice
from cocodiff_eval.metrics import Result, distance_db, masked_psnr_db, masked_quality, mean
from cocodiff_eval.report import Picture, shown_slices
from cocodiff_eval.slices import save_preview_png

from cocodiff.jobs.items import Drawn
from cocodiff.jobs.job import Judged
from cocodiff.jobs.report_pictures import picture
from cocodiff.jobs.tasks import BOUNDS, Task, kept_samples, result_files, slice_name, spread_of


class Restored(NamedTuple):
    """native: what goes into each of `result_files`; picture: what the report shows."""

    native: dict[str, np.ndarray]
    picture: Callable[[], Picture]


@dataclass(frozen=True)
class Seen:
    """A slice whose samples are judged one by one."""

    task: Task
    index: int
    original_YX: np.ndarray
    mask_YX: np.ndarray

    @cached_property
    def truth_YX(self) -> np.ndarray | None:
        return self.task.truth.read(self.index) if self.task.truth is not None else None

    def psnr_db(self, run: Drawn) -> float | None:
        """Against the truth, under the mask; of a sample as of a run with this sample alone."""
        if self.truth_YX is None:
            return None
        native_YX = compose_native(self.original_YX, run.restored01_YX, self.mask_YX, self.task.scale)
        return masked_psnr_db(self.task.scale, self.truth_YX, native_YX, self.mask_YX)


def judge_slice(
    seen: Seen,
    modes: Sequence[str],
    exact_mode: str | None,
    drawn: Mapping[str, Drawn],
    samples: int,
    intervals: Intervals | None = None,
) -> Judged:
    """Restored slices in the input's dtype, of several samples with their standard deviation, and their rows of
    metrics.json with the biharmonic baseline. modes: whose results are kept; exact_mode: which they are compared with;
    intervals: calibrated ones, whose ends are written.
    """
    task, index, original_YX, mask_YX = seen.task, seen.index, seen.original_YX, seen.mask_YX
    scale = task.scale
    rows: list[dict[str, Any]] = []
    presets = {mode: drawn[mode] for mode in modes}
    native = {name: compose_native(original_YX, one.restored01_YX, mask_YX, scale) for name, one in presets.items()}
    if samples > 1:
        native |= {
            spread_of(name): spread_native(one.moments.deviation_YX, mask_YX, scale) for name, one in presets.items()
        }
    shown = partial(picture, task, index, slice_name(task.stack, index))
    written = native | further_native(seen, presets, intervals)
    if not mask_YX.any():
        return Judged(rows, Restored(written, partial(shown, (original_YX, mask_YX, None), native, None)))
    truth_YX = seen.truth_YX
    started = time.perf_counter()
    smooth_YX, baseline = None, None
    if not mask_YX.all():
        smooth_YX = smoothed(task, original_YX, mask_YX)
        baseline = {**masked_quality(scale, truth_YX, smooth_YX, mask_YX), "seconds": time.perf_counter() - started}
    exact = drawn.get(exact_mode) if exact_mode is not None else None
    for preset, one in presets.items():
        more: dict[str, Any] = {}
        if exact is not None:
            more = {"psnr_vs_exact_db": psnr_vs_exact_db(scale, exact, one, mask_YX), "bytes_exact": exact.cost.bytes}
        if samples > 1 or intervals is not None:
            more |= {"samples": samples, "psnr_db_single": mean(one.psnr_db)}
            more |= coverage(one.moments, truth_YX, mask_YX, scale, intervals)
        result = Result(
            slice_name(task.stack, index),
            task.mask.name,
            preset,
            **masked_quality(scale, truth_YX, native[preset], mask_YX),
            **one.cost.reported(),
            **more,
            baseline=baseline,
            exact_compared=exact is not None,
        )
        rows.append(result.row())
    return Judged(rows, Restored(written, partial(shown, (original_YX, mask_YX, truth_YX), native, smooth_YX)))


def further_native(seen: Seen, presets: Mapping[str, Drawn], intervals: Intervals | None) -> dict[str, np.ndarray]:
    """The ends of intervals that hold 90 % of the truth, and the samples that are kept, in the input's dtype, by the
    names of their files."""
    found: dict[str, np.ndarray] = {}
    for name, one in presets.items():
        found |= {f"{name}{end}": kept_YX for end, kept_YX in zip(kept_samples(len(one.kept)), one.kept, strict=True)}
        if intervals is not None:
            radius_YX = intervals.radius(one.moments.deviation_YX, 0.9)
            for end, end01_YX in zip(
                BOUNDS, (one.restored01_YX - radius_YX, one.restored01_YX + radius_YX), strict=True
            ):
                found[f"{name}{end}"] = compose_native(seen.original_YX, end01_YX, seen.mask_YX, seen.task.scale)
    return found


def smoothed(task: Task, original_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """A slice restored by biharmonic inpainting, in the input's units."""
    return task.scale.denormalise(biharmonic(prepare_slice(original_YX, mask_YX, task.scale), mask_YX))


def psnr_vs_exact_db(scale: IntensityRange, exact: Drawn, run: Drawn, mask_YX: np.ndarray) -> float | None:
    """PSNR under the mask against the exact run, before rounding to the input's dtype; None for the same bits."""
    exact_YX, restored_YX = (scale.denormalise(one.restored01_YX) for one in (exact, run))
    return distance_db(scale, exact_YX, restored_YX, mask_YX)


def picture_of(task: Task, index: int, presets: Sequence[str], folder: Path, samples: int) -> Picture:
    """What the report shows of a slice whose results are in their files."""
    native = {name: file.read(index) for name, file in result_files(task, presets, folder, samples).items()}
    original_YX, mask_YX = task.stack.read(index), task.mask.read(index)
    hidden = bool(mask_YX.any())
    truth_YX = task.truth.read(index) if task.truth is not None and hidden else None
    smooth_YX = smoothed(task, original_YX, mask_YX) if hidden and not mask_YX.all() else None
    return picture(task, index, slice_name(task.stack, index), (original_YX, mask_YX, truth_YX), native, smooth_YX)


def save_previews(task: Task, masked: Sequence[bool], presets: Sequence[str], folder: Path) -> None:
    """Saves a few restored slices as PNG beside the files of results."""
    files = result_files(task, presets, folder)
    for index in shown_slices(masked):
        for preset in presets:
            path = folder / task.files.preview(slice_name(task.stack, index).removeprefix(task.stack.name), preset)
            save_preview_png(path, files[preset].read(index), task.scale.low, task.scale.high)

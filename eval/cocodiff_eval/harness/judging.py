"""The results of a restored slice: its voxels in the input's dtype, its rows of metrics.json and its pictures.

The pictures of slices that the report shows in any case are made by the replica that restores them, and kept in the
store until the report is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.config.grouping import by_key
from cocodiff.jobs.arrays import Outcome
from cocodiff_eval.data.intensity import compose_native, half_width, prepare_slice
from cocodiff_eval.data.masks import depth_in
from cocodiff_eval.data.slices import save_preview_png
from cocodiff_eval.data.volume import Progress
from cocodiff_eval.harness.items import ItemSamples
from cocodiff_eval.harness.job import ItemResult
from cocodiff_eval.harness.tasks import BOUNDS, SPREAD, ResultFile, Task, kept_samples, slice_name
from cocodiff_eval.harness.volume import NOWHERE, is_deep
from cocodiff_eval.quality.fusing import FEWEST_HIDDEN, Intervals, Lead, Moments, coverage, spread_native
from cocodiff_eval.quality.metrics import (
    Result,
    distance_db,
    json_ready,
    masked_psnr_db,
    masked_quality,
    mean,
    ring_correlation,
    slice_jumps,
)
from cocodiff_eval.report.pictures import Picture, PicturePlan, encode, shown_slices, worst_slices
from cocodiff_eval.report.volume import ShownVolume
from cocodiff_eval.restore.baseline import Solver, biharmonic, laplace, linear

# methods without a model that slices are compared with if each is restored by itself
IN_SLICES: dict[str, Solver] = {
    "linear across y": partial(linear, axis=0),
    "linear across x": partial(linear, axis=1),
    "biharmonic": biharmonic,
    "Laplace": laplace,
}
MOST_SHELLED = 2**22  # most voxels of a volume for its shell correlation, which needs 80 bytes of memory a voxel


def encode_picture(picture: Picture, plan: PicturePlan) -> str:
    """Return a slice's pictures as JSON text, which the report embeds.

    Args:
        picture: what is shown of the slice.
        plan: the pictures' size in pixels and bytes.
    """
    return encode(picture, plan.side, plan.share if picture.mask_YX.any() else plan.unmasked_share)


def slices_of_report(plan: PicturePlan, rows: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Return (index of the task, index of the slice) of each slice that the report shows.

    They are those of the plan, and those with the lowest PSNR.

    Args:
        plan: names the slices that are shown in any case, and the number of further ones.
        rows: rows of metrics.json, each as (task, index, row).
    """
    found: list[tuple[int, int]] = []
    for task, shown in enumerate(plan.shown):
        judged = [(index, row["psnr_db"]) for of_task, index, row in rows if of_task == task]
        quality = by_key((index, db) for index, db in judged if db is not None)
        found += [(task, n) for n in sorted({*shown, *worst_slices(quality, shown, plan.worst)})]
    return found


def shown_volume(task: Task, presets: Sequence[str], files: Mapping[str, ResultFile]) -> ShownVolume:
    """Return a task's volume for the report, which shows it in three views.

    Args:
        task: the volume and its mask.
        presets: names of the presets.
        files: the files of results, by the presets' names. Keys with BOUNDS added give the ends of intervals, if any.
    """
    grey = {preset: files[preset].read for preset in presets}
    ends = [(preset, *end) for preset in presets for end in zip(BOUNDS, ("low 90 %", "high 90 %"), strict=True)]
    grey |= {f"{preset}: {told}": files[preset + end].read for preset, end, told in ends if preset + end in files}

    def width(preset: str, index: int) -> np.ndarray:
        """Return half the width of a slice's 90 % intervals, [Y, X] in the input's units."""
        return half_width([files[preset + end].read(index) for end in BOUNDS], task.mask.read(index), task.scale)

    uncertainty = {f"{one}: uncertainty": partial(width, one) for one in presets if one + BOUNDS[0] in files}
    return ShownVolume(task.stack, task.mask, task.scale, task.truth, grey, uncertainty)


def jumps(
    task: Task, presets: Sequence[str], files: Mapping[str, ResultFile], progress: Progress
) -> list[dict[str, Any]]:
    """Return the entries of `jumps` in metrics.json: for each preset, how much neighbouring slices of a volume differ.

    An entry has `slice_jump`: the mean difference of neighbouring slices divided by that of the truth. Small volumes
    also have the shell correlation. The list is empty if the truth is unknown or the stack has too few slices.

    Args:
        task: the volume and its mask.
        presets: names of the presets.
        files: the files of results, by the presets' names.
        progress: shows the progress of reading.
    """
    truth, small = task.truth, math.prod(task.stack.shape) <= MOST_SHELLED
    if truth is None or not is_deep(task.stack):
        return []

    @lru_cache(len(task.stack) if small else 0)
    def read(index: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Return a slice's mask, its truth, and its restoration with each preset."""
        return task.mask.read(index), truth.read(index), {one: files[one].read(index) for one in presets}

    found, shells = slice_jumps(read, task.mask.masked, progress), dict[str, dict[str, Any]]()
    if small:
        masks, truths, restored = zip(*map(read, range(len(task.stack))), strict=True)
        mask_ZYX, truth_ZYX = np.stack(masks), np.stack(truths)
        for one in presets:
            volume_ZYX = np.stack([of_slice[one] for of_slice in restored])
            shells[one] = ring_correlation(task.scale, truth_ZYX, volume_ZYX, mask_ZYX)
    named = {"name": task.stack.name, "mask": task.mask.name}
    rows = [{**named, "mode": mode, "slice_jump": value, **shells.get(mode, {})} for mode, value in found.items()]
    return [json_ready(row) for row in rows]


@dataclass(frozen=True)
class SliceReview:
    """One slice of a task (a stack under a mask), with all that is needed to restore it and to judge the result."""

    task: Task
    index: int  # index of the slice in the task
    original_YX: np.ndarray  # as in the input, in its dtype
    mask_YX: np.ndarray  # True for voxels to restore
    # True for known voxels that calibration samples restore too: their errors set the intervals of restored voxels.
    # All False if none can be hidden. None if the slice is not calibrated by itself, as in a volume.
    hidden_YX: np.ndarray | None = None
    # cache of `given`
    _given: dict[bool, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @cached_property
    def hides(self) -> bool:
        """True if the slice has enough hidden voxels to calibrate its intervals (FEWEST_HIDDEN).

        Else calibration samples, which restore them, are of no use.
        """
        hidden_YX = self.hidden_YX
        return hidden_YX is not None and int((hidden_YX & np.isfinite(self.original_YX)).sum()) >= FEWEST_HIDDEN

    @cached_property
    def unknown_YX(self) -> np.ndarray:
        """The voxels that calibration samples restore: the masked and the hidden ones, boolean [Y, X]."""
        return self.mask_YX if self.hidden_YX is None else self.mask_YX | self.hidden_YX

    def given(self, test: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the model's input: the slice as float32 in [0, 1], filled under the mask, and the mask.

        Args:
            test: True for calibration samples, whose mask also covers the hidden voxels.
        """
        if test not in self._given:
            mask_YX = self.unknown_YX if test else self.mask_YX
            self._given[test] = prepare_slice(self.original_YX, mask_YX, self.task.scale), mask_YX
        return self._given[test]

    def intervals(self, tested: Moments | None) -> Intervals | None:
        """Return the intervals around the slice's restored voxels, calibrated by the errors at its hidden voxels.

        They are without ends if too few voxels are hidden. Return None if the slice is to have no intervals of its own.

        Args:
            tested: mean and spread of the calibration samples; None if there are none.
        """
        if self.hidden_YX is None or tested is None:
            return None if self.hidden_YX is None else Intervals.unknown()
        judged_YX = self.hidden_YX & np.isfinite(self.original_YX)
        errors_P = tested.mean_YX[judged_YX] - self.task.scale.normalise(self.original_YX[judged_YX])
        found = Intervals.calibrated(errors_P, tested.deviation_YX[judged_YX], depth_in(self.unknown_YX)[judged_YX])
        return found.at(depth_in(self.mask_YX))

    def errors(self, tested: Moments | None) -> np.ndarray:
        """Return the errors at the slice's P hidden voxels, of the model and of the M methods of IN_SLICES.

        They are normalised. P is 0 if the slice has no calibration samples. `outcome_of_slices` compares them.

        Args:
            tested: mean and spread of the calibration samples; None if there are none.

        Returns:
            float64 [2 + M, P]: the number of each voxel's hidden region, then the model's errors, then those of each
            method.
        """
        from scipy import ndimage

        if self.hidden_YX is None or tested is None:
            return np.zeros((2 + len(IN_SLICES), 0))
        at = (self.hidden_YX & np.isfinite(self.original_YX)).nonzero()
        made = [tested.mean_YX[at], *(solve(*self.given(True))[at] for solve in IN_SLICES.values())]
        truth_P = self.task.scale.normalise(self.original_YX[at])
        return np.stack([ndimage.label(self.hidden_YX)[0][at], *(one_P - truth_P for one_P in made)])

    @cached_property
    def truth_YX(self) -> np.ndarray | None:
        """The true slice, in the input's units; None if it is unknown."""
        return self.task.truth.read(self.index) if self.task.truth is not None else None

    def native(self, run: ItemSamples) -> np.ndarray:
        """Return the restored slice in the input's dtype, equal to the input outside the mask.

        Args:
            run: its samples, of which the mean is taken.
        """
        return compose_native(self.original_YX, run.moments.mean_YX, self.mask_YX, self.task.scale)

    def psnr_db(self, run: ItemSamples) -> float | None:
        """Return the PSNR in dB of the restored slice under the mask, against the truth.

        It is None if no masked voxel's truth is known, or if all known voxels are equal, so that there is no range. The
        samples' mean is first rounded to the input's dtype, as in the result.

        Args:
            run: its samples, of which the mean is taken.
        """
        if self.truth_YX is None:
            return None
        return masked_psnr_db(self.task.scale, self.truth_YX, self.native(run), self.mask_YX)

    def psnr_vs_exact_db(self, exact: ItemSamples, run: ItemSamples) -> float | None:
        """Return the PSNR in dB of the slice under the mask against the exact run, before rounding to the input's
        dtype.

        Return None if all bits are equal.

        Args:
            exact: its samples in the exact run.
            run: the samples to judge.
        """
        exact_YX, restored_YX = (self.task.scale.denormalise(one.moments.mean_YX) for one in (exact, run))
        return distance_db(self.task.scale, exact_YX, restored_YX, self.mask_YX)

    @cached_property
    def smooth_YX(self) -> np.ndarray | None:
        """The slice restored by the biharmonic method, in the input's units; None if no or every voxel is masked."""
        if self.mask_YX.all() or not self.mask_YX.any():
            return None
        return self.task.scale.denormalise(biharmonic(*self.given(False)))

    def picture(self, presets: Sequence[str], native: Mapping[str, np.ndarray]) -> Picture:
        """Return what the report shows of the slice: the input, mask, truth, results and uncertainty.

        Args:
            presets: names of the presets.
            native: results in the input's dtype, by the presets' names. Keys with BOUNDS added hold the ends of
                intervals, if any.
        """
        task, masked = self.task, bool(self.mask_YX.any())
        shown = presets if masked else ()
        restored = {preset: native[preset] for preset in shown}
        ends = {preset: [native[preset + end] for end in BOUNDS] for preset in shown if preset + BOUNDS[0] in native}
        widths = {preset: half_width(of_preset, self.mask_YX, task.scale) for preset, of_preset in ends.items()}
        known = [preset for preset, width_YX in widths.items() if np.isfinite(width_YX[self.mask_YX]).any()]
        if self.smooth_YX is not None:
            restored["biharmonic"] = self.smooth_YX
        return Picture(
            slice_name(task.stack, self.index),
            task.mask.name,
            self.original_YX,
            self.mask_YX,
            task.scale,
            restored,
            self.truth_YX if masked else None,
            {preset: widths[preset] for preset in known},
            {preset: ends[preset] for preset in known},
        )


def judge_slice(
    seen: SliceReview,
    modes: Sequence[str],
    exact: ItemSamples | None,
    drawn: Mapping[str, ItemSamples],
    samples: int,
    intervals: Mapping[str, Intervals],
) -> ItemResult:
    """Return a slice's results: a row of metrics.json for each preset, and arrays by the names of their files.

    For each preset the arrays are the mean, the standard deviation of several samples, each sample if these are kept,
    and the ends of intervals. They are in the input's dtype, but the standard deviation is float32. Each row also has
    the quality of the biharmonic method.

    Args:
        seen: the slice.
        modes: names of the presets, whose results are kept.
        exact: the exact run's samples to compare with; None to compare with none.
        drawn: the slice's samples by preset, and by the exact run's name.
        samples: number of samples that the mean is of.
        intervals: calibrated intervals of each preset that has any.
    """
    task, mask_YX, scale = seen.task, seen.mask_YX, seen.task.scale
    presets = {mode: drawn[mode] for mode in modes}
    native = {name: seen.native(one) for name, one in presets.items()}
    for name, one in presets.items():
        mean_YX, deviation_YX = one.moments.mean_YX, one.moments.deviation_YX
        if samples > 1:
            native[name + SPREAD] = spread_native(deviation_YX, mask_YX, scale)
        native |= {f"{name}{end}": kept_YX for end, kept_YX in zip(kept_samples(len(one.kept)), one.kept, strict=True)}
        for end, sign in zip(BOUNDS, (-1, 1), strict=True) if name in intervals else ():
            end_YX = mean_YX + sign * intervals[name].radius(deviation_YX, 0.9)
            native[name + end] = compose_native(np.zeros_like(seen.original_YX), end_YX, mask_YX, scale)
    truth_YX, started, baseline = seen.truth_YX, time.perf_counter(), None
    if seen.smooth_YX is not None:
        baseline = masked_quality(scale, truth_YX, seen.smooth_YX, mask_YX)
        baseline["seconds"] = time.perf_counter() - started
        baseline |= ring_correlation(scale, truth_YX, seen.smooth_YX, mask_YX)
    rows: list[dict[str, Any]] = []
    for preset, one in presets.items():
        more: dict[str, Any] = {}
        if exact is not None:
            more = {"psnr_vs_exact_db": seen.psnr_vs_exact_db(exact, one), "bytes_exact": exact.cost.bytes}
        if samples > 1 or intervals:
            of_preset = intervals.get(preset)
            more |= {"samples": samples, "psnr_db_single": mean(one.psnr_db)}
            more |= coverage(one.moments, truth_YX, mask_YX, scale, of_preset)
            more["intervals"] = None if of_preset is None else of_preset.record()
            if more["intervals"] is not None:
                low_P, high_P = (native[preset + end][mask_YX].astype(float) for end in BOUNDS)
                more["uncertainty"] = float((high_P / 2 - low_P / 2).mean() / scale.scale)
        result = Result(
            slice_name(task.stack, seen.index),
            task.mask.name,
            preset,
            **masked_quality(scale, truth_YX, native[preset], mask_YX),
            **ring_correlation(scale, truth_YX, native[preset], mask_YX),
            **one.cost.reported(),
            **more,
            baseline=baseline,
            exact_compared=exact is not None,
        )
        rows.append(result.row())
    return ItemResult(rows, native)


def outcome_of_slices(task: Task, errors: Sequence[np.ndarray]) -> Outcome:
    """Return the comparison of the model with the best simple method, for a task whose slices are restored one by one.

    Simple methods, those of IN_SLICES, need no model. All are compared by their errors at hidden voxels.

    Args:
        task: the stack and its mask, of which the number of parts is used.
        errors: for each masked slice what `SliceReview.errors` returns.
    """
    from scipy import ndimage

    if not any(one.size for one in errors):
        return Outcome(reason=NOWHERE)
    slice_P = np.repeat(np.arange(len(errors)), [one.shape[1] for one in errors])
    region_P, own_P, *others = np.concatenate(errors, axis=1)
    _, region_P = np.unique(np.stack([slice_P, region_P], 1), axis=0, return_inverse=True)
    parts = sum(ndimage.label(task.mask.read(n))[1] for n, masked in enumerate(task.mask.masked) if masked)
    best = int(np.argmin([np.square(one_P).sum() if np.isfinite(one_P).all() else np.inf for one_P in others]))
    return Lead.found(own_P, others[best], region_P.ravel(), parts).outcome([*IN_SLICES][best])


def save_previews(task: Task, files: Mapping[str, ResultFile], presets: Sequence[str], folder: Path) -> None:
    """Save a few restored slices of a task as PNG files.

    Args:
        task: the stack and its mask.
        files: the files of results, by the presets' names.
        presets: names of the presets.
        folder: the folder of results.
    """
    for index in shown_slices(task.mask.masked):
        for preset in presets:
            path = folder / task.files.preview(slice_name(task.stack, index).removeprefix(task.stack.name), preset)
            save_preview_png(path, files[preset].read(index), task.scale.low, task.scale.high)

"""Restores the slices of a stack under a mask in every mode, batch by batch, so that no stack need fit in memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.baseline import biharmonic
from cocodiff_eval.intensity import IntensityRange, compose_native, prepare_slice
from cocodiff_eval.masks import Mask
from cocodiff_eval.metrics import ExactDistance, MaskedQuality, metrics_row
from cocodiff_eval.pipeline_inpainter import PipelineInpainter
from cocodiff_eval.report import Picture, shown_slices
from cocodiff_eval.restore import plan_slice, restore_slices
from cocodiff_eval.slices import Stack, StackFile, save_preview_png, unique_names
from cocodiff_eval.tiling import TilingSettings

from cocodiff.commands.pipelines import Model
from cocodiff.commands.report_pictures import ReportPictures, picture
from cocodiff.commands.session import Cost, measured
from cocodiff.commands.terminal import JobBar
from cocodiff.engine import Engine

SMALL_MODEL = 256  # pixels on a side
TOGETHER = 8  # slices in a batch: more make calls little cheaper, and leave replicas idle at the end of a stack
COPIED_TOGETHER = 64  # the same of slices without masked voxels
LONGEST_STEM = 210  # bytes; file systems take names of 255, with the slice, the preset and the suffix


@dataclass(frozen=True)
class FileNames:
    """The names of a stack and a mask in those of result files; no two tasks of a run are called the same."""

    stack: str
    mask: str

    def result(self, preset: str) -> str:
        return f"{self.stack}_{self.mask}_{preset}.tif"

    def preview(self, place: str, preset: str) -> str:
        """place: `[3]` of a stack's slice, nothing of a single one."""
        return f"{self.stack}{place}_{self.mask}_{preset}.png"


@dataclass(frozen=True)
class Task:
    """One stack under one mask. scale: intensities outside the mask; truth: None where it is unknown."""

    stack: Stack
    mask: Mask
    scale: IntensityRange
    truth: Stack | None
    files: FileNames


def file_names(pairs: Sequence[tuple[str, str]]) -> list[FileNames]:
    """Names for the files of each stack and mask of a run: their own; numbered where `a` + `b_c` and `a_b` + `c` would
    be one, and cut where a file system would not take them."""
    fitting = [
        (stack, mask) if len(os.fsencode(f"{stack}_{mask}")) <= LONGEST_STEM else (_cut(stack), _cut(mask))
        for stack, mask in pairs
    ]
    stems = unique_names([f"{stack}_{mask}" for stack, mask in fitting])
    return [FileNames(stack, stem[len(stack) + 1 :]) for (stack, _), stem in zip(fitting, stems, strict=True)]


def _cut(name: str) -> str:
    return os.fsencode(name)[: LONGEST_STEM // 2 - 2].decode(errors="ignore")


def tiles_in_a_call(wanted: int | None, native: int) -> int:
    """Tiles that share a model's call. More of them mean fewer messages; what limits them is the memory of large
    models. native: pixels of a tile's side."""
    return wanted or (16 if native <= SMALL_MODEL else 2)


def slices_together(shape: Sequence[int], native: int, batch: int) -> int:
    """How many slices [Y, X] may share a model's calls of `batch` tiles: those of a small model whose tiles fit into
    one."""
    tiles = math.prod(-(-side // native) for side in shape)
    return min(TOGETHER, max(1, batch // tiles)) if native <= SMALL_MODEL else 1


@dataclass(frozen=True)
class Batch:
    """Slices of a task that are restored together, in the same calls of the model. task: its number. compared: whether
    the exact run is made of them for comparison alone."""

    task: int
    indices: tuple[int, ...]
    compared: bool


@dataclass(frozen=True)
class Restorer:
    """Restores slices: with the model's tiles, and an engine for each mode. `presets` are the modes whose results are
    kept; a further one in `engines` is the exact run that they are compared with."""

    inpainter: PipelineInpainter
    engines: dict[str, Engine]
    presets: list[str]
    exact: str | None
    batch: int
    tiling: TilingSettings

    @classmethod
    def of_model(
        cls,
        model: Model,
        values: dict[str, Any],
        steps: int,
        engines: dict[str, Engine],
        presets: list[str],
        exact: str | None,
    ) -> Restorer:
        """steps: those that run, also where a strength below 1 skips the first part of the schedule."""
        inpainter = PipelineInpainter(model.pipe, model.arguments, round(steps / values["strength"]), values["seed"])
        batch = tiles_in_a_call(values["batch"], inpainter.native_size)
        return cls(inpainter, engines, presets, exact, batch, TilingSettings(strength=values["strength"]))

    def tile_steps(self, masks_YX: Sequence[np.ndarray]) -> int:
        """Denoising steps of all tiles of these slices together, in one mode."""
        plans = [plan_slice(mask_YX, self.inpainter, self.batch, self.tiling) for mask_YX in masks_YX]
        return sum(plan.tile_steps(self.inpainter.steps) for plan in plans)

    def run(self, prepared_YX: Sequence[np.ndarray], masks_YX: Sequence[np.ndarray], mode: str) -> list[Run]:
        """Slices in one mode, on all ranks of the engine."""
        with measured(self.engines[mode]) as cost:
            restored = restore_slices(prepared_YX, masks_YX, self.inpainter, batch=self.batch, settings=self.tiling)
        return [Run(one_YX, share) for one_YX, share in zip(restored, cost.shares(len(restored)), strict=True)]


@dataclass(frozen=True)
class Run:
    """A slice restored in one mode: float32 [Y, X] in [0, 1], and what it took."""

    restored01_YX: np.ndarray
    cost: Cost


def batches_of(task: int, masked: Sequence[bool], together: int, sample: int) -> list[Batch]:
    """The slices of a task in batches, which depend on nothing but these arguments.

    masked: which slices have something to restore. together: so many of them at most in a batch. sample: so many,
    evenly spread, are compared with an exact run, and have batches of their own: it then runs the same calls.
    """
    hidden = [index for index, has_mask in enumerate(masked) if has_mask]
    chosen = shown_slices(masked, sample)
    groups = [(group, True) for group in _evenly(chosen, together)]
    groups += [(group, False) for group in _evenly(sorted({*hidden} - {*chosen}), together)]
    groups += [(group, False) for group in _evenly(sorted({*range(len(masked))} - {*hidden}), COPIED_TOGETHER)]
    return [Batch(task, group, compared) for group, compared in sorted(groups)]


def _evenly(indices: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Cut into as few groups of at most `most` as go, of nearly equal sizes."""
    count = -(-len(indices) // most)
    cuts = [round(n * len(indices) / count) for n in range(count + 1)] if count else []
    return [tuple(indices[start:end]) for start, end in pairwise(cuts)]


def result_files(task: Task, presets: Sequence[str], folder: Path) -> dict[str, StackFile]:
    stack = task.stack
    return {
        preset: StackFile(folder / task.files.result(preset), stack.shape, stack.dtype, stack.ndim)
        for preset in presets
    }


def restore_batch(
    task: Task, batch: Batch, restorer: Restorer, folder: Path, leads: bool, bar: JobBar, pages: ReportPictures
) -> list[tuple[int, dict[str, Any]]]:
    """Restores slices in every mode. The leader of the replica judges them, writes them to the files in `folder` and
    returns rows of metrics.json, each with its slice's index; others return none."""
    originals = [task.stack.read(index) for index in batch.indices]
    masks = [task.mask.read(index) for index in batch.indices]
    prepared = [prepare_slice(o_YX, m_YX, task.scale) for o_YX, m_YX in zip(originals, masks, strict=True)]
    modes = [mode for mode in restorer.engines if mode in restorer.presets or batch.compared]
    if masks[0].any():
        if bar.shown:
            bar.begin(len(masks), restorer.tile_steps(masks) * len(modes))
        runs = {mode: restorer.run(prepared, masks, mode) for mode in modes}
    else:  # a slice without masked voxels is its own restoration
        runs = {mode: [Run(one_YX, Cost()) for one_YX in prepared] for mode in modes}
    if not leads:
        return []
    files = result_files(task, restorer.presets, folder)
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, index in enumerate(batch.indices):
        of_slice = {mode: of_mode[number] for mode, of_mode in runs.items()}
        judged = judge_slice(task, restorer, index, originals[number], masks[number], of_slice)
        for preset, file in files.items():
            file.write(index, judged.native[preset])
        pages.add(batch.task, index, judged.picture)
        rows += [(index, row) for row in judged.rows]
    return rows


@dataclass(frozen=True)
class Judged:
    native: dict[str, np.ndarray]  # restored slices in the input's dtype
    rows: list[dict[str, Any]]
    picture: Callable[[], Picture]  # what the report shows


def judge_slice(
    task: Task, restorer: Restorer, index: int, original_YX: np.ndarray, mask_YX: np.ndarray, runs: dict[str, Run]
) -> Judged:
    """Restored slices in the input's dtype, and their rows of metrics.json with the biharmonic baseline."""
    scale = task.scale
    rows: list[dict[str, Any]] = []
    presets = {preset: runs[preset] for preset in restorer.presets}
    native = {name: compose_native(original_YX, run.restored01_YX, mask_YX, scale) for name, run in presets.items()}
    shown = partial(picture, task, index, slice_name(task.stack, index))
    if not mask_YX.any():
        return Judged(native, rows, partial(shown, (original_YX, mask_YX, None), native, None))
    truth_YX = task.truth.read(index) if task.truth is not None else None
    started = time.perf_counter()
    smooth_YX = smoothed(task, original_YX, mask_YX)
    baseline = {**quality(scale, truth_YX, smooth_YX, mask_YX), "seconds": time.perf_counter() - started}
    exact = runs.get(restorer.exact) if restorer.exact is not None else None
    for preset, run in presets.items():
        rows.append(
            metrics_row(
                slice_name(task.stack, index),
                task.mask.name,
                preset,
                quality(scale, truth_YX, native[preset], mask_YX),
                run.cost.seconds,
                run.cost.sent,
                psnr_vs_exact_db=psnr_vs_exact_db(scale, exact, run, mask_YX) if exact is not None else None,
                exact_compared=exact is not None,
                baseline=baseline,
                drift=run.cost.drift,
                exact_bytes=exact.cost.sent if exact is not None else None,
            )
        )
    return Judged(native, rows, partial(shown, (original_YX, mask_YX, truth_YX), native, smooth_YX))


def smoothed(task: Task, original_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """A slice restored by biharmonic inpainting, in the input's units."""
    return task.scale.denormalise(biharmonic(prepare_slice(original_YX, mask_YX, task.scale), mask_YX))


def picture_of(task: Task, index: int, presets: Sequence[str], folder: Path) -> Picture:
    """What the report shows of a slice whose results are in their files."""
    native = {name: file.read(index) for name, file in result_files(task, presets, folder).items()}
    original_YX, mask_YX = task.stack.read(index), task.mask.read(index)
    hidden = bool(mask_YX.any())
    truth_YX = task.truth.read(index) if task.truth is not None and hidden else None
    smooth_YX = smoothed(task, original_YX, mask_YX) if hidden else None
    return picture(task, index, slice_name(task.stack, index), (original_YX, mask_YX, truth_YX), native, smooth_YX)


def slice_name(stack: Stack, index: int) -> str:
    return stack.name if stack.ndim == 2 else f"{stack.name}[{index}]"


def quality(
    scale: IntensityRange, truth_YX: np.ndarray | None, restored_YX: np.ndarray, mask_YX: np.ndarray
) -> dict[str, float | None]:
    """`psnr_db`, `ssim` and `mse` of a slice under its mask; None each where the truth is unknown."""
    measured = MaskedQuality(scale)
    if truth_YX is not None:
        measured.add(truth_YX, restored_YX, mask_YX)
    return measured.result()


def psnr_vs_exact_db(scale: IntensityRange, exact: Run, run: Run, mask_YX: np.ndarray) -> float | None:
    """PSNR under the mask against the exact run, before rounding to the input's dtype; None for the same bits."""
    distance = ExactDistance(scale)
    distance.add(scale.denormalise(exact.restored01_YX), scale.denormalise(run.restored01_YX), mask_YX)
    return distance.psnr_vs_exact_db()


def save_previews(task: Task, masked: Sequence[bool], presets: Sequence[str], folder: Path) -> None:
    """Saves a few restored slices as PNG beside the files of results."""
    files = result_files(task, presets, folder)
    for index in shown_slices(masked):
        for preset in presets:
            path = folder / task.files.preview(slice_name(task.stack, index).removeprefix(task.stack.name), preset)
            save_preview_png(path, files[preset].read(index), task.scale.low, task.scale.high)

"""Restores one stack under one mask in every mode, slice by slice, so that no stack need fit in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.baseline import biharmonic
from cocodiff_eval.intensity import IntensityRange, compose_native, prepare_slice
from cocodiff_eval.masks import Mask
from cocodiff_eval.metrics import ExactDistance, MaskedQuality, metrics_row
from cocodiff_eval.pipeline_inpainter import PipelineInpainter
from cocodiff_eval.report import Picture, shown_slices
from cocodiff_eval.restore import plan_slice, restore_slice
from cocodiff_eval.slices import Stack, StackWriter, save_preview_png, unique_names
from cocodiff_eval.tiling import TilingSettings

from cocodiff.commands.session import Cost, measured
from cocodiff.commands.terminal import progress_bar
from cocodiff.engine import Engine

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


@dataclass
class Restored:
    """Rows of metrics.json and pictures of the report; empty on ranks other than 0."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


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
    shows_bars: bool

    def run(self, task: Task, prepared_YX: np.ndarray, mask_YX: np.ndarray, mode: str) -> Run:
        """One slice in one mode, on all ranks."""
        steps = plan_slice(mask_YX, self.inpainter, self.batch, self.tiling).denoising_steps(self.inpainter.steps)
        bar_name = f"{task.stack.name} {task.mask.name} {mode}"
        with progress_bar(bar_name, steps, self.shows_bars) as bar, measured(self.engines[mode]) as cost:
            self.inpainter.on_step = bar.update
            restored01_YX = restore_slice(prepared_YX, mask_YX, self.inpainter, batch=self.batch, settings=self.tiling)
        return Run(restored01_YX, cost)

    def run_all(self, task: Task, original_YX: np.ndarray, mask_YX: np.ndarray) -> dict[str, Run]:
        """One slice in every mode; a slice without masked voxels is its own restoration."""
        prepared_YX = prepare_slice(original_YX, mask_YX, task.scale)
        if not mask_YX.any():
            return {mode: Run(prepared_YX, Cost()) for mode in self.engines}
        return {mode: self.run(task, prepared_YX, mask_YX, mode) for mode in self.engines}


@dataclass(frozen=True)
class Run:
    """A slice restored in one mode: float32 [Y, X] in [0, 1], and what it took."""

    restored01_YX: np.ndarray
    cost: Cost


def restore_stack(task: Task, restorer: Restorer, folder: Path | None) -> Restored:
    """Restores a stack in every mode. Rank 0, which has the folder, judges every slice and writes it at once."""
    restored, stack = Restored(), task.stack
    shown = shown_slices([int(np.count_nonzero(task.mask.read(index))) for index in range(len(stack))])
    with ExitStack() as files:
        writers = {}
        if folder is not None:
            for preset in restorer.presets:
                path = folder / "images" / task.files.result(preset)
                writers[preset] = files.enter_context(StackWriter(path, stack.shape, stack.dtype, stack.ndim))
        for index in range(len(stack)):
            original_YX, mask_YX = stack.read(index), task.mask.read(index)
            runs = restorer.run_all(task, original_YX, mask_YX)
            if folder is None:
                continue
            judged = judge_slice(task, restorer, index, original_YX, mask_YX, runs)
            for preset, writer in writers.items():
                writer.write(judged.native[preset])
            restored.rows += judged.rows
            if index in shown:
                restored.pictures.append(judged.picture)
                save_previews(folder / "images", task, judged.picture, restorer.presets)
    return restored


@dataclass(frozen=True)
class Judged:
    native: dict[str, np.ndarray]  # restored slices in the input's dtype
    rows: list[dict[str, Any]]
    picture: Picture


def judge_slice(
    task: Task, restorer: Restorer, index: int, original_YX: np.ndarray, mask_YX: np.ndarray, runs: dict[str, Run]
) -> Judged:
    """Restored slices in the input's dtype, their rows of metrics.json with the biharmonic baseline, the picture."""
    stack, scale = task.stack, task.scale
    name = slice_name(stack, index)
    truth_YX = task.truth.read(index) if task.truth is not None else None
    native = {preset: compose_native(original_YX, runs[preset].restored01_YX, mask_YX, scale) for preset in runs}
    started = time.perf_counter()
    smooth_YX = scale.denormalise(biharmonic(prepare_slice(original_YX, mask_YX, scale), mask_YX))
    baseline = {**quality(scale, truth_YX, smooth_YX, mask_YX), "seconds": time.perf_counter() - started}
    rows = []
    for preset in restorer.presets if mask_YX.any() else []:
        run, against = runs[preset], None
        if restorer.exact is not None:
            against = psnr_vs_exact_db(scale, runs[restorer.exact], run, mask_YX)
        rows.append(
            metrics_row(
                name,
                task.mask.name,
                preset,
                quality(scale, truth_YX, native[preset], mask_YX),
                run.cost.seconds,
                run.cost.sent,
                psnr_vs_exact_db=against,
                exact_compared=restorer.exact is not None,
                baseline=baseline,
                drift=run.cost.drift,
                exact_bytes=runs[restorer.exact].cost.sent if restorer.exact is not None else None,
            )
        )
    restored = {preset: native[preset] for preset in restorer.presets} | {"biharmonic": smooth_YX}
    return Judged(native, rows, Picture(name, task.mask.name, index, original_YX, mask_YX, scale, restored, truth_YX))


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


def save_previews(folder: Path, task: Task, picture: Picture, presets: list[str]) -> None:
    for preset in presets:
        path = folder / task.files.preview(picture.name.removeprefix(task.stack.name), preset)
        save_preview_png(path, picture.restored[preset], picture.scale.low, picture.scale.high)

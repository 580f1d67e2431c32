"""Restores the slices of a stack under a mask in every mode, batch by batch, so that no stack need fit in memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.baseline import biharmonic
from cocodiff_eval.formats.table import new_volume
from cocodiff_eval.formats.volume import VolumeFile
from cocodiff_eval.intensity import IntensityRange, compose_native, prepare_slice
from cocodiff_eval.masks import Mask
from cocodiff_eval.metrics import ExactDistance, MaskedQuality, masked_psnr_db, mean, metrics_row
from cocodiff_eval.pipeline_inpainter import PipelineInpainter
from cocodiff_eval.report import Picture, shown_slices
from cocodiff_eval.restore import plan_slice, restore_slices
from cocodiff_eval.slices import Stack, save_preview_png, unique_names
from cocodiff_eval.tiling import TilingSettings
from cocodiff_eval.uncertainty import Moments, coverage, spread_native

from cocodiff.commands.pipelines import Model
from cocodiff.commands.samples import Batch, Drawn, Parts
from cocodiff.commands.session import Cost, measured
from cocodiff.commands.terminal import JobBar
from cocodiff.engine import Engine

SMALL_MODEL = 256  # pixels on a side
TOGETHER = 8  # slices in a batch: more make calls little cheaper, and leave replicas idle at the end of a stack
LONGEST_STEM = 210  # bytes; file systems take names of 255, with the slice, the preset and the suffix


@dataclass(frozen=True)
class FileNames:
    """The names of a stack and a mask in those of result files; no two tasks of a run are called the same."""

    stack: str
    mask: str

    def result(self, preset: str, suffix: str = ".tif") -> str:
        return f"{self.stack}_{self.mask}_{preset}{suffix}"

    def preview(self, place: str, preset: str) -> str:
        """place: `[3]` of a stack's slice, nothing of a single one."""
        return f"{self.stack}{place}_{self.mask}_{preset}.png"


@dataclass(frozen=True)
class Task:
    """One stack under one mask. scale: intensities outside the mask; truth: None where it is unknown; format: of the
    results, a word of `cocodiff_eval.formats.table.FORMATS`."""

    stack: Stack
    mask: Mask
    scale: IntensityRange
    truth: Stack | None
    files: FileNames
    format: str = "tiff"


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

    def run(
        self,
        prepared_YX: Sequence[np.ndarray],
        masks_YX: Sequence[np.ndarray],
        mode: str,
        samples: Sequence[int] | None = None,
    ) -> list[Run]:
        """Slices in one mode, on all ranks of the engine. samples: of each slice the number of the sample, 0 unless
        given."""
        with measured(self.engines[mode]) as cost:
            restored = restore_slices(
                prepared_YX, masks_YX, self.inpainter, batch=self.batch, settings=self.tiling, samples=samples
            )
        return [Run(one_YX, share) for one_YX, share in zip(restored, cost.shares(len(restored)), strict=True)]


@dataclass(frozen=True)
class Run:
    """A slice restored in one mode: float32 [Y, X] in [0, 1], and what it took."""

    restored01_YX: np.ndarray
    cost: Cost


def result_files(
    task: Task,
    presets: Sequence[str],
    folder: Path,
    samples: int = 1,
    provenance: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, VolumeFile]:
    """For each preset the file of its restored slices. Of several samples it holds the mean, and one more file,
    `spread_of(preset)`, their standard deviation in the input's units: float32, 0 outside the mask.

    provenance: how each preset's results are made, for those who create and finish the files.
    """
    spread = np.dtype(np.float32)
    dtypes = {preset: (preset, task.stack.dtype) for preset in presets}
    if samples > 1:
        dtypes |= {spread_of(preset): (preset, spread) for preset in presets}
    return {
        name: new_volume(
            task.format,
            folder,
            partial(task.files.result, name),
            task.stack.volume,
            dtype,
            {**provenance[preset], "mask": task.mask.name} if provenance else {},
        )
        for name, (preset, dtype) in dtypes.items()
    }


def spread_of(preset: str) -> str:
    """The name under which a preset's standard deviation is kept."""
    return f"{preset}_std"


def restore_batch(
    task: Task, batch: Batch, restorer: Restorer, folder: Path, parts: Parts, leads: bool, bar: JobBar
) -> list[tuple[int, dict[str, Any]]]:
    """Restores slices in every mode. The leader of the replica judges them, writes them to the files in `folder` and
    returns rows of metrics.json, each with its slice's index; others return none. Where the slices have samples in
    other batches, it keeps those of this one in `parts`, and rows come from `put_together`."""
    originals = [task.stack.read(index) for index in batch.indices]
    masks = [task.mask.read(index) for index in batch.indices]
    prepared = [prepare_slice(o_YX, m_YX, task.scale) for o_YX, m_YX in zip(originals, masks, strict=True)]
    modes = [mode for mode in restorer.engines if mode in restorer.presets or batch.compared]
    if masks[0].any():
        if bar.shown:
            bar.begin(batch.size, restorer.tile_steps(masks) * len(batch.samples) * len(modes))
        seen = [Seen(task, *one) for one in zip(batch.indices, originals, masks, strict=True)] if leads else []
        drawn = {mode: draw(batch, restorer, prepared, masks, mode, seen) for mode in modes}
    else:  # a slice without masked voxels is its own restoration
        drawn = {mode: [Drawn(Moments.of(one_YX), Cost()) for one_YX in prepared] for mode in modes}
    if not leads:
        return []
    if not batch.whole:
        parts.keep(batch, drawn)
        return []
    rows: list[tuple[int, dict[str, Any]]] = []
    for place, index in enumerate(batch.indices):
        of_slice = {mode: of_mode[place] for mode, of_mode in drawn.items()}
        judged = judge_slice(task, restorer, index, originals[place], masks[place], of_slice, batch.of)
        write_slice(result_files(task, restorer.presets, folder, batch.of), index, judged)
        rows += [(index, row) for row in judged.rows]
    return rows


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

    def psnr_db(self, run: Run) -> float | None:
        """As of a run with this sample alone."""
        if self.truth_YX is None:
            return None
        native_YX = compose_native(self.original_YX, run.restored01_YX, self.mask_YX, self.task.scale)
        return masked_psnr_db(self.task.scale, self.truth_YX, native_YX, self.mask_YX)


def draw(
    batch: Batch,
    restorer: Restorer,
    prepared: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    mode: str,
    seen: Sequence[Seen],
) -> list[Drawn]:
    """The batch's samples of each slice in one mode, of which no more are in memory than share calls. seen: the slices,
    empty on ranks that judge none; there the result is empty too."""
    moments: dict[int, Moments] = {}
    costs: list[list[Cost]] = [[] for _ in seen]
    psnr_db: list[list[float | None]] = [[] for _ in seen]
    for pairs in batch.calls:
        places, samples = zip(*pairs, strict=True)
        runs = restorer.run([prepared[n] for n in places], [masks[n] for n in places], mode, samples)
        for place, run in zip(places, runs if seen else [], strict=False):
            one = Moments.of(run.restored01_YX)
            moments[place] = moments[place].merged(one) if place in moments else one
            costs[place].append(run.cost)
            if batch.of > 1 and mode in restorer.presets:
                psnr_db[place].append(seen[place].psnr_db(run))
    return [Drawn(moments[n], Cost.summed(costs[n]), tuple(psnr_db[n])) for n in range(len(seen))]


def put_together(
    task: Task, batches: Sequence[Batch], restorer: Restorer, folder: Path, parts: Parts
) -> list[tuple[int, dict[str, Any]]]:
    """Judges and writes the slices of batches that have some of their samples each, when all of them are done: what
    `restore_batch` does for others. batches: those of the same slices, in the order of samples."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for index in batches[0].indices:
        found = [parts.read(batch, index) for batch in batches]
        drawn = {mode: Drawn.merged([part[mode] for part in found]) for mode in found[0]}
        original_YX, mask_YX, of = task.stack.read(index), task.mask.read(index), batches[0].of
        judged = judge_slice(task, restorer, index, original_YX, mask_YX, drawn, of)
        write_slice(result_files(task, restorer.presets, folder, of), index, judged)
        rows += [(index, row) for row in judged.rows]
    return rows


@dataclass(frozen=True)
class Judged:
    native: dict[str, np.ndarray]  # what goes into each of `result_files`
    rows: list[dict[str, Any]]


def write_slice(files: Mapping[str, VolumeFile], index: int, judged: Judged) -> None:
    for name, file in files.items():
        file.write(index, judged.native[name])


def judge_slice(
    task: Task,
    restorer: Restorer,
    index: int,
    original_YX: np.ndarray,
    mask_YX: np.ndarray,
    drawn: Mapping[str, Drawn],
    samples: int,
) -> Judged:
    """Restored slices in the input's dtype, of several samples with their standard deviation, and their rows of
    metrics.json with the biharmonic baseline."""
    scale = task.scale
    rows: list[dict[str, Any]] = []
    presets = {preset: drawn[preset] for preset in restorer.presets}
    native = {name: compose_native(original_YX, one.restored01_YX, mask_YX, scale) for name, one in presets.items()}
    if samples > 1:
        native |= {
            spread_of(name): spread_native(one.moments.deviation_YX, mask_YX, scale) for name, one in presets.items()
        }
    if not mask_YX.any():
        return Judged(native, rows)
    truth_YX = task.truth.read(index) if task.truth is not None else None
    started = time.perf_counter()
    smooth_YX = smoothed(task, original_YX, mask_YX)
    baseline = {**quality(scale, truth_YX, smooth_YX, mask_YX), "seconds": time.perf_counter() - started}
    exact = drawn.get(restorer.exact) if restorer.exact is not None else None
    for preset, one in presets.items():
        of_samples = {
            "samples": samples,
            **coverage(one.moments, truth_YX, mask_YX, scale),
            "psnr_db_single": mean(one.psnr_db),
        }
        rows.append(
            metrics_row(
                slice_name(task.stack, index),
                task.mask.name,
                preset,
                quality(scale, truth_YX, native[preset], mask_YX),
                one.cost.seconds,
                one.cost.sent,
                psnr_vs_exact_db=psnr_vs_exact_db(scale, exact, one, mask_YX) if exact is not None else None,
                exact_compared=exact is not None,
                baseline=baseline,
                drift=one.cost.drift,
                exact_bytes=exact.cost.sent if exact is not None else None,
                of_samples=of_samples if samples > 1 else None,
            )
        )
    return Judged(native, rows)


def smoothed(task: Task, original_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray:
    """A slice restored by biharmonic inpainting, in the input's units."""
    return task.scale.denormalise(biharmonic(prepare_slice(original_YX, mask_YX, task.scale), mask_YX))


def pictures_of(
    task: Task, masked: Sequence[bool], presets: list[str], folder: Path, samples: int = 1
) -> list[Picture]:
    """What the report shows of a finished task, whose previews are saved beside the restored slices."""
    files = result_files(task, presets, folder, samples)
    pictures: list[Picture] = []
    for index in shown_slices(masked):
        original_YX, mask_YX = task.stack.read(index), task.mask.read(index)
        restored = {preset: files[preset].read(index) for preset in presets}
        spread = {preset: files[spread_of(preset)].read(index) for preset in presets if samples > 1}
        restored["biharmonic"] = smoothed(task, original_YX, mask_YX)
        truth_YX = task.truth.read(index) if task.truth is not None else None
        name, scale = slice_name(task.stack, index), task.scale
        pictures.append(Picture(name, task.mask.name, index, original_YX, mask_YX, scale, restored, truth_YX, spread))
        save_previews(folder, task, pictures[-1], presets)
    return pictures


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


def psnr_vs_exact_db(scale: IntensityRange, exact: Run | Drawn, run: Run | Drawn, mask_YX: np.ndarray) -> float | None:
    """PSNR under the mask against the exact run, before rounding to the input's dtype; None for the same bits."""
    distance = ExactDistance(scale)
    distance.add(scale.denormalise(exact.restored01_YX), scale.denormalise(run.restored01_YX), mask_YX)
    return distance.psnr_vs_exact_db()


def save_previews(folder: Path, task: Task, picture: Picture, presets: list[str]) -> None:
    for preset in presets:
        path = folder / task.files.preview(picture.name.removeprefix(task.stack.name), preset)
        save_preview_png(path, picture.restored[preset], picture.scale.low, picture.scale.high)

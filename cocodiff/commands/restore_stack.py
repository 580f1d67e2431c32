"""Restores the slices of a stack under a mask in every mode, batch by batch, so that no stack need fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.intensity import prepare_slice
from cocodiff_eval.pipeline_inpainter import PipelineInpainter
from cocodiff_eval.restore import plan_slice, restore_slices
from cocodiff_eval.tiling import TilingSettings, plan_restoration, steps_at
from cocodiff_eval.uncertainty import Moments

from cocodiff.commands.cost import Cost, measured
from cocodiff.commands.judging import Run, Seen, judge_slice
from cocodiff.commands.pipelines import Model
from cocodiff.commands.report_pictures import ReportPictures
from cocodiff.commands.samples import Batch, Drawn, Parts
from cocodiff.commands.tasks import Task, checksums, result_files
from cocodiff.commands.terminal import JobBar
from cocodiff.engine import Engine

DrawnOf = Callable[[Sequence[Batch], int], dict[str, Drawn]]
SMALL_MODEL = 256  # pixels on a side
TOGETHER = 8  # slices in a batch: more make calls little cheaper, and leave replicas idle at the end of a stack


def tiles_in_a_call(wanted: int | None, native: int) -> int:
    """Tiles that share a model's call. More of them mean fewer messages; what limits them is the memory of large
    models. native: pixels of a tile's side."""
    return wanted or (16 if native <= SMALL_MODEL else 2)


def slices_together(shape: Sequence[int], native: int, batch: int) -> int:
    """How many slices [Y, X] may share a model's calls of `batch` tiles: those of a small model whose tiles fit into
    one."""
    tiles = math.prod(-(-side // native) for side in shape)
    return min(TOGETHER, max(1, batch // tiles)) if native <= SMALL_MODEL else 1


def mean_call(
    tasks: Sequence[Task], native: int, batch: int, settings: TilingSettings, values: dict[str, Any], groups: int
) -> tuple[int, int] | None:
    """Calls of the model, steps included, that a batch of slices takes in one mode, and tiles in a mean one: by the
    tiles of the first slice with something to restore. None where there is none. batch: tiles in a call at most.
    groups: of slices that share calls, in a batch."""
    for task in tasks:
        stack, steps = task.stack, round(values["steps"] / settings.strength)
        masks = (task.mask.read(index) for index in range(len(stack)))
        first = next((mask_YX for mask_YX in masks if mask_YX.any()), None)
        if first is None:
            continue
        plan = plan_restoration(first, native, batch, settings)
        slices = min(task.mask.masked * values["samples"], slices_together(stack.shape[1:], native, batch))
        passes = [one for level in plan.levels for one in level.passes]
        calls = sum(math.ceil(len(one.tiles) * slices / batch) * steps_at(steps, one.strength) for one in passes)
        return groups * calls, max(1, round(plan.tile_steps(steps) * slices / calls))
    return None


@dataclass(frozen=True)
class Restorer:
    """Restores slices: with the model's tiles, and an engine for each mode. `presets` are the modes whose results are
    kept; a further one in `engines` is the exact run that they are compared with. replica: the number of the one that
    does it."""

    inpainter: PipelineInpainter
    engines: Mapping[str, Engine]
    presets: list[str]
    exact: str | None
    batch: int
    tiling: TilingSettings
    replica: int = 0

    @classmethod
    def of_model(
        cls,
        model: Model,
        values: dict[str, Any],
        steps: int,
        engines: Mapping[str, Engine],
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
        limits: tuple[float, float],
        samples: Sequence[int] | None = None,
    ) -> list[Run]:
        """Slices in one mode, on all ranks of the engine. limits: of restored voxels; samples: of each slice the number
        of the sample, 0 unless given."""
        with measured(self.engines[mode]) as cost:
            restored = restore_slices(
                prepared_YX,
                masks_YX,
                self.inpainter,
                batch=self.batch,
                settings=self.tiling,
                samples=samples,
                limits=limits,
            )
        cost.replica_seconds = {str(self.replica): cost.seconds}
        return [Run(one_YX, share) for one_YX, share in zip(restored, cost.shares(len(restored)), strict=True)]


@dataclass(frozen=True)
class Results:
    """Where a job's results go. folder: of the files of restored slices; parts: samples of slices that are not
    complete; pages: what the report shows; provenance: of a task's number, how its results of each preset are made, for
    those who write them."""

    folder: Path
    parts: Parts
    pages: ReportPictures
    provenance: Callable[[int], Mapping[str, Mapping[str, Any]]] | None = None

    def add(self, batch: Batch, seen: Seen, restorer: Restorer, drawn: Mapping[str, Drawn]) -> list[dict[str, Any]]:
        """Judges and writes a slice whose samples are all there; returns its rows of metrics.json."""
        judged = judge_slice(seen, restorer.presets, restorer.exact, drawn, batch.of)
        made = self.provenance(batch.task) if self.provenance is not None else None
        for name, file in result_files(seen.task, restorer.presets, self.folder, batch.of, made).items():
            file.write(seen.index, judged.native[name])
        self.pages.add(batch.task, seen.index, judged.picture)
        return judged.rows

    def checksums(self, task: Task, batch: Batch, presets: Sequence[str]) -> list[int]:
        """Of what the files hold of a batch."""
        return checksums(result_files(task, presets, self.folder, batch.of).values(), batch.indices)


def restore_batch(
    task: Task, batch: Batch, restorer: Restorer, results: Results, leads: bool, bar: JobBar
) -> list[tuple[int, dict[str, Any]]]:
    """Restores slices in every mode. The leader of the replica judges and writes them and returns rows of metrics.json,
    each with its slice's index; others return none. Where the slices have samples in other batches, it keeps those of
    this one, and rows come from `put_together`."""
    modes = [mode for mode in restorer.engines if mode in restorer.presets or batch.compared]
    seen, drawn = draw_modes(task, batch, restorer, modes, leads, bar)
    if leads and not batch.whole:
        results.parts.keep(batch, drawn)
        return []
    rows: list[tuple[int, dict[str, Any]]] = []
    for place, one in enumerate(seen):
        of_slice = {mode: of_mode[place] for mode, of_mode in drawn.items()}
        rows += [(one.index, row) for row in results.add(batch, one, restorer, of_slice)]
    return rows


def try_batch(task: Task, batch: Batch, restorer: Restorer, mode: str, parts: Parts, leads: bool, bar: JobBar) -> None:
    """Restores slices in one mode and keeps them, to be compared and perhaps taken as results when others are there."""
    _, drawn = draw_modes(task, batch, replace(restorer, presets=[mode]), [mode], leads, bar)
    if leads:
        parts.keep(batch, drawn)


def draw_modes(
    task: Task, batch: Batch, restorer: Restorer, modes: Sequence[str], leads: bool, bar: JobBar
) -> tuple[list[Seen], dict[str, list[Drawn]]]:
    """The batch's slices, and in each mode their samples; both empty on ranks that do not lead."""
    originals = [task.stack.read(index) for index in batch.indices]
    masks = [task.mask.read(index) for index in batch.indices]
    prepared = [prepare_slice(o_YX, m_YX, task.scale) for o_YX, m_YX in zip(originals, masks, strict=True)]
    seen = [Seen(task, *one) for one in zip(batch.indices, originals, masks, strict=True)] if leads else []
    if not masks[0].any():  # a slice without masked voxels is its own restoration
        return seen, {mode: [Drawn(Moments.of(one_YX), Cost()) for one_YX in prepared] for mode in modes}
    if bar.shown:
        bar.begin(batch.size, restorer.tile_steps(masks) * len(batch.samples) * len(modes))
    return seen, {mode: draw(task, batch, restorer, prepared, masks, mode, seen) for mode in modes}


def draw(
    task: Task,
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
        of_call = ([prepared[n] for n in places], [masks[n] for n in places])
        runs = restorer.run(*of_call, mode, task.scale.limits01, samples)
        for place, run in zip(places, runs if seen else [], strict=False):
            one = Moments.of(run.restored01_YX)
            moments[place] = moments[place].merged(one) if place in moments else one
            costs[place].append(run.cost)
            if batch.of > 1 and mode in restorer.presets:
                psnr_db[place].append(seen[place].psnr_db(run))
    return [Drawn(moments[n], Cost.summed(costs[n]), tuple(psnr_db[n])) for n in range(len(seen))]


def put_together(
    task: Task, batches: Sequence[Batch], restorer: Restorer, results: Results, drawn: DrawnOf
) -> list[tuple[int, dict[str, Any]]]:
    """Judges and writes the slices of batches that were kept, when all of them are done: what `restore_batch` does for
    others. batches: those of the same slices, in the order of samples; drawn: what was kept of a slice of theirs."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for index in batches[0].indices:
        seen = Seen(task, index, task.stack.read(index), task.mask.read(index))
        rows += [(index, row) for row in results.add(batches[0], seen, restorer, drawn(batches, index))]
    return rows

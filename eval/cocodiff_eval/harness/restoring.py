"""Restores slices under a mask with tiles of a model, batch by batch, so that no stack need fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.jobs.model_checks import check_sides
from cocodiff.jobs.terminal import say, span
from cocodiff_eval.data.reoriented import AXES
from cocodiff_eval.data.volume import Reader
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, measured
from cocodiff_eval.harness.judging import SliceReview
from cocodiff_eval.harness.partition import own_pixels
from cocodiff_eval.harness.pipelines import Model, Request
from cocodiff_eval.harness.session import Engines, Prepared, Session, load_requested
from cocodiff_eval.quality.fusing import Moments, samples_along
from cocodiff_eval.restore.pipeline_inpainter import SMALL_MODEL, PipelineInpainter
from cocodiff_eval.restore.restore import plan_slice, restore_slices
from cocodiff_eval.restore.tiling import plan_restoration

if TYPE_CHECKING:
    from cocodiff_eval.harness.tasks import Task

COUNTED = 9  # slices along an axis whose tiles are counted, to estimate those of all
TESTED, MOST_TESTS = 4, 4  # samples of a slice for each one in which more is hidden, and these at most
TOGETHER = 8  # slices in a batch: more make calls little cheaper, and leave replicas idle at the end of a stack


def tiles_in_a_call(wanted: int | None, native: int) -> int:
    """What limits them is the memory of large models. native: pixels of a tile's side."""
    return wanted or (16 if native <= SMALL_MODEL else 2)


def slices_together(shape: Sequence[int], native: int, batch: int, frames: int, most: int = TOGETHER) -> int:
    """How many slices [Y, X] share a model's calls: those of a video, or of a small model those whose tiles fit one."""
    if frames > 1:
        return frames
    tiles = math.prod(-(-side // native) for side in shape)
    return min(most, max(1, batch // tiles)) if native <= SMALL_MODEL else 1


def frames_of(values: Mapping[str, Any], request: Request) -> int:
    """Slices that the model restores as one video at most; 1 of a model that makes images. Raises UserError for frames
    that are asked of one."""
    asked = values.get("frames")
    if request.video is None:
        if asked is not None:
            raise UserError(f"--frames {asked}: model {request.model} restores images: leave it away")
        return 1
    return int(asked or request.video.frames)


def count_tests(values: Mapping[str, Any]) -> int:
    """Return how many samples of a slice alone are drawn to learn its intervals, beside those of its result."""
    calibrates = values["samples"] > 1 and not values["quality"] and values["hidden_test"] is None
    return min(MOST_TESTS, max(1, values["samples"] // TESTED)) if calibrates else 0


def count_tile_steps(tasks: Sequence[Task], values: Mapping[str, Any], native: int) -> int:
    """Return about how many denoising steps a job's tiles take in each preset, those of tests included.

    Tiles are counted in a few slices along each axis.

    Args:
        values: the job's options.
        native: pixels of a tile's side.
    """

    def of_slice(task: Task, mask_YX: np.ndarray) -> int:
        plan = plan_restoration(mask_YX, native, 1, values["strength"], 8 if native <= SMALL_MODEL else None)
        return plan.tile_steps(task.steps)

    def of_axis(task: Task, read: Reader, axis: str, indices: Sequence[int]) -> float:
        """Return the mean of some slices along an axis, which are read through those along z."""
        chosen = [indices[n] for n in np.unique(np.linspace(0, len(indices) - 1, COUNTED).astype(int))]
        if axis == "z":
            return float(np.mean([of_slice(task, read(n)) for n in chosen]))
        place = AXES.index(axis)
        found = np.stack([np.take(read(n), chosen, place - 1) for n in range(len(task.stack))])
        return float(np.mean([of_slice(task, mask_YX) for mask_YX in np.moveaxis(found, place, 0)]))

    total, samples = 0.0, values["samples"]
    for task in tasks:
        volume, slices = task.volume, {"z": np.flatnonzero(task.mask.masked).tolist()}
        if volume is not None:
            slices = {axis: volume.statistics.restorable(axis) for axis in volume.axes}
        slices = {axis: indices for axis, indices in slices.items() if indices}
        drawn = samples_along(samples, dict.fromkeys(slices, 1.0))
        for axis, indices in slices.items():
            read, tests = (task.mask.read, count_tests(values)) if volume is None else (volume.read_mask, 0)
            runs = len(indices) * (drawn[axis] + tests)
            if volume is not None and volume.tested:
                runs += volume.tested_slices(samples) * volume.sampled(samples)
            total += runs * of_axis(task, read, axis, indices)
    return round(total)


def told_steps(tile_steps: int, steps: int) -> str:
    """Return in words how much a job has for the model to do. tile_steps: as `count_tile_steps` gives them."""
    return f"about {-(-tile_steps // steps):,} tiles for the model, at {steps} steps"


def inpainter_of(prepared: Prepared, model: Model, steps: int) -> PipelineInpainter:
    """Return a model as what restores tiles.

    steps: those that run, also where a strength below 1 skips the first part of the schedule. Raise UserError for tiles
    that the model would round, or has no positions for.
    """
    values, request = prepared.values, prepared.request
    side = values.get("tile") or (own_pixels(request) if request.video is not None else None)
    fresh = values.get("fresh_noise")
    inpainter = PipelineInpainter(
        model.pipe,
        model.arguments,
        round(steps / values["strength"]),
        values["seed"],
        side=side,
        frames=frames_of(values, request),
        fresh=1.0 if fresh is None else fresh,
    )
    if side is not None:
        options, multiple = ("tile", "tile"), inpainter.multiple
        check_sides(model.pipe, side, side, model.name, inpainter.frames, options, multiple, "takes")
    return inpainter


def say_time(prepared: Prepared, tile_steps: int, transport: Any) -> None:
    """Time a call of the model on this rank, and say how long a job takes by it.

    tile_steps: as `count_tile_steps` gives them
    """
    values, steps, replicas = prepared.values, prepared.values["steps"], prepared.partition.replicas
    model = load_requested(prepared.request, values["dtype"], transport)
    inpainter = inpainter_of(prepared, model, steps)
    small, batch = inpainter.thin, tiles_in_a_call(values["batch"], inpainter.native_size)
    tiles = min(batch, TOGETHER) if small else batch if inpainter.frames == 1 else inpainter.frames
    call_s, step_s = time_call(inpainter, tiles)
    all_s = (tile_steps / steps * call_s + tile_steps * step_s) * len(prepared.presets) / replicas
    more = f" in {replicas} replicas" if replicas > 1 else ""
    more += ", less where ranks share a call" if prepared.ranks > replicas else ""
    say(
        f"a call with {tiles} tile(s) takes {span(tiles * (call_s + steps * step_s))} here: {span(all_s)} for all{more}"
    )


def time_call(inpainter: PipelineInpainter, tiles: int) -> tuple[float, float]:
    """Return the seconds that a call of the pipeline takes here for each tile, without its steps, and for each step.

    Args:
        inpainter: the model.
        tiles: number of tiles in the call.
    """
    import torch

    images_BHW, more = torch.rand(tiles, *[inpainter.native_size] * 2), 4 if inpainter.thin else 1
    masks_BHW, seconds = (images_BHW > 0.5).float(), list[float]()
    if inpainter.frames > 1:
        images_BHW, masks_BHW = images_BHW[None], masks_BHW[None]
    for steps in (1, 1, 1 + more):  # the first call prepares what others find
        started = perf_counter()
        replace(inpainter, steps=steps)(images_BHW, masks_BHW, 1.0, range(len(images_BHW)))
        seconds.append(perf_counter() - started)
    step_s = max(0.0, seconds[2] - seconds[1]) / more
    return max(0.0, seconds[1] - step_s) / tiles, step_s / tiles


@dataclass(frozen=True)
class Restorer:
    """Restores slices with the model's tiles, by an engine for each mode, as the replica of this number."""

    inpainter: PipelineInpainter
    engines: Engines
    batch: int
    strength: float
    replica: int

    @classmethod
    def of(cls, session: Session, steps: int) -> Restorer:
        """Make it of a job's session. steps, and what is raised: as of `inpainter_of`."""
        values, inpainter = session.prepared.values, inpainter_of(session.prepared, session.model, steps)
        batch = tiles_in_a_call(values["batch"], inpainter.native_size)
        return cls(inpainter, session.engines, batch, values["strength"], session.replica.number)

    def tile_steps(self, masks_YX: Sequence[np.ndarray]) -> int:
        """Denoising steps of all tiles of these slices together, in one mode."""
        if self.inpainter.frames > 1 and masks_YX:  # a video's frames have one plan
            masks_YX = [np.logical_or.reduce(masks_YX)] * len(masks_YX)
        plans = [plan_slice(mask_YX, self.inpainter, self.batch, self.strength) for mask_YX in masks_YX]
        return sum(plan.tile_steps(self.inpainter.steps) for plan in plans)

    def together(self, rows_columns: Sequence[int], most: int = TOGETHER) -> int:
        """As of `slices_together`."""
        return slices_together(rows_columns, self.inpainter.native_size, self.batch, self.inpainter.frames, most)

    def run(
        self,
        prepared_YX: Sequence[np.ndarray],
        masks_YX: Sequence[np.ndarray],
        mode: str,
        limits: tuple[float, float],
        samples: Sequence[int] | None = None,
    ) -> list[ItemSamples]:
        """Slices in one mode, on all ranks. limits: of voxels; samples: the number of each, 0 unless given."""
        how: dict[str, Any] = {"batch": self.batch, "strength": self.strength, "samples": samples, "limits": limits}
        with measured(self.engines[mode]) as cost:
            restored = restore_slices(prepared_YX, masks_YX, self.inpainter, **how)
        cost.replica_seconds = {str(self.replica): cost.seconds}
        return [*map(ItemSamples, map(Moments.of, restored), cost.shares(len(restored)))]

    def draw(self, batch: Batch, seen: Sequence[SliceReview], mode: str, leads: bool, keeps: bool) -> list[ItemSamples]:
        """The batch's samples of each slice in one mode, of which no more are in memory than share calls, unless each
        is kept. leads: on ranks that judge none the result is empty."""
        moments: dict[tuple[int, bool], Moments] = {}
        costs: list[list[Cost]] = [[] for _ in seen]
        psnr_db: list[list[float | None]] = [[] for _ in seen]
        kept: list[list[np.ndarray]] = [[] for _ in seen]
        limits = seen[0].task.scale.limits01
        for pairs in batch.calls:
            test = pairs[0][1] >= batch.drawn
            made = [(place, sample) for place, sample in pairs if not test or seen[place].hides]
            if not made:
                continue
            images, masks = zip(*(seen[place].given(test) for place, _ in made), strict=True)
            runs = self.run(images, masks, mode, limits, [sample for _, sample in made])
            for (place, _), run in zip(made, runs if leads else [], strict=False):
                key = place, test
                moments[key] = moments[key].merged(run.moments) if key in moments else run.moments
                costs[place].append(run.cost)
                if batch.drawn > 1 and not test:
                    psnr_db[place].append(seen[place].psnr_db(run))
                if keeps and not test:
                    kept[place].append(seen[place].native(run))

        found = []
        for place in range(len(seen) if leads else 0):
            drawn = moments.get((place, False)) or Moments.none(seen[place].mask_YX.shape)
            cost, tested = Cost.summed(costs[place] or [Cost()]), moments.get((place, True))
            found.append(ItemSamples(drawn, cost, tuple(psnr_db[place]), tuple(kept[place]), tested))
        return found

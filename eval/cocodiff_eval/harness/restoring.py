"""The restoration of masked slices with a model that sees tiles of fixed size.

Slices are restored batch by batch, so a stack need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from cocodiff.jobs.model_checks import check_sides
from cocodiff.jobs.terminal import say, span
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, measured
from cocodiff_eval.harness.judging import SliceReview
from cocodiff_eval.harness.partition import own_pixels
from cocodiff_eval.harness.pipelines import Model
from cocodiff_eval.harness.session import Engines, Prepared, Session, load_requested
from cocodiff_eval.harness.tasks import TOGETHER, frames_of, slices_together, tiles_in_a_call
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.restore.pipeline_inpainter import PipelineInpainter
from cocodiff_eval.restore.restore import plan_slice, restore_slices


def inpainter_of(prepared: Prepared, model: Model, steps: int) -> PipelineInpainter:
    """Return the inpainter that restores tiles with a job's model.

    Raise UserError if the model would round the tile's side, or has no position embeddings for it.

    Args:
        prepared: the job, whose options say the tile's side, frames, strength and seed.
        model: the loaded model.
        steps: denoising steps that run. A strength below 1 skips the first steps of a longer schedule.
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
    """Time a call of the model on this rank, and print how long the whole job would take. It serves dry runs.

    Args:
        prepared: the job.
        tile_steps: denoising steps of all tiles, as `count_tile_steps` returns it.
        transport: this rank's connection to other ranks.
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
    """Time calls of the pipeline on this rank. Return (seconds outside of denoising steps, seconds of each step).

    Both are those of a call, divided by its number of tiles.

    Args:
        inpainter: the model.
        tiles: number of tiles in a call.
    """
    import torch

    images_BHW, more = torch.rand(tiles, *[inpainter.native_size] * 2), 4 if inpainter.thin else 1
    masks_BHW, seconds = (images_BHW > 0.5).float(), list[float]()
    if inpainter.frames > 1:
        images_BHW, masks_BHW = images_BHW[None], masks_BHW[None]
    for steps in (1, 1, 1 + more):  # the first call is not counted: it sets up what later ones reuse
        started = perf_counter()
        replace(inpainter, steps=steps)(images_BHW, masks_BHW, 1.0, range(len(images_BHW)))
        seconds.append(perf_counter() - started)
    step_s = max(0.0, seconds[2] - seconds[1]) / more
    return max(0.0, seconds[1] - step_s) / tiles, step_s / tiles


@dataclass(frozen=True)
class Restorer:
    """The model as it restores whole slices, tile by tile, with the engine of any mode.

    A mode is a preset, or a candidate of `--quality`.
    """

    inpainter: PipelineInpainter  # restores tiles
    engines: Engines  # the engine of each mode: of a preset, or a candidate of `--quality`
    batch: int  # most tiles in a call of the model
    strength: float  # noise level to start from, in (0, 1]
    replica: int  # number of this rank's replica

    @classmethod
    def of(cls, session: Session, steps: int) -> Restorer:
        """Return the restorer of slices for a job. Raise UserError if its model cannot restore with the options.

        Args:
            session: the job on its ranks, with the loaded model.
            steps: number of denoising steps of a tile that is restored from noise.
        """
        values, inpainter = session.prepared.values, inpainter_of(session.prepared, session.model, steps)
        batch = tiles_in_a_call(values["batch"], inpainter.native_size)
        return cls(inpainter, session.engines, batch, values["strength"], session.replica.number)

    def tile_steps(self, masks_YX: Sequence[np.ndarray]) -> int:
        """Return the number of denoising steps of all tiles of some slices in one mode (a preset, or a candidate of
        `--quality`), for the progress bar.

        A video's slices all have the tiles of their masks' union.

        Args:
            masks_YX: the slices' masks, True where to restore.
        """
        if self.inpainter.frames > 1 and masks_YX:  # a video's frames have one plan
            masks_YX = [np.logical_or.reduce(masks_YX)] * len(masks_YX)
        plans = [plan_slice(mask_YX, self.inpainter, self.batch, self.strength) for mask_YX in masks_YX]
        return sum(plan.tile_steps(self.inpainter.steps) for plan in plans)

    def together(self, rows_columns: Sequence[int], most: int = TOGETHER) -> int:
        """Return the number of slices that may share calls of the model, by their size (`slices_together`).

        Args:
            rows_columns: number of rows and of columns of a slice.
            most: most slices that share calls of a small model.
        """
        return slices_together(rows_columns, self.inpainter.native_size, self.batch, self.inpainter.frames, most)

    def run(
        self,
        prepared_YX: Sequence[np.ndarray],
        masks_YX: Sequence[np.ndarray],
        mode: str,
        limits: tuple[float, float],
        samples: Sequence[int] | None = None,
    ) -> list[ItemSamples]:
        """Restore one sample of some slices in one mode. Return the sample and its cost for each slice.

        All ranks of the replica call it.

        Args:
            prepared_YX: normalised slices, filled under the mask.
            masks_YX: boolean, True where to restore.
            mode: name of a preset, or of a candidate of --quality; a key of `engines`.
            limits: smallest and largest value of restored voxels, normalised.
            samples: for each slice the number of its sample, which selects the noise; 0 if not given.
        """
        how: dict[str, Any] = {"batch": self.batch, "strength": self.strength, "samples": samples, "limits": limits}
        with measured(self.engines[mode]) as cost:
            restored = restore_slices(prepared_YX, masks_YX, self.inpainter, **how)
        cost.replica_seconds = {str(self.replica): cost.seconds}
        return [*map(ItemSamples, map(Moments.of, restored), cost.shares(len(restored)))]

    def draw(self, batch: Batch, seen: Sequence[SliceReview], mode: str, leads: bool, keeps: bool) -> list[ItemSamples]:
        """Restore all samples of a batch in one mode. Return for each slice their mean, spread and cost.

        All ranks of the replica call it. No more samples are in memory at once than share calls of the model, unless
        each is kept. A slice in which too little is hidden gets no calibration samples.

        Args:
            batch: the batch.
            seen: its slices.
            mode: name of a preset or candidate, a key of `engines`.
            leads: False on ranks that judge no slices; they get an empty list.
            keeps: True to keep each sample, in the input's dtype, besides mean and spread.
        """
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

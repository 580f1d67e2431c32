"""Restores slices under a mask with tiles of a model, batch by batch, so that no stack need fit in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cocodiff.config.errors import UserError
from cocodiff.jobs.model_checks import check_sides
from cocodiff.jobs.partition import own_pixels
from cocodiff.jobs.pipelines import Request
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, measured
from cocodiff_eval.harness.judging import SliceReview
from cocodiff_eval.harness.session import Engines, Session
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.restore.pipeline_inpainter import SMALL_MODEL, PipelineInpainter
from cocodiff_eval.restore.restore import plan_slice, restore_slices

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
        """steps: those that run, also where a strength below 1 skips the first part of the schedule. Raises UserError
        for tiles that the model would round, or has no positions for."""
        values, request, model = session.prepared.values, session.prepared.request, session.model
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

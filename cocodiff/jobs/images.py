"""The job of `generate`: an image for each prompt."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cocodiff_eval.finite import check_finite
from cocodiff_eval.intensity import IntensityRange
from cocodiff_eval.metrics import Result, distance_db
from cocodiff_eval.pipeline_inpainter import drawing_from, own_size, side_multiple, silent
from cocodiff_eval.report import Generated, encode, plan_pictures
from cocodiff_eval.slices import safe_stem, unique_names
from cocodiff_eval.uncertainty import Moments
from PIL import Image

from cocodiff.errors import UserError
from cocodiff.jobs.bound import Bound
from cocodiff.jobs.cost import measured
from cocodiff.jobs.items import Batch, Drawn
from cocodiff.jobs.job import Done, Job, Judged
from cocodiff.jobs.session import Session
from cocodiff.loading.model_checks import check_sides


class ImageJob(Job[Batch]):
    """The prompts of a job, each a batch. Images are float32 [Y, X, C] in [0, 1]."""

    unit = "images"

    def __init__(self, session: Session) -> None:
        self.session, self.presets = session, list(session.prepared.presets)
        self.sides = image_sides(session)
        self.prompts = session.prepared.request.prompts or ("",)
        self.names = unique_names([safe_stem(prompt)[:40] if prompt else "image" for prompt in self.prompts])
        self.batches = [Batch(0, (number,)) for number in range(len(self.prompts))]
        self._advance: Callable[[int], None] = lambda steps: None

    def settings(self) -> dict[str, Any]:
        return {"prompts": list(self.prompts), "sides": list(self.sides)}

    def watched(self, advance: Callable[[int], None]) -> None:
        self._advance = advance

    def steps(self, batch: Batch) -> int:
        return int(self.session.prepared.values["steps"])

    def make(self, settings: Sequence[str], batch: Batch) -> dict[str, list[Drawn]]:
        found = {setting: self._paint(setting, batch.indices[0]) for setting in settings}
        return {setting: [drawn] if self.session.replica.leads else [] for setting, drawn in found.items()}

    def _paint(self, setting: str, prompt: int) -> Drawn:
        """One image in one mode, on all ranks of the replica."""
        model, values = self.session.model, self.session.prepared.values

        def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 0:
                check_finite(pipe, tensors["latents"])
            self._advance(1)
            return tensors

        with silent(model.pipe), drawing_from(values["seed"]), measured(self.session.engines[setting]) as cost:
            image_YXC = model.pipe(
                height=self.sides[0],
                width=self.sides[1],
                num_inference_steps=values["steps"],
                generator=torch.Generator("cpu").manual_seed(values["seed"]),
                output_type="np",
                callback_on_step_end=after_step,
                **model.arguments(1, prompt),
            ).images[0]
        check_finite(model.pipe, torch.from_numpy(image_YXC))
        return Drawn(Moments.of(image_YXC.astype(np.float32)), cost)

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, Drawn], exact: str | None) -> Judged:
        """There is no truth, but there may be an exact run to compare with."""
        name, rows, compared = self.names[batch.indices[place]], [], None if exact is None else drawn[exact]
        for preset in self.presets:
            one = drawn[preset]
            result = Result(name, None, preset, **one.cost.reported(), exact_compared=compared is not None)
            if compared is not None:
                against = psnr_vs_exact_db(compared, one)
                result = replace(result, psnr_vs_exact_db=against, bytes_exact=compared.cost.bytes)
            rows.append(result.row())
        return Judged(rows, drawn)

    def write(self, batch: Batch, place: int, result: Mapping[str, Drawn]) -> None:
        for preset, path in self._files(batch.indices[place]).items():
            image8_YXC = np.rint(image01(result[preset]) * 255).astype(np.uint8)
            with path.open("wb") as file:
                Image.fromarray(image8_YXC).save(file, "PNG")
                file.flush()
                os.fsync(file.fileno())

    def sums(self, batch: Batch) -> list[int]:
        return [zlib.crc32(path.read_bytes()) for path in self._files(batch.indices[0]).values()]

    def name(self, number: int) -> str:
        return self.names[number]

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: Drawn, one: Drawn) -> float | None:
        return psnr_vs_exact_db(exact, one)

    def complete(self, done: Done) -> dict[str, Any]:
        """What `session.finish` takes besides the rows."""
        plan = plan_pictures([[True] * len(self.prompts)], len(self.presets))
        return {
            "pictures": (encode(self._shown(number), plan.side, plan.share) for number in sorted(plan.shown[0])),
            "title": "Generated images",
            "prompts": dict(zip(self.names, self.prompts, strict=True)),
            "side": plan.side,
        }

    def _files(self, number: int) -> dict[str, Path]:
        """The file of an image in each preset."""
        return {preset: self.session.images / f"{self.names[number]}_{preset}.png" for preset in self.presets}

    def _shown(self, number: int) -> Generated:
        """The presets' images as saved, for the report."""
        found = {preset: np.asarray(Image.open(path)) for preset, path in self._files(number).items()}
        return Generated(self.names[number], self.prompts[number], found)


def image_sides(session: Session) -> tuple[int, int]:
    """Height and width. Raises UserError for sides that the model would round."""
    pipe, values = session.model.pipe, session.prepared.values
    multiple = side_multiple(pipe)
    sides = []
    for name in ("height", "width"):
        side = values[name] or own_size(pipe)
        if side % multiple:
            near = max(multiple, round(side / multiple) * multiple)
            raise UserError(f"--{name} {side}: model {session.model.name} makes multiples of {multiple}; give {near}")
        sides.append(side)
    check_sides(pipe, sides[0], sides[1], session.model.name)
    return sides[0], sides[1]


def image01(drawn: Drawn) -> np.ndarray:
    """float32 [Y, X, C] in [0, 1], as it was made."""
    return drawn.moments.mean_YX.astype(np.float32)


def psnr_vs_exact_db(exact: Drawn, one: Drawn) -> float | None:
    """None for the same bits."""
    images = image01(exact), image01(one)
    return distance_db(IntensityRange(0.0, 1.0), *images, np.ones(images[0].shape, bool))

"""`cocodiff generate`: text to image, on any number of ranks."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.commands.cost import Cost, measured
from cocodiff.commands.deal import deal_of
from cocodiff.commands.journal import Entry
from cocodiff.commands.model_checks import check_sides
from cocodiff.commands.options import (
    DEAL_OPTIONS,
    RESUME,
    RUN_OPTIONS,
    Option,
    check_counts,
    parse,
    preset_configs,
    with_settings,
)
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.pipelines import Request, check_model
from cocodiff.commands.quality import BOUND_OPTIONS, PRESET_OPTION, Quality
from cocodiff.commands.session import DTYPES, Job, Session, finish, nothing_left, open_session, run_job, settle
from cocodiff.commands.terminal import JobBar, say
from cocodiff.config import load_machine
from cocodiff.errors import UserError
from cocodiff.models.family import GENERATE
from cocodiff.topology.machine import Topology

ABOUT = "Make images from text with a diffusion transformer."
OPTIONS = (
    Option(
        "model",
        "folder in diffusers' layout or hub id of a text-to-image model; the embedded model only restores",
        required=True,
    ),
    Option("prompt", "what to show, one image for each; none for models without text encoders", [], many=True),
    Option("height", "pixels, instead of the model's own", type=int),
    Option("width", "pixels, instead of the model's own", type=int),
    PRESET_OPTION,
    Option("steps", "denoising steps", 50, type=int),
    Option("seed", "seed of the noise; the same for every prompt and preset", 0, type=int),
    Option("guidance", "classifier-free guidance scale, instead of the model's own", type=float),
    Option("dtype", "arithmetic; auto is fp32 on CPU and bf16 elsewhere", "auto", choices=DTYPES),
    Option("exact", "compare with the same run in the exact baseline", True, type=bool),
    *BOUND_OPTIONS,
    Option("out", "folder of the results", "generated"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    RESUME,
    *DEAL_OPTIONS,
    *RUN_OPTIONS,
)


def start(words: Sequence[str], launch: Launch) -> int:
    started = time.monotonic()
    values = parse("generate", ABOUT, with_settings(OPTIONS), words)
    ranks = settle(values, launch)
    job = prepare(values, ranks, started)
    if launch.speaks:
        say(f"cocodiff {__version__}: {', '.join(job.presets)} on {ranks} rank(s) into {values['out']}")
    job = deal(job, ranks)
    if launch.speaks and job.quality is not None:
        say(job.quality.line("images"))
    # the sides follow from the model and from those that are asked for
    asked = {"prompts": list(job.request.prompts or ("",))}
    if values["dry_run"] or nothing_left(job, launch, ranks, lambda there: asked | {"sides": there.get("sides")}):
        return 0
    return run_job(job, launch, work)


def prepare(values: dict[str, Any], ranks: int, started: float) -> Job:
    """Checks the request against machine, model and output. Raises UserError; writes nothing."""
    check_counts(values, "steps", "height", "width", "ranks")
    quality = Quality.asked(values)
    if quality is not None and quality.bound.against == "truth":
        raise UserError(
            f"--quality {quality.bound} is a loss against the truth, which generated images have not: give a distance "
            f"to the exact run, as 50dB"
        )
    presets = preset_configs(values) if quality is None else quality.presets
    Topology.build(load_machine(values["machine"]), ranks)
    request = Request(values["model"], GENERATE, tuple(values["prompt"]), values["guidance"])
    check_model(request, 1, weights=not values["dry_run"])
    output = OutputFolder(values["out"], values["overwrite"], values["resume"])
    return Job(values, request, presets, output, started, quality=quality)


def deal(job: Job, ranks: int) -> Job:
    """The job with its ranks dealt to replicas and guidance. Raises UserError."""
    values, modes = job.values, job.presets if job.quality is None else job.quality.rungs
    images, compares = max(1, len(values["prompt"])), job.quality is None
    chosen = deal_of(values, job.request, [*modes.values()], ranks, images=images, compares=compares)
    check_model(job.request, ranks // (chosen.replicas * chosen.guidance), weights=not values["dry_run"])
    return job.dealt(chosen, ranks)


@dataclass(frozen=True)
class Image:
    """An image made in one mode, float32 [Y, X, 3] in [0, 1], and what it took."""

    image01_YXC: np.ndarray
    cost: Cost

    @property
    def image8_YXC(self) -> np.ndarray:
        return np.rint(self.image01_YXC * 255).astype(np.uint8)


def work(job: Job, transport: Any) -> None:
    """One rank's part: the prompts that its replica takes, in every mode. The replica's leader compares and writes."""
    import torch
    from cocodiff_eval.report import encode, plan_pictures
    from cocodiff_eval.slices import safe_stem, unique_names

    from cocodiff.commands.quality_images import choose

    session = open_session(job, transport)
    sides = image_sides(session)
    prompts = job.request.prompts or ("",)
    names = unique_names([safe_stem(prompt)[:40] if prompt else "image" for prompt in prompts])
    settings = {"prompts": list(prompts), "sides": list(sides)}
    is_whole = partial(image_is_whole, session, names)
    with session.queue(lambda: settings, [1] * len(prompts), "images", is_whole) as queue, torch.no_grad():
        chosen = choose(session, queue, names, sides) if session.job.quality is not None else None
        modes = {mode: mode for mode in session.engines} if chosen is None else chosen.modes
        for number in queue.take([n for n in range(len(prompts)) if chosen is None or n not in chosen.kept]):
            queue.bar.begin(1, job.values["steps"] * len(modes))
            images = {mode: paint(session, name, number, sides, queue.bar) for mode, name in modes.items()}
            if session.replica.leads:
                save(session, names[number], images)
                exact = session.exact if chosen is None else chosen.exact
                rows = judge(session, names[number], images, exact)
                queue.add(number, rows, checksums(session, names[number]))
    rows = queue.rows() if session.folder is not None else []
    if session.folder is not None and chosen is not None:
        rows = chosen.put_together(session, names, rows)
    plan = plan_pictures([[True] * len(prompts)], len(job.presets))
    pictures = (encode(shown(session, names[n], prompts[n]), plan.side, plan.share) for n in sorted(plan.shown[0]))
    named = dict(zip(names, prompts, strict=True))
    bounds = chosen.records if chosen is not None else None
    finish(session, rows, pictures, bounds, title="Generated images", prompts=named, side=plan.side)


def image_sides(session: Session) -> tuple[int, int]:
    """Height and width. Raises UserError for sides that the model would round."""
    from cocodiff_eval.pipeline_inpainter import own_size, side_multiple

    pipe, values = session.model.pipe, session.job.values
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


def paint(session: Session, mode: str, prompt: int, sides: tuple[int, int], bar: JobBar) -> Image:
    """One image in one mode, on all ranks of the replica."""
    import torch
    from cocodiff_eval.finite import check_finite
    from cocodiff_eval.pipeline_inpainter import drawing_from, silent

    pipe, values, engine = session.model.pipe, session.job.values, session.engines[mode]

    def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            check_finite(pipe, tensors["latents"])
        bar.advance(1)
        return tensors

    with silent(pipe), drawing_from(values["seed"]), measured(engine) as cost:
        image_YXC = pipe(
            height=sides[0],
            width=sides[1],
            num_inference_steps=values["steps"],
            generator=torch.Generator("cpu").manual_seed(values["seed"]),
            output_type="np",
            callback_on_step_end=after_step,
            **session.model.arguments(1, prompt),
        ).images[0]
    check_finite(pipe, torch.from_numpy(image_YXC))
    return Image(image_YXC.astype(np.float32), cost)


def psnr_vs_exact_db(exact: Image, image: Image) -> float | None:
    """None for the same bits."""
    from cocodiff_eval.intensity import IntensityRange
    from cocodiff_eval.metrics import ExactDistance

    distance = ExactDistance(IntensityRange(0.0, 1.0))
    distance.add(exact.image01_YXC, image.image01_YXC, np.ones(exact.image01_YXC.shape, bool))
    return distance.psnr_vs_exact_db()


def judge(session: Session, name: str, images: dict[str, Image], exact: str | None) -> list[dict[str, Any]]:
    """Rows of metrics.json: there is no truth, but there may be an exact run to compare with. exact: its mode."""
    from cocodiff_eval.metrics import Result

    rows, compared = [], None if exact is None else images[exact]
    for mode in session.job.presets:
        result = Result(name, None, mode, **images[mode].cost.reported(), exact_compared=compared is not None)
        if compared is not None:
            distance_db = psnr_vs_exact_db(compared, images[mode])
            result = replace(result, psnr_vs_exact_db=distance_db, bytes_exact=compared.cost.bytes)
        rows.append(result.row())
    return rows


def image_files(session: Session, name: str) -> dict[str, Path]:
    """The file of an image in each preset."""
    return {mode: session.images / f"{name}_{mode}.png" for mode in session.job.presets}


def checksums(session: Session, name: str) -> list[int]:
    """Of an image's files."""
    return [zlib.crc32(path.read_bytes()) for path in image_files(session, name).values()]


def image_is_whole(session: Session, names: Sequence[str], entry: Entry) -> bool:
    """Whether an image of an earlier start is still there; in a bound on quality also one that was tried."""
    from cocodiff.commands.quality_images import tried

    trial, number = divmod(entry.number, len(names))
    if trial:
        return tried(session, trial - 1, number)
    try:
        return checksums(session, names[number]) == entry.sums
    except OSError:
        return False


def save(session: Session, name: str, images: dict[str, Image]) -> None:
    from PIL import Image as Pillow

    for mode, path in image_files(session, name).items():
        with path.open("wb") as file:
            Pillow.fromarray(images[mode].image8_YXC).save(file, "PNG")
            file.flush()
            os.fsync(file.fileno())


def shown(session: Session, name: str, prompt: str) -> Any:
    """The presets' images as saved, for the report."""
    from cocodiff_eval.report import Generated
    from PIL import Image as Pillow

    found = {mode: np.asarray(Pillow.open(path)) for mode, path in image_files(session, name).items()}
    return Generated(name, prompt, found)

"""The command `cocodiff generate`: text to image or to video, on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.config.errors import UserError
from cocodiff.jobs.options import JOB_OPTIONS, Option, check_counts, parse, with_settings
from cocodiff.jobs.ranks import settle
from cocodiff.jobs.terminal import say
from cocodiff.models.family import GENERATE
from cocodiff_eval.harness.pipelines import Request
from cocodiff_eval.harness.quality import BOUND_OPTIONS, PRESET_OPTION, Quality
from cocodiff_eval.harness.session import DTYPES, Prepared, start_job

ABOUT = "Make images or videos from text with a diffusion transformer."
# options by the heading that `--help` shows them under
SHOWN = {"images": "model prompt image frames height width steps seed guidance"}
OPTIONS = (
    Option("model", "folder in diffusers' layout or hub id; the embedded model only restores", required=True),
    Option("prompt", "what to show; one image for each; none for models without text encoders", [], many=True),
    Option("image", "first frame of every video; for models that make videos of an image"),
    Option("frames", "of a video; by default the model's own; 4 n + 1 of Wan", type=int),
    Option("fps", "frames a second of the MP4 file of a video, instead of the model's own", type=int),
    Option("height", "pixels; by default the model's own", type=int),
    Option("width", "pixels; by default the model's own", type=int),
    PRESET_OPTION,
    Option("steps", "denoising steps", 50, type=int),
    Option("seed", "seed of the noise; the same for every prompt and preset", 0, type=int),
    Option("guidance", "scale of classifier-free guidance; by default the model's own", type=float),
    Option("guidance_2", "the same for the second expert of Wan 2.2, instead of the first one's", type=float),
    Option("dtype", "arithmetic; auto is fp32 on CPU and bf16 elsewhere", "auto", choices=DTYPES),
    Option("exact", "compare with the exact baseline (the same run)", True, type=bool),
    *BOUND_OPTIONS,
    Option("out", "folder of the results", "generated"),
    *JOB_OPTIONS,
)


def start(words: Sequence[str], launch: Launch) -> int:
    """Run the command `cocodiff generate` on this rank. Return its exit code.

    Args:
        words: the words of the command line after `generate`.
        launch: the start of this process, alone or as one of a launcher's ranks.
    """
    started = time.monotonic()
    values = parse("generate", ABOUT, with_settings(OPTIONS), words, headings=SHOWN)
    launch, ranks = settle(values, launch)
    prepared = prepare(values, ranks, started)
    if launch.speaks:
        say(f"cocodiff {__version__}: {', '.join(prepared.presets)} on {ranks} rank(s) into {values['out']}")
    prepared = prepared.partitioned(images=max(1, len(values["prompt"])))
    request = prepared.request
    unit = "images" if request.video is None else "videos"
    prepared = replace(prepared, inputs=lambda: request.content)
    return start_job(prepared, launch, unit, "cocodiff_eval.harness.images:ImageJob")


def prepare(values: dict[str, Any], ranks: int, started: float) -> Prepared:
    """Check the command's request against machine, model and output. Return the job, which is not started.

    Raise UserError if it cannot be run. Nothing is written.

    Args:
        values: the options' values by name.
        ranks: number of ranks.
        started: time at which the command began, as of `time.monotonic`.
    """
    check_counts(values, "steps", "height", "width", "frames", "fps", "ranks")
    quality = Quality.asked(values)
    if quality is not None and quality.bound.against == "truth":
        raise UserError(
            f"--quality {quality.bound} is a loss against the truth, which generated images have not: give a distance "
            f"to the exact run, as 50dB"
        )
    prompts, scales = tuple(values["prompt"]), (values["guidance"], values["guidance_2"])
    request = Request(values["model"], GENERATE, prompts, *scales, image=values["image"])
    if values["frames"] is not None and request.video is None:
        raise UserError(f"--frames {values['frames']}: model {request.model} makes images: leave it away")
    return Prepared.checked(values, ranks, request, started, quality)

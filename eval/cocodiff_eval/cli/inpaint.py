"""The command `cocodiff inpaint`: restores masked regions of slices on any number of ranks, and measures quality."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.jobs.options import JOB_OPTIONS, Option, check_counts, check_strength, parse, with_settings
from cocodiff.jobs.ranks import run_ranks, settle
from cocodiff.jobs.terminal import say
from cocodiff.models.family import INPAINT
from cocodiff_eval.data import SAME, WRITTEN
from cocodiff_eval.harness.partition import is_planned
from cocodiff_eval.harness.pipelines import EMBEDDED, Request, check_model, usual_steps
from cocodiff_eval.harness.quality import BOUND_OPTIONS, PRESET_OPTION, Quality
from cocodiff_eval.harness.session import DTYPES, Prepared

ABOUT = "Restore masked regions of slices with a diffusion transformer."
SHOWN = {
    "data": "input mask grow invert slices roi range truth",
    "restoring": "model prompt guidance steps strength seed samples axes hidden_test",
}
STEPS = "a number of steps, or auto"
MASK_OPTIONS = (
    Option("grow", "voxels by which a mask file is made larger on each side, along z too if it is 3-D", 0, type=int),
    Option("invert", "restore what a mask file does not mark (default: refuses one that marks nearly all)", type=bool),
)
OPTIONS = (
    Option(
        "input",
        "PNG, TIFF, a folder of TIFF files, HDF5, OME-Zarr, MRC or .npy; also stacks in TIFF, a quoted pattern of "
        "names of TIFF files as one stack, and a dataset of HDF5 as file.h5:/dataset",
        many=True,
        required=True,
    ),
    Option(
        "mask",
        "block, center or a file, non-zero where to restore; labels/NAME is one of the Zarr input's own store; "
        "one or more",
        ["block"],
        many=True,
    ),
    *MASK_OPTIONS,
    Option("slices", "restore these slices only, as 100:200; results hold them alone, and say which they are"),
    Option("roi", "restore these rows and columns only, as y0:y1,x0:x1; results hold them alone"),
    Option("range", "intensities low,high seen as black and white; by default those of known voxels, without outliers"),
    Option("format", f"of the results; {SAME} is the input's own, TIFF for PNG", SAME, choices=(SAME, *WRITTEN)),
    PRESET_OPTION,
    Option("steps", "steps that run; auto: the model's own", "auto", type=int | str, choices=("auto",), wanted=STEPS),
    Option("strength", "how far the fill under the mask is noised; 1: entirely", 1.0, type=float),
    Option("seed", "seed of block masks and of the noise", 0, type=int),
    Option("samples", "restorations of each slice; of several, mean, spread and intervals are written", 1, type=int),
    Option(
        "axes",
        "slices are restored along these of z, y and x; samples are spread over them, and fused; auto chooses by a "
        "test on hidden regions (default: auto for several samples of 16 slices or more, else z)",
        many=True,
    ),
    Option(
        "hidden_test",
        "hide regions like the mask's in known voxels; axes, weights and intervals are learnt there, and how "
        "good methods without a model are (default: of several samples of 16 slices or more; of less, for "
        "intervals alone; --no_hidden_test: neither)",
        type=bool,
    ),
    Option("keep_samples", "write each sample as well", False, type=bool),
    Option("prompt", "what the slices show (for models with text encoders)", ""),
    Option("guidance", "scale of classifier-free guidance; by default the model's own", type=float),
    Option("model", "folder in diffusers' layout or hub id", EMBEDDED),
    Option("truth", "the original (where a mask file hides unknown voxels)"),
    Option("dtype", "arithmetic; auto is fp32 on CPU and bf16 elsewhere", "auto", choices=DTYPES),
    Option("tile", "pixels of a side of what the model sees at once; by default its own size", type=int),
    Option("frames", "slices at most that a model of videos restores as one; by default its own number", type=int),
    Option(
        "fresh_noise",
        "restore with the model's pipeline for generating, and draw this share of each step's noise anew: 1 has the "
        "least error, 0 the finest structure (default: 1 where diffusers has no inpainting pipeline, else that one)",
        type=float,
    ),
    Option("batch", "tiles in one model call; by default 16 of a small model, 2 of a large one", type=int),
    Option("exact", "compare with the exact baseline (the same run)", True, type=bool),
    Option("exact_slices", "slices of a stack that are compared with it, evenly spread", 8, type=int),
    *BOUND_OPTIONS,
    Option("follow_links", "read other files that an HDF5 file links to or has its voxels in", False, type=bool),
    Option("out", "folder of the results", "restored"),
    *JOB_OPTIONS,
)
# Values of the options for volumes, in jobs that treat each slice by itself.
SLICE_BY_SLICE = {"samples": 1, "axes": ["z"], "hidden_test": False, "keep_samples": False, "quality": None}


def start(words: Sequence[str], launch: Launch) -> int:
    """Run the command `cocodiff inpaint` on this rank. Return its exit code.

    Args:
        words: the words of the command line after `inpaint`.
        launch: the start of this process, alone or as one of a launcher's ranks.
    """
    started = time.monotonic()
    values = parse("inpaint", ABOUT, with_settings(OPTIONS), words, headings=SHOWN)
    launch, ranks = settle(values, launch)
    prepared = prepare(values, ranks, started)
    if launch.speaks:
        what = f"{', '.join(prepared.presets)} on {ranks} rank(s)"
        say(f"cocodiff {__version__}: {what} into {values['out']}; reading {len(values['input'])} input(s)")
    from cocodiff_eval.harness.tasks import start_slices  # imports the libraries that read files

    return start_slices(prepared, launch, say_time_here)


def prepare(values: dict[str, Any], ranks: int, started: float) -> Prepared:
    """Check the command's request against machine, model and output. Return the job, which is not started.

    Raise UserError if it cannot be run. Nothing is written. `--steps auto` becomes a number in `values`.

    Args:
        values: the options' values by name.
        ranks: number of ranks.
        started: time at which the command began, as of `time.monotonic`.
    """
    fresh = values["fresh_noise"]
    request = Request(values["model"], INPAINT, (values["prompt"],), values["guidance"], keeps=fresh is not None)
    if values["steps"] == "auto":
        values["steps"] = usual_steps(request)
    check_counts(values, "steps", "batch", "ranks", "exact_slices", "samples", "tile", "frames")
    check_strength(values["strength"], [values["steps"]])
    if fresh is not None and not 0 <= fresh <= 1:
        raise UserError(f"--fresh_noise {fresh:g}: give a share from 0 to 1")
    if fresh is not None and not request.keeps_known:
        raise UserError(f"--fresh_noise {fresh:g}: model {request.model} only restores: leave it away")
    prepared = Prepared.checked(values, ranks, request, started, Quality.asked(values))
    for how, lacks in (("tiled", "has no tiles"), ("sharded", "is not known in bands")):
        if request.own is not None and any(config.vae == how for config in prepared.presets.values()):
            raise UserError(f"--vae {how}: the embedded model's VAE {lacks}: choose one or all")
    return prepared


def say_time_here(prepared: Prepared, launch: Launch, tile_steps: int) -> None:
    """Print, for `--dry_run`, how long a job takes, by calls of the pipeline that are timed here.

    Nothing is printed if the plan predicts it, or if the model cannot be run here, as without weights.

    Args:
        prepared: the job.
        launch: the start of this process.
        tile_steps: denoising steps of all tiles.
    """
    request = prepared.request
    if not load_machine(prepared.values["machine"]).missing_rates and is_planned(request):
        return
    from cocodiff_eval.harness.restoring import say_time

    with suppress(UserError):
        check_model(request, 1)
        run_ranks(1, launch, next(iter(prepared.presets.values())), {}, partial(say_time, prepared, tile_steps))

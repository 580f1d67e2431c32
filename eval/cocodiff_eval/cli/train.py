"""The command `cocodiff train`: trains the embedded model on a user's own volumes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import RESUME, RUN_OPTIONS, Option, check_counts, engine_settings, parse, with_settings
from cocodiff.jobs.ranks import run_holding, settle
from cocodiff.jobs.terminal import note, say
from cocodiff_eval.cli.inpaint import MASK_OPTIONS, SLICE_BY_SLICE
from cocodiff_eval.harness.pipelines import EMBEDDED, own_weights

ABOUT = (
    "Train the embedded model on patches of known voxels of your own volumes. An eighth of each volume is held out and "
    "tells whether it helps; `cocodiff inpaint --model FOLDER` takes the result."
)
NOTHING = "none"  # the mask's name that hides nothing
# options by the heading that `--help` shows them under
SHOWN = {"data": "input mask grow invert slices roi range", "training": "model anew iterations batch patches rate seed"}
OPTIONS = (
    Option("input", "volumes or slices, in every format that inpaint reads", many=True, required=True),
    Option("mask", f"mask file of what is missing in the inputs, or {NOTHING}", NOTHING),
    *MASK_OPTIONS,
    Option("slices", "of these slices only, as 100:200"),
    Option("roi", "of these rows and columns only, as y0:y1,x0:x1"),
    Option("range", "intensities low,high that it sees as black, white; as in inpaint"),
    Option("model", "embedded, or the folder of one that was trained (from it, to go on from)", EMBEDDED),
    Option("anew", "begin with random weights instead of the model's", False, type=bool),
    Option("iterations", "updates", 3000, type=int),
    Option("batch", "patches in an update, of all ranks together", 16, type=int),
    Option("patches", "cut from the volumes to train on", 4000, type=int),
    Option("rate", "of learning; 1 for that which random weights begin with (default: .2, with --anew 1)", type=float),
    Option("seed", "of patches, masks and noise", 0, type=int),
    Option("follow_links", "read other files that an HDF5 file links to or has its voxels in", False, type=bool),
    Option("out", "folder of the model", "trained"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    RESUME,
    *RUN_OPTIONS,
)


def start(words: Sequence[str], launch: Launch) -> int:
    """Run the command `cocodiff train` on this rank. Return its exit code.

    Args:
        words: the words of the command line after `train`.
        launch: the start of this process, alone or as one of a launcher's ranks.
    """
    options = with_settings(OPTIONS, lambda one: one.given == "machine")
    values = parse("train", ABOUT, options, words, headings=SHOWN)
    launch, ranks = settle(values, launch)
    check_counts(values, "iterations", "batch", "patches", "ranks")
    if values["rate"] is None:
        values["rate"] = 1.0 if values["anew"] else 0.2
    if not 0 < values["rate"] <= 100:
        raise UserError(f"--rate {values['rate']:g}: give a number above 0 and up to 100")
    weights = own_weights(values["model"])
    if weights is None:
        raise UserError(
            f"--model {values['model']}: only the embedded model, or one trained from it, can be trained: leave "
            f"it away, or name a folder that cocodiff train has written"
        )
    output = OutputFolder(values["out"], values["overwrite"], values["resume"])
    output.keep_apart([*values["input"], values["mask"]])
    if output.finished is not None:
        if launch.speaks:
            say(f"nothing is left to do: the model in {output.final} is finished")
        return 0
    if launch.speaks:
        say(f"cocodiff {__version__}: training on {ranks} rank(s) into {values['out']}")
    from cocodiff_eval.harness.tasks import find_tasks

    tasks = find_tasks(values | SLICE_BY_SLICE | {"mask": [values["mask"]], "truth": None}, unmasked=NOTHING)
    config = Config.preset("flat", **engine_settings(values))

    def imports() -> None:
        """Import what ranks need before they are forked, so that they share it."""
        if not values["quiet"]:
            note("importing torch and diffusers")
        import cocodiff_eval.harness.training  # noqa: F401  before ranks are forked, so that they share it

    return run_holding(output, values, launch, config, partial(work, tasks, values, weights, output), imports)


def work(tasks: list[Any], values: dict[str, Any], weights: Path, output: OutputFolder, transport: Any) -> None:
    """Train the embedded model, as one of several ranks.

    Args:
        tasks: a `tasks.Task` for each input, with the mask of what is missing in it.
        values: the options' values by name.
        weights: folder of the model to start from.
        output: folder of the results.
        transport: the connection to the other ranks.
    """
    from cocodiff_eval.harness.training import train

    train(tasks, values, weights, output, transport)

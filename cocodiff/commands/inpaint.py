"""`cocodiff inpaint`: restores masked regions of slices, on any number of ranks, and says how well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch, detect
from cocodiff.commands.deal import deal_of, own_pixels, with_guidance
from cocodiff.commands.options import (
    DEAL_OPTIONS,
    RESUME,
    RUN_OPTIONS,
    Option,
    check_counts,
    check_strength,
    parse,
    preset_configs,
    with_settings,
)
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.pipelines import EMBEDDED, Request, check_model
from cocodiff.commands.record import described_inputs
from cocodiff.commands.session import DTYPES, Job, finish, open_session, run_job, settle
from cocodiff.commands.terminal import reading_bar, say
from cocodiff.config import load_machine
from cocodiff.errors import UserError
from cocodiff.files import is_there
from cocodiff.models.family import INPAINT
from cocodiff.topology.machine import Topology

ABOUT = "Restore masked regions of slices with a diffusion transformer."
OPTIONS = (
    Option("input", "slices: PNG, TIFF (also stacks) or HDF5 as file.h5:/dataset", many=True, required=True),
    Option(
        "mask", "block, center or a mask file whose non-zero voxels are restored; one or more", ["block"], many=True
    ),
    Option("preset", "how ranks exchange tokens: one or more presets, as A,B or A B", ["tapa"], many=True),
    Option("steps", "denoising steps that run", 50, type=int),
    Option(
        "strength", "how far the fill under the mask is noised before it is restored, 1 for entirely", 1.0, type=float
    ),
    Option("seed", "seed of block masks and of the noise", 0, type=int),
    Option("prompt", "what the slices show, for models with text encoders", ""),
    Option("guidance", "classifier-free guidance scale, instead of the model's own", type=float),
    Option("model", "folder in diffusers' layout or hub id, instead of the embedded model", EMBEDDED),
    Option("truth", "the original, where a mask file hides unknown voxels"),
    Option("dtype", "arithmetic; auto is fp32 on CPU and bf16 elsewhere", "auto", choices=DTYPES),
    Option("batch", "tiles in one model call; by default 16 of a small model, 2 of a large one", type=int),
    Option("exact", "compare with the same run in the exact baseline", True, type=bool),
    Option("exact_slices", "slices of a stack that are compared with it, evenly spread", 8, type=int),
    Option("follow_links", "read other files that an HDF5 file links to or has its voxels in", False, type=bool),
    Option("out", "folder of the results", "restored"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    RESUME,
    *DEAL_OPTIONS,
    *RUN_OPTIONS,
)


def start(words: Sequence[str], launch: Launch) -> int:
    started = time.monotonic()
    values = parse("inpaint", ABOUT, with_settings(OPTIONS), words)
    ranks = settle(values, launch)
    job = prepare(values, ranks, started)
    if launch.speaks:
        what = f"{', '.join(job.presets)} on {ranks} rank(s)"
        say(f"cocodiff {__version__}: {what} into {values['out']}; reading {len(values['input'])} input(s)")
    tasks = find_tasks(values)
    job = deal(job, tasks, ranks)
    if values["dry_run"]:
        return 0
    compared = {f"intensities of {task.stack.name} outside {task.mask.name}": str(task.scale) for task in tasks}
    return run_job(job, launch, partial(work, tasks), compared)


def prepare(values: dict[str, Any], ranks: int, started: float) -> Job:
    """Checks the request against machine, model and output. Raises UserError; writes nothing."""
    check_counts(values, "steps", "batch", "ranks", "exact_slices")
    check_strength(values["strength"], [values["steps"]])
    presets = preset_configs(values)
    Topology.build(load_machine(values["machine"]), ranks)
    request = Request(values["model"], INPAINT, (values["prompt"],), values["guidance"])
    check_model(request, 1, weights=not values["dry_run"])
    if request.model == EMBEDDED and any(config.vae == "tiled" for config in presets.values()):
        raise UserError("--vae tiled: the embedded model's VAE has no tiles: choose one or all")
    output = OutputFolder(values["out"], values["overwrite"], values["resume"])
    output.keep_apart([*values["input"], *values["mask"], *filter(None, [values["truth"]])])
    return Job(values, request, presets, output, started)


def deal(job: Job, tasks: list[Any], ranks: int) -> Job:
    """The job with its ranks dealt to replicas and guidance. Raises UserError."""
    from cocodiff.commands.restore_stack import SMALL_MODEL, slices_together, tiles_in_a_call

    values, native, presets = job.values, own_pixels(job.request.model), [*job.presets.values()]
    batch = tiles_in_a_call(values["batch"], native)
    counts = [(len(task.stack), slices_together(task.stack.shape[1:], native, batch)) for task in tasks]
    chosen = deal_of(
        values,
        job.request,
        presets,
        ranks,
        images=sum(slices for slices, _ in counts),
        batches=sum(-(-slices // together) for slices, together in counts),
        batch=batch if native <= SMALL_MODEL else 1,
    )
    check_model(job.request, ranks // (chosen.replicas * chosen.guidance), weights=not values["dry_run"])
    return replace(job, presets=with_guidance(job.presets, chosen, job.request), deal=chosen)


def find_tasks(values: dict[str, Any]) -> list[Any]:
    """The work: a `restore_stack.Task` for each input and mask. Raises UserError; reads, writes nothing."""
    from cocodiff_eval.intensity import intensity_range
    from cocodiff_eval.masks import make_mask
    from cocodiff_eval.slices import open_stacks, open_truth

    from cocodiff.commands.restore_stack import Task, file_names

    links, progress = values["follow_links"], reading_bar(not values["quiet"] and detect().speaks)
    stacks = open_stacks(values["input"], links)
    if values["truth"] and len(stacks) > 1:
        raise UserError(f"--truth is the original of one input and {len(stacks)} were given: run them one by one")
    masks = list(dict.fromkeys(values["mask"]))
    if len(masks) == 1 and not is_there(masks[0]):
        masks = list(dict.fromkeys(masks[0].split(",")))
    found: list[tuple[Any, Any, Any, Any]] = []
    for stack in stacks:
        truth = open_truth(values["truth"], stack, links) if values["truth"] else None
        for number, word in enumerate(masks):
            mask = make_mask(word, stack, values["seed"], links, progress)
            if any(mask.name == other.name for of, other, *_ in found if of is stack):
                raise UserError(f"--mask {word}: two masks are called {mask.name}: rename file {number + 1}")
            known = truth or (None if mask.from_file else stack)
            found.append((stack, mask, intensity_range(stack, mask, progress), known))
    names = file_names([(stack.name, mask.name) for stack, mask, *_ in found])
    return [Task(*one, files) for one, files in zip(found, names, strict=True)]


def work(tasks: list[Any], job: Job, transport: Any) -> None:
    """One rank's part: the model once, then the batches that its replica takes, every slice in every preset."""
    import torch
    from cocodiff_eval.metrics import json_ready
    from cocodiff_eval.report import plan_pictures

    from cocodiff.commands.report_pictures import ReportPictures
    from cocodiff.commands.restore_stack import (
        Restorer,
        batches_of,
        picture_of,
        restore_batch,
        result_files,
        save_previews,
        slices_together,
    )

    values, session = job.values, open_session(job, transport)
    presets = list(job.presets)
    restorer = Restorer.of_model(session.model, values, values["steps"], session.engines, presets, session.exact)
    masked: list[list[bool]] = transport.broadcast_object(find_masked(tasks) if transport.rank == 0 else None)
    pages = ReportPictures(job.output.journals.folder, plan_pictures(masked, len(presets) + 1))
    batches: list[Any] = []
    for number, (task, of_task) in enumerate(zip(tasks, masked, strict=True)):
        together = slices_together(task.stack.shape[1:], restorer.inpainter.native_size, restorer.batch)
        batches += batches_of(number, of_task, together, values["exact_slices"])
    settings = partial(describe_inputs, tasks, values)
    with session.queue(settings, [len(batch.indices) for batch in batches], "slices") as queue, torch.no_grad():
        if session.folder is not None:
            for task in tasks:
                for file in result_files(task, presets, session.images).values():
                    if not file.path.exists():
                        file.create()
        transport.broadcast_object(None)  # the files are there
        restorer.inpainter.on_step = queue.bar.advance
        for number in queue:
            batch = batches[number]
            leads, task = session.replica.leads, tasks[batch.task]
            rows = restore_batch(task, batch, restorer, session.images, leads, queue.bar, pages)
            if leads:
                queue.add(number, [[batch.task, index, json_ready(row)] for index, row in rows])
    found: list[Any] = []
    if session.folder is not None:
        found = sorted(queue.rows(), key=lambda one: one[:2])
        for task, of_task in zip(tasks, masked, strict=True):
            save_previews(task, of_task, presets, session.images)
    pictures = pages.all(
        found,
        lambda task, index: picture_of(tasks[task], index, presets, session.images),
        reading_bar(not values["quiet"]),
    )
    counts = {task.stack.name: len(task.stack) for task in tasks if len(task.stack) > 1}
    finish(session, [row for _, _, row in found], pictures, slice_counts=counts, side=pages.plan.side)


def find_masked(tasks: list[Any]) -> list[list[bool]]:
    """Which slices of each task have something to restore."""
    return [[bool(task.mask.read(index).any()) for index in range(len(task.stack))] for task in tasks]


def describe_inputs(tasks: list[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {"exact_slices": values["exact_slices"], "inputs": described_inputs(tasks)}

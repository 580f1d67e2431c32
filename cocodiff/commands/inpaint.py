"""`cocodiff inpaint`: restores masked regions of slices, on any number of ranks, and says how well."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.commands.options import RUN_OPTIONS, Option, engine_config, parse
from cocodiff.commands.outputs import MARK, OutputFolder
from cocodiff.commands.pipelines import EMBEDDED, check_model, load_model
from cocodiff.commands.ranks import run_ranks
from cocodiff.commands.terminal import limit_threads, quiet_libraries, say
from cocodiff.config import Config, check_choice, load_machine, preset_names
from cocodiff.errors import UserError
from cocodiff.topology import Topology

EXACT = "flat"
EVERY_RANK_IMPORTS = (
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_inpaint",
    "skimage.metrics",
    "skimage.restoration",
    "cocodiff.commands.restore_stack",
    "cocodiff.demo_model.vae",
    "cocodiff.engine",
    "cocodiff_eval.report",
)
SMALL_MODEL = 256  # pixels on a side
DTYPES = ("auto", "fp32", "bf16", "fp16")
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
    Option("out", "folder of the results", "restored"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    *RUN_OPTIONS,
)


@dataclass(frozen=True)
class Job:
    """A checked request: everything that can be known before ranks start."""

    values: dict[str, Any]
    presets: dict[str, Config]
    tasks: list[Any]  # one for each stack and mask: restore_stack.Task
    output: OutputFolder


def start(words: Sequence[str], launch: Launch) -> int:
    started = time.monotonic()
    values = parse("inpaint", "Restore masked regions of slices with a diffusion transformer.", OPTIONS, words)
    quiet_libraries(values["log_level"])
    ranks = (values["ranks"] if launch.kind == "alone" else launch.size) or 1
    limit_threads(launch.local_size or ranks)
    job = prepare(values, ranks)
    if launch.speaks:
        say(f"cocodiff {__version__}: {', '.join(job.presets)} on {ranks} rank(s)")
    if launch.kind == "alone":
        import_before_fork()
    alike = {name: str(value) for name, value in values.items() if name != "ranks"}
    alike |= {f"intensities of {task.stack.name} outside {task.mask.name}": str(task.scale) for task in job.tasks}
    code = 1
    try:
        code = run_ranks(values["ranks"], launch, next(iter(job.presets.values())), alike, partial(work, job, started))
    finally:
        if code:
            job.output.discard()
    return code


def prepare(values: dict[str, Any], ranks: int) -> Job:
    """Checks the request against files, machine and model. Raises UserError; writes nothing."""
    from cocodiff_eval.intensity import intensity_range
    from cocodiff_eval.masks import make_mask
    from cocodiff_eval.slices import open_stacks, open_truth

    from cocodiff.commands.restore_stack import Task

    for name, least in (("steps", 1), ("batch", 1), ("ranks", 1)):
        if values[name] is not None and values[name] < least:
            raise UserError(f"--{name} {values[name]}: at least {least} is needed")
    if not 0 < values["strength"] <= 1:
        raise UserError(f"--strength {values['strength']}: give a number above 0 and up to 1")
    names = list(dict.fromkeys(name for word in values["preset"] for name in word.split(",") if name))
    for name in names:
        check_choice("preset", name, preset_names())
    settings = vars(engine_config(values))
    kept = {key: settings[key] for key in ("machine", "transport", "device", "timeout_s")}
    presets = {name: Config.preset(name, **kept) for name in names}
    Topology.build(load_machine(values["machine"]), ranks)
    check_model(values["model"], ranks)
    output = OutputFolder(values["out"], values["overwrite"])
    stacks = open_stacks(values["input"])
    if values["truth"] and len(stacks) > 1:
        raise UserError(f"--truth is the original of one input and {len(stacks)} were given: run them one by one")
    masks = list(dict.fromkeys(values["mask"]))
    if len(masks) == 1 and not Path(masks[0]).exists():
        masks = list(dict.fromkeys(masks[0].split(",")))
    tasks: list[Task] = []
    for stack in stacks:
        truth = open_truth(values["truth"], stack) if values["truth"] else None
        for number, word in enumerate(masks):
            mask = make_mask(word, stack, values["seed"])
            if any(mask.name == task.mask.name for task in tasks if task.stack is stack):
                raise UserError(f"--mask {word}: two masks are called {mask.name}: rename file {number + 1}")
            known = truth or (None if mask.from_file else stack)
            tasks.append(Task(stack, mask, intensity_range(stack, mask), known))
    return Job(values, presets, tasks, output)


def import_before_fork() -> None:
    """Imports what every rank needs once, in the process that ranks are forked from."""
    for name in EVERY_RANK_IMPORTS:
        import_module(name)


def work(job: Job, started: float, transport: Any) -> None:
    """One rank's part: the model once, then every stack under every mask in every preset. Rank 0 judges and writes."""
    import torch
    from cocodiff_eval.pipeline_inpainter import PipelineInpainter
    from cocodiff_eval.tiling import TilingSettings

    from cocodiff.commands.restore_stack import Restorer, restore_stack
    from cocodiff.engine import Engine

    values, speaks = job.values, transport.rank == 0
    transport.health.when_lost(lambda error: job.output.discard())
    dtype = pick_dtype(values["dtype"], transport.device.type)
    model = load_model(values["model"], dtype, values["prompt"], values["guidance"])
    model.pipe.to(transport.device)
    # `--steps` counts the steps that run, also where a strength below 1 skips the first part of the schedule.
    steps = round(values["steps"] / values["strength"])
    inpainter = PipelineInpainter(model.pipe, model.prompt_kwargs, steps, values["seed"], model.guidance_scale)
    modes = dict(job.presets)
    if values["exact"] and EXACT not in modes:
        modes[EXACT] = next(iter(job.presets.values())).with_(exchange="flat")
    engines = {mode: Engine(model.pipe, config, transport) for mode, config in modes.items()}
    folder = job.output.open() if speaks else None
    if folder is not None:
        (folder / "images").mkdir()
    transport.broadcast_object(None)  # all ranks have their model
    if speaks:
        say(f"{transport.size} rank(s) ready after {time.monotonic() - started:.1f} s")
    # More tiles a call mean fewer messages; what limits them is the memory of large models.
    batch = values["batch"] or (16 if inpainter.native_size <= SMALL_MODEL else 2)
    restorer = Restorer(
        inpainter, engines, list(job.presets), EXACT if EXACT in engines else None, batch,
        TilingSettings(strength=values["strength"]), speaks, bars=not values["quiet"],
    )  # fmt: skip
    rows, pictures = [], []
    with torch.no_grad():
        for task in job.tasks:
            done = restore_stack(task, restorer, folder)
            rows += done.rows
            pictures += done.pictures
    records = {mode: transport.gather_object(engine.trace.record()) for mode, engine in engines.items()}
    if folder is not None:
        write_results(job, folder, transport.size, model.name, rows, pictures, records)
    transport.broadcast_object(None)  # nobody leaves before the results stand


def pick_dtype(name: str, device: str) -> Any:
    import torch

    if name == "auto":
        name = "fp32" if device == "cpu" else "bf16"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def write_results(
    job: Job, folder: Path, ranks: int, model: str, rows: list[Any], pictures: list[Any], records: dict[str, Any]
) -> None:
    import json

    import yaml
    from cocodiff_eval.metrics import metrics_document
    from cocodiff_eval.report import write_report
    from cocodiff_eval.table import terminal_table

    from cocodiff.trace import save_traces

    document = metrics_document(job.values, ranks, rows)
    (folder / "metrics.json").write_text(json.dumps(document, indent=1))
    save_traces(folder / "trace.json", records)
    facts = {
        "model": model,
        "ranks": str(ranks),
        "machine": job.values["machine"],
        "presets": ", ".join(job.presets),
        "steps": str(job.values["steps"]),
        "seed": str(job.values["seed"]),
        "cocodiff": __version__,
    }
    counts = {task.stack.name: len(task.stack) for task in job.tasks if len(task.stack) > 1}
    write_report(folder / "report.html", document, pictures, facts, slice_counts=counts)
    settings = {name: value for name, value in job.values.items() if value is not None}
    (folder / MARK).write_text(yaml.safe_dump(settings, sort_keys=False))
    job.output.publish()
    say()
    say(terminal_table(document))
    say()
    say(f"report: {job.output.final / 'report.html'}")

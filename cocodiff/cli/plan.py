"""`cocodiff plan`: the memory, bytes and time of a run, without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from cocodiff.cli import plan_report as report
from cocodiff.comm.launch import Launch
from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.options import LOG_LEVEL, Option, check_counts, engine_record, parse, preset_configs, with_settings
from cocodiff.jobs.record import write_document
from cocodiff.jobs.terminal import quiet_libraries, say
from cocodiff.models.adapter import image_and_text
from cocodiff.models.family import Video
from cocodiff.planner.case import Case, ModelShape
from cocodiff.planner.choice import MARGIN, Division, choose, shared_weights, untimed, with_weights_chosen
from cocodiff.planner.decisions import read_decisions
from cocodiff.planner.memory import mib
from cocodiff.topology import Topology
from cocodiff.topology.axes import Partition, partitions_of

SIDE = 1024  # pixels of an image's side by default
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of an element
VIDEO = ("frames", "height", "width")  # options for the size of a video
OPTIONS = (
    Option("model", "a name in configs/models, a .yaml file, or a folder in diffusers' layout"),
    Option("size", f"side of the square image in pixels (default: {SIDE})", type=int),
    *(Option(name, "of a video, instead of the model's own", type=int) for name in VIDEO),
    Option("batch", "images in one call", 1, type=int),
    Option("steps", "denoising steps that run", 50, type=int),
    Option("text_tokens", "tokens of the prompt; default: the model's longest", type=int),
    Option("negative_tokens", "tokens of the prompt that guidance leads away from; default: as many", type=int),
    Option("machine", "machine of the run: aurora or a .yaml file", "aurora"),
    Option("nodes", "nodes of the run (default: 1)", type=int),
    Option("ranks", "ranks of the run, on a machine of no fixed size", type=int),
    Option("preset", "the run's preset; by default that of jobs", "tapa"),
    Option(
        "images",
        "images of a whole job: plans the partition of the ranks into replicas and guidance branches that makes them "
        "soonest; with --compare the table of all partitions",
        type=int,
    ),
    Option("branches", "guidance branches, calls in a step (1: no guidance; default: the model's own)", type=int),
    Option("dtype", "of weights, activations and caches", "bf16", choices=tuple(DTYPES)),
    Option("stable", "of the tokens, the part that stays where a schedule goes by a threshold", 0.7, type=float),
    Option(
        "decisions",
        "with arrival adaptive: metrics.json of such runs, or files of decisions, which say what is displaced at each "
        "step; default: recorded runs of the embedded model",
        [],
        many=True,
    ),
    Option("memory", "the memory part alone", False, type=bool),
    Option("compare", "all presets side by side, with plan.png; with --images all partitions", False, type=bool),
    Option("explain", "the timeline of one layer on rank 0 and its plan of messages", False, type=bool),
    Option("paper", "the CoCoDiff paper's cases, on a machine that is fitted to its figure 11", False, type=bool),
    Option("out", "folder that plan.json is written to; default: a plan is printed alone"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    LOG_LEVEL,
)


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff plan` with its options, and return its exit code.

    Args:
        words: the options.
        launch: how this process was started.
    """
    options = with_settings(OPTIONS, lambda one: one.given == "sweep")
    values = parse("plan", "Says what a run would take, without starting it.", options, words)
    quiet_libraries(values["log_level"])
    check(values)
    if not launch.speaks:
        return 0
    plan: dict[str, Any] = {"schema": 1}
    if values["out"] is None:
        run_plan(values, plan, None)
        return 0
    output = OutputFolder(values["out"], values["overwrite"])
    with output.held(), output.writing():
        folder = output.open()
        run_plan(values, plan, folder)
        write_document(folder, "plan.json", plan, values)
        output.publish()
    say(f"results: {output.final / 'plan.json'}")
    return 0


def check(values: dict[str, Any]) -> None:
    """Raise UserError for options that are invalid or do not go together.

    Args:
        values: the command's options by name.
    """
    if not values["paper"] and not values["model"]:
        raise UserError("--model is missing: sd3.5, flux.1, flux.2, qwen-image, wan2.2, a .yaml file or a folder")
    check_counts(values, "batch", "steps", "size", "frames", "height", "width", "nodes", "ranks", "branches", "images")
    for name in ("text_tokens", "negative_tokens"):
        if values[name] is not None and values[name] < 0:
            raise UserError(f"--{name} {values[name]}: at least 0 is needed")
    if values["images"] is not None and values["memory"]:
        raise UserError("--images asks for the time of a job and --memory for memory alone: leave one of them away")
    if not 0 <= values["stable"] <= 1:
        raise UserError(f"--stable {values['stable']:g}: give a part from 0 to 1")


def run_plan(values: dict[str, Any], plan: dict[str, Any], folder: Path | None) -> None:
    """Plan a run, or with --paper the paper's cases: print memory, partition and time, and add them to the content of
    plan.json.

    Args:
        values: the command's options by name.
        plan: the content of plan.json, which is added to.
        folder: folder of the results, which further files are written to; None for none.
    """
    if values["paper"]:
        plan |= import_module("cocodiff_studies.papers").run_paper(values)
        return
    shape = load_shape(values["model"])
    video = video_of(values, shape)
    case, choice = case_of(values, shape, video), None
    report.say_all(replicas_line(case))
    pinned = None if case.config.guidance_parallel == "auto" else int(case.config.guidance_parallel)
    if values["images"] is None:  # all ranks make one image, guidance in two halves where their number is even
        halves = 2 if case.topology.size % 2 == 0 else 1
        partition = Partition(1, (pinned or halves) if case.guides else 1)
    else:
        batches = -(-values["images"] // values["batch"])
        choice = choose([case], values["images"], batches, partitions_of(case.topology.size, case.guides, None, pinned))
        partition = choice.taken.partition
    if case.config.weights == "auto":
        case = with_weights_chosen(case, partition)
        report.say_all(shared_weights(case.config))
    division = Division(partition, [case])
    memory, why = report.memory_of(division, video)
    plan |= {"case": report.record_of(division, values, video)} | memory
    say("\n".join(report.memory_table(plan, case.topology, why)))
    if choice is not None:
        plan |= report.partitions_of_job(choice)
        table = report.partitions_table(plan["deals"]) if values["compare"] else []
        say("\n".join([*table, choice.line()]))
    elif pinned == 2 and not case.guides:
        say(f"guidance_parallel 2: {shape.name} computes one branch, on all ranks")
    elif partition.guidance > 1:
        each = case.topology.size // partition.guidance
        say(f"guidance_parallel {partition.guidance}: each branch on {each} rank(s)")
    unknown = None if values["memory"] else untimed(case.topology.machine)
    if unknown is not None:
        say(unknown)
    elif not values["memory"]:
        report.add_times(values, division, plan, folder)


def replicas_line(case: Case) -> list[str]:
    """Return the line that says that each rank has memory for the whole run, so that replicas of one rank need no
    exchange, in a list.

    Return an empty list if the memory does not suffice or is not known, and if there is only one rank.
    """
    ranks, config = case.topology.size, engine_record().preset("flat", guidance_parallel=1, weights="whole")
    if ranks == 1 or not case.tile:
        return []
    need = Division(Partition(ranks, 1), [replace(case, config=config)]).need.total
    if need + MARGIN > case.tile:
        return []
    return [
        f"each rank has memory for the whole run ({mib(need)} of {mib(case.tile)} MiB): for {ranks} images or more, as "
        f"slices of a scan, {ranks} replicas of one rank need no exchange at all (--images N plans a job)"
    ]


def topology_of(values: dict[str, Any]) -> Topology:
    """Return the ranks that the options ask for, on their machine.

    Raise UserError if the machine has no fixed size and no number of ranks is given, or if the ranks are on another
    number of nodes than is given.

    Args:
        values: the command's options by name.
    """
    machine = load_machine(values["machine"])
    if values["ranks"] is None and machine.tiles_per_node is None:
        raise UserError(f"machine {machine.name} has no fixed size: add --ranks N")
    nodes = values["nodes"] or 1
    ranks = values["ranks"] or nodes * (machine.tiles_per_node or 1)
    topology = Topology.build(machine, ranks, -(-ranks // nodes))
    if values["nodes"] not in (None, topology.nodes):
        raise UserError(
            f"--nodes {nodes}: {ranks} ranks of {machine.name} fill {topology.nodes} node(s): leave it away"
        )
    return topology


def video_of(values: dict[str, Any], shape: ModelShape) -> Video:
    """Return the size of the video that the options ask for; of an image, as a video of one frame.

    For images the default is put into the option `size`. Raise UserError for options that do not belong to what the
    model makes.

    Args:
        values: the command's options by name.
        shape: the sizes of the model.
    """
    own = shape.video
    wrong = next((name for name in (VIDEO if own is None else ("size",)) if values[name] is not None), None)
    if wrong is not None:
        what, instead = ("images", "--size") if own is None else ("videos", "--height and --width")
        raise UserError(f"--{wrong} {values[wrong]}: {shape.name} makes {what}: leave it away, or give {instead}")
    if own is not None:
        return Video(*(values[name] or getattr(own, name) for name in VIDEO))
    values["size"] = values["size"] or SIDE
    return Video(1, values["size"], values["size"])


def case_of(values: dict[str, Any], shape: ModelShape, video: Video) -> Case:
    """Return the case to plan, on all ranks: the model, the settings and the size of a call that the options ask for.

    Args:
        values: the command's options by name.
        shape: the sizes of the model.
        video: the size of the video or image, from `video_of`.
    """
    text = shape.text_tokens if values["text_tokens"] is None else values["text_tokens"]
    image = shape.image_tokens(video.height) if shape.video is None else shape.video_tokens(video)
    negative, branches = values["negative_tokens"], values["branches"] or shape.branches
    if negative is not None and branches != 2:
        wrong = f"{shape.name} does not call its transformer for that prompt by itself"
        raise UserError(f"--negative_tokens {negative}: {wrong}; leave it away")
    if values["branches"] == 1:  # SD3 has both branches in one call
        shape = replace(shape, rows_per_image=1)
    config = preset_configs(values | {"preset": [values["preset"]]})[values["preset"]].with_(image_tokens=image)
    batch, itemsize = values["batch"] * shape.rows_per_image, DTYPES[values["dtype"]]
    call = image_and_text(image, text), batch, itemsize, branches
    apart = None if negative is None else image_and_text(image, negative)
    decisions = read_decisions(values["decisions"])
    return Case(shape, topology_of(values), config, *call, values["steps"], apart, values["stable"], decisions)

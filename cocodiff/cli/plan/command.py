"""`cocodiff plan`: what a run would take of a machine, without starting it: memory, bytes and time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cocodiff.cli.plan.memory import as_json, size, table
from cocodiff.comm.launch import Launch
from cocodiff.config import Config, load_machine
from cocodiff.console.options import (
    LOG_LEVEL,
    Option,
    check_counts,
    engine_record,
    engine_settings,
    parse,
    with_settings,
)
from cocodiff.console.terminal import quiet_libraries, say
from cocodiff.errors import UserError
from cocodiff.loading.model_shapes import load_shape
from cocodiff.models.family import Video
from cocodiff.models.tokens import image_and_text
from cocodiff.outputs.folder import OutputFolder
from cocodiff.outputs.settings import write_document
from cocodiff.planning.deal_prices import Pricer, Workload, untimed
from cocodiff.planning.decisions import read_decisions
from cocodiff.planning.memory import Load, ModelShape
from cocodiff.topology.machine import Machine, Topology

SIDE = 1024
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
OPTIONS = (
    Option("model", "a name in configs/models, a .yaml file, or a folder in diffusers' layout"),
    Option("size", f"side of the square image in pixels (default: {SIDE})", type=int),
    Option("frames", "of a video, instead of the model's own", type=int),
    Option("height", "of a video, instead of the model's own", type=int),
    Option("width", "of a video, instead of the model's own", type=int),
    Option("batch", "images in one call", 1, type=int),
    Option("steps", "denoising steps that run", 50, type=int),
    Option("text_tokens", "tokens of the prompt; default: the model's longest", type=int),
    Option("negative_tokens", "tokens of the prompt that guidance leads away from; default: as many", type=int),
    Option("machine", "machine of the run: aurora or a .yaml file", "aurora"),
    Option("nodes", "nodes of the run", 1, type=int),
    Option("ranks", "ranks of the run, on a machine of no fixed size", type=int),
    Option("preset", "the run's preset", "cocodiff"),
    Option(
        "images",
        "images of a whole job: plans the deal of the ranks to replicas and guidance branches that makes them soonest; "
        "with --compare the table of all deals",
        type=int,
    ),
    Option("branches", "guidance branches, calls of the model in a step; default: the model's usual", type=int),
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
    Option("compare", "all presets side by side, with plan.png; with --images all deals", False, type=bool),
    Option("explain", "the timeline of one layer on rank 0 and its plan of messages", False, type=bool),
    Option("calibrate", "bench.json of bench alltoall: fits latencies and link efficiencies, writes machine.yaml"),
    Option("paper", "the figures of the CoCoDiff paper beside what the plan says of them", False, type=bool),
    Option("out", "folder of plan.json", "plan"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    LOG_LEVEL,
)


def start(words: Sequence[str], launch: Launch) -> int:
    values = parse(
        "plan",
        "Says what a run would take, without starting it.",
        with_settings(OPTIONS, lambda one: one.given == "sweep"),
        words,
    )
    quiet_libraries(values["log_level"])
    check(values)
    if not launch.speaks:
        return 0
    if values["calibrate"]:
        from cocodiff.cli.plan.calibrate import run_calibration

        run_calibration(values, topology_of(values))
    elif values["paper"]:
        from cocodiff_studies.paper.figures import run_paper

        run_paper(values)
    else:
        run_plan(values)
    return 0


def check(values: dict[str, Any]) -> None:
    if values["calibrate"] is None and not values["paper"] and not values["model"]:
        raise UserError("--model is missing: sd3.5, flux.1, flux.2, qwen-image, wan2.2, a .yaml file or a folder")
    check_counts(values, "batch", "steps", "size", "frames", "height", "width", "nodes", "ranks", "branches", "images")
    for name in ("text_tokens", "negative_tokens"):
        if values[name] is not None and values[name] < 0:
            raise UserError(f"--{name} {values[name]}: at least 0 is needed")
    if values["images"] is not None and values["memory"]:
        raise UserError("--images asks for the time of a job and --memory for memory alone: leave one of them away")
    if not 0 <= values["stable"] <= 1:
        raise UserError(f"--stable {values['stable']:g}: give a part from 0 to 1")


def run_plan(values: dict[str, Any]) -> None:
    from cocodiff.cli.plan.deals import deals_as_json, deals_table, one_replica, pinned_guidance
    from cocodiff.planning.deal_choice import choose

    shape, topology = load_shape(values["model"]), topology_of(values)
    config = engine_record().preset(values["preset"], **engine_settings(values))
    video = video_of(values, shape)
    work = workload_of(values, shape, config, video)
    output = OutputFolder(values["out"], values["overwrite"])
    started = time.monotonic()
    choice, pricer = None, Pricer(topology)
    if values["images"] is not None:
        batches = -(-values["images"] // values["batch"])
        choice = choose(pricer, [work], values["images"], batches, None, pinned_guidance(config), values["compare"])
    deal = one_replica(topology, work) if choice is None else choice.taken.deal
    sizes = size(topology, work, deal, video)
    plan = as_json(values, shape, topology, work.load, sizes, video)
    plan["case"] |= {"replicas": deal.replicas, "guidance_parallel": deal.guidance}
    say("\n".join(table(values, shape, topology, work.load, sizes, video)))
    if choice is not None:
        plan |= deals_as_json(choice)
        say("\n".join(deals_table(choice) if values["compare"] else [choice.line()]))
    elif config.guidance_parallel == 2 and not work.guides:
        say(f"guidance_parallel 2: {shape.name} computes one branch, on all ranks")
    elif deal.guidance > 1:
        say(f"guidance_parallel {deal.guidance}: each branch on {topology.size // deal.guidance} rank(s)")
    unknown = None if values["memory"] else untimed(topology.machine)
    if unknown is not None:
        say(unknown)
    with output.held(), output.writing():
        folder = output.open()
        if not values["memory"] and unknown is None:
            from cocodiff.cli.plan.time import add_times

            add_times(values, pricer, work, deal, plan, folder)
            say(f"planned in {time.monotonic() - started:.1f} s")
        write_document(folder, "plan.json", plan, values)
        output.publish()
    say(f"results: {output.final / 'plan.json'}")


def topology_of(values: dict[str, Any]) -> Topology:
    machine = load_machine(values["machine"])
    return Topology.build(machine, rank_count(machine, values), None)


def rank_count(machine: Machine, values: dict[str, Any]) -> int:
    if values["ranks"] is not None:
        return int(values["ranks"])
    if machine.tiles_per_node is None:
        raise UserError(f"machine {machine.name} has no fixed size: add --ranks N")
    return int(values["nodes"] * machine.tiles_per_node)


def video_of(values: dict[str, Any], shape: ModelShape) -> Video:
    """What is made: a video, or an image, whose `size` is completed. Raises UserError for options of the other one."""
    own, names = shape.video, ("frames", "height", "width")
    wrong = next((name for name in (names if own is None else ("size",)) if values[name] is not None), None)
    if wrong is not None:
        what, instead = ("images", "--size") if own is None else ("videos", "--height and --width")
        raise UserError(f"--{wrong} {values[wrong]}: {shape.name} makes {what}: leave it away, or give {instead}")
    if own is not None:
        return Video(*(values[name] or getattr(own, name) for name in names))
    values["size"] = values["size"] or SIDE
    return Video(1, values["size"], values["size"])


def workload_of(values: dict[str, Any], shape: ModelShape, config: Config, video: Video) -> Workload:
    from cocodiff.planning.costs import state_sizes

    text = shape.text_tokens if values["text_tokens"] is None else values["text_tokens"]
    image = shape.image_tokens(video.height) if shape.video is None else shape.video_tokens(video)
    negative = values["negative_tokens"]
    load = Load(
        segments=image_and_text(image, text),
        batch=values["batch"] * shape.rows_per_image,
        itemsize=DTYPES[values["dtype"]],
        branches=values["branches"] or shape.branches,
        state=state_sizes(config),
    )
    if negative is not None and load.branches != 2:
        raise UserError(
            f"--negative_tokens {negative}: {shape.name} does not call its transformer for that prompt by itself; "
            f"leave it away"
        )
    apart = None if negative is None else image_and_text(image, negative)
    given = read_decisions(values["decisions"])
    return Workload(shape, load, config, values["steps"], values["stable"], apart, given)

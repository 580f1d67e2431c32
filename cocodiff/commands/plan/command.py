"""`cocodiff plan`: what a run would take of a machine, without starting it: memory, bytes and time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.commands.model_shapes import load_shape
from cocodiff.commands.options import (
    LOG_LEVEL,
    Option,
    check_counts,
    engine_record,
    engine_settings,
    parse,
    with_settings,
)
from cocodiff.commands.outputs import OutputFolder, write_settings
from cocodiff.commands.plan.memory import as_json, size, table
from cocodiff.commands.terminal import quiet_libraries, say
from cocodiff.config import Config, load_machine
from cocodiff.errors import UserError
from cocodiff.models.tokens import image_and_text
from cocodiff.planning.memory import Load, ModelShape
from cocodiff.planning.placement import Work
from cocodiff.topology.machine import Links, Machine, Topology

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
OPTIONS = (
    Option("model", "a name in configs/models, a .yaml file, or a folder in diffusers' layout"),
    Option("size", "side of the square image in pixels", 1024, type=int),
    Option("batch", "images in one call", 1, type=int),
    Option("steps", "denoising steps that run", 50, type=int),
    Option("text_tokens", "tokens of the prompt; default: the model's longest", type=int),
    Option("machine", "machine of the run: aurora or a .yaml file", "aurora"),
    Option("nodes", "nodes of the run", 1, type=int),
    Option("ranks", "ranks of the run, on a machine of no fixed size", type=int),
    Option("preset", "the run's preset", "cocodiff"),
    Option("branches", "guidance branches, calls of the model in a step; default: the model's usual", type=int),
    Option("dtype", "of weights, activations and caches", "bf16", choices=tuple(DTYPES)),
    Option("stable", "of the tokens, the part that stays where a schedule goes by a threshold", 0.7, type=float),
    Option("memory", "the memory part alone", False, type=bool),
    Option("compare", "all presets side by side, with plan.png", False, type=bool),
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
        from cocodiff.commands.plan.calibrate import run_calibration

        run_calibration(values, topology_of(values))
    elif values["paper"]:
        from cocodiff.commands.plan.paper import run_paper

        run_paper(values)
    else:
        run_plan(values)
    return 0


def check(values: dict[str, Any]) -> None:
    if values["calibrate"] is None and not values["paper"] and not values["model"]:
        raise UserError("--model is missing: sd3.5, flux.1, flux.2, qwen-image, a .yaml file or a folder")
    check_counts(values, "batch", "steps", "size", "nodes", "ranks", "branches")
    if values["text_tokens"] is not None and values["text_tokens"] < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: at least 0 is needed")
    if not 0 <= values["stable"] <= 1:
        raise UserError(f"--stable {values['stable']:g}: give a part from 0 to 1")


def run_plan(values: dict[str, Any]) -> None:
    from cocodiff.assemble import mesh_of

    shape, topology = load_shape(values["model"]), topology_of(values)
    config = engine_record().preset(values["preset"], **of_run(values))
    load = load_of(values, shape, config)
    work = Work(shape.heads, shape.head_dim)
    mesh = mesh_of(config, topology, work)
    sizes = size(shape, topology, load, mesh, values["size"])
    output = OutputFolder(values["out"], values["overwrite"])
    plan = as_json(values, shape, topology, load, sizes)
    say("\n".join(table(values, shape, topology, load, sizes)))
    unknown = None if values["memory"] else untimed(topology.machine)
    if unknown is not None:
        say(unknown)
    with output.held(), output.writing():
        folder = output.open()
        if not values["memory"] and unknown is None:
            from cocodiff.commands.plan.time import add_times

            started = time.monotonic()
            add_times(values, shape, topology, config, load, plan, folder)
            say(f"planned in {time.monotonic() - started:.1f} s")
        write(folder, values, plan)
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


def untimed(machine: Machine) -> str | None:
    """Why there are no times for a machine; None where there are."""
    lacking = [] if machine.device.bf16_tflop_s and machine.device.memory_gb_s else ["its device"]
    if machine.links == Links():
        lacking.append("its links")
    return f"machine {machine.name} does not say how fast {' and '.join(lacking)} are: no times" if lacking else None


def of_run(values: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings that are given, over those of a preset."""
    return {name: value for name, value in engine_settings(values).items() if name != "steps"}


def load_of(values: dict[str, Any], shape: ModelShape, config: Config) -> Load:
    from cocodiff.assemble import state_sizes

    text = shape.text_tokens if values["text_tokens"] is None else values["text_tokens"]
    return Load(
        segments=image_and_text(shape.image_tokens(values["size"]), text),
        batch=values["batch"] * shape.rows_per_image,
        itemsize=DTYPES[values["dtype"]],
        branches=values["branches"] or shape.branches,
        state=state_sizes(config),
    )


def write(folder: Path, values: dict[str, Any], plan: dict[str, Any]) -> None:
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    write_settings(folder, values)

"""`cocodiff plan --memory`: what a run would take of a machine's memory, without starting it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cocodiff.comm.launch import Launch
from cocodiff.commands.options import Option, parse
from cocodiff.commands.outputs import MARK, OutputFolder
from cocodiff.commands.terminal import quiet_libraries, say
from cocodiff.config import Config, find_shipped, from_mapping, load_machine, read_yaml
from cocodiff.errors import UserError
from cocodiff.memory import (
    MIB,
    Load,
    ModelShape,
    RankMemory,
    add,
    largest_batch,
    mib,
    misfit,
    shape_of_config,
    size_run,
)
from cocodiff.topology import Machine, Topology

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
OPTIONS = (
    Option("memory", "the memory part: weights, activations, V-Major's caches", False, type=bool),
    Option("model", "a name in configs/models, a .yaml file, or a folder in diffusers' layout"),
    Option("size", "side of the square image in pixels", 1024, type=int),
    Option("batch", "images in one call", 1, type=int),
    Option("text_tokens", "tokens of the prompt; default: the model's longest", type=int),
    Option("machine", "machine of the run: aurora or a .yaml file", "aurora"),
    Option("nodes", "nodes of the run", 1, type=int),
    Option("ranks", "ranks of the run, on a machine of no fixed size", type=int),
    Option("preset", "the run's preset", "cocodiff"),
    Option("branches", "guidance branches, calls of the model in a step; default: the model's usual", type=int),
    Option("dtype", "of weights, activations and caches", "bf16", choices=tuple(DTYPES)),
    Option("out", "folder of plan.json", "plan"),
    Option("overwrite", "replace the results of an earlier run", False, type=bool),
    Option("log_level", "library messages to show", "error", choices=("debug", "info", "warning", "error")),
)


@dataclass(frozen=True)
class Sizes:
    """What the plan tells, in bytes. site: one joint attention of one branch on the fullest rank; node: the fullest.
    tile: the machine's memory of one rank, None where its file does not say; then `largest`, in images, is None too."""

    site: RankMemory
    rank: RankMemory
    node: RankMemory
    tile: int | None
    largest: int | None


def start(words: Sequence[str], launch: Launch) -> int:
    values = parse("plan", "Says what a run would take, without starting it.", OPTIONS, words)
    quiet_libraries(values["log_level"])
    if not values["memory"]:
        raise UserError("plan has only its memory part so far: add --memory")
    if not values["model"]:
        raise UserError("--model is missing: sd3.5, flux.1, flux.2, qwen-image, a .yaml file or a folder")
    for name in ("batch", "nodes", "ranks", "branches"):
        if values[name] is not None and values[name] < 1:
            raise UserError(f"--{name} {values[name]}: at least 1 is needed")
    if values["text_tokens"] is not None and values["text_tokens"] < 0:
        raise UserError(f"--text_tokens {values['text_tokens']}: at least 0 is needed")
    shape, config, machine = (
        load_shape(values["model"]),
        Config.preset(values["preset"]),
        load_machine(values["machine"]),
    )
    topology = Topology.build(machine, rank_count(machine, values), None)
    load = load_of(values, shape, config)
    sizes = size(shape, topology, load)
    if launch.speaks:
        output = OutputFolder(values["out"], values["overwrite"])
        say("\n".join(table(values, shape, topology, load, sizes)))
        write(output, values, as_json(values, shape, topology, load, sizes))
    return 0


def load_shape(name: str) -> ModelShape:
    """A model's shape by its name in configs/models, from a YAML file, or of a folder in diffusers' layout."""
    folder = Path(name)
    if folder.is_dir():
        found = [path for path in (folder / "transformer" / "config.json", folder / "config.json") if path.is_file()]
        if not found:
            raise UserError(f"--model {name} holds no transformer/config.json: give a folder in diffusers' layout")
        return shape_of_folder(found[0])
    path = find_shipped("model", "models", name)
    try:
        return from_mapping(ModelShape, read_yaml(path), path.name)
    except TypeError as error:
        missing = str(error).partition("missing ")[2] or str(error)
        raise UserError(f"model file {path.name}: missing {missing}; see configs/models/flux.1.yaml") from error


def shape_of_folder(path: Path) -> ModelShape:
    """The shape of the transformer of a config.json; its parameters are counted without any memory for them."""
    import diffusers
    import torch

    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    kind = str(config.get("_class_name"))
    built = getattr(diffusers, kind, None)
    if built is None or not hasattr(built, "from_config"):
        raise UserError(f"{path}: diffusers has no class {kind}: give a folder with a transformer of diffusers")
    with torch.device("meta"):
        model = built.from_config(config)
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    shape = shape_of_config(kind, model.config, numbers)
    return replace(shape, name=(path.parents[1] if path.parent.name == "transformer" else path.parent).resolve().name)


def rank_count(machine: Machine, values: dict[str, Any]) -> int:
    if values["ranks"] is not None:
        return int(values["ranks"])
    if machine.tiles_per_node is None:
        raise UserError(f"machine {machine.name} has no fixed size: add --ranks N")
    return int(values["nodes"] * machine.tiles_per_node)


def load_of(values: dict[str, Any], shape: ModelShape, config: Config) -> Load:
    return Load(
        image_tokens=shape.image_tokens(values["size"]),
        text_tokens=shape.text_tokens if values["text_tokens"] is None else values["text_tokens"],
        batch=values["batch"] * shape.rows_per_image,
        itemsize=DTYPES[values["dtype"]],
        branches=values["branches"] or shape.branches,
        scoring=config.scoring if config.selection == "v_major" else None,
    )


def size(shape: ModelShape, topology: Topology, load: Load) -> Sizes:
    of_ranks = size_run(shape, topology, load)
    fullest = max(range(topology.size), key=lambda rank: of_ranks[rank].total)
    one_site = replace(shape, joint_layers=1, parallel_layers=0, image_layers=0)
    site = size_run(one_site, topology, replace(load, branches=1))[fullest]
    nodes = [add([of_ranks[p.rank] for p in topology.places if p.node == node]) for node in range(topology.nodes)]
    tile = int(topology.machine.device.memory_gib * 2**30) or None
    largest = None if tile is None else largest_batch(shape, topology, load, tile)
    return Sizes(site, of_ranks[fullest], max(nodes, key=lambda node: node.total), tile, largest)


def table(values: dict[str, Any], shape: ModelShape, topology: Topology, load: Load, sizes: Sizes) -> list[str]:
    side, rank = values["size"], sizes.rank
    lines = [
        f"{shape.name} {side}x{side} batch {values['batch']}, {load.branches} branch(es), {values['dtype']}, preset "
        f"{values['preset']}: {topology.size} rank(s) on {topology.nodes} node(s) of {topology.machine.name}",
        f"{'MiB':<28}{'a site':>12}{'a rank':>12}{'a node':>12}",
    ]
    cached = {
        "q, k, v of the image": "image_cache",
        "scoring reference": "reference_cache",
        "q, k, v of the text": "text_cache",
    }
    for name, field in {**{f"cache: {k}": v for k, v in cached.items()}, "cache": "cache"}.items():
        lines.append(f"{name:<28}" + "".join(f"{mib(getattr(x, field)):>12}" for x in (sizes.site, rank, sizes.node)))
    for name in ("weights", "activations", "total"):
        about = f"{name} (estimate)" if name == "activations" else name
        lines.append(f"{about:<28}{'':>12}" + "".join(f"{mib(getattr(x, name)):>12}" for x in (rank, sizes.node)))
    if sizes.tile is None:
        return [*lines, f"machine {topology.machine.name} does not say how much memory a rank has"]
    reason = misfit(rank, sizes.tile)
    left = f"fits: {mib(sizes.tile - rank.total)} of {mib(sizes.tile)} MiB of a tile are left for text encoders and VAE"
    return [*lines, left if reason is None else f"does not fit: {reason}", f"largest batch that fits: {sizes.largest}"]


def as_json(values: dict[str, Any], shape: ModelShape, topology: Topology, load: Load, sizes: Sizes) -> dict[str, Any]:
    def part(of: RankMemory, names: Sequence[str]) -> dict[str, float]:
        return {name: getattr(of, name) / MIB for name in names}

    cache = ("image_cache", "reference_cache", "text_cache", "cache")
    return {
        "schema": 1,
        "case": {
            "model": shape.name, "size": values["size"], "batch": values["batch"], "image_tokens": load.image_tokens,
            "text_tokens": load.text_tokens, "branches": load.branches, "dtype": values["dtype"],
            "preset": values["preset"], "machine": topology.machine.name, "nodes": topology.nodes,
            "ranks": topology.size,
        },
        "memory_mib": {
            "site": part(sizes.site, cache),
            "rank": part(sizes.rank, (*cache, "weights", "activations", "total")),
            "node": part(sizes.node, (*cache, "weights", "activations", "total")),
            "tile": None if sizes.tile is None else sizes.tile / MIB,
        },
        "fits": None if sizes.tile is None else sizes.rank.total <= sizes.tile,
        "largest_batch": sizes.largest,
    }  # fmt: skip


def write(output: OutputFolder, values: dict[str, Any], plan: dict[str, Any]) -> None:
    import yaml

    folder = output.open()
    (folder / "plan.json").write_text(json.dumps(plan, indent=1))
    (folder / MARK).write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}, sort_keys=False))
    output.publish()
    say(f"results: {output.final / 'plan.json'}")

"""The choice of a job's partition of ranks into replicas and guidance branches, before any weight is read.

With `--parallel auto` the planner chooses, by predicted time and memory. Here it gets the model's shape, from its
config files, and the settings that depend on the choice are filled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocodiff.comm.launch import detect
from cocodiff.config.config import Config, load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.files import read_json
from cocodiff.demo_model import PROMPT_TOKENS
from cocodiff.jobs.terminal import say, span
from cocodiff.models import families
from cocodiff.models.family import INPAINT, VAE_FACTOR
from cocodiff.topology import Topology
from cocodiff.topology.axes import Partition, partitions_of
from cocodiff_eval.harness.pipelines import (
    Request,
    encoders_of,
    import_pipeline,
    model_file,
    own_weights,
    transformer_config,
)
from cocodiff_eval.harness.replicas import axes_of, topology_of

if TYPE_CHECKING:
    from cocodiff.engine.assemble import AttentionWork
    from cocodiff.planner.case import Case, ModelShape
    from cocodiff.planner.choice import Choice

OWN_SIDE = 128  # latent pixels of an image's side if the transformer's config has no sample_size
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of an element


def partition_of(
    values: dict[str, Any],
    request: Request,
    presets: Sequence[Config],
    ranks: int,
    images: int,
    batches: int | None = None,
    batch: int = 1,
    steps: int | None = None,
    compares: bool = True,
    calls: int | None = None,
) -> Partition:
    """Return the division of a job's ranks into replicas and parts for guidance, the same on every rank.

    If a preset is lossy, at least two ranks share an image. A model unknown to the planner has one replica unless the
    option gives more. Parts for guidance are for presets whose `guidance_parallel` is auto. If the planner has a
    choice, rank 0 prints what was chosen and why, in a dry run also memory and time.

    Raise UserError for given numbers that the ranks do not allow, and if no partition fits the machine's memory. Raise
    it also if an image's bits would depend on the replica that makes it.

    Args:
        values: options by name: parallel, replicas, dry_run, dtype, machine, device, steps, height, width and tile.
        request: the model.
        presets: the presets' settings.
        ranks: number of all ranks.
        images: number of images that are made in each preset.
        batches: number of calls of the pipeline in each preset; None for one per image.
        batch: number of images, or tiles of them, in one call.
        steps: number of denoising steps of a call; None for the option's.
        compares: True if several presets are to be compared. Then there is one replica unless the option gives more.
        calls: number of calls of the pipeline that a dry run predicts the time of; None for `batches`.
    """
    two = guides(request)
    replicas, guidance = pinned(values, presets)
    if values["parallel"] == "off":
        replicas, guidance = replicas or 1, guidance or 1
    compares = compares and replicas is None and len(presets) > 1
    least = 2 if ranks > 1 and not all(config.exact_attention for config in presets) else 1
    if not is_planned(request):
        return partitions_of(ranks, two, replicas or 1, guidance or 1, least)[0]
    possible = partitions_of(ranks, two, 1 if compares else replicas, guidance, least)
    only = possible[0] if len(possible) == 1 and not values["dry_run"] else None
    unused = "guidance_parallel 2: the run has one branch" if guidance == 2 and not two else ""
    if only is not None and unused and detect().speaks:
        say(unused)
    if only is not None and only.replicas == 1:
        return only
    cases = cases_of(values, request, presets, ranks, batch, values["steps"] if steps is None else steps)
    from cocodiff.planner.choice import Division, choose

    if only is not None:
        Division(only, cases).check_same_bits()
        return only
    images = max(1, images)
    count = images if batches is None else max(1, batches)
    choice = choose(cases, images, count, possible)
    if detect().speaks:
        about = f"; {unused}" if unused else ""
        about += "; presets are compared on all ranks" if compares else ""
        say(choice.line() + about)
        if values["dry_run"]:
            say("\n".join(dry_lines(choice, calls)))
    choice.check_fits()
    return choice.taken.partition


def with_guidance(presets: Mapping[str, Config], partition: Partition, request: Request) -> dict[str, Config]:
    """Return the presets with `guidance_parallel` set to the partition's number of parts for guidance.

    In a run with guidance, presets that give a number themselves keep it.

    Args:
        presets: settings by the presets' names.
        partition: the division of the ranks.
        request: the model, which tells if the run has guidance.
    """
    two, chosen = guides(request), partition.guidance
    return {
        name: config if two and config.guidance_parallel != "auto" else config.with_(guidance_parallel=chosen)
        for name, config in presets.items()
    }


def with_weights(
    presets: Mapping[str, Config],
    values: dict[str, Any],
    request: Request,
    partition: Partition,
    ranks: int,
    batch: int = 1,
    **_: Any,
) -> dict[str, Config]:
    """Return the presets with `weights: auto` replaced by what the ranks' memory allows. Rank 0 prints what ranks
    share.

    Weights are whole on a CPU, and if memory or model are unknown. Otherwise these presets are treated as the one that
    needs most memory, as all share one model. Each keeps as much of its codec's state as fits.

    Args:
        presets: settings by the presets' names.
        values: options by name, as of `partition_of`.
        request: the model.
        partition: the ranks' partition.
        ranks: number of all ranks.
        batch: number of images, or tiles of them, in one call.
    """
    undecided = {name: config for name, config in presets.items() if config.weights == "auto"}
    memory = load_machine(values["machine"]).device.memory_gib
    if not undecided or values["device"] == "cpu" or not memory or not is_planned(request):
        return dict(presets) | {name: config.with_(weights="whole") for name, config in undecided.items()}
    cases = cases_of(values, request, [*undecided.values()], ranks, batch, 1)
    from cocodiff.planner.choice import shared_weights, with_weights_chosen

    found = [with_weights_chosen(case, partition).config for case in cases]
    most = max(found, key=lambda one: (one.split is not None, one.weights == "node", one.split_layers or math.inf))
    chosen = {
        name: one.with_(weights=most.weights, split_layers=most.split_layers)
        for name, one in zip(undecided, found, strict=True)
    }
    if detect().speaks:
        for line in dict.fromkeys(line for one in chosen.values() for line in shared_weights(one)):
            say(line)
    return dict(presets) | chosen


def sequence_of(
    values: dict[str, Any], request: Request, partition: Partition, ranks: int
) -> tuple[Topology, AttentionWork]:
    """Return the places of the first ranks that share a sequence, and the number and width of attention heads.

    They are for `Quality.for_links`. Raise UserError, naming `--quality`, if the transformer's config does not give its
    heads.

    Args:
        values: options by name, of which `machine` is read.
        request: the model.
        partition: the ranks' partition.
        ranks: number of all ranks.
    """
    from cocodiff.engine.assemble import AttentionWork

    axes = axes_of(values["machine"], ranks, partition.replicas, partition.guidance)
    config = read_json(transformer_config(request.model))
    heads, width = (config.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    if heads is None or width is None:
        raise UserError(f"--quality: the config of {request.model} does not say its heads: name a preset instead")
    return axes.topology.part(axes.branch(0)), AttentionWork(heads, width)


def is_planned(request: Request) -> bool:
    """Return True if the planner can predict time and memory of the model's transformer, by its class."""
    from cocodiff.jobs.model_shapes import family_of_class

    return family_of_class(str(read_json(transformer_config(request.model)).get("_class_name"))) is not None


def pinned(values: dict[str, Any], presets: Sequence[Config]) -> tuple[int | None, int | None]:
    """Return the numbers of replicas and of a replica's guidance parts that the user has set.

    None stands for a number that the planner may choose. The second is also None if presets set different numbers:
    each then keeps its own.

    Args:
        values: the options by name.
        presets: the settings of every preset of the job.
    """
    replicas = values.get("replicas")
    of_presets = {config.guidance_parallel for config in presets}
    guidance = of_presets.pop() if len(of_presets) == 1 else "auto"
    return (None if replicas in (None, "auto") else int(replicas), None if guidance == "auto" else int(guidance))


def guides(request: Request) -> bool:
    """Return True if a run of the model has two branches of classifier-free guidance.

    It follows from the pipeline's class and the guidance scale of the request.
    """
    if request.own is not None or request.index.get("is_distilled"):
        return False
    pipelines = request.pipelines
    family = next((one for one in families() if pipelines in one.pipelines), None)
    if family is None or (family.rows_per_image == 1 and pipelines.negative is None):
        return False
    # a pipeline without encoders is called with a scale of 1
    return bool(encoders_of(request.index)) if request.guidance is None else request.guidance > 1


def cases_of(
    values: dict[str, Any], request: Request, presets: Sequence[Config], ranks: int, batch: int, steps: int
) -> list[Case]:
    """Return the planner's description of one call of the pipeline on all ranks, for each preset.

    It follows from the model's config files. The prompt is taken to have the largest number of tokens.

    Args:
        values: options by name, as of `partition_of`.
        request: the model.
        presets: the presets' settings.
        ranks: number of all ranks.
        batch: number of images, or tiles of them, in the call.
        steps: number of denoising steps of the call.
    """
    from cocodiff.models.adapter import image_and_text
    from cocodiff.planner.case import Case

    shape, tokens = shape_and_tokens(values, request)
    if not guides(request):
        shape = replace(shape, rows_per_image=1, branches=1)
    elif shape.rows_per_image == 1:
        shape = replace(shape, branches=2)
    itemsize = ITEMSIZE.get(values["dtype"], 4 if values["device"] == "cpu" else 2)
    segments = image_and_text(tokens, PROMPT_TOKENS if request.own is not None else shape.text_tokens)
    call = segments, batch * shape.rows_per_image, itemsize, shape.branches, steps
    topology = topology_of(values["machine"], ranks)
    return [Case(shape, topology, config.with_(image_tokens=tokens), *call) for config in presets]


def with_tokens(presets: Mapping[str, Config], values: dict[str, Any], request: Request) -> dict[str, Config]:
    """Return the presets with the number of tokens of the job's images, by which the engine chooses meshes.

    They are returned unchanged if a rate of the machine is unknown, or the model is unknown to the planner.

    Args:
        presets: settings by the presets' names.
        values: options by name, as of `partition_of`.
        request: the model.
    """
    if load_machine(values["machine"]).missing_rates or not is_planned(request):
        return dict(presets)
    _, tokens = shape_and_tokens(values, request)
    return {name: config.with_(image_tokens=tokens) for name, config in presets.items()}


def shape_and_tokens(values: dict[str, Any], request: Request) -> tuple[ModelShape, int]:
    """Return the sizes of the model's transformer, and the number of tokens of an image or video.

    The pipeline's class is imported. Sizes are read from the model's config files.

    Args:
        values: options by name, as of `image_tokens`.
        request: the model.
    """
    import_pipeline(request)  # the shape is that of the pipeline's transformer
    from cocodiff.jobs.model_shapes import shape_of_folder

    path = transformer_config(request.model)
    shape = shape_of_folder(path)
    return shape, image_tokens(values, request, path, shape)


def image_tokens(values: dict[str, Any], request: Request, path: Path, shape: ModelShape) -> int:
    """Return the number of tokens of an image, a tile of one, or a video, for one call of the transformer.

    The size is that of the options, or else the model's own.

    Args:
        values: options by name: height, width, frames and tile.
        request: the model.
        path: the transformer's config.json.
        shape: the sizes of the transformer.
    """
    model = request.model
    if request.task == INPAINT and request.own is None:
        values = values | dict.fromkeys(("height", "width"), values.get("tile") or own_pixels(request))
    patch = shape.pixels_per_token // VAE_FACTOR
    if request.video is not None:
        frames, height, width = (values.get(name) or getattr(request.video, name) for name in request.video._fields[:3])
        each = read_json(model_file(model, "vae/config.json")).get("scale_factor_temporal", 4)
        side = vae_factor(model) * patch
        return (1 + (frames - 1) // each) * max(1, height // side) * max(1, width // side)
    wanted = (values.get(name) for name in ("height", "width"))
    sides = (max(1, side // (vae_factor(model) * patch)) if side else own_latents(path) // patch for side in wanted)
    return math.prod(sides)


def own_latents(path: Path) -> int:
    """Return the side in latent pixels of the images that a model is made for.

    Args:
        path: the transformer's config.json.
    """
    side = read_json(path).get("sample_size")
    return side if isinstance(side, int) else OWN_SIDE


def own_pixels(request: Request) -> int:
    """Return the side in pixels of the images that the model is made for; of videos the shorter side."""
    if request.video is not None:
        return min(request.video.height, request.video.width)
    return own_latents(transformer_config(request.model)) * vae_factor(request.model)


def vae_factor(model: str) -> int:
    """Return the number of pixels along a latent pixel's side, by the config of the model's VAE."""
    if own_weights(model) is not None:
        return VAE_FACTOR
    config = read_json(model_file(model, "vae/config.json"))
    if "scale_factor_spatial" in config:
        return int(config["scale_factor_spatial"])
    levels = config.get("temperal_downsample", config.get("block_out_channels", [None])[1:])
    return int(2 ** len(levels))


def dry_lines(choice: Choice, calls: int | None = None) -> list[str]:
    """Return a dry run's lines about memory and predicted time of the partition that the planner chose.

    Args:
        choice: the planner's choice.
        calls: number of calls of the pipeline that the time is predicted of; None for those of the choice.
    """
    from cocodiff.planner.memory import mib

    taken, machine, tile = choice.taken, choice.machine.name, choice.machine.device.memory
    need = f"memory of the fullest rank: {mib(taken.need.total)} MiB (weights {mib(taken.need.weights)}, activations "
    need += f"{mib(taken.need.activations)}, cache {mib(taken.need.cache)})"
    unknown = f"; machine {machine} does not say how much memory a rank has"
    lines = [need + (unknown if tile is None else f" of {mib(tile)} MiB"), *filter(None, [choice.reason])]
    if not choice.reason:
        count, job_s = taken.batches, taken.job_s
        if calls is not None:
            count, job_s = calls, taken.image_s * -(-calls // taken.partition.replicas)
        times = f"{span(taken.image_s)} for each of {count} call(s) of the pipeline, {span(job_s)} for all"
        lines.append(f"predicted, denoising alone: {times}, {taken.images_per_hour:.0f} images an hour")
    return [*lines, "dry run: nothing was started or written"]

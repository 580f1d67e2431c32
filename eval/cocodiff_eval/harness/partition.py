"""Which partition of its ranks a job takes, before any weight is read: with `--parallel auto` the planner's choice."""

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

OWN_SIDE = 128  # latent pixels of a side, of pipelines whose transformer's config has no sample_size
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


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
    """The partition of a job that makes `images` in each of `presets`; all ranks find the same.

    values: of options parallel, replicas, dry_run, dtype, machine, device; steps, height and width. batches: calls of
    the pipeline, by default one for each image. batch: images, or tiles of them, in one call. steps: of a call, instead
    of the option's. compares: whether several presets are compared: on all ranks, unless replicas are given. calls: of
    the pipeline, that the time in a dry run is of, instead of `batches`.

    Two ranks or more share an image where a preset selects or codes what it sends. A model of which no more than a plan
    is known has one replica unless more are given. Rank 0 says what was taken and why, in a dry run memory and time
    too. The guidance is for presets whose guidance_parallel is auto. Raises UserError for pinned axes that the ranks do
    not allow, and where no partition fits the machine's memory.
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
    if only is not None and only.replicas == 1:
        return only
    cases = cases_of(values, request, presets, ranks, batch, values["steps"] if steps is None else steps)
    from cocodiff.planner.choice import Division, choose

    if only is not None:
        Division(only, cases).check_same_bits()
        return only
    images = max(1, images)
    count = images if batches is None else max(1, batches)
    choice = choose(cases, images, count, 1 if compares else replicas, guidance, least=least)
    if detect().speaks:
        about = "; guidance_parallel 2: the run has one branch" if guidance == 2 and not two else ""
        about += "; presets are compared on all ranks" if compares else ""
        say(choice.line() + about)
        if values["dry_run"]:
            say("\n".join(dry_lines(choice, calls)))
    choice.check_fits()
    return choice.taken.partition


def with_guidance(presets: Mapping[str, Config], partition: Partition, request: Request) -> dict[str, Config]:
    """The presets with the partition's guidance, but for those that pin their own in a run that guides."""
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
    """The presets with `weights: auto` decided: whole on a CPU and where memory or model are not known; else as the
    preset that needs most has it, for all share one model, each with the state that fits beside."""
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
    """Where the first ranks sit that share a sequence, and what heads they share."""
    from cocodiff.engine.assemble import AttentionWork

    axes = axes_of(values["machine"], ranks, partition.replicas, partition.guidance)
    config = read_json(transformer_config(request.model))
    heads, width = (config.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    if heads is None or width is None:
        raise UserError(f"--quality: the config of {request.model} does not say its heads: name a preset instead")
    return axes.topology.part(axes.branch(0)), AttentionWork(heads, width)


def is_planned(request: Request) -> bool:
    """Whether enough of the model's transformer is known to price its calls and count its memory."""
    from cocodiff.jobs.model_shapes import family_of_class

    return family_of_class(str(read_json(transformer_config(request.model)).get("_class_name"))) is not None


def pinned(values: dict[str, Any], presets: Sequence[Config]) -> tuple[int | None, int | None]:
    """Replicas and guidance where they are given. Presets that pin guidance differently leave it to each of them."""
    replicas = values.get("replicas")
    of_presets = {config.guidance_parallel for config in presets}
    guidance = of_presets.pop() if len(of_presets) == 1 else "auto"
    return (None if replicas in (None, "auto") else int(replicas), None if guidance == "auto" else int(guidance))


def guides(request: Request) -> bool:
    """Whether the run has two branches of classifier-free guidance, by the model's pipeline and the scale."""
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
    """Return what one call of the pipeline is in each preset, from the model's configs alone: the prompt is the
    longest."""
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
    """With the tokens of the job's images, by which meshes are chosen, where all rates and the model are known."""
    if load_machine(values["machine"]).missing_rates or not is_planned(request):
        return dict(presets)
    _, tokens = shape_and_tokens(values, request)
    return {name: config.with_(image_tokens=tokens) for name, config in presets.items()}


def shape_and_tokens(values: dict[str, Any], request: Request) -> tuple[ModelShape, int]:
    """Return the model's shape, and the tokens of what is made."""
    import_pipeline(request)  # which the model's shape is taken from
    from cocodiff.jobs.model_shapes import shape_of_folder

    path = transformer_config(request.model)
    shape = shape_of_folder(path)
    return shape, image_tokens(values, request, path, shape)


def image_tokens(values: dict[str, Any], request: Request, path: Path, shape: ModelShape) -> int:
    """Of what is made: the model's own size, or that of the options. path: of the transformer's config."""
    model = request.model
    if request.task == INPAINT and request.own is None:
        values = values | dict.fromkeys(("height", "width"), values.get("tile") or own_pixels(request))
    patch = shape.pixels_per_token // VAE_FACTOR
    if request.video is not None:
        frames, height, width = (values.get(name) or getattr(request.video, name) for name in request.video._fields[:3])
        each = read_json(model_file(model, "vae/config.json")).get("scale_factor_temporal", 4)
        side = vae_factor(model) * patch
        return (1 + (frames - 1) // each) * max(1, height // side) * max(1, width // side)
    sides = [own_latents(path) // patch] * 2
    for axis, name in enumerate(("height", "width")):
        if values.get(name):
            sides[axis] = max(1, values[name] // (vae_factor(model) * patch))
    return sides[0] * sides[1]


def own_latents(path: Path) -> int:
    """Latent pixels of a side of the model's own size."""
    side = read_json(path).get("sample_size")
    return side if isinstance(side, int) else OWN_SIDE


def own_pixels(request: Request) -> int:
    """Pixels of a side of the model's own size; of a video's shorter one."""
    if request.video is not None:
        return min(request.video.height, request.video.width)
    return own_latents(transformer_config(request.model)) * vae_factor(request.model)


def vae_factor(model: str) -> int:
    """Pixels of a latent pixel's side."""
    if own_weights(model) is not None:
        return VAE_FACTOR
    config = read_json(model_file(model, "vae/config.json"))
    if "scale_factor_spatial" in config:
        return int(config["scale_factor_spatial"])
    levels = config.get("temperal_downsample", config.get("block_out_channels", [None])[1:])
    return int(2 ** len(levels))


def dry_lines(choice: Choice, calls: int | None = None) -> list[str]:
    """Return lines about memory and predicted time of the partition that was taken. calls: as of `partition_of`."""
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

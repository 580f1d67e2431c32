"""`cocodiff bench step`: whole denoising steps of a pipeline, with plain diffusers and with presets in turn; or of a
random transformer that has the shape of a large model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from cocodiff_eval.harness import session
from cocodiff_eval.harness.pipelines import EMBEDDED, Model, Request, check_model

from cocodiff.config.config import Config
from cocodiff.engine.engine import Engine
from cocodiff.engine.verification import twin
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts, preset_configs
from cocodiff.models.family import INPAINT
from cocodiff.planner.case import ModelShape
from cocodiff_bench import common
from cocodiff_bench.common import Row, SerialGroup, SerialTransport, Values
from cocodiff_bench.random_models import OF_FAMILIES, Sizes, random_model, run, run_inputs

PLAIN = "diffusers"  # name of the variant without cocodiff
ABOUT = "Times a whole denoising step: plain diffusers against cocodiff on one rank, or presets on several."
OPTIONS = common.with_common_options(
    Option("model", "folder in diffusers' layout or hub id, instead of the embedded model", EMBEDDED),
    Option("preset", "what to measure beside the baseline", ["flat", "tapa"], many=True),
    Option("batch", "images in one call", 1, type=int),
    Option("steps", "denoising steps of one pipeline call", 10, type=int),
    Option("dtype", "arithmetic; auto is fp32 on CPU and bf16 elsewhere", "auto", choices=session.DTYPES),
)


def request_of(values: Values) -> Request:
    """Return the description of the model that the options of `bench step` name, to be loaded for inpainting."""
    return Request(values["model"], INPAINT)


def check(values: Values, ranks: int | None) -> None:
    """Raise UserError for options of `bench step`, or a model in diffusers' layout, that cannot be measured here.

    Args:
        values: the command's options.
        ranks: number of ranks of the launch; None if unknown, and then checked as for one.
    """
    check_counts(values, "batch", "steps", "repeats", "ranks")
    preset_configs(values)
    check_model(request_of(values), ranks or 1)


def import_before_fork(values: Values) -> None:
    """Import the modules that all ranks need for the model. They are imported once, before ranks are forked."""
    session.import_before_fork(request_of(values))


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of `bench step` with a pipeline: time whole calls, one variant after the other in each round.

    Rank 0 prints and writes the results. A step's time is the call's, divided by its number of steps.

    Args:
        values: the command's options.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    model = session.load_requested(request_of(values), values["dtype"], transport)
    model.pipe.set_progress_bar_config(disable=True)
    side = model.pipe.default_sample_size * model.pipe.vae_scale_factor
    call = partial(restore_once, model, values["batch"], side, values["steps"])
    configs = common.with_compiled(preset_configs(values))
    engines = {name: Engine(model.pipe, config, transport) for name, config in configs.items()}

    def parallel(engine: Engine) -> None:
        with engine:
            call()

    variants: dict[str, Callable[[], None]] = {name: partial(parallel, engine) for name, engine in engines.items()}
    if transport.size == 1:
        variants = {PLAIN: call} | variants  # on several ranks, each would run the whole plain pipeline
    seconds = common.measure_in_turns("bench step", variants, values, transport, units=values["steps"])
    sent = bytes_of_steps(engines, values)
    if transport.rank == 0:
        case = f"{model.name} {side}x{side} batch {values['batch']}, {transport.size} rank(s)"
        baselines = common.compared_with(variants, "flat", next(iter(variants)))
        measured = common.rows(case, seconds, sent, baselines)
        common.say_rows(measured, "a step")
        common.publish(output, values, measured)


def bytes_of_steps(engines: Mapping[str, Engine], values: Values) -> dict[str, dict[str, int]]:
    """Return the bytes that all ranks sent in a mean step, by variant and class of link. All ranks call this.

    The mean is over all steps that were run, those of the warm-up included.

    Args:
        engines: the engine of each variant.
        values: the command's options.
    """
    steps = (values["repeats"] + 1) * values["steps"]
    return {name: {link: count // steps for link, count in engine.bytes().items()} for name, engine in engines.items()}


def restore_once(model: Model, batch: int, side: int, steps: int) -> None:
    """Run the inpainting pipeline once on random images whose centre is masked.

    Args:
        model: the loaded pipeline, with the arguments that it needs.
        batch: number of images.
        side: pixels of an image's edge.
        steps: number of denoising steps.
    """
    noise = torch.Generator().manual_seed(0)
    mask_BCHW = torch.zeros(batch, 1, side, side)
    mask_BCHW[..., side // 4 : side - side // 4, side // 4 : side - side // 4] = 1
    model.pipe(
        image=torch.rand(batch, 3, side, side, generator=noise),
        mask_image=mask_BCHW,
        height=side,
        width=side,
        strength=1.0,
        num_inference_steps=steps,
        generator=noise,
        output_type="latent",
        **model.arguments(batch),
    )


# A random transformer -------------------------------------------------------------------------------------------------

SILENT = "no messages"  # name of the variant that measures a step without messages


class SilentGroup(SerialGroup):
    """A group of ranks that neither sends nor receives attention's tensors, to time computation alone.

    Tensors that would be received hold arbitrary numbers.
    """

    def send_recv(self, sends: list[tuple[Any, int]], recvs: list[tuple[Any, int]]) -> Any:
        """Send and receive nothing. Return an empty set of messages to wait for."""
        return self._inner.send_recv([], [])

    collective = send_recv


class SilentTransport(SerialTransport):
    """A transport whose groups send no tensors, to time computation alone."""

    group_of = SilentGroup


def measure_shape(
    values: Values, shape: ModelShape, family: str, configs: Mapping[str, Config], transport: Any
) -> list[Row]:
    """Time whole denoising runs of a random transformer with a model's sizes. They take as long as with real weights.

    Return a row for each variant, with the most memory that a rank used on its device.

    Args:
        values: the command's options. Images have the first size of `--size`.
        shape: the model's sizes.
        family: name of the model's family, a key of OF_FAMILIES.
        configs: settings by variant. The variant "flat_serial" exchanges with one peer at a time.
        transport: this rank's connection to the other ranks.
    """
    benched, device = OF_FAMILIES[family], transport.device
    sizes = Sizes(
        *(shape.heads, shape.joint_layers, shape.parallel_layers),
        side=values["size"][0] // shape.pixels_per_token,
        text=shape.text_tokens,
        head_dim=shape.head_dim,
        channels=benched.channels,
        text_channels=benched.text_channels,
        pooled=benched.pooled_channels,
        batch=values["batch"] * shape.rows_per_image,
        dtype="fp32" if device.type == "cpu" else "bf16",
        device=str(device),
    )
    model, inputs = random_model(benched, sizes), run_inputs(benched, sizes, values["steps"], values["steps"])
    over = {"flat_serial": SerialTransport(transport), SILENT: SilentTransport(transport)}
    every = {**configs, SILENT: common.engine_config(values, exchange="flat")}
    engines = {
        name: Engine(twin(model), config.with_(steps=values["steps"]), over.get(name, transport))
        for name, config in every.items()
    }
    most: dict[str, int] = dict.fromkeys(engines, 0)
    memory = None if device.type == "cpu" else torch.get_device_module(device)

    def whole(name: str, engine: Engine) -> None:
        """Run all denoising steps of a variant's model once. Store in `most` the peak of the device's memory in bytes.

        Args:
            name: name of the variant.
            engine: its engine.
        """
        if memory is not None:
            memory.reset_peak_memory_stats(device)
        with engine:
            engine.new_run()
            run(engine.model, inputs, shape.branches)
        if memory is not None:
            memory.synchronize(device)
            most[name] = memory.max_memory_allocated(device)

    variants: dict[str, Callable[[], None]] = {name: partial(whole, name, one) for name, one in engines.items()}
    seconds = common.measure_in_turns("bench step", variants, values, transport, units=values["steps"])
    sent = bytes_of_steps(engines, values)
    of_ranks = transport.gather_values(most) or [most]
    title = f"{shape.name} {values['size'][0]}x{values['size'][0]} batch {values['batch']}, {transport.size} ranks"
    references = common.compared_with(engines, "library", "flat")
    found = common.rows(title, common.of_slowest_rank(seconds, transport), sent, references)
    silent_s = next(row["median_s"] for row in found if row["variant"] == SILENT)
    for row in found:
        row["compute_s"], row["communication_share"] = silent_s, 1 - silent_s / row["median_s"]
        row["peak_bytes"] = max(one[row["variant"]] for one in of_ranks) or None
    return found

"""`cocodiff bench peers`: denoising steps of one random transformer, FLUX by default, by cocodiff and by the Ulysses
attention of other libraries. All use the same ranks over gloo.

A variant's calls are the steps of one run: from noise towards a picture that changes on the way, as a model's estimate
does. Times are taken after the special first steps of a run (tensors sent as they are, comparisons of inputs). The
first call's time is reported separately.

Only this file knows other libraries. They are imported for this benchmark only, and on the CPU only. What they replace
in diffusers' classes is in place only while their own variants run.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from cocodiff_eval.harness.replicas import topology_of
from torch import Tensor

from cocodiff.comm.launch import emulated
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Device
from cocodiff.config.registry import EXCHANGES, ORDERS
from cocodiff.engine.assemble import AttentionWork, with_codec_chosen
from cocodiff.engine.engine import Engine
from cocodiff.engine.verification import twin
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts
from cocodiff.jobs.terminal import say
from cocodiff.models.adapter import image_and_text, image_segment
from cocodiff.planner.traffic import slowed
from cocodiff_bench import common
from cocodiff_bench.common import Row, Values
from cocodiff_bench.random_models import DTYPES, MODELS, Inputs, Sizes, in_fp32, random_model, run_inputs, step

OURS, DIFFUSERS, CACHE_DIT = "ours", "diffusers", "cache_dit"
WHOSE = (OURS, DIFFUSERS, CACHE_DIT)
PACKAGES = ("cache_dit", "einops")  # what CACHE_DIT needs beyond our own dependencies
DIFFUSERS_MODELS = "diffusers.models.transformers"
INSTALL = "pip install cache-dit einops"
HEAD_DIM = 32
LEAD_IN = 3  # calls before the warm-up: those in which the engine compares inputs, and those that a codec predicts from
STEPS = 50  # steps of the run; more if more calls are measured
# The methods of diffusers' classes that cache-dit replaces for a model; the module comes first. Its asynchronous
# attention is measured for the models that it supports.
REPLACED = {
    "flux": ("transformer_flux", "FluxAttnProcessor.__call__", "FluxSingleTransformerBlock.forward"),
    "wan": ("transformer_wan", "WanAttnProcessor.__call__"),
    "qwen-image": ("transformer_qwenimage", "QwenDoubleStreamAttnProcessor2_0.__call__"),
}
ASYNCHRONOUS = ("flux", "qwen-image")
ALLOWED_EPS = 100  # tolerance in fp32, times eps and the largest value: sums in another order stay well below it
ALLOWED_OF_PLAIN = 4  # tolerance in bf16, times the largest error of one process in that dtype
ABOUT = "Times one transformer call of a random model (FLUX by default) on CPU ranks: cocodiff, and others' Ulysses."
OPTIONS = common.with_common_options(
    Option("only", "whose variants to measure", list(WHOSE), many=True, choices=WHOSE),
    Option("model", "the class of transformers", "flux", choices=tuple(MODELS)),
    Option("side", "image tokens along one edge", 32, type=int),
    Option("frames", "images or frames of so many tokens", 1, type=int),
    Option("text", "text tokens", 64, type=int),
    Option("heads", f"attention heads, of {HEAD_DIM} channels; Wan 2.1 has 12 or 40", 24, type=int),
    Option("double", "blocks with image and text apart", 2, type=int),
    Option("single", "blocks with both in one stream; Wan and Qwen-Image have one sort, of both numbers", 4, type=int),
    Option("preset", "presets of ours to measure beside all exchanges and orders, lossy ones too", [], many=True),
    Option("dtype", "of weights and activations, of all variants", "fp32", choices=tuple(DTYPES)),
    Option(
        "transport",
        "how ranks talk; the other libraries start on the CPU with this one only",
        "gloo",
        choices=("gloo",),
    ),
    Option("device", "what ranks compute on", "cpu", choices=("cpu",)),
)
Call = Callable[[Inputs], Any]
Replaceable = dict[tuple[Any, str], Any]  # values of attributes, by (class, name)


def check(values: Values, ranks: int | None) -> None:
    """Raise UserError for options of `bench peers` that cannot be run: wrong sizes, or other libraries missing.

    Args:
        values: the command's options.
        ranks: number of ranks of the launch; None if unknown, and then not checked.
    """
    check_counts(values, "side", "frames", "text", "heads", "double", "single", "repeats", "ranks")
    our_configs(values)
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing and CACHE_DIT in values["only"]:
        others = " ".join(name for name in values["only"] if name != CACHE_DIT) or OURS
        raise UserError(f"not installed: {', '.join(missing)}: {INSTALL}, or leave it out with --only {others}")
    if ranks is not None:
        check_sizes(values, ranks)


def sizes_of(values: Values) -> Sizes:
    """Return the sizes of the random transformer that the command's options ask for."""
    names = ("heads", "double", "single", "side", "text", "frames", "dtype")
    return Sizes(**{name: values[name] for name in names}, head_dim=HEAD_DIM)


def steps_of(values: Values) -> int:
    """Return the number of steps of the denoising run that every variant makes: at least STEPS, or as measured.

    values: the command's options, of which `repeats` is used
    """
    return max(STEPS, values["repeats"] + LEAD_IN + 1)


def check_sizes(values: Values, ranks: int) -> None:
    """Raise UserError if there is only one rank, or if other libraries cannot split the model evenly among ranks.

    The numbers of image tokens, text tokens and heads are checked.

    Args:
        values: the command's options.
        ranks: number of ranks.
    """
    if ranks < 2:
        raise UserError("bench peers compares exchanges between ranks: start at least 2, e.g. --ranks 2")
    peers = [name for name in values["only"] if name != OURS]
    sizes = {"image tokens": sizes_of(values).tokens, "text tokens": values["text"], "heads": values["heads"]}
    if not MODELS[values["model"]].text_travels:
        del sizes["text tokens"]
    for what, size in sizes.items():
        if peers and size % ranks:
            raise UserError(
                f"{size} {what} on {ranks} ranks: {' and '.join(peers)} split evenly only; "
                f"choose a multiple of {ranks}, or --only ours"
            )


def import_before_fork(values: Values) -> None:
    """Import diffusers' module of the model's class. It is imported once, before ranks are forked."""
    import_module(f"{DIFFUSERS_MODELS}.{REPLACED[values['model']][0]}")


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of `bench peers`: check every variant's output, then time a call of the model with each.

    Outputs are compared with those of one process, and times with those of the fastest variant that is not ours. Rank 0
    prints and writes the results.

    Args:
        values: the command's options.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    check_sizes(values, transport.size)
    configs = with_codecs(values, transport) if OURS in values["only"] else {}
    with torch.no_grad(), contextlib.ExitStack() as opened:
        benched, sizes = MODELS[values["model"]], sizes_of(values)
        model = random_model(benched, sizes)
        inputs = run_inputs(benched, sizes, values["repeats"] + LEAD_IN + 1, steps_of(values))
        exact = copy.deepcopy(model).float()
        expected = {number: step(exact, in_fp32(inputs[number])) for number in (0, -1)}
        allowed = {number: allowed_error(step(model, inputs[number]), one) for number, one in expected.items()}
        engines = {name: Engine(twin(model), config, transport) for name, config in configs.items()}
        calls: dict[str, Call] = {name: partial(step, engine.model) for name, engine in engines.items()}
        calls |= calls_of_peers(values, model, transport)
        last: dict[str, Tensor] = {}  # output of each variant's latest call

        def next_step(name: str, coming: Iterator[Inputs]) -> None:
            """Call a variant's model for the next denoising step, so that variants with a state are timed as in a
            run."""
            last[name] = calls[name](next(coming))

        variants = {name: partial(next_step, name, iter(inputs)) for name in calls}
        for engine in engines.values():
            opened.enter_context(engine)
        lossless = [name for name in variants if name not in configs or configs[name].exact]
        first_s = {}
        for name, variant in variants.items():
            common.meet(transport)
            started = time.perf_counter()
            variant()
            first_s[name] = time.perf_counter() - started
            if name in lossless:
                check_output(name, last[name], expected[0], allowed[0], transport.rank)
            for _ in range(LEAD_IN - 1):
                variant()
        before = {name: engine.bytes() for name, engine in engines.items()}
        late = {name: -late_bytes(engine) for name, engine in engines.items() if configs[name].arrival != "now"}
        seconds = common.measure_in_turns("bench peers", variants, values, transport)
        steps = values["repeats"] + 1  # with the warm-up
        sent = {
            name: {link: (count - before[name][link]) // steps for link, count in engine.bytes().items()}
            for name, engine in engines.items()
        }
        late = {name: (late[name] + late_bytes(engines[name])) / steps / sum(sent[name].values()) for name in late}
        reference = last[next(iter(variants))]
        errors = {name: errors_of(last[name], expected[-1], reference, transport) for name in variants}
        for name in lossless:
            check_output(name, last[name], expected[-1], allowed[-1], transport.rank)
    if transport.rank == 0:
        found: dict[str, dict[str, Any]] = {name: errors[name] | {"first_s": first_s[name]} for name in variants}
        for name, part in late.items():
            found[name] |= {"codec": configs[name].codec, "late_part": part}
        others = [name for name in seconds if name not in configs]
        baseline = min(others, key=lambda name: statistics.median(seconds[name])) if others else next(iter(seconds))
        references = common.compared_with(seconds, "flat", baseline)
        rows = common.rows(title_of(values, transport.size), seconds, sent, references)
        measured = [row | found[row["variant"]] for row in rows]
        common.say_rows(measured, "a step", more_words)
        say(
            f"first: the run's first call. error: of its last step, as a part of the norm, to one process in fp32 and "
            f"to {rows[0]['variant']}" + ("; late: of the bytes sent, the part that no call waited for" if late else "")
        )
        common.publish(output, values, measured)


def calls_of_peers(values: Values, model: Any, transport: Any) -> dict[str, Call]:
    """Return, by variant, functions of a call's inputs that call the model with other libraries' parallel attention.

    All ranks build the same ones in the same order, because building makes process groups.

    Args:
        values: the command's options.
        model: the random model. Variants get copies with the same weight tensors.
        transport: this rank's connection to the other ranks.
    """
    calls: dict[str, Call] = {}
    if DIFFUSERS in values["only"]:
        for name, anything in {"diffusers ulysses": False, "diffusers ulysses_anything": True}.items():
            calls[name] = partial(step, diffusers_parallel(twin(model), transport, anything))
    if CACHE_DIT in values["only"]:
        calls |= cache_dit_variants(model, transport.size, values)
    return calls


def title_of(values: Values, ranks: int) -> str:
    """Return what `bench peers` measures, in words: the model with its sizes and dtype, and the ranks.

    Args:
        values: the command's options.
        ranks: number of ranks.
    """
    frames = f"{values['frames']}x" if values["frames"] > 1 else ""
    tokens = f"{frames}{values['side']}x{values['side']} image and {values['text']} text tokens"
    sorts = f"{values['double']} double and {values['single']} single blocks"
    blocks = sorts if values["model"] == "flux" else f"{values['double'] + values['single']} blocks"
    title = f"{MODELS[values['model']].title} in {values['dtype']}"
    heads = f"{values['heads']} heads of {HEAD_DIM}"
    return f"{title}, {blocks}, {heads}, {tokens}, {ranks} ranks on {values['transport']}"


def more_words(row: Row) -> list[str]:
    """Return more text to print after the times of a row of results of `bench peers`, in parts.

    They are the first call's milliseconds, and two relative errors: against one process in fp32 and against an exact
    variant. Variants that displace tensors also have their codec, and the share of their bytes that no call waited for.
    """
    errors = f"error {row['relative_error']:.1e}, {row['relative_to_exact']:.1e}"
    arrival = [f"codec {row['codec']}, late {row['late_part']:.0%}"] if "late_part" in row else []
    return [f"first {row['first_s'] * 1e3:.0f} ms", errors, *arrival]


# Correctness ----------------------------------------------------------------------------------------------------------


def allowed_error(plain: Tensor, expected: Tensor) -> float:
    """Return the largest absolute error that an exact variant may have against one process in fp32.

    Args:
        plain: output of one process in the variants' dtype.
        expected: output of one process in fp32.
    """
    if plain.dtype == torch.float32:
        return float(ALLOWED_EPS * torch.finfo(torch.float32).eps * expected.abs().max())
    return ALLOWED_OF_PLAIN * float((plain.float() - expected).abs().max())


def check_output(name: str, output: Tensor, expected: Tensor, allowed: float, rank: int) -> None:
    """Raise RuntimeError if an output differs anywhere from the expected one by more than `allowed`.

    Args:
        name: name of the variant.
        output: the variant's output.
        expected: output of one process in fp32.
        allowed: the largest absolute difference.
        rank: this rank's number, for the message.
    """
    error = float((output.float() - expected).abs().max())
    if not error <= allowed:
        raise RuntimeError(f"{name} is wrong: {error:.1e} off one process on rank {rank}, not {allowed:.1e}")


def errors_of(output: Tensor, expected: Tensor, reference: Tensor, transport: Any) -> dict[str, float]:
    """Return the largest errors of a variant's output on any rank, by column of bench.json. Only rank 0's are complete.

    They are max_abs_error; relative_error, the L2 norm of the error divided by that of the expected output; and
    relative_to_exact, the same against an exact variant in the same dtype, which leaves out rounding.

    Args:
        output: this rank's output of the variant.
        expected: output of one process in fp32.
        reference: output of an exact variant in the same dtype.
        transport: this rank's connection to the other ranks.
    """
    off, beside = output.float() - expected, output.float() - reference.float()
    own = [float(off.abs().max()), float(off.norm() / expected.norm()), float(beside.norm() / expected.norm())]
    largest = [max(of_ranks) for of_ranks in zip(*(transport.gather_values(own) or [own]), strict=True)]
    return dict(zip(("max_abs_error", "relative_error", "relative_to_exact"), largest, strict=True))


# Ours -----------------------------------------------------------------------------------------------------------------


def our_configs(values: Values) -> dict[str, Config]:
    """Return the settings of cocodiff's own variants by name: every exchange in every order, and the presets.

    With the joint order a variant has the name of the exchange. Presets are there also compiled if the options ask for
    it.

    Args:
        values: the command's options.
    """
    exact = {}
    for exchange, order in product(EXCHANGES, ORDERS):
        name = exchange if order == "joint" else f"{exchange} {order}"
        exact[name] = common.engine_config(values, exchange=exchange, order=order).with_(compile=False)
    run = steps_of(values)
    presets = {name: common.engine_config(values, preset=name, steps=run) for name in values["preset"]}
    return exact | {name: config for name, config in common.with_compiled(presets).items() if name not in exact}


def with_codecs(values: Values, transport: Any) -> dict[str, Config]:
    """Return the settings of cocodiff's own variants, with each codec "auto" replaced by the planner's choice.

    Rank 0 prints the choice. On emulated links it is made for the actual conditions: links slower than the machine
    file's by the scale, and arithmetic as fast as rank 0 measures it on this host.

    Args:
        values: the command's options.
        transport: this rank's connection to the other ranks.
    """
    configs = our_configs(values)
    if all(config.codec != "auto" for config in configs.values()):
        return configs
    topology, scale = topology_of(values["machine"], transport.size), emulated().get("scale")
    joint = MODELS[values["model"]].text_travels
    tokens = sizes_of(values).tokens
    segments = image_and_text(tokens, values["text"]) if joint else (image_segment(tokens),)
    if scale:
        mine = None if transport.rank else measured_device(topology.size, tokens, values["heads"] * HEAD_DIM)
        slower = slowed(topology.machine, scale)
        topology = replace(topology, machine=replace(slower, device=transport.broadcast_value(mine)))
    work = AttentionWork(values["heads"], HEAD_DIM, segments, itemsize=DTYPES[values["dtype"]].itemsize)
    found = {name: with_codec_chosen(config, topology, work) for name, config in configs.items()}
    where = f" (links {scale:g} times slower, arithmetic as measured on this host)" if scale else ""
    for name, (_, line) in found.items():
        if line and not transport.rank:
            say(f"{name}: {line}{where}")
    return {name: config for name, (config, _) in found.items()}


def measured_device(ranks: int, tokens: int, width: int) -> Device:
    """Return this host's CPU as the device of one rank, with its speed while all ranks compute.

    Speed is taken from short measurements of a linear layer and of copies.

    Args:
        ranks: number of ranks that share the CPU.
        tokens: number of all ranks' tokens together.
        width: channels of the linear layer.
    """
    share = min(1.0, len(os.sched_getaffinity(0)) / (ranks * torch.get_num_threads()))
    x_LW, weight_WW = torch.ones(max(1, tokens // ranks), width), torch.ones(width, width)
    source, few = torch.zeros(2**25, dtype=torch.uint8), torch.zeros(16)
    onto = torch.empty_like(source)

    def rate(call: Callable[[], object]) -> float:
        """Return the number of calls in a second, for one rank while all compute."""
        return share / min(timeit.repeat(call, number=1, repeat=5))

    flop = 2 * len(x_LW) * width * width
    return Device(
        memory_gb_s=2 * len(source) * rate(lambda: onto.copy_(source)) / 1e9,
        bf16_tflop_s=flop * rate(lambda: torch.nn.functional.linear(x_LW, weight_WW)) / 1e12,
        launch_us=1e6 / rate(lambda: few + few),
    )


def late_bytes(engine: Engine) -> int:
    """Return the bytes that all ranks have sent for displaced tensors, which are used a step later.

    No attention call waits for these bytes. All ranks call this.

    Args:
        engine: the engine of one variant on this rank.
    """
    return sum(engine.bytes("late").values())


# Other libraries ------------------------------------------------------------------------------------------------------


def diffusers_parallel(model: Any, transport: Any, anything: bool) -> Any:
    """Set up diffusers' own Ulysses attention on a model, in place, and return the model.

    `enable_parallelism` divides by the number of accelerators, so on the CPU its steps are done one by one.

    Args:
        model: the model.
        transport: this rank's connection to the other ranks.
        anything: True for the variant that also splits sizes that the ranks do not divide.
    """
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    size = transport.size
    context = ContextParallelConfig(ulysses_degree=size, ulysses_anything=anything)
    # The "anything" variant gathers sizes on the CPU only where a group's backend names it.
    backend: Any = {"ulysses": "cpu:gloo"}
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"), backend_override=backend)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(transport.rank, size, torch.device("cpu"), mesh=mesh)
    for processor in model.attn_processors.values():
        processor._parallel_config = config
    apply_context_parallel(model, context, model._cp_plan)
    return model


def cache_dit_variants(model: Any, ranks: int, values: Values) -> dict[str, Call]:
    """Return, by variant, the functions that call the model with cache-dit's Ulysses attention, plain and asynchronous.

    It replaces methods and attention backends of diffusers' classes, once in a process. What it replaces is restored at
    once, and put back in place for each of its own calls.

    Args:
        model: the random model. Variants get copies with the same weight tensors.
        ranks: number of ranks.
        values: the command's options.
    """
    name_of_model = values["model"]
    before = theirs = replaceable(name_of_model)
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", values["log_level"])  # read when it is imported
    import cache_dit

    variants: dict[str, Call] = {}
    asynchronous = ["ulysses_async"] if name_of_model in ASYNCHRONOUS else []
    for name in ("ulysses", *asynchronous):
        own = twin(model)
        with in_place(theirs, before):
            settings = {} if name == "ulysses" else {name: True}
            parallel = cache_dit.ParallelismConfig(ulysses_size=ranks, **settings)
            cache_dit.enable_cache(own, cache_config=None, parallelism_config=parallel)
            theirs = replaceable(name_of_model)
        variants[f"cache-dit {name}"] = in_place(theirs, before)(partial(step, own))
    return variants


def replaceable(model: str) -> Replaceable:
    """Return the attributes of diffusers' classes that cache-dit replaces, with copies of their current values.

    Args:
        model: a key of REPLACED, such as "flux".
    """
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    tables = [(Registry, name) for name, value in vars(Registry).items() if isinstance(value, dict | set)]
    module, *attributes = REPLACED[model]
    classes = import_module(f"{DIFFUSERS_MODELS}.{module}")
    places = [(getattr(classes, kind), name) for kind, name in (one.split(".") for one in attributes)]
    return {(owner, name): copy.copy(vars(owner)[name]) for owner, name in [*places, *tables]}


def put(what: Replaceable) -> None:
    """Set attributes of diffusers' classes, which cache-dit replaces.

    Args:
        what: the values to set, by (class, name of the attribute).
    """
    for (owner, name), value in what.items():
        setattr(owner, name, copy.copy(value))  # a copy, because a table may be changed later


@contextlib.contextmanager
def in_place(theirs: Replaceable, before: Replaceable) -> Iterator[None]:
    """Set the attributes that cache-dit replaces to its values inside the `with` block, and restore them after it.

    Args:
        theirs: cache-dit's values.
        before: diffusers' values.
    """
    put(theirs)
    try:
        yield
    finally:
        put(before)

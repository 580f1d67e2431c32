"""`cocodiff bench peers`: one denoising step of the same random FLUX transformer, by cocodiff and by the Ulysses
attention of other libraries, all on the same ranks over gloo.

This file alone knows other libraries. They are imported for this benchmark only, on the CPU only, and what they replace
in diffusers' classes is there while their own variants run and gone while all others do.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cocodiff.commands.options import Option, check_counts
from cocodiff.commands.outputs import OutputFolder
from cocodiff.commands.terminal import say
from cocodiff.config import Config
from cocodiff.errors import UserError
from cocodiff.registry import EXCHANGES, ORDERS
from cocodiff_bench import common
from cocodiff_bench.common import Benchmark, Values

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from torch import Tensor

    from cocodiff.engine import Engine

OURS, DIFFUSERS, CACHE_DIT = "ours", "diffusers", "cache_dit"
WHOSE = (OURS, DIFFUSERS, CACHE_DIT)
PACKAGES = {CACHE_DIT: ("cache_dit", "einops")}  # what a peer needs beyond our own dependencies
INSTALL = "pip install cache-dit einops"
HEAD_DIM, CHANNELS, TEXT_CHANNELS, POOLED = 32, 16, 64, 32
ALLOWED_EPS = 100  # of fp32, times the largest value: what sums in another order, through all layers, stay well below
OPTIONS = common.with_common_options(
    Option("only", "whose variants to measure", list(WHOSE), many=True, choices=WHOSE),
    Option("side", "image tokens along one edge", 32, type=int),
    Option("text", "text tokens", 64, type=int),
    Option("heads", f"attention heads, of {HEAD_DIM} channels", 24, type=int),
    Option("double", "blocks with image and text apart", 2, type=int),
    Option("single", "blocks with both in one stream", 4, type=int),
    Option(
        "transport",
        "how ranks talk; the other libraries start on the CPU with this one only",
        "gloo",
        choices=("gloo",),
    ),
    Option("device", "what ranks compute on", "cpu", choices=("cpu",)),
)
Call = Callable[[], Any]
Replaceable = dict[tuple[Any, str], Any]  # (class, attribute) -> what it is


def check(values: Values, ranks: int | None) -> None:
    """Raises UserError for sizes that cannot be run or that peers cannot split, and for peers that are not there."""
    check_counts(values, "side", "text", "heads", "double", "single", "repeats", "ranks")
    peers = [name for name in values["only"] if name != OURS]
    for peer in peers:
        missing = [package for package in PACKAGES.get(peer, ()) if find_spec(package) is None]
        if missing:
            others = " ".join(name for name in values["only"] if name != peer) or OURS
            raise UserError(f"not installed: {', '.join(missing)}: {INSTALL}, or leave it out with --only {others}")
    if ranks is not None:
        check_sizes(values, ranks)


def check_sizes(values: Values, ranks: int) -> None:
    if ranks < 2:
        raise UserError("bench peers compares exchanges between ranks: start at least 2, e.g. --ranks 2")
    peers = [name for name in values["only"] if name != OURS]
    sizes = {"image tokens": values["side"] ** 2, "text tokens": values["text"], "heads": values["heads"]}
    for what, size in sizes.items():
        if peers and size % ranks:
            raise UserError(
                f"{size} {what} on {ranks} ranks: {' and '.join(peers)} split evenly only; "
                f"choose a multiple of {ranks}, or --only ours"
            )


def import_before_fork(values: Values) -> None:
    for name in ("diffusers.models.transformers.transformer_flux", "cocodiff.engine"):
        import_module(name)


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Every variant on its own copy of the model, checked against one process, then timed in turn."""
    import torch

    check_sizes(values, transport.size)
    engines: dict[str, Engine] = {}
    with torch.no_grad(), contextlib.ExitStack() as opened:
        model = flux(values)
        call = partial(step, inputs=flux_inputs(values))
        expected = call(model)
        variants = make_variants(values, model, call, engines, transport)
        for engine in engines.values():
            opened.enter_context(engine)
        errors = {name: worst_error(name, variant(), expected, transport) for name, variant in variants.items()}
        seconds = common.measure_in_turns("bench peers", variants, values, transport)
        calls = values["repeats"] + 2  # with the checked one and the warm-up
        traffic = {name: engine.bytes() for name, engine in engines.items()}
    if transport.rank == 0:
        sent = {name: {link: count // calls for link, count in total.items()} for name, total in traffic.items()}
        report(values, output, seconds, sent, errors, transport.size)


def make_variants(
    values: Values, model: Any, call: Callable[[Any], Any], engines: dict[str, Engine], transport: Any
) -> dict[str, Call]:
    """Name -> one step; the engines of ours go to `engines`, not yet entered. Every rank makes the same variants in the
    same order: process groups are made on the way."""
    variants: dict[str, Call] = {}
    if OURS in values["only"]:
        from cocodiff.engine import Engine

        for name, config in our_configs(values).items():
            own = twin(model)
            engines[name] = Engine(own, config, transport)
            variants[name] = partial(call, own)
    if DIFFUSERS in values["only"]:
        for name, anything in {"diffusers ulysses": False, "diffusers ulysses_anything": True}.items():
            variants[name] = partial(call, diffusers_parallel(twin(model), transport, anything))
    if CACHE_DIT in values["only"]:
        variants |= cache_dit_variants(model, call, transport.size, values["log_level"])
    return variants


def our_configs(values: Values) -> dict[str, Config]:
    """Every exchange in every order; the joint order's name is that of the exchange alone."""
    return {
        exchange if order == "joint" else f"{exchange} {order}": common.engine_config(
            values, exchange=exchange, order=order
        )
        for exchange in EXCHANGES
        for order in ORDERS
    }


def report(
    values: Values,
    output: OutputFolder,
    seconds: dict[str, list[float]],
    sent: dict[str, dict[str, int]],
    errors: dict[str, float],
    ranks: int,
) -> None:
    """Rows with the error beside the time. What they are compared with is the fastest variant that is not ours."""
    peers = [name for name in seconds if name not in our_configs(values)]
    baseline = min(peers, key=lambda name: statistics.median(seconds[name])) if peers else next(iter(seconds))
    tokens = f"{values['side']}x{values['side']} image and {values['text']} text tokens"
    blocks = f"{values['double']} double and {values['single']} single blocks, {values['heads']} heads of {HEAD_DIM}"
    case = f"FLUX, {blocks}, {tokens}, {ranks} ranks on {values['transport']}"
    found = common.rows(case, seconds, sent, common.compared_with(seconds, "flat", baseline))
    measured = [row | {"max_abs_error": errors[row["variant"]]} for row in found]
    common.say_rows(measured, "a step")
    say("largest error to one process: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    common.publish(output, values, measured)


# The model ------------------------------------------------------------------------------------------------------------


def flux(values: Values) -> Any:
    """The same random FluxTransformer2DModel on every rank."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=values["double"],
        num_single_layers=values["single"],
        attention_head_dim=HEAD_DIM,
        num_attention_heads=values["heads"],
        joint_attention_dim=TEXT_CHANNELS,
        pooled_projection_dim=POOLED,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    ).eval()


def flux_inputs(values: Values) -> dict[str, Any]:
    import torch

    side, text, noise = values["side"], values["text"], torch.Generator().manual_seed(1)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return {
        "hidden_states": torch.randn(1, side * side, CHANNELS, generator=noise),
        "encoder_hidden_states": torch.randn(1, text, TEXT_CHANNELS, generator=noise),
        "pooled_projections": torch.randn(1, POOLED, generator=noise),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([torch.zeros_like(y), y, x], dim=-1).reshape(side * side, 3).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def step(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, return_dict=False)[0]


def twin(model: Any) -> Any:
    """A model with modules of its own, to be changed at will, and the weights of another one."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def worst_error(name: str, output: Tensor, expected: Tensor, transport: Any) -> float:
    """The largest absolute error of any rank; on rank 0 it is whole. Raises RuntimeError for a wrong output."""
    import torch

    error = float((output - expected).abs().max())
    allowed = ALLOWED_EPS * torch.finfo(torch.float32).eps * float(expected.abs().max())
    if not error <= allowed:
        raise RuntimeError(f"{name} is wrong: {error:.1e} off one process on rank {transport.rank}, not {allowed:.1e}")
    return max(transport.gather_object(error) or [error])


# Other libraries ------------------------------------------------------------------------------------------------------


def diffusers_parallel(model: Any, transport: Any, anything: bool) -> Any:
    """diffusers' own context parallelism. `enable_parallelism` divides by the number of accelerators, so on the CPU its
    steps are taken one by one."""
    import torch
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


def cache_dit_variants(model: Any, call: Callable[[Any], Any], ranks: int, log_level: str) -> dict[str, Call]:
    """cache-dit's Ulysses attention, plain and asynchronous. It replaces methods and attention backends of diffusers'
    classes, each once in a process: what is replaced goes back at once and is there again for each call of its own."""
    before = theirs = replaceable()
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", log_level)  # read when it is imported
    import cache_dit

    variants: dict[str, Call] = {}
    for name, settings in {"cache-dit ulysses": {}, "cache-dit ulysses_async": {"ulysses_async": True}}.items():
        own = twin(model)
        with in_place(theirs, before):
            parallel = cache_dit.ParallelismConfig(ulysses_size=ranks, **settings)
            cache_dit.enable_cache(own, cache_config=None, parallelism_config=parallel)
            theirs = replaceable()
        variants[name] = partial(call_in_place, partial(call, own), theirs, before)
    return variants


def call_in_place(call: Call, theirs: Replaceable, before: Replaceable) -> Any:
    with in_place(theirs, before):
        return call()


def replaceable() -> Replaceable:
    """The attributes of diffusers' classes that cache-dit replaces, as they are now."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxSingleTransformerBlock

    tables = [(Registry, name) for name, value in vars(Registry).items() if isinstance(value, dict | set)]
    places = [(FluxAttnProcessor, "__call__"), (FluxSingleTransformerBlock, "forward"), *tables]
    return {(owner, name): copy.copy(vars(owner)[name]) for owner, name in places}


def put(what: Replaceable) -> None:
    for (owner, name), value in what.items():
        setattr(owner, name, copy.copy(value))  # a copy of a table: what is put may be changed


@contextlib.contextmanager
def in_place(theirs: Replaceable, before: Replaceable) -> Iterator[None]:
    put(theirs)
    try:
        yield
    finally:
        put(before)


BENCHMARK = Benchmark(
    "Times one transformer call of a random FLUX model on several CPU ranks: cocodiff, and other libraries' Ulysses.",
    OPTIONS,
    check,
    measure,
    import_before_fork,
)

"""`cocodiff bench latte`: one step of a random Latte that ranks share in several ways.

With Ulysses, ranks have some places of all frames, and exchange q, k, v and the output of spatial attention. With
transposes, they exchange hidden states. In slices, no part, half or all of a transpose is sent while the block before
it computes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cocodiff.attention.strategy import LazyQKV
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import Engine
from cocodiff.engine.verification import twin
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import Option, check_counts
from cocodiff.jobs.terminal import say
from cocodiff.models.adapter import Adapter, AttentionProcessor
from cocodiff.models.checks import signature_of
from cocodiff.models.latte import PLACES, LatteAdapter
from cocodiff.models.plan import Cut, Gather, Plan, as_given
from cocodiff_bench import common
from cocodiff_bench.common import Values

TEXT = 16  # number of text tokens
# Ways in slices, with their `LatteAdapter.early`.
SLICED = {"sliced": 0.5, "received in slices": 0.0, "sent in slices": 1.0}
WAYS = ("ulysses", "transposed", *SLICED)
ABOUT = "Times one step of a random Latte: Ulysses, transposes of hidden states, and these in slices."
OPTIONS = common.with_common_options(
    Option("exchanges", "routes of messages", ["flat", "split"], many=True, choices=("flat", "tapa", "split")),
    Option("ways", "how ranks share the model", [*WAYS[:3]], many=True, choices=WAYS),
    Option("slices", "of each rank's frames and places", 4, type=int),
    Option("frames", "of the video", 48, type=int),
    Option("side", "places along one edge of a frame", 16, type=int),
    Option("layers", "pairs of a spatial and a temporal block; Latte-1 has 28", 2, type=int),
    Option("heads", "attention heads; Latte-1 has 16", 16, type=int),
    Option("head_dim", "their channels; Latte-1 has 72", 24, type=int),
    Option(
        "waits", "seconds of a step that linear layers take on each rank, as waits; 0: compute them", 0.0, type=float
    ),
)


def check(values: Values, ranks: int | None) -> None:
    """Raise UserError for options of `bench latte` that cannot be measured, and for a single rank.

    Args:
        values: the command's options.
        ranks: number of ranks of the launch; None if unknown, and then not checked.
    """
    check_counts(values, "slices", "frames", "side", "layers", "heads", "head_dim", "repeats", "ranks")
    if not 0 <= values["waits"] < float("inf"):
        raise UserError(f"--waits {values['waits']}: give 0 or more")
    if ranks == 1:
        raise UserError("bench latte compares how ranks share a model: start at least 2, e.g. --ranks 2")


TOKENS: Plan = {"transformer_blocks.0": {"hidden_states": Cut(tokens=PLACES)}, "proj_out": Gather(tokens=PLACES)}


class UlyssesLatte(LatteAdapter):
    """The adapter that lets ranks share a Latte video model by Ulysses attention, as other families do. A baseline.

    Each rank has some places (positions within a frame) of all frames, which is all that temporal blocks need. Ranks
    exchange places for heads where a spatial block attends.
    """

    plan = TOKENS

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        """Return the class of attention processors that replaces diffusers' own, by the replaced class."""
        from diffusers.models.attention_processor import AttnProcessor2_0

        return {AttnProcessor2_0: SpatialProcessor}

    def attach(self, model: Any, host: Any, kernels: Any) -> Callable[[], None]:
        """Attach the engine to a Latte model, in place, and return the function that undoes it.

        Args:
            model: the Latte model.
            host: the engine, which cuts the model's tensors among ranks and gathers them.
            kernels: the engine's kernels.
        """
        undo = contextlib.ExitStack()
        undo.callback(Adapter.attach(self, model, host, kernels))

        def cut_timesteps(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            """Return a block's arguments, positional and named, with the timesteps of this rank's places in a frame
            only."""
            bound = signature_of(block).bind(*args, **kwargs)  # [videos * places, C]
            of_places = bound.arguments["timestep"].unflatten(0, (-1, sum(host.sequence.shares(PLACES))))
            bound.arguments["timestep"] = host.sequence.cut(PLACES, of_places).flatten(0, 1)
            return as_given(bound, args, kwargs)

        for block in model.temporal_transformer_blocks:
            undo.callback(block.register_forward_pre_hook(cut_timesteps, with_kwargs=True).remove)
        return undo.close


class SpatialProcessor(AttentionProcessor):
    """The attention of Latte's blocks with Ulysses: spatial attention exchanges tokens for heads between ranks.

    Attention to the text, and between frames, needs no other rank, and is computed as in diffusers.
    """

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **more: Any) -> Any:
        """Return the output of a block's attention, computed with other ranks only in spatial blocks.

        Args:
            attn: diffusers' attention module.
            hidden_states: this rank's tokens.
            encoder_hidden_states: tokens of the text to attend to; None in self-attention.
            more: other arguments of diffusers' processors.
        """
        if encoder_hidden_states is not None or self.layer.startswith("temporal"):
            return self.replaced(attn, hidden_states, encoder_hidden_states, **more)

        def projected(to: Any) -> Any:
            return to(hidden_states).unflatten(-1, (attn.heads, -1))

        q, k, v = (partial(projected, to) for to in (attn.to_q, attn.to_k, attn.to_v))
        out_BLC = self.attend(LazyQKV(q, k, v, self.host.segments[1:], attn.heads)).flatten(-2)
        return attn.to_out[0](out_BLC)


def engine_of(model: Any, config: Config, transport: Any, way: str) -> Any:
    """Return an engine with a copy of the model, which ranks share in one of several ways.

    Args:
        model: the Latte model.
        config: the engine's settings.
        transport: this rank's connection to the other ranks.
        way: how ranks share the model, a name in WAYS.
    """
    engine = Engine(twin(model), config, transport)
    if way == "ulysses":
        engine.adapter = UlyssesLatte()
    elif way in SLICED:
        engine.adapter = LatteAdapter()
        engine.adapter.early = SLICED[way]
    return engine


def measure(values: Values, output: OutputFolder, transport: Any) -> None:
    """Run one rank's part of `bench latte`: time a step of every variant, each on its own copy of the model.

    Rank 0 prints and writes the results. The largest difference of a variant's output to the first variant's is printed
    too.

    Args:
        values: the command's options.
        output: folder of the results.
        transport: this rank's connection to the other ranks.
    """
    model, call = random_latte(values)
    if values["waits"]:
        wait_in_linear_layers(model, values["waits"] * transport.size / (values["frames"] * values["side"] ** 2))
    names = {f"{exchange} {way}": (exchange, way) for exchange in values["exchanges"] for way in values["ways"]}
    with contextlib.ExitStack() as opened, torch.no_grad():
        engines = {}
        for name, (exchange, way) in names.items():
            config = common.engine_config(values, exchange=exchange, chunks=values["slices"] if way in SLICED else 1)
            engines[name] = engine_of(model, config, transport, way)
        variants = {name: partial(opened.enter_context(one).model, **call) for name, one in engines.items()}
        outputs = [variant().sample for variant in variants.values()]
        largest = max(float((x - outputs[0]).abs().max()) for x in outputs)
        traces = {name: engine.trace for name, engine in engines.items()}
        seconds, sent = common.measure_slowest("bench latte", variants, values, transport, traces)
    if transport.rank == 0:
        size = f"{values['frames']} frames of {values['side']}x{values['side']} places"
        case = f"Latte, {size}, {values['layers']} layers, {transport.size} ranks"
        references = {name: {way: f"{exchange} {way}" for way in WAYS[:2]} for name, (exchange, _) in names.items()}
        measured = common.rows(case, seconds, sent, references)
        common.say_rows(measured, "a step", lambda row: [f"{sum(row['bytes'].values()) / 1e6:.1f} MB"])
        say(f"largest difference to the first: {largest:.1e}")
        common.publish(output, values, measured)


def random_latte(values: Values) -> tuple[Any, dict[str, Any]]:
    """Return a random Latte model in float32 and the arguments of a call of it. Both are the same on every rank.

    Args:
        values: the command's options, with the model's sizes.
    """
    from diffusers import LatteTransformer3DModel

    torch.manual_seed(0)
    width, side = values["heads"] * values["head_dim"], 2 * values["side"]
    blocks = {"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "attention_bias": True}
    blocks |= {"num_embeds_ada_norm": 1000, "activation_fn": "gelu-approximate", "cross_attention_dim": width}
    sizes = {"num_attention_heads": values["heads"], "attention_head_dim": values["head_dim"]}
    sizes |= {"num_layers": values["layers"], "sample_size": side, "video_length": values["frames"]}
    channels = {"in_channels": 4, "out_channels": 8, "patch_size": 2, "caption_channels": 64}
    model = LatteTransformer3DModel(**sizes, **channels, **blocks).eval()
    call = {"hidden_states": torch.randn(1, 4, values["frames"], side, side), "timestep": torch.tensor([500])}
    return model, call | {"encoder_hidden_states": torch.randn(1, TEXT, 64)}


def wait_in_linear_layers(model: Any, seconds_of_token: float) -> None:
    """Replace the linear layers in a model's blocks, in place, by waits.

    Ranks on one host share its cores, so a rank computes while others' messages are in flight, with slices or without.
    On a real machine each has its own cores: there a layer takes as long as its rows need, regardless of the others.

    Args:
        model: the Latte model.
        seconds_of_token: seconds of all linear layers for one token.
    """

    class Waiting(torch.nn.Module):
        """A wait in place of a linear layer. Its output is zeros."""

        def __init__(self, of: torch.nn.Linear, seconds_of_row: float) -> None:
            """Take the place of the linear layer `of`. A call waits for so many seconds for each row of its input."""
            super().__init__()
            self.width, self.seconds_of_row = of.out_features, seconds_of_row

        def forward(self, x: Any) -> Any:
            time.sleep(self.seconds_of_row * x[..., 0].numel())
            return x.new_zeros(*x.shape[:-1], self.width)

    blocks = torch.nn.ModuleList([*model.transformer_blocks, *model.temporal_transformer_blocks])
    linear = [
        (module, name, layer)
        for module in blocks.modules()
        for name, layer in module.named_children()
        if isinstance(layer, torch.nn.Linear)
    ]
    weights = sum(layer.weight.numel() for *_, layer in linear)
    for module, name, layer in linear:
        setattr(module, name, Waiting(layer, seconds_of_token * layer.weight.numel() / weights))

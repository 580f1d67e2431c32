"""Our variants of `cocodiff bench peers`: their settings, and which codec `auto` is on the ranks that are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cocodiff.config import Config
from cocodiff.console.terminal import say
from cocodiff.processes.emulated import emulated
from cocodiff.registry import EXCHANGES, ORDERS
from cocodiff_bench import common
from cocodiff_bench.common import Values
from cocodiff_bench.peers_model import HEAD_DIM, MODELS, steps_of, tokens_of

if TYPE_CHECKING:  # torch is imported by the ranks, or once before they are forked
    from cocodiff.engine import Engine

ITEMSIZES = {"fp32": 4, "bf16": 2}


def our_configs(values: Values) -> dict[str, Config]:
    """Every exchange in every order; the joint order's name is that of the exchange alone. And the presets, also
    compiled where that is wanted."""
    exact = {
        exchange if order == "joint" else f"{exchange} {order}": common.engine_config(
            values, exchange=exchange, order=order
        ).with_(compile=False)
        for exchange in EXCHANGES
        for order in ORDERS
    }
    run = steps_of(values)
    presets = common.with_compiled(
        {name: common.engine_config(values, preset=name, steps=run) for name in values["preset"]}
    )
    return exact | {name: config for name, config in presets.items() if name not in exact}


def with_codecs(values: Values, transport: Any) -> dict[str, Config]:
    """`our_configs` with `codec: auto` decided. On emulated links it goes by what the ranks are on: links so many times
    slower than the file's, and arithmetic as fast as rank 0 measures it on this host. Rank 0 says it."""
    configs = our_configs(values)
    if all(config.codec != "auto" for config in configs.values()):
        return configs
    from cocodiff.assemble import AttentionWork, with_codec_chosen
    from cocodiff.models.tokens import image_and_text, image_segment
    from cocodiff.planning.calibrate import Constants
    from cocodiff.planning.here import measure_device, rank_share
    from cocodiff.planning.memory import Load, ModelShape

    topology, scale = common.topology_of(values, transport.size), emulated().get("scale")
    joint = MODELS[values["model"]].text_travels
    tokens = tokens_of(values)
    segments = image_and_text(tokens, values["text"]) if joint else (image_segment(tokens),)
    load = Load(segments, 1, ITEMSIZES[values["dtype"]])
    if scale:
        shape, share = ModelShape("a layer", values["heads"], HEAD_DIM, 1, 1), rank_share(topology.size)
        mine = None if transport.rank else measure_device(share, shape, load, topology.size)
        slowed = Constants(sibling=1 / scale, plane=1 / scale, nic=1 / scale).machine(topology.machine)
        topology = replace(topology, machine=replace(slowed, device=transport.broadcast_object(mine)))
    work = AttentionWork(values["heads"], HEAD_DIM, segments, itemsize=load.itemsize)
    found = {name: with_codec_chosen(config, topology, work) for name, config in configs.items()}
    where = f" (links {scale:g} times slower, arithmetic as measured on this host)" if scale else ""
    for name, (_, line) in found.items():
        if line and not transport.rank:
            say(f"{name}: {line}{where}")
    return {name: config for name, (config, _) in found.items()}


def coded_at_first(configs: Mapping[str, Config]) -> list[str]:
    from cocodiff.attention.residual import codes_first_calls

    return [name for name, config in configs.items() if codes_first_calls(config.codec)]


def late_bytes(engine: Engine) -> int:
    return sum(engine.bytes("late").values())

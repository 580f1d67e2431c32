"""The planner's answers to a run: which mesh and which codec `auto` stand for, and whether there is room for what is
kept. Alike on every rank.

The engine asks by the table `PLANNER` of the registry, so that runs which leave nothing open import none of this. As it
chooses before it has seen a call, mesh and codec are those for an image of 1024 x 1024 pixels with a prompt of 512
tokens. Larger images compute somewhat longer for their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from cocodiff.attention.stateful import TENSORS
from cocodiff.attention.strategy import LazyQKV
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Machine, Topology
from cocodiff.config.registry import EXACT_CODECS
from cocodiff.engine.assemble import AttentionWork, chunking_on, codec_class
from cocodiff.engine.sequence import SequenceRanks
from cocodiff.kernels.device import free_memory
from cocodiff.models.family import Family
from cocodiff.planner.costs import CODED, CallKind, costs_of, state_sizes
from cocodiff.planner.layers import Case, PlannedCall, Sent, kinds_of
from cocodiff.planner.memory import Load, ModelShape, check_fits, run_cache, shape_of_config, size_run
from cocodiff.planner.placement import choose
from cocodiff.planner.traffic import Latencies
from cocodiff.topology.axes import Mesh
from cocodiff.topology.routes.chunks import Chunking

FROM_THE_FINEST = (*EXACT_CODECS, "int8", "int4", "int2")
GAIN = 1.02  # a coarser codec is chosen where a finer one takes more than so many times as long
# Of a run's tensors, the part that attention waits for: the first step and the last ones of 50, and with `adaptive` as
# many as the embedded model's controller has waited for.
AWAITED = {"now": 1.0, "displaced": 0.06, "adaptive": 0.3}


def mesh_of(config: Config, topology: Topology, work: AttentionWork) -> Mesh:
    """Raises UserError for a ring that ranks and heads do not allow."""
    head_bytes = costs_of(config).sent_bytes(work.head_dim, work.itemsize)
    work = replace(work, chunking=predicted_chunking(config), head_bytes=head_bytes)
    prefer_ulysses = codec_class(config).keeps_state
    return choose(topology, work, config.ring, config.placement, prefer_ulysses, config.ring_kind)


def predicted_chunking(config: Config) -> Callable[[Topology], Chunking]:
    """`chunking` for predictions, which look at meshes that nobody takes: without chunks where none were measured."""

    @cache
    def on_nodes(machine: Machine, nodes: int) -> Chunking:
        try:
            return chunking_on(config, machine, nodes)
        except UserError:
            return Chunking()

    return lambda part: on_nodes(part.machine, part.nodes)


def check_room(
    model: nn.Module,
    family: Family,
    ranks: SequenceRanks,
    call: tuple[int, int, int],
    device: Any,
    on_node: int,
    held: int,
) -> None:
    """Raises UserError where this rank does not have the memory for what a run keeps between calls. call: its batch,
    the bytes of a number and the branches. on_node: ranks that share the node's memory. held: bytes of it that are kept
    already."""
    free = free_memory(device, on_node)
    if free is None:
        return
    stored = [*model.parameters(), *model.buffers()]
    weights = sum(x.nbytes for x in stored if x.device == device)
    config: Any = model.config
    shape = shape_of_config(family, config, sum(x.numel() for x in stored))
    load = Load(ranks.segments, *call, state_sizes(ranks.config))
    need = replace(size_run(shape, ranks.topology, load, ranks.mesh)[ranks.rank], weights=weights, library=0)
    check_fits(need, free + weights + held, f"rank {ranks.rank} on {device}")


def check_room_for_layers(layers: int, qkv: LazyQKV, ranks: SequenceRanks, on_node: int) -> None:
    """As `check_room`, for what so many layers keep for one branch of guidance. qkv: of one of them."""
    q_BLHD = qkv.q()
    free = free_memory(q_BLHD.device, on_node)
    if free is None:
        return
    shape = ModelShape("layers", qkv.heads, q_BLHD.shape[-1], layers, 1)
    state = state_sizes(ranks.config.with_(step_cache="none"))
    load = Load(qkv.segments, len(q_BLHD), q_BLHD.element_size(), state=state)
    kept = run_cache(shape, ranks.topology, load, ranks.mesh)[ranks.rank]
    check_fits(kept, free, f"rank {ranks.rank} on {q_BLHD.device}")


def codec_of(config: Config, topology: Topology, work: AttentionWork) -> tuple[Config, str]:
    """The settings with the finest codec that is as fast as any, and what was decided in words."""
    if topology.size == 1 or topology.machine.missing_rates:
        codec = FROM_THE_FINEST[0]
        told = f"codec auto: {codec}, as the machine file does not tell rates, or one rank sends nothing"
        return config.with_(codec=codec), told
    mesh = choose(topology, work, config.ring, config.placement, True, config.ring_kind)
    codecs = EXACT_CODECS if config.only_exact else FROM_THE_FINEST
    found = {codec: layer_s(config.with_(codec=codec), mesh, work) for codec in codecs}
    fastest = min(found.values())
    codec = next(codec for codec in found if found[codec] <= GAIN * fastest)
    listed = ", ".join(f"{codec} {of * 1e3:.3g}" for codec, of in found.items())
    return config.with_(codec=codec), f"codec auto: {codec}; predicted ms a layer: {listed}"


def layer_s(config: Config, mesh: Mesh, work: AttentionWork) -> float:
    """Seconds of a layer by the settings, whose codec is not auto."""
    shape = ModelShape("a layer", work.heads, work.head_dim, 1, 1)
    load = Load(work.segments, work.batch, work.itemsize)
    case = Case(shape, mesh.topology, config, load, known_mesh=mesh)
    latencies, awaited = Latencies.of(mesh.topology.machine), AWAITED[config.arrival]
    (kind,) = kinds_of(shape, load)
    sent, late = Sent(case, kind, latencies, CODED), CallKind(displaced="".join(TENSORS))
    now_s, late_s = (PlannedCall(case, kind, call, latencies, sent).run().seconds for call in (CODED, late))
    return awaited * now_s + (1 - awaited) * late_s

"""The planner's answers to a run: which mesh `auto` stands for, and whether there is room for what is kept.

The engine asks by the table `PLANNER` of the registry, so that runs which leave nothing open import none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from cocodiff.assemble import AttentionWork, chunking_on, coding_of
from cocodiff.attention.strategy import LazyQKV
from cocodiff.config import Config
from cocodiff.device import free_memory
from cocodiff.errors import UserError
from cocodiff.models.family import Family
from cocodiff.planning.costs import costs_of, state_sizes
from cocodiff.planning.memory import Load, ModelShape, check_fits, run_cache, shape_of_config, size_run
from cocodiff.planning.placement import choose
from cocodiff.routes.choice import Chunking
from cocodiff.sequence import SequenceRanks
from cocodiff.topology.axes import Mesh
from cocodiff.topology.machine import Machine, Topology


def mesh_of(config: Config, topology: Topology, work: AttentionWork) -> Mesh:
    """The mesh that the settings `ring` and `placement` leave to be chosen. Raises UserError for a ring that ranks and
    heads do not allow."""
    head_bytes = costs_of(config).head_bytes(config, work.head_dim, work.itemsize)
    work = replace(work, chunking=predicted_chunking(config), head_bytes=head_bytes)
    prefer_ulysses = coding_of(config).prefers_ulysses
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
    need = replace(size_run(shape, ranks.topology, load, ranks.mesh)[ranks.rank], weights=weights)
    check_fits(need, free + weights + held, f"rank {ranks.rank} on {device}")


def check_room_for_layers(layers: int, qkv: LazyQKV, ranks: SequenceRanks, on_node: int) -> None:
    """Raises UserError where this rank does not have the memory for what so many layers keep for one branch of
    guidance. qkv: of one of them. on_node: ranks that share the node's memory."""
    q_BLHD = qkv.q()
    free = free_memory(q_BLHD.device, on_node)
    if free is None:
        return
    shape = ModelShape("layers", qkv.heads, q_BLHD.shape[-1], layers, 1)
    state = state_sizes(ranks.config.with_(step_cache="none"))
    load = Load(qkv.segments, len(q_BLHD), q_BLHD.element_size(), state=state)
    kept = run_cache(shape, ranks.topology, load, ranks.mesh)[ranks.rank]
    check_fits(kept, free, f"rank {ranks.rank} on {q_BLHD.device}")

"""One rank's attention from the settings: which mesh, which exchange, which strategy, on any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.ring import Ring
from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.part import Part
from cocodiff.comm.transport import Transport
from cocodiff.config import Config, load_chunk_table, load_exchange_table
from cocodiff.errors import UserError
from cocodiff.kernels import Kernels
from cocodiff.planning.codec_choice import choose_codec
from cocodiff.planning.placement import Work, choose
from cocodiff.registry import ARRIVALS, CODECS, CODINGS, ORDERS, load
from cocodiff.routes.choice import Chunking, ExchangeTable
from cocodiff.routes.chunks import sequence_of
from cocodiff.topology.axes import Mesh
from cocodiff.topology.machine import Machine, Topology
from cocodiff.trace import Trace
from cocodiff.wire.coding import AllRanks, Coding, StateSizes
from cocodiff.wire.exchange import Exchange


def build_strategy(
    config: Config,
    mesh: Mesh,
    transport: Transport,
    trace: Trace,
    kernels: Kernels,
    local: LocalAttention | None = None,
) -> Ulysses:
    """The attention of one rank by the settings, on any transport, virtual ones too: Ulysses among the ranks of its
    group, with a ring where there are several groups. local: what computes, see `Ulysses`."""
    exchange = ring = None
    group, slot = mesh.seat(transport.rank)
    topology, ranks = mesh.parts[group], mesh.groups[group]
    members = transport if ranks == tuple(range(transport.size)) else Part(transport, ranks)
    chunked = chunking(config, topology)
    if mesh.ring > 1:  # before what parts of different shape set up, each in its own way
        sequences = [sequence_of(one, slot, chunking(config, one).chunks) for one in mesh.parts]
        ring = Ring(mesh, transport, trace, kernels, local, sequences)
    if mesh.ulysses > 1:
        table = exchange_table(config, mesh.topology)
        exchange = Exchange(config.exchange, topology, members, trace, table, config.nic_balance, kernels, chunked)
    coding = coding_of(config).of(config, topology, exchange, members, AllRanks(mesh.topology, transport))
    return Ulysses(topology, exchange, trace, load(ORDERS, config.order), coding, local, ring)


def coding_of(config: Config) -> type[Coding]:
    """What travels in tensors' places, by the settings `codec`, `arrival` and `selection`."""
    if config.codec != "none":
        coding: type[Coding] = load(CODECS, config.codec)
    elif config.arrival != "now":
        coding = load(ARRIVALS, config.arrival)
    else:
        coding = load(CODINGS, config.selection)
    return coding


def state_sizes(config: Config) -> StateSizes | None:
    """How much the coding keeps between calls; None where it keeps nothing."""
    coding = coding_of(config)
    return StateSizes(coding, config) if coding.keeps_state else None


def settled(config: Config, topology: Topology, work: Work) -> tuple[Config, str | None]:
    """The settings of ranks that share a sequence with `codec: auto` decided, and what was decided in words; None where
    nothing was to decide."""
    if config.codec != "auto":
        return config, None

    def width(codec: str) -> int:
        chosen = config.with_(codec=codec)
        return coding_of(chosen).head_bytes(chosen, work.head_dim, work.itemsize)

    choice = choose_codec(topology, work, config, width)
    return config.with_(codec=choice.codec), choice.line()


def mesh_of(config: Config, topology: Topology, work: Work) -> Mesh:
    """The mesh of Ulysses and Ring that the settings ask for, for a transformer's heads.

    Raises UserError for a ring that ranks and heads do not allow."""
    coding = coding_of(config)
    head_bytes = coding.head_bytes(config, work.head_dim, work.itemsize)
    work = replace(work, chunking=predicted_chunking(config), head_bytes=head_bytes)
    return choose(topology, work, config.ring, config.placement, prefer_ulysses=coding.prefers_ulysses)


def exchange_table(config: Config, topology: Topology) -> ExchangeTable | None:
    """What `exchange: auto` goes by; None for all others. Raises UserError for a machine without one."""
    if config.exchange != "auto":
        return None
    rows = load_exchange_table(topology.machine.name, topology.nodes, config.exchange_table)
    return ExchangeTable(tuple(rows))


def chunking(config: Config, topology: Topology) -> Chunking:
    """In how many chunks tensors travel among the ranks of a Ulysses group. Raises UserError for `chunks: auto` on so
    many nodes of a machine as were not measured."""
    return chunking_on(config, topology.machine, topology.nodes)


def chunking_on(config: Config, machine: Machine, nodes: int) -> Chunking:
    if config.chunks == "auto":
        return Chunking(*load_chunk_table(machine.name, nodes))
    return Chunking(int(config.chunks))


def predicted_chunking(config: Config) -> Callable[[Topology], Chunking]:
    """`chunking` for predictions, which look at meshes that nobody takes: without chunks where none were measured."""

    @cache
    def on_nodes(machine: Machine, nodes: int) -> Chunking:
        try:
            return chunking_on(config, machine, nodes)
        except UserError:
            return Chunking()

    return lambda part: on_nodes(part.machine, part.nodes)

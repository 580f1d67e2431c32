"""One rank's attention from the settings: which mesh, which exchange, which strategy, on any transport."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.trace import Trace
from cocodiff.comm.transport import TOGETHER, Part, Transport
from cocodiff.config.config import Config, load_chunk_table, load_exchange_table
from cocodiff.config.machine import Topology
from cocodiff.config.registry import ARRIVALS, CODECS, ORDERS, PLANNER, RINGS, SELECTIONS, imported, load
from cocodiff.exchange.codec import AllRanks, Codec
from cocodiff.exchange.exchange import Exchange
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import image_and_text
from cocodiff.topology.axes import Mesh, mesh_without_ring
from cocodiff.topology.layout import Segments
from cocodiff.topology.routes.chunks import Chunking, ExchangeTable, sequence_of

USUAL = image_and_text(4096, 512)


@dataclass(frozen=True)
class AttentionWork:
    """One attention call. The default is what meshes and codecs are chosen by where a job does not tell its tokens: an
    image of 1024 x 1024 pixels with a prompt of 512 tokens."""

    heads: int
    head_dim: int = 128
    segments: Segments = USUAL
    batch: int = 1
    itemsize: int = 2

    @property
    def cell(self) -> int:
        """Bytes of one token for one head, as they are and as rings send them."""
        return self.batch * self.head_dim * self.itemsize


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
    exchange, ring, local = None, None, local or LocalAttention()
    group, slot = mesh.group_and_slot(transport.rank)
    topology, ranks = mesh.parts[group], mesh.groups[group]
    members = transport if ranks == tuple(range(transport.size)) else Part(transport, ranks)
    chunked = chunking(config, topology)
    if mesh.ring > 1:  # before what parts of different shape set up, each in its own way
        sequences = [sequence_of(one, slot, chunking(config, one).chunks) for one in mesh.parts]
        ring = load(RINGS, mesh.kind)(mesh, transport, trace, kernels, local, sequences)
    if mesh.ulysses > 1:
        table = exchange_table(config, mesh.topology)
        together = TOGETHER[config.messages]
        exchange = Exchange(
            config.exchange, topology, members, trace, table, config.nic_balance, kernels, chunked, together
        )
    codec = codec_class(config)(config, exchange, members, AllRanks(mesh.topology, transport))
    return Ulysses(topology, exchange, trace, load(ORDERS, config.order), codec, local, ring)


def codec_name(config: Config) -> str:
    """The import string of what travels in tensors' places, by the settings `codec`, `arrival` and `selection`."""
    if config.arrival != "now":
        return ARRIVALS[config.arrival]
    return CODECS[config.codec] if config.codec != "none" else SELECTIONS[config.selection]


def codec_class(config: Config) -> type[Codec]:
    """The class of the codec that the settings ask for."""
    codec: type[Codec] = imported(codec_name(config))
    return codec


def _of_job(config: Config, work: AttentionWork) -> AttentionWork:
    """With the job's tokens, where the work does not tell others."""
    return replace(work, segments=image_and_text(config.image_tokens, 512)) if work.segments is USUAL else work


def with_codec_chosen(config: Config, topology: Topology, work: AttentionWork) -> tuple[Config, str | None]:
    """The settings of ranks that share a sequence, with `codec: auto` decided, and what was decided in words, if so."""
    if config.codec != "auto":
        return config, None
    chosen: tuple[Config, str] = load(PLANNER, "codec")(config, topology, _of_job(config, work))
    return chosen


def mesh_of(config: Config, topology: Topology, work: AttentionWork) -> Mesh:
    """The mesh of Ulysses and Ring that the settings ask for, for a transformer's heads and, where the machine's file
    tells all rates, calls of `image_tokens`: the engine decides before it has seen a call. Raises UserError for a ring
    that ranks and heads do not allow."""
    if not topology.machine.missing_rates:
        work = _of_job(config, work)
    plain = mesh_without_ring(topology, work.heads, config.ring, codec_class(config).keeps_state, config.ring_kind)
    chosen: Mesh = plain or load(PLANNER, "mesh")(config, topology, work)
    return chosen


def exchange_table(config: Config, topology: Topology) -> ExchangeTable | None:
    """The table that `exchange: auto` goes by; None for all others. Raises UserError for a machine without one."""
    if config.exchange != "auto":
        return None
    rows = load_exchange_table(topology.machine.name, topology.nodes, config.exchange_table)
    return ExchangeTable(tuple(rows))


def chunking(config: Config, topology: Topology) -> Chunking:
    """In how many chunks tensors travel among the ranks of a Ulysses group. Raises UserError for `chunks: auto` on so
    many nodes of a machine as were not measured."""
    if config.chunks == "auto":
        return Chunking(*load_chunk_table(topology.machine.name, topology.nodes))
    return Chunking(int(config.chunks))

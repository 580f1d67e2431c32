"""Construction of one rank's attention from the settings: its mesh, exchange, codec and strategy, on any transport."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cocodiff.attention.local import LocalAttention
from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.transport import TOGETHER, RankContext
from cocodiff.config.config import Config, load_chunk_table, load_exchange_table
from cocodiff.config.registry import ARRIVALS, CODECS, ORDERS, RINGS, SELECTIONS, imported, load, planner
from cocodiff.exchange.codec import Codec
from cocodiff.exchange.exchange import Exchange
from cocodiff.models.adapter import image_and_text
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh, mesh_without_ring
from cocodiff.topology.layout import Segments
from cocodiff.topology.routes.chunks import Chunking, ExchangeTable, sequence_of

USUAL = image_and_text(4096, 512)  # segments of an image of 1024 x 1024 pixels with a prompt of 512 tokens


@dataclass(frozen=True)
class AttentionWork:
    """The size of one attention call, by which the mesh of Ulysses and Ring and the codec are chosen."""

    heads: int  # number of all heads
    head_dim: int = 128  # channels of a head
    segments: Segments = USUAL  # segments of the sequence with their tokens; the default: not known yet
    batch: int = 1  # rows of the batch
    itemsize: int = 2  # bytes of an element

    @property
    def cell(self) -> int:
        """The bytes of one token for one head, over the batch, in a tensor that is not coded."""
        return self.batch * self.head_dim * self.itemsize


def build_strategy(config: Config, mesh: Mesh, context: RankContext, local: LocalAttention | None = None) -> Ulysses:
    """Return the attention of one rank: Ulysses within its group, with a ring if there are several groups.

    All ranks call it, since it opens communicators and threads.

    Args:
        config: the engine's settings.
        mesh: the Ulysses groups and the rings across them.
        context: this rank among all ranks of the mesh; its transport may be a virtual one, for predictions.
        local: computes attention on this rank; None for `LocalAttention`.
    """
    exchange, ring, local, transport = None, None, local or LocalAttention(), context.transport
    group, slot = mesh.group_and_slot(transport.rank)
    topology, ranks = mesh.parts[group], mesh.groups[group]
    members = transport if ranks == tuple(range(transport.size)) else transport.part(ranks)
    chunked = chunking(config, topology)
    if mesh.ring > 1:  # first, since groups of different shape then make their own groups and lanes
        sequences = [sequence_of(one, slot, chunking(config, one).chunks) for one in mesh.parts]
        ring = load(RINGS, mesh.kind)(mesh, context, local, sequences)
    if mesh.ulysses > 1:
        table = exchange_table(config, mesh.topology)
        together = TOGETHER[config.messages]
        of_group = replace(context, transport=members, topology=topology)
        exchange = Exchange(config.exchange, of_group, table, config.nic_balance, chunked, together)
    codec = codec_class(config)(config, exchange, context)
    return Ulysses(topology, exchange, context.trace, load(ORDERS, config.order), codec, local, ring)


def codec_class(config: Config) -> type[Codec]:
    """Return the class of the codec that the settings `codec`, `arrival` and `selection` ask for."""
    name = CODECS[config.codec] if config.codec != "none" else SELECTIONS[config.selection]
    return imported(name if config.arrival == "now" else ARRIVALS[config.arrival])


def _of_job(config: Config, work: AttentionWork) -> AttentionWork:
    """Return a size of attention calls whose segments are known: by the setting `image_tokens` if the given one has
    none of its own.

    Args:
        config: the engine's settings.
        work: the given size of an attention call.
    """
    return replace(work, segments=image_and_text(config.image_tokens, 512)) if work.segments is USUAL else work


def with_codec_chosen(config: Config, topology: Topology, work: AttentionWork) -> tuple[Config, str | None]:
    """Return two things: the settings with `codec: auto` replaced by a codec, and this choice in words.

    The words are None if the codec was set.

    Args:
        config: the engine's settings.
        topology: the ranks that share a sequence.
        work: the size of an attention call.
    """
    if config.codec != "auto":
        return config, None
    return planner().choose_codec(config, topology, _of_job(config, work))


def mesh_of(config: Config, topology: Topology, work: AttentionWork) -> Mesh:
    """Return the mesh of Ulysses groups and rings that the settings ask for. Raise UserError for a ring that ranks and
    heads do not allow.

    The engine calls it before the first call of the model. It decides by the transformer's heads and, if the machine
    file gives all rates, by the setting `image_tokens`.

    Args:
        config: the engine's settings.
        topology: the ranks that share a sequence.
        work: the size of an attention call.
    """
    if not topology.machine.missing_rates:
        work = _of_job(config, work)
    plain = mesh_without_ring(topology, work.heads, config.ring, codec_class(config).keeps_state, config.ring_kind)
    return plain or planner().choose_mesh(config, topology, work)


def exchange_table(config: Config, topology: Topology) -> ExchangeTable | None:
    """Return the table by which `exchange: auto` chooses; None for other settings. Raise UserError if the machine has
    none.

    Args:
        config: the engine's settings.
        topology: all ranks of the mesh, on their machine.
    """
    if config.exchange != "auto":
        return None
    return load_exchange_table(topology.machine.name, topology.nodes, config.exchange_table)


def chunking(config: Config, topology: Topology) -> Chunking:
    """Return the number of chunks in which tensors are sent within a Ulysses group, and from which size on.

    Raise UserError for `chunks: auto` on a machine and number of nodes that were not measured.

    Args:
        config: the engine's settings.
        topology: the ranks of the Ulysses group.
    """
    if config.chunks == "auto":
        return Chunking(*load_chunk_table(topology.machine.name, topology.nodes))
    return Chunking(int(config.chunks))

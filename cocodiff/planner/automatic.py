"""The planner's answers to a run: the mesh and the codec that `auto` stands for, and checks of memory. All ranks find
the same answers.

The engine finds this module by `planner()` of the registry, so a run that leaves nothing open imports none of this. It
asks before the first call of the model. So mesh and codec are chosen for an image of 1024 x 1024 pixels with a prompt
of 512 tokens; larger images compute somewhat longer for their bytes. A mesh or a codec costs what `plan` predicts for a
layer (`layers.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from cocodiff.attention.stateful import TENSORS
from cocodiff.attention.strategy import LazyQKV
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.registry import EXACT_CODECS, RINGS
from cocodiff.engine.assemble import AttentionWork, mesh_of
from cocodiff.engine.sequence import SequenceRanks
from cocodiff.exchange.codec import CODED, CallKind
from cocodiff.kernels.device import free_memory
from cocodiff.models.family import Family
from cocodiff.planner.case import Case, ModelShape, shape_of_config
from cocodiff.planner.layers import PlannedCall, Sent, kinds_of
from cocodiff.planner.memory import check_fits, run_cache, size_run
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh, meshes

FROM_THE_FINEST = (*EXACT_CODECS, "int8", "int4", "int2")  # codecs, from those that change tensors least
# Without rates, a longer ring is chosen if the shorter one's heads are more uneven by this factor.
UNEVEN = 1.15
GAIN = 1.02  # a longer ring or a coarser codec is chosen if the others take longer by more than this factor
# The part of a run's tensors that attention waits for: those of the first and the last steps of 50, and with `adaptive`
# the part in a recorded run of the embedded model.
AWAITED = {"now": 1.0, "displaced": 0.06, "adaptive": 0.3}
Call = tuple[int, int, int]  # batch, bytes of an element and guidance branches of a call of the model


class PricedMesh(NamedTuple):
    """A mesh of Ulysses and Ring with the predicted bytes and seconds of one layer."""

    mesh: Mesh  # the Ulysses groups and the rings across them
    sent: Sent  # the messages of a layer
    seconds: float  # seconds of a layer; without all rates, the largest number of heads on a rank over the mean


def price(config: Config, mesh: Mesh, work: AttentionWork) -> PricedMesh:
    """Predict the cost of one layer on a mesh: return the mesh with its bytes and seconds. Raise UserError if the
    settings do not allow the mesh.

    Args:
        config: the engine's settings.
        mesh: the mesh of Ulysses and Ring.
        work: the sizes of the layer's attention call.
    """
    shape = ModelShape("a layer", work.heads, work.head_dim, 1, 1)
    case = Case(shape, mesh.topology, config, work.segments, work.batch, work.itemsize, known_mesh=mesh)
    (kind,) = kinds_of(case)
    sent, heads = Sent(case, kind, CODED), mesh.heads(work.heads)
    if mesh.topology.machine.missing_rates:
        return PricedMesh(mesh, sent, max(heads) * len(heads) / sum(heads))
    awaited, seconds = AWAITED[config.arrival], 0.0
    for part, call in ((awaited, CODED), (1 - awaited, CallKind(displaced="".join(TENSORS)))):
        seconds += part * PlannedCall(case, kind, call, sent).run().seconds if part else 0.0
    return PricedMesh(mesh, sent, seconds)


def price_meshes(config: Config, topology: Topology, work: AttentionWork) -> list[PricedMesh]:
    """Return all meshes that ranks, heads and settings allow, with their predicted costs. Raise UserError if there is
    none.

    They are sorted: rings of keys before other kinds, then shorter rings, then fewer bytes out of the busiest node,
    then fewer bytes between nodes.

    Args:
        config: the engine's settings, which may fix the ring, its kind and its placement.
        topology: the ranks that share a sequence.
        work: the sizes of one attention call.
    """
    kinds = list(RINGS) if config.ring_kind == "auto" else [config.ring_kind]
    found, refused = list[PricedMesh](), list[UserError]()
    for kind in kinds:
        for mesh in meshes(topology, work.heads, config.ring, config.placement, kind):
            try:
                found.append(price(config, mesh, work))
            except UserError as error:  # such as `chunks: auto` on a number of nodes that was not measured
                refused.append(error)
    if not found:
        raise refused[0]

    def place(one: PricedMesh) -> tuple[float, ...]:
        return list(RINGS).index(one.mesh.kind), one.mesh.ring, one.sent.busiest_node, one.sent.bytes["node"]

    return sorted(found, key=place)


def choose_mesh(config: Config, topology: Topology, work: AttentionWork) -> Mesh:
    """Return the mesh of a run whose settings leave it open: the first in the order of `price_meshes` that is about as
    fast as the fastest.

    If the machine file lacks rates, evenness of heads is compared in place of time. Raise UserError for a ring that
    ranks and heads do not allow.

    Args:
        config: the engine's settings.
        topology: the ranks that share a sequence.
        work: the sizes of one attention call.
    """
    config = config.with_(codec="none") if config.codec == "auto" else config  # auto is decided later, for the mesh
    found, near = price_meshes(config, topology, work), UNEVEN if topology.machine.missing_rates else GAIN
    least = min(one.seconds for one in found)
    return next(one.mesh for one in found if one.seconds <= near * least)


def choose_codec(config: Config, topology: Topology, work: AttentionWork) -> tuple[Config, str]:
    """Decide `codec: auto`. Return (the settings with that codec, a line that says why it was chosen).

    It is the codec that changes tensors least of those about as fast as the fastest by prediction. If times cannot be
    predicted, or on one rank, it is "none".

    Args:
        config: the engine's settings.
        topology: the ranks that share a sequence.
        work: the sizes of one attention call.
    """
    if topology.size == 1 or topology.machine.missing_rates:
        codec = FROM_THE_FINEST[0]
        told = f"codec auto: {codec}, as the machine file does not tell rates, or one rank sends nothing"
        return config.with_(codec=codec), told
    mesh = mesh_of(config, topology, work)
    codecs = EXACT_CODECS if config.only_exact else FROM_THE_FINEST
    found = {codec: price(config.with_(codec=codec), mesh, work).seconds for codec in codecs}
    fastest = min(found.values())
    codec = next(codec for codec in found if found[codec] <= GAIN * fastest)
    listed = ", ".join(f"{codec} {of * 1e3:.3g}" for codec, of in found.items())
    return config.with_(codec=codec), f"codec auto: {codec}; predicted ms a layer: {listed}"


def check_room(
    model: nn.Module, family: Family, ranks: SequenceRanks, call: Call, device: Any, on_node: int, held: int
) -> None:
    """Raise UserError if this rank lacks the memory for a run: activations, and what is kept between calls.

    Nothing is checked if the free memory is not known.

    Args:
        model: the transformer, on its device.
        family: the model's family.
        ranks: this rank's place among those that share a sequence, and the tokens.
        call: batch, bytes of an element and guidance branches of the model's call.
        device: the device that the transformer runs on.
        on_node: number of ranks that share the node's memory.
        held: bytes that are already kept between calls.
    """
    free = free_memory(device, on_node)
    if free is None:
        return
    stored = [*model.parameters(), *model.buffers()]
    weights = sum(x.nbytes for x in stored if x.device == device)
    config: Any = model.config
    shape = shape_of_config(family, config, sum(x.numel() for x in stored))
    case = Case(shape, ranks.topology, ranks.config, ranks.segments, *call, known_mesh=ranks.mesh)
    need = size_run(case)[ranks.rank]._replace(weights=weights, library=0)
    check_fits(need, free + weights + held, f"rank {ranks.rank} on {device}")


def check_room_for_layers(layers: int, qkv: LazyQKV, ranks: SequenceRanks, on_node: int) -> None:
    """Raise UserError if this rank lacks the memory for what some layers keep between calls, for one guidance branch.

    It is for models whose sizes are known only from a call. Nothing is checked if the free memory is not known.

    Args:
        layers: number of layers.
        qkv: the tensors of one of these layers, which show their sizes.
        ranks: this rank's place among those that share a sequence.
        on_node: number of ranks that share the node's memory.
    """
    q_BLHD = qkv.q()
    shape = ModelShape("layers", qkv.heads, q_BLHD.shape[-1], layers, 1)
    config, call = ranks.config.with_(step_cache="none"), (len(q_BLHD), q_BLHD.element_size())
    case = Case(shape, ranks.topology, config, qkv.segments, *call, known_mesh=ranks.mesh)
    free = free_memory(q_BLHD.device, on_node)
    check_fits(run_cache(case)[ranks.rank], free, f"rank {ranks.rank} on {q_BLHD.device}")

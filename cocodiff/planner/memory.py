"""The memory of each rank in a run: weights, activations and the tensors kept between calls. Pure arithmetic, in bytes.

V-Major's caches (CoCoDiff section III-D) are exact to the byte: q, k, v and the scoring reference. For B batch rows,
S_img image tokens, H heads of D channels and P ranks, where everything divides:
    `branches x layers x 4 x B x S_img x H x D x itemsize / P`.
They hold whole sequences, so the text's rows are added.

The residual codec's reconstructions are exact as well: q, k, v and the output, text included, at both ends. They are
kept twice, or with predictor last once:
    `branches x layers x 8 x B x S x H x D x itemsize / P`.

If calls do not wait for what they send, each layer's codes or tensors are in flight, once at either end. Without a
codec only the receiver keeps tensors, and with `arrival: adaptive` the sender every 16th row.

The step cache keeps what blocks added to a rank's tokens, exact as well. If the last block returns the text:
    `branches x B x (2 L_img + L_text) x H x D x itemsize`.

Activations are an estimate (`activations`). Memory that the allocator keeps in reserve is not counted.

Before and after the denoising steps (`Peaks`): rank 0 alone loads the text encoders, all at once, before the
transformer is on its device. They are freed before the first step (`harness/pipelines.py`). Every rank holds the VAE's
weights, and encodes the image that is to be restored. Latents are decoded as the setting `vae` says, while the codec
keeps its caches. Encoding and decoding are estimates (`models.family.VaeSize`): the VAE's attention is taken to be
fused, and activations of the text encoders are left out as small.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from cocodiff.attention.streaming import head_runs
from cocodiff.config.errors import UserError
from cocodiff.engine.weights import sharing, split_blocks
from cocodiff.models.adapter import IMAGE
from cocodiff.models.family import VaeSize, Video
from cocodiff.planner.case import Case, ModelShape, coded_layers
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh, cut
from cocodiff.topology.links import alltoall_bound
from cocodiff.topology.routes.rounds import rounds_of

MIB = 2**20
VAE_SETTINGS = ("one", "all", "tiled", "sharded")
CHANNELS = 3  # channels of an image
STRIDE = 0.75  # distance from one tile's start to the next one's, in tiles: diffusers' default

# Numbers of tensors in the estimate of activations, each the size of one rank's share: [B, L, H, D] or [B, S, G, D].
STREAMS = 6  # the residual stream, attention's output, and results of normalisation and modulation before each half
ALONE = 5  # q, k, v, the output, and one being concatenated or rotated
EXCHANGED = 14  # q, k, v projected, packed, received and put in place; the output; one being concatenated or rotated
RING = 9  # k and v of two other groups; the merged output in float32; a partial result and its float32 form
PIECE = 7  # for a piece of streaming attention: its queries and the next piece's; two partial results; both ways
TOKENS = 8  # in a token ring: q of two other ranks, and partial results in flight, three received and three sent


# Fields of `RankMemory` that are kept between calls.
KEPT = ("image_cache", "reference_cache", "text_cache", "reconstructions", "in_flight", "step_cache")


class RankMemory(NamedTuple):
    """The bytes that one rank needs in a run, by what they are for."""

    weights: int = 0  # all weights of the transformer on this rank, with buffers for split ones
    activations: int = 0  # temporary tensors of a call at their peak, an estimate
    image_cache: int = 0  # V-Major's q, k and v of image tokens
    reference_cache: int = 0  # V-Major's scoring reference
    text_cache: int = 0  # V-Major's q, k and v of text tokens
    reconstructions: int = 0  # q, k, v and the output at both ends, of the residual codec or of displaced exchange
    in_flight: int = 0  # tensors of one call of every layer that are sent, or received for the next call
    step_cache: int = 0  # the step cache: the changes that blocks made at the last computed call
    library: int = 0  # the communication library's own memory (`library_mib` of `Device`)

    @property
    def cache(self) -> int:
        """The bytes of tensors that are kept between calls: the sum of the fields in KEPT."""
        return sum(getattr(self, name) for name in KEPT)

    @property
    def total(self) -> int:
        """The bytes that the rank needs in all."""
        return self.weights + self.activations + self.cache + self.library


def add(parts: Sequence[RankMemory]) -> RankMemory:
    """Return the memory of several ranks together, such as those of a node: the sum of each field."""
    return RankMemory(*map(sum, zip(*parts, strict=True)))


def run_cache(case: Case) -> list[RankMemory]:
    """Return what each rank keeps between calls, by rank, over all layers and guidance branches, with the step cache.
    Other fields are 0."""
    shape, mesh, kept_P = case.shape, case.mesh, [Counter[str]() for _ in case.topology.places]
    call = case.batch, shape.head_dim, case.itemsize
    *of_all, image_layers = coded_layers(shape, case.config.state_layers)
    for layers, segments in ((sum(of_all), case.segments), (image_layers, case.image_only)):
        if not segments:  # models that run by a plan have no image segment
            continue
        for group, part, layout in zip(mesh.groups, mesh.parts, mesh.layouts(segments, shape.heads), strict=True):
            of_layer = case.codec.state_bytes(part, layout, *call) if part.size > 1 else [{}]  # one alone keeps nothing
            for rank, sizes, L in zip(group, of_layer, layout.rows, strict=True):
                kept_P[rank].update({name: size * layers * case.branches for name, size in sizes.items()})
                if case.config.step_cache != "none":
                    kept_P[rank]["step_cache"] += case.branches * L * shape.heads * case.work.cell
    return [RankMemory(**kept) for kept in kept_P]


def activations(case: Case) -> list[int]:
    """Return every rank's activations at their peak, in bytes: where tokens enter or in one layer. An estimate.

    Where tokens enter there are `unsharded_copies` tensors of the whole image, one of which lives on in the first
    layer. In a layer there are the streams that it keeps, in tensors of the rank's share, and the largest of three:

    - attention (q, k, v, send and receive buffers, whole sequences, the output) with an MLP's hidden layer beside it;
    - such a layer's output projection, whose input is put together from both;
    - a following MLP (hidden layer before and after its activation, and its output).

    Attention itself is taken to be fused: no S x S matrix. The text's embeddings, rotary angles and the model's exit
    are left out as small.
    """
    shape, mesh = case.shape, case.mesh
    attention = (ALONE if mesh.ulysses == 1 else EXCHANGED) + (RING if mesh.ring > 1 else 0)
    if mesh.ring > 1 and mesh.kind != "keys":
        attention += TOKENS if mesh.kind == "token" else streamed(mesh, shape.heads)
    hidden, gates = shape.mlp_ratio, 3 if shape.gated_mlp else 1
    stages = [attention, 1 + max(2, gates) * hidden]
    if shape.parallel_layers:
        fused = 3 if shape.gated_mlp else 1
        stages += [attention + gates * hidden, fused + gates * hidden + 1 + hidden + 1]
    copies, whole, found = STREAMS + max(stages), case.tokens(IMAGE) * shape.width, dict[int, int]()
    kept = whole if shape.unsharded_copies and mesh.topology.size > 1 else 0
    for group, layout in zip(mesh.groups, mesh.layouts(case.segments, shape.heads), strict=True):
        for rank, L, G in zip(group, layout.rows, layout.heads, strict=True):
            share = max(L * shape.width, sum(layout.rows) * G * shape.head_dim)
            count = max(shape.unsharded_copies * whole, kept + copies * share)
            found[rank] = int(count * case.batch * case.itemsize)
    return [found[rank] for rank in range(mesh.topology.size)]


def streamed(mesh: Mesh, heads: int) -> int:
    """Return the number that streaming attention adds to RING in a rank's activations, in tensors of the rank's share.
    It may be negative.

    Added are its buffers for a piece of the queries (PIECE), each with some heads of the queries of one node's ranks,
    and one tensor more. Taken off are four tensors of RING: k and v of two other groups. A ring passes these on; in
    streaming attention keys and values stay.

    Args:
        mesh: the mesh of Ulysses groups and rings.
        heads: number of all attention heads.
    """
    nodes = rounds_of(mesh)[0].shape[0]
    pieces = nodes * min(head_runs(nodes, held) for held in mesh.heads(heads))
    return -(-PIECE * mesh.ring // pieces) + 1 - 4


def size_run(case: Case) -> list[RankMemory]:
    """Return the memory that each rank needs in a run, by rank.

    Raise UserError if there are more ranks than image tokens, or more in a Ulysses group than heads.
    """
    device, (ranks, nodes) = case.topology.machine.device, max((case.topology.size, case.topology.nodes), case.job)
    library = int(MIB * ((ranks > 1) * device.library_mib + (nodes > 1) * device.across_mib))
    held = {"weights": weights_held(case), "library": library}
    of_ranks = zip(run_cache(case), activations(case), strict=True)
    return [kept._replace(activations=most, **held) for kept, most in of_ranks]


def fullest(case: Case) -> RankMemory:
    """Return the memory of the rank that needs most in a run.

    Raise UserError if there are more ranks than image tokens, or more in a Ulysses group than heads.
    """
    return max(size_run(case), key=lambda need: need.total)


def block_parameters(shape: ModelShape) -> list[int]:
    """Return the number of elements of every block's weights, in the model's order: attention, modulation and MLP of
    each stream.

    An estimate, within 3 % of the published models (`tests/test_memory.py`).
    """
    modulation, mlp = 0 if shape.gated_mlp else 3, (3 if shape.gated_mlp else 2) * shape.mlp_ratio
    joint = 2 * (2 * modulation + 4 + mlp) if shape.text_tokens else 8 + mlp  # Wan attends to its text alone
    of_width = [joint] * shape.joint_layers + [modulation + 4 + mlp] * shape.parallel_layers
    return [int(x * shape.width**2) for x in of_width]


def sharing_ranks(case: Case) -> Topology | None:
    """Return the smallest set of ranks that share blocks' weights, as a topology; None if no weights are shared."""
    if case.config.split is None or case.topology.size == 1:
        return None
    of_ranks = [sharing(case.topology, case.config.weights, rank) for rank in range(case.topology.size)]
    fewest = min(of_ranks, key=len)
    return case.topology.part(fewest) if len(fewest) > 1 else None


def weights_held(case: Case) -> int:
    """Return the bytes of weights on a rank. Of shared blocks it holds its part, and two buffers of the largest block's
    size."""
    numbers, blocks, ranks = case.shape.parameters, block_parameters(case.shape), sharing_ranks(case)
    if ranks is not None and blocks:
        models = max(1, round(numbers / sum(blocks)))  # Wan 2.2 has two
        some = [blocks[number] for number in split_blocks(len(blocks), case.config.split_layers)]
        numbers -= models * int(sum(some) * (1 - 1 / ranks.size) - 2 * max(some))
    return numbers * case.itemsize


def weights_waited_s(case: Case, layers_s: Sequence[float]) -> float:
    """Return the seconds in one call of the model that a rank waits for the other parts of shared weights.

    A block's parts are under way from the start of the previous shared block on. Tokens on the same links are not
    counted.

    Args:
        case: the call.
        layers_s: seconds of every block, in the model's order.
    """
    numbers, waited, ranks = block_parameters(case.shape), 0.0, sharing_ranks(case)
    if ranks is None or not numbers:
        return waited
    chosen = split_blocks(len(numbers), case.config.split_layers)
    for before, number in zip([chosen[-1] - len(numbers), *chosen[:-1]], chosen, strict=True):
        arriving_s = alltoall_bound(ranks, numbers[number] * case.itemsize / ranks.size) or 0.0
        computed_s = sum(layers_s[place] for place in range(before, number))
        waited += max(0.0, case.latencies.latency_s + arriving_s - computed_s)
    return waited


def largest_batch(case: Case, memory: int) -> int:
    """Return the largest number of images that fit the memory of every rank in one call; 0 if one is too many.

    Args:
        case: the run, whose own batch is not used.
        memory: bytes of a tile.
    """
    of_one = size_run(replace(case, batch=case.shape.rows_per_image))
    return max(0, min((memory - need.weights - need.library) // (need.activations + need.cache) for need in of_one))


def misfit(need: RankMemory, memory: int | None) -> str | None:
    """Return a sentence that says by how much a rank's needs exceed its memory, with the cause and the remedy. Return
    None if they fit or the memory is unknown.

    Args:
        need: the rank's needs.
        memory: bytes that the rank has; None if unknown.
    """
    if memory is None or need.total <= memory:
        return None
    fewer = "a smaller batch or more ranks"
    if need.weights > memory:
        blame = "the weights alone do not fit: share them by weights card or node, or use a smaller dtype"
    elif need.weights + need.activations > memory:
        blame = f"weights and activations alone do not fit: use weights card or node, a smaller image, {fewer}"
    elif 2 * need.step_cache > need.cache:
        blame = f"what the step cache keeps is too much: use step_cache none, which keeps nothing, {fewer}"
    elif need.in_flight:
        blame = f"what calls keep or have in flight is too much: use arrival now, predictor last, {fewer}"
    elif need.reconstructions:
        blame = f"what the residual codec keeps is too much: use predictor last, which keeps half, codec none, {fewer}"
    else:
        blame = f"V-Major's cache is too much: use preset tapa, which keeps no cache, {fewer}"
    listed = ", ".join(f"{name} {mib(getattr(need, name))}" for name in ("weights", "activations", "cache", "library"))
    return f"{mib(need.total)} MiB are needed ({listed}) and {mib(memory)} MiB are there; {blame}"


def check_fits(need: RankMemory, memory: int | None, where: str) -> None:
    """Raise UserError, with figures, cause and remedy, if a rank's needs exceed its memory.

    Args:
        need: the rank's needs.
        memory: bytes that the rank has; None if unknown, which checks nothing.
        where: the rank in the message, such as "rank 3 on cpu".
    """
    reason = misfit(need, memory)
    if reason is not None:
        raise UserError(f"memory of {where}: {reason}")


def mib(count: float) -> str:
    """Return a number of bytes as text in MiB, without the unit: whole numbers, or two decimals below ten."""
    return f"{count / MIB:.0f}" if count >= 10 * MIB else f"{count / MIB:.2f}"


# Before and after the denoising steps ---------------------------------------------------------------------------------


class VaePeak(NamedTuple):
    """The activations of the VAE on a rank with one value of the setting `vae`, in bytes."""

    encoding: int  # bytes on every rank, while it encodes the image that is to be restored
    decoding: int  # bytes on a rank that decodes
    decoders: int  # the largest number of ranks on one node that decode at the same time


class Peaks(NamedTuple):
    """The memory that a run needs before and after its denoising steps, in bytes."""

    encoders: int  # weights of the text encoders, on rank 0
    vae: int  # weights of the VAE
    of_vae: Mapping[str, VaePeak]  # activations of the VAE, by value of the setting `vae`

    def of_rank(self, step: RankMemory, vae: str) -> dict[str, int]:
        """Return the bytes of the fullest rank in each phase of a run, by the phase's name.

        Args:
            step: the rank's memory in a denoising step.
            vae: the setting `vae`.
        """
        kept, peak = step.weights + step.library + self.vae, self.of_vae[vae]
        return {
            "text encoding": self.encoders + step.library,
            "image encoding": kept + peak.encoding,
            "denoising": step.total + self.vae,
            "decoding": kept + step.cache + peak.decoding,
        }


def size_peaks(
    shape: ModelShape, topology: Topology, video: Video, images: int, itemsize: int, replicas: int = 1
) -> Peaks | None:
    """Return the memory that a run needs before and after its denoising steps; None if the sizes of the model's VAE are
    not known.

    Raise UserError if the replicas do not divide the ranks.

    Args:
        shape: the sizes of the model.
        topology: all ranks of the run.
        video: the size of a video, or of an image as one of a single frame; only images are decoded in tiles.
        images: number of images of one call.
        itemsize: bytes of an element.
        replicas: sets of ranks, all of which decode at the same time.
    """
    vae = shape.vae
    if vae is None:
        return None
    sets = cut(topology, tuple(range(topology.size)), replicas, "replicas")
    tiles = math.prod(len(tile_sides(side, vae.tile)) for side in (video.height, video.width))
    longer = max(video.height, video.width)
    most = {"one": 1, "all": topology.size, "tiled": tiles, "sharded": math.ceil(longer / vae.factor)}

    def peak(how: str) -> VaePeak:
        decoders = [topology.places[rank].node for ranks in sets for rank in ranks[: most[how]]]
        encoding, decoding = _activations(vae, video, how, len(sets[0]))
        unit = images * itemsize
        return VaePeak(encoding * unit, decoding * unit, max(decoders.count(node) for node in range(topology.nodes)))

    settings = [how for how in VAE_SETTINGS if how != "tiled" or video.frames == 1]
    return Peaks(shape.encoders * itemsize, vae.parameters * itemsize, {how: peak(how) for how in settings})


def _activations(vae: VaeSize, video: Video, how: str, ranks: int) -> tuple[int, int]:
    """Return (elements at the peak of encoding one image or video, elements at the peak of decoding it) on one rank.

    Args:
        vae: the sizes of the VAE.
        video: the size of the video, or of an image as one of a single frame.
        how: the setting `vae`.
        ranks: number of ranks that share the image or video.
    """
    if how == "sharded" and ranks > 1:
        return _of_band(vae, video, ranks)
    pixels = video.height * video.width
    if video.frames > 1:
        decoding, encoding = (numbers + CHANNELS * video.frames for numbers in vae.video)
        return encoding * pixels, decoding * pixels
    if how != "tiled":
        return vae.encoding * pixels, vae.decoding * pixels
    rows, columns = (tile_sides(side, vae.tile) for side in (video.height, video.width))
    tile, own = rows[0] * columns[0], math.ceil(len(rows) * len(columns) / ranks)
    decoded, own = CHANNELS * sum(rows) * sum(columns), CHANNELS * tile * own
    # Either a rank's last tile with those that it has decoded; or all tiles, and its own twice more or the image.
    blending = decoded + max(2 * own, CHANNELS * pixels)
    return vae.encoding * tile, max(vae.decoding * tile + own, blending)


def _of_band(vae: VaeSize, video: Video, ranks: int) -> tuple[int, int]:
    """Return (elements at the peak of encoding, elements at the peak of decoding) of the largest band of rows of an
    image or video, with a row of each neighbour.

    Gathers count too, with their received and joined parts: keys and values of all bands, and the image.

    Args:
        vae: the sizes of the VAE.
        video: the size of the video, or of an image as one of a single frame.
        ranks: number of bands.
    """
    shorter, longer = sorted((video.height, video.width))
    latent = math.ceil(longer / vae.factor)
    rows = math.ceil(latent / ranks) * vae.factor
    attended = 4 * vae.attention * latent * math.ceil(shorter / vae.factor)
    of_video, each = CHANNELS * video.frames * shorter, vae.band if video.frames == 1 else vae.video
    kept = of_video * rows if video.frames > 1 else 0
    decoding, encoding = (max(numbers * shorter * min(longer, rows + 2) + kept, attended) for numbers in each)
    return encoding, max(decoding, of_video * (2 * longer + rows))


def tile_sides(side: int, tile: int) -> list[int]:
    """Return the sides in pixels of the tiles that the VAE decodes along one side of an image.

    Args:
        side: pixels of the image's side.
        tile: pixels of a whole tile's side.
    """
    starts = range(0, side, int(tile * STRIDE)) if side > tile else range(1)
    return [min(tile, side - start) for start in starts]

"""What a run takes of each rank's memory: weights, activations and what a codec keeps. Pure arithmetic, in bytes.

Caches (CoCoDiff section III-D) are exact to the byte. With B batch rows, S_img image tokens, H heads of D channels and
P ranks they are `branches x layers x 4 x B x S_img x H x D x itemsize / P` where everything divides: q, k, v and the
scoring reference. They hold whole sequences, so the rows of the text come on top. The residual codec's reconstructions
are exact to the byte as well: q, k, v and the output, text included, at both ends, each once (predictor last) or twice,
`branches x layers x 8 x B x S x H x D x itemsize / P` once. Where calls do not wait for what they send, a call's codes
or tensors are in flight for every layer, once at either end; without a codec only the receiver keeps something, and
with `arrival: adaptive` the sender every 16th row. The step cache keeps what blocks added to a rank's tokens, exact as
well: `branches x B x (2 L_img + L_text) x H x D x itemsize`, where the last block returns the text. Activations are an
estimate (`activations`); what the allocator keeps in reserve is not counted. `peaks.py` has what comes before and
after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from cocodiff.attention.streaming import head_runs
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.engine.assemble import AttentionWork
from cocodiff.engine.weights import sharing, split_blocks
from cocodiff.models.adapter import IMAGE, image_and_text
from cocodiff.models.family import VAE_FACTOR, Family, VaeSize, Video
from cocodiff.planner.costs import Costs
from cocodiff.planner.traffic import Latencies
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Segments
from cocodiff.topology.links import alltoall_bound
from cocodiff.topology.routes.rounds import rounds_of

MIB = 2**20

# What the estimate of activations counts, in tensors of one rank's share: [B, L, H, D], or as large [B, S, G, D].
STREAMS = 6  # the residual stream, attention's output, and what normalisation and modulation make before each half
ALONE = 5  # q, k, v, the output, and one being concatenated or rotated
EXCHANGED = 14  # q, k, v projected, packed, received and put in place; the output; one being concatenated or rotated
RING = 9  # k and v of two other groups; the merged output in float32; a part and its share of that
PIECE = 7  # of streaming, for the rows of a piece: its queries and the next one's, put together; two parts; both ways
TOKENS = 8  # of a token ring beside that: q of two other ranks, and parts on their way, three here and three from here


@dataclass(frozen=True)
class ModelShape:
    """A transformer as memory sees it."""

    name: str
    heads: int
    head_dim: int
    joint_layers: int  # attention over image and text tokens, then an MLP (double blocks)
    parameters: int  # numbers that the weights hold
    parallel_layers: int = 0  # the MLP runs beside the attention (FLUX's single blocks)
    image_layers: int = 0  # second attentions over image tokens alone (the dual layers of SD3.5 Medium)
    mlp_ratio: float = 4.0  # width of the MLP's hidden layer over the model's
    gated_mlp: bool = False  # whether that layer is made of two
    text_tokens: int = 512  # of the longest prompt
    pixels_per_token: int = 16  # of a side: the VAE's factor times the patch
    rows_per_image: int = 1  # batch rows of a call for one image: 2 where guidance puts both halves in one call
    branches: int = 1  # calls in one step: 2 where guidance calls the model twice
    # Tensors of all image tokens that a rank has before the engine cuts them: 3 where the model adds positions to them
    # (what the patches give, the positions, the sum), 1 where they are cut at the first block, 0 where the call's
    # inputs are.
    unsharded_copies: int = 0
    encoders: int = 0  # numbers that the weights of all text encoders hold; 0 where that is not known
    vae: VaeSize | None = None  # what the VAE takes; None where that is not known
    video: Video | None = None  # what the model makes of itself; None for images

    def __post_init__(self) -> None:
        may_be_zero = ("joint_layers", "parallel_layers", "image_layers", "text_tokens", "unsharded_copies", "encoders")
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in may_be_zero else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise UserError(f"model {self.name}: {field.name} {value!r}: give a whole number of at least {least}")
        if not isinstance(self.mlp_ratio, (int, float)) or not self.mlp_ratio > 0:
            raise UserError(f"model {self.name}: mlp_ratio {self.mlp_ratio!r}: give a number above 0")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def image_tokens(self, side: int) -> int:
        """Tokens of a square image of `side` pixels. Raises UserError for sides that patches do not fill."""
        a_side, rest = divmod(side, self.pixels_per_token)
        if rest or side < 1:
            lower, step = max(1, a_side) * self.pixels_per_token, self.pixels_per_token
            raise UserError(
                f"size {side}: {self.name} cuts images into tokens of {step} x {step} pixels; "
                f"use {lower} or {lower + step}"
            )
        return a_side**2

    def video_tokens(self, video: Video) -> int:
        """Tokens of a video, of a model whose VAE is known. Raises UserError for frames and sides that patches do not
        fill."""
        assert self.vae is not None, "what a latent frame is"
        each, side = self.vae.frames, self.pixels_per_token * self.vae.factor // VAE_FACTOR
        sides = ("height", video.height, side, 0), ("width", video.width, side, 0)
        for name, value, step, rest in (("frames", video.frames - 1, each, 1), *sides):
            if value % step:
                makes, lower = f"{step} n{' + 1' * rest}", value // step * step + rest
                raise UserError(f"--{name} {value + rest}: {self.name} makes {makes}: use {lower or step}")
        return (1 + video.frames // each) * (video.height // side) * (video.width // side)

    def segments(self, side: int) -> Segments:
        """Of joint attention: a square image of `side` pixels and the longest prompt. Raises UserError as
        `image_tokens`."""
        return image_and_text(self.image_tokens(side), self.text_tokens)


def shape_of_config(family: Family, config: Mapping[str, Any], parameters: int) -> ModelShape:
    """The shape of a family's transformer from its config."""
    mlp_ratio = config.get("mlp_ratio", 4.0)
    if "ffn_dim" in config:
        mlp_ratio = config["ffn_dim"] / (config["num_attention_heads"] * config["attention_head_dim"])
    return ModelShape(
        name=family.class_name,
        heads=config["num_attention_heads"],
        head_dim=config["attention_head_dim"],
        joint_layers=config["num_layers"],
        parallel_layers=config.get("num_single_layers", 0),
        image_layers=len(config.get("dual_attention_layers") or ()),
        mlp_ratio=mlp_ratio,
        parameters=parameters,
        **family.shape_facts(config),
    )


class Split(NamedTuple):
    """Weights of so many blocks (None: of all) are shared by these ranks, each with a part."""

    ranks: Topology
    layers: int | None

    @classmethod
    def of(cls, split: tuple[str, int | None] | None, topology: Topology) -> Split | None:
        """split: see `Config.split`. topology: of ranks that share a sequence, of whose groups the smallest counts."""
        if split is None:
            return None
        groups = [sharing(topology, split[0], rank) for rank in range(topology.size)]
        ranks = topology.part(min(groups, key=len))
        return cls(ranks, split[1]) if ranks.size > 1 else None


@dataclass(frozen=True)
class Load:
    """What a run puts on the ranks. batch: rows B of one call. state: what is kept between steps; None where that is
    nothing. split: how blocks' weights are shared; None where every rank has all of them."""

    segments: Segments
    batch: int
    itemsize: int = 2
    branches: int = 1
    state: Costs | None = None
    split: Split | None = None
    job: tuple[int, int] = (1, 1)  # ranks and nodes of a whole job, of which those that share a sequence are a part

    def tokens(self, name: str) -> int:
        """Of the segments of this name."""
        return sum(segment.tokens for segment in self.segments if segment.name == name)


KEPT = ("image_cache", "reference_cache", "text_cache", "reconstructions", "in_flight", "step_cache")  # between calls


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. Caches of V-Major: q, k and v of image tokens, the scoring reference, and q, k and v of text
    tokens. reconstructions: of the residual codec or of calls that do not wait, what the ends hold of q, k, v and the
    output. in_flight: of one call of every layer, what was sent or came and the next call takes. step_cache: what
    blocks added at the last call that was computed."""

    weights: int = 0
    activations: int = 0
    image_cache: int = 0
    reference_cache: int = 0
    text_cache: int = 0
    reconstructions: int = 0
    in_flight: int = 0
    step_cache: int = 0
    library: int = 0  # what the library of messages takes for itself (`library_mib` of `Device`)

    @property
    def cache(self) -> int:
        """All that is kept between calls."""
        return sum(getattr(self, name) for name in KEPT)

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.cache + self.library


def add(parts: list[RankMemory]) -> RankMemory:
    return RankMemory(*(sum(getattr(part, field.name) for part in parts) for field in fields(RankMemory)))


def run_cache(shape: ModelShape, topology: Topology, load: Load, mesh: Mesh | None = None) -> list[RankMemory]:
    """Every rank's caches of all layers, layers times branches, and its step cache. Nothing where nothing is kept.
    mesh: of Ulysses and Ring; None is Ulysses alone."""
    state, kept_P = load.state, [Counter[str]() for _ in range(topology.size)]
    mesh = mesh or Mesh.build(topology)
    work = AttentionWork(shape.heads, shape.head_dim, load.segments, load.batch, load.itemsize)
    if state is None:
        return [RankMemory()] * topology.size
    alone = tuple(segment for segment in load.segments if segment.name == IMAGE)
    *of_all, image_layers = coded_layers(shape, state.settings.state_layers)
    for layers, segments in ((sum(of_all), load.segments), (image_layers, alone)):
        if not segments:  # by a plan no token is known to be an image's
            continue
        for group, part, layout in zip(mesh.groups, mesh.parts, mesh.layouts(segments, shape.heads), strict=True):
            of_layer = state.state_bytes(part, layout, work) if part.size > 1 else [{}]  # one alone keeps nothing
            for rank, sizes, L in zip(group, of_layer, layout.rows, strict=True):
                kept_P[rank].update({name: size * layers * load.branches for name, size in sizes.items()})
                if state.settings.step_cache != "none":
                    kept_P[rank]["step_cache"] += load.branches * L * shape.heads * work.cell
    return [RankMemory(**kept) for kept in kept_P]


def coded_layers(shape: ModelShape, state_layers: int | None) -> tuple[int, int, int]:
    """How many joint, parallel and image layers keep something: of `state_layers` in all, those that a model calls
    first. Its dual blocks, the first ones, have a joint and an image layer each."""
    left = shape.joint_layers + shape.parallel_layers + shape.image_layers if state_layers is None else state_layers
    image = min(shape.image_layers, left // 2)
    joint = min(shape.joint_layers, left - image)
    return joint, min(shape.parallel_layers, left - image - joint), image


def activations(shape: ModelShape, mesh: Mesh, load: Load) -> list[int]:
    """Every rank's activations at their peak, where tokens enter or in one layer: an estimate.

    Where tokens enter there are `unsharded_copies` tensors of the whole image, one of which lives on in the first
    layer. In a layer, of the size of the rank's share, there are the streams that a layer keeps, and the largest of:
    attention (q, k, v, send and receive buffers, whole sequences, the output) with the hidden layer of an MLP that runs
    beside it; that layer's output projection, whose input is put together from both; and an MLP that follows (hidden
    layer before and after its activation, and its output). Attention itself is taken to be fused: no S x S matrix. The
    text's embeddings, rotary angles and the model's exit are left out as small.
    """
    attention = (ALONE if mesh.ulysses == 1 else EXCHANGED) + (RING if mesh.ring > 1 else 0)
    if mesh.ring > 1 and mesh.kind != "keys":
        attention += TOKENS if mesh.kind == "token" else streamed(mesh, shape.heads)
    hidden, gates = shape.mlp_ratio, 3 if shape.gated_mlp else 1
    stages = [attention, 1 + max(2, gates) * hidden]
    if shape.parallel_layers:
        fused = 3 if shape.gated_mlp else 1
        stages += [attention + gates * hidden, fused + gates * hidden + 1 + hidden + 1]
    copies, whole, found = STREAMS + max(stages), load.tokens(IMAGE) * shape.width, dict[int, int]()
    kept = whole if shape.unsharded_copies and mesh.topology.size > 1 else 0
    for group, layout in zip(mesh.groups, mesh.layouts(load.segments, shape.heads), strict=True):
        for rank, L, G in zip(group, layout.rows, layout.heads, strict=True):
            share = max(L * shape.width, sum(layout.rows) * G * shape.head_dim)
            count = max(shape.unsharded_copies * whole, kept + copies * share)
            found[rank] = int(count * load.batch * load.itemsize)
    return [found[rank] for rank in range(mesh.topology.size)]


def streamed(mesh: Mesh, heads: int) -> int:
    """Tensors of the size of a rank's share that streaming attention has beside a ring's, without the four blocks that
    it does not pass on."""
    nodes = rounds_of(mesh)[0].shape[0]
    pieces = nodes * min(head_runs(nodes, held) for held in mesh.heads(heads))
    return -(-PIECE * mesh.ring // pieces) + 1 - 4


def size_run(shape: ModelShape, topology: Topology, load: Load, mesh: Mesh | None = None) -> list[RankMemory]:
    """What every rank needs. mesh: None is Ulysses alone. Raises UserError where the ranks outnumber image tokens, or
    those of a Ulysses group heads."""
    mesh = mesh or Mesh.build(topology)
    caches, active = run_cache(shape, topology, load, mesh), activations(shape, mesh, load)
    device, (ranks, nodes) = topology.machine.device, max((topology.size, topology.nodes), load.job)
    library = int(MIB * ((ranks > 1) * device.library_mib + (nodes > 1) * device.across_mib))
    held = {"weights": weights_held(shape, load), "library": library}
    return [replace(one, activations=most, **held) for one, most in zip(caches, active, strict=True)]


def block_parameters(shape: ModelShape) -> list[int]:
    """Numbers of every block's weights, in the model's order: attention, modulation and MLP of each stream. An
    estimate, within 3 % of the published models (`tests/test_memory.py`)."""
    modulation, mlp = 0 if shape.gated_mlp else 3, (3 if shape.gated_mlp else 2) * shape.mlp_ratio
    joint = 2 * (2 * modulation + 4 + mlp) if shape.text_tokens else 8 + mlp  # Wan attends to its text alone
    of_width = [joint] * shape.joint_layers + [modulation + 4 + mlp] * shape.parallel_layers
    return [int(x * shape.width**2) for x in of_width]


def weights_held(shape: ModelShape, load: Load) -> int:
    """Bytes of a rank's weights: of split blocks its part, and two buffers of the largest one."""
    numbers, blocks = shape.parameters, block_parameters(shape)
    if load.split is not None and blocks:
        models = max(1, round(shape.parameters / sum(blocks)))  # Wan 2.2 has two
        some = [blocks[number] for number in split_blocks(len(blocks), load.split.layers)]
        numbers -= models * int(sum(some) * (1 - 1 / load.split.ranks.size) - 2 * max(some))
    return numbers * load.itemsize


def weights_waited_s(shape: ModelShape, load: Load, layers_s: Sequence[float], latencies: Latencies) -> float:
    """Seconds of a call that ranks wait for split weights: a block's parts are under way from where the split block
    before it begins. That tokens use these links as well is left out."""
    numbers, waited = block_parameters(shape), 0.0
    if load.split is None or not numbers:
        return waited
    ranks, layers = load.split
    chosen = split_blocks(len(numbers), layers)
    for before, number in zip([chosen[-1] - len(numbers), *chosen[:-1]], chosen, strict=True):
        arriving_s = alltoall_bound(ranks, numbers[number] * load.itemsize / ranks.size) or 0.0
        waited += max(0.0, latencies.latency_s + arriving_s - sum(layers_s[place] for place in range(before, number)))
    return waited


def largest_batch(shape: ModelShape, topology: Topology, load: Load, memory: int, mesh: Mesh | None = None) -> int:
    """The most images that fit into `memory` bytes on every rank; 0 where one is too many. load.batch plays no part."""
    of_one = size_run(shape, topology, replace(load, batch=shape.rows_per_image), mesh)
    return max(0, min((memory - need.weights - need.library) // (need.activations + need.cache) for need in of_one))


def misfit(need: RankMemory, memory: int) -> str | None:
    """Why a rank's needs exceed `memory` bytes, what is to blame and what helps; None where they fit."""
    if need.total <= memory:
        return None
    parts = {"weights": need.weights, "activations": need.activations, "cache": need.cache, "library": need.library}
    if need.weights > memory:
        blame = "the weights alone do not fit: share them by weights card or node, or use a smaller dtype"
    elif need.weights + need.activations > memory:
        blame = (
            "weights and activations alone do not fit: share weights by weights card or node, or use a smaller batch, "
            "a smaller image or more ranks"
        )
    elif 2 * need.step_cache > need.cache:
        blame = (
            "what the step cache keeps is too much: use a smaller batch, more ranks, or step_cache none, which keeps "
            "nothing"
        )
    elif need.in_flight:
        blame = (
            "what calls keep for the next ones and have in flight is too much: use arrival now, which has nothing in "
            "flight (and with codec none keeps nothing), predictor last with a codec, a smaller batch or more ranks"
        )
    elif need.reconstructions:
        blame = (
            "what the residual codec keeps is too much: use predictor last, which keeps half of what the others do, a "
            "smaller batch, more ranks, or codec none, which keeps nothing"
        )
    else:
        blame = "V-Major's cache is too much: use a smaller batch, more ranks, or preset tapa, which keeps no cache"
    listed = ", ".join(f"{name} {mib(count)}" for name, count in parts.items())
    return f"{mib(need.total)} MiB are needed ({listed}) and {mib(memory)} MiB are there; {blame}"


def check_fits(need: RankMemory, memory: int, where: str) -> None:
    """Raises UserError with figures, blame and remedy where a rank's needs exceed `memory`, in bytes. where: what is
    asked, for the message, e.g. "rank 3 on cpu"."""
    reason = misfit(need, memory)
    if reason is not None:
        raise UserError(f"memory of {where}: {reason}")


def mib(count: float) -> str:
    """Bytes as MiB: whole ones, of less than ten with two decimals."""
    return f"{count / MIB:.0f}" if count >= 10 * MIB else f"{count / MIB:.2f}"

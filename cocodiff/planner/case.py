"""A case to plan: a batch of a model's images, or a video, with some settings on the ranks of a machine.

The commands' options become a case. From it follow its memory (`memory.py`), its time (`layers.py`), and the division
of a job's ranks (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.assemble import AttentionWork, chunking, codec_class, exchange_table, mesh_of
from cocodiff.exchange.codec import Codec
from cocodiff.models.adapter import IMAGE, image_and_text
from cocodiff.models.family import VAE_FACTOR, Family, VaeSize, Video
from cocodiff.planner.decisions import Decisions
from cocodiff.planner.traffic import Latencies
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Segments


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer that decide its memory and time."""

    name: str
    heads: int
    head_dim: int
    joint_layers: int  # layers with attention over image and text tokens, then an MLP (double blocks)
    parameters: int  # elements of all weights
    parallel_layers: int = 0  # layers with the MLP beside the attention (FLUX's single blocks)
    image_layers: int = 0  # second attentions over image tokens alone (the dual layers of SD3.5 Medium)
    mlp_ratio: float = 4.0  # width of the MLP's hidden layer over the model's
    gated_mlp: bool = False  # True if the hidden layer is the product of two
    text_tokens: int = 512  # tokens of the longest prompt
    pixels_per_token: int = 16  # pixels of a token's side: the VAE's factor times the patch
    rows_per_image: int = 1  # batch rows of a call for one image: 2 if guidance puts both halves in one call
    branches: int = 1  # calls in one step: 2 if guidance calls the model twice
    # Tensors of all image tokens on a rank before the engine cuts them: 3 if the model adds positions to them (the
    # patches' output, the positions, the sum), 1 if they are cut at the first block, 0 if the call's inputs are cut.
    unsharded_copies: int = 0
    encoders: int = 0  # elements of the weights of all text encoders; 0 if that is not known
    vae: VaeSize | None = None  # memory of the VAE; None if that is not known
    video: Video | None = None  # default size of the videos that the model makes; None for images

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
        """The channels of a token."""
        return self.heads * self.head_dim

    def image_tokens(self, side: int) -> int:
        """Return the tokens of a square image of `side` pixels. Raise UserError for sides that patches do not fill."""
        a_side, rest = divmod(side, self.pixels_per_token)
        if rest or side < 1:
            lower, step = max(1, a_side) * self.pixels_per_token, self.pixels_per_token
            raise UserError(
                f"size {side}: {self.name} cuts images into tokens of {step} x {step} pixels; "
                f"use {lower} or {lower + step}"
            )
        return a_side**2

    def video_tokens(self, video: Video) -> int:
        """Return the tokens of a video. The VAE must be known. Raise UserError for frames and sides that patches do not
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
        """Return the segments of joint attention: a square image of `side` pixels, the longest prompt. Raise as
        `image_tokens`."""
        return image_and_text(self.image_tokens(side), self.text_tokens)


def shape_of_config(family: Family, config: Mapping[str, Any], parameters: int) -> ModelShape:
    """Return the shape of a family's transformer from its config. parameters: elements of its weights."""
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


def coded_layers(shape: ModelShape, state_layers: int | None) -> tuple[int, int, int]:
    """Return the numbers of joint, parallel and image layers that keep tensors between calls.

    They are the first `state_layers` layers that a model calls (None: all). Its first blocks, the dual ones, have a
    joint and an image layer each.
    """
    left = shape.joint_layers + shape.parallel_layers + shape.image_layers if state_layers is None else state_layers
    image = min(shape.image_layers, left // 2)
    joint = min(shape.joint_layers, left - image)
    return joint, min(shape.parallel_layers, left - image - joint), image


@dataclass(frozen=True)
class Case:
    """A batch on ranks that share its sequence; or on all ranks of a job, until these are divided."""

    shape: ModelShape
    topology: Topology
    config: Config
    segments: Segments  # tokens of one call of the model
    batch: int = 1  # rows of one call
    itemsize: int = 2  # bytes of an element
    branches: int = 1  # calls in a step
    steps: int = 50
    negative: Segments | None = None  # tokens of the last call of a step, if they differ
    stable: float = 0.7  # the fraction of tokens that V-Major does not send, if a threshold decides
    decisions: tuple[Decisions, ...] = ()  # recorded runs of `arrival: adaptive`; default: the shipped ones
    one_peer: bool = False  # True if groups exchange with one peer at a time
    known_mesh: Mesh | None = None  # default: the one that the engine chooses
    job: tuple[int, int] = (1, 1)  # ranks and nodes of the whole job

    @property
    def codec(self) -> Codec:
        """The codec that the settings name, for questions alone."""
        return codec_class(self.config)(self.config)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of Ulysses and Ring. Raises UserError if ranks and heads do not allow the ring, or if `chunks: auto`
        or `exchange: auto` has no measured table."""
        work = AttentionWork(self.shape.heads, self.shape.head_dim)
        mesh = self.known_mesh or mesh_of(self.config, self.topology, work)
        for group in mesh.parts:
            chunking(self.config, group)
        if mesh.ulysses > 1:
            exchange_table(self.config, self.topology)
        return mesh

    @property
    def work(self) -> AttentionWork:
        """One call of joint attention."""
        return AttentionWork(self.shape.heads, self.shape.head_dim, self.segments, self.batch, self.itemsize)

    @property
    def image_only(self) -> Segments:
        """The segments of the image alone."""
        return tuple(segment for segment in self.segments if segment.name == IMAGE)

    @property
    def tile(self) -> int | None:
        """The bytes of memory that a rank has; None if the machine file does not say."""
        return self.topology.machine.device.memory

    @property
    def latencies(self) -> Latencies:
        """The machine's latencies."""
        return Latencies.of(self.topology.machine)

    @property
    def guides(self) -> bool:
        """True with guidance: two calls in a step, or two halves of one call's rows."""
        return self.branches == 2 or self.shape.rows_per_image == 2

    @property
    def calls(self) -> list[Case]:
        """The calls of a step. Calls that cost the same are one case with several branches."""
        if self.negative is None or self.branches == 1:
            return [self]
        last = replace(self, branches=1, segments=self.negative, negative=None)
        return [replace(self, branches=self.branches - 1, negative=None), last]

    @property
    def alike(self) -> Hashable:
        """A key that is equal for cases of equal cost: equal work on ranks that are arranged in the same way. On
        several nodes these begin at the same tile of the first one, and share NICs in the same way too."""
        others = (getattr(self, field.name) for field in fields(self) if field.name != "topology")
        return *others, self.topology.machine, self.topology.relative_places

    def tokens(self, name: str) -> int:
        """Return the number of tokens in the segments called `name`."""
        return sum(segment.tokens for segment in self.segments if segment.name == name)

    def with_settings(self, **settings: Any) -> Case:
        """Return the case with some settings changed."""
        return replace(self, config=self.config.with_(**settings))

    def of_branch(self, branch: int) -> Case:
        """Return the case of the ranks that compute only one branch of guidance."""
        if self.branches == 2:
            segments = self.negative if branch and self.negative else self.segments
            return replace(self, branches=1, segments=segments, negative=None)
        return replace(self, shape=replace(self.shape, rows_per_image=1), batch=self.batch // 2)

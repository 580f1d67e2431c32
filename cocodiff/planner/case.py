"""A case to plan: a batch of a model's images, or a video, by some settings on ranks of a machine.

A case goes from the options of a command to its tables: how much memory it takes (`memory.py`), how long (`layers.py`),
and how the ranks of a job are divided (`choice.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.engine.assemble import AttentionWork, chunking, exchange_table, mesh_of
from cocodiff.models.adapter import IMAGE, image_and_text
from cocodiff.models.family import VAE_FACTOR, Family, VaeSize, Video
from cocodiff.planner.decisions import Decisions
from cocodiff.planner.traffic import Latencies
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Segments


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
        """Return the tokens of joint attention: a square image of `side` pixels, the longest prompt. Raises as
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


def coded_layers(shape: ModelShape, state_layers: int | None) -> tuple[int, int, int]:
    """Return the numbers of joint, parallel and image layers that keep something: of `state_layers` in all, those that
    a model calls first. Its dual blocks, the first ones, have a joint and an image layer each."""
    left = shape.joint_layers + shape.parallel_layers + shape.image_layers if state_layers is None else state_layers
    image = min(shape.image_layers, left // 2)
    joint = min(shape.joint_layers, left - image)
    return joint, min(shape.parallel_layers, left - image - joint), image


@dataclass(frozen=True)
class Case:
    """A batch on ranks that share its sequence, or on all ranks of a job, as long as these are not divided."""

    shape: ModelShape
    topology: Topology
    config: Config
    segments: Segments  # tokens of one call of the model
    batch: int = 1  # rows of one call
    itemsize: int = 2  # bytes of a number
    branches: int = 1  # calls in a step
    steps: int = 50
    negative: Segments | None = None  # tokens of the last call of a step, where they differ
    stable: float = 0.7  # the part of the tokens that stay, where a threshold decides
    decisions: tuple[Decisions, ...] = ()  # recorded runs that say what a controller displaces; default: shipped ones
    one_peer: bool = False  # whether groups exchange with one peer at a time
    known_mesh: Mesh | None = None  # default: the one that the engine chooses
    job: tuple[int, int] = (1, 1)  # ranks and nodes of the whole job

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of Ulysses and Ring. Raises UserError where ranks and heads do not allow the ring that the settings
        ask for, and for `chunks: auto` and `exchange: auto` without a measured table."""
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
        """The image's tokens alone."""
        return tuple(segment for segment in self.segments if segment.name == IMAGE)

    @property
    def tile(self) -> int | None:
        """The bytes of memory that a rank has; None where the machine does not say."""
        return self.topology.machine.device.memory

    @property
    def latencies(self) -> Latencies:
        return Latencies.of(self.topology.machine)

    @property
    def guides(self) -> bool:
        """True with two calls in a step, or two halves of one call's rows."""
        return self.branches == 2 or self.shape.rows_per_image == 2

    @property
    def calls(self) -> list[Case]:
        """The calls of a step; those that take alike are one case of several branches."""
        if self.negative is None or self.branches == 1:
            return [self]
        last = replace(self, branches=1, segments=self.negative, negative=None)
        return [replace(self, branches=self.branches - 1, negative=None), last]

    @property
    def alike(self) -> Hashable:
        """The same for cases that take alike: of the same work, whose ranks sit alike. If those are on several nodes,
        they begin at the same tile of their first one, and share NICs alike."""
        others = (getattr(self, field.name) for field in fields(self) if field.name != "topology")
        return *others, self.topology.machine, self.topology.relative_places

    def tokens(self, name: str) -> int:
        """Return the number of tokens in the segments of this name."""
        return sum(segment.tokens for segment in self.segments if segment.name == name)

    def with_settings(self, **settings: Any) -> Case:
        return replace(self, config=self.config.with_(**settings))

    def of_branch(self, branch: int) -> Case:
        """Return the case of the ranks that compute one branch of guidance alone."""
        if self.branches == 2:
            segments = self.negative if branch and self.negative else self.segments
            return replace(self, branches=1, segments=segments, negative=None)
        return replace(self, shape=replace(self.shape, rows_per_image=1), batch=self.batch // 2)

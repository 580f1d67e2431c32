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
    """The sizes of a transformer that decide its memory and time, from a model's file or config."""

    name: str  # name of the model, for messages
    heads: int  # number of attention heads
    head_dim: int  # channels of a head
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
    # 3 if the model adds positions to them (the patches' output, the positions, the sum), 1 if they are cut at the
    # first block, 0 if the call's inputs are cut.
    unsharded_copies: int = 0  # tensors of all image tokens on a rank before the engine cuts them among ranks
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
        """The number of channels of a token."""
        return self.heads * self.head_dim

    def image_tokens(self, side: int) -> int:
        """Return the number of tokens of a square image. Raise UserError if its side cannot be divided into whole
        patches.

        Args:
            side: pixels of the image's side.
        """
        a_side, rest = divmod(side, self.pixels_per_token)
        if rest or side < 1:
            lower, step = max(1, a_side) * self.pixels_per_token, self.pixels_per_token
            raise UserError(
                f"size {side}: {self.name} cuts images into tokens of {step} x {step} pixels; "
                f"use {lower} or {lower + step}"
            )
        return a_side**2

    def video_tokens(self, video: Video) -> int:
        """Return the number of tokens of a video. Raise UserError if its frames or sides cannot be divided into whole
        patches.

        The sizes of the model's VAE must be known.
        """
        assert self.vae is not None, "what a latent frame is"
        each, side = self.vae.frames, self.pixels_per_token * self.vae.factor // VAE_FACTOR
        sides = ("height", video.height, side, 0), ("width", video.width, side, 0)
        for name, value, step, rest in (("frames", video.frames - 1, each, 1), *sides):
            if value % step:
                makes, lower = f"{step} n{' + 1' * rest}", value // step * step + rest
                raise UserError(f"--{name} {value + rest}: {self.name} makes {makes}: use {lower or step}")
        return (1 + video.frames // each) * (video.height // side) * (video.width // side)

    def segments(self, side: int) -> Segments:
        """Return the text and image segments of joint attention, for a square image and the longest prompt.

        Raise UserError if the image's side cannot be divided into whole patches.

        Args:
            side: pixels of the image's side.
        """
        return image_and_text(self.image_tokens(side), self.text_tokens)


def shape_of_config(family: Family, config: Mapping[str, Any], parameters: int) -> ModelShape:
    """Return the sizes of a transformer from its diffusers config.

    Args:
        family: the model family that the config belongs to.
        config: the transformer's config.
        parameters: number of elements of its weights.
    """
    heads, head_dim, hidden = config["num_attention_heads"], config["attention_head_dim"], config.get("ffn_dim")
    mlp_ratio = config.get("mlp_ratio", 4.0) if hidden is None else hidden / (heads * head_dim)
    layers = {"joint_layers": config["num_layers"], "parallel_layers": config.get("num_single_layers", 0)}
    facts = family.shape_facts(config) | layers | {"image_layers": len(config.get("dual_attention_layers") or ())}
    return ModelShape(family.class_name, heads, head_dim, parameters=parameters, mlp_ratio=mlp_ratio, **facts)


def coded_layers(shape: ModelShape, state_layers: int | None) -> tuple[int, int, int]:
    """Return the numbers of joint, parallel and image layers that keep tensors between calls, for a codec, V-Major or
    displacement.

    They are the first layers that a model calls. Its first blocks, the dual ones, have a joint and an image layer each.

    Args:
        shape: the sizes of the model.
        state_layers: the setting `state_layers`, the number of such layers; None for all.
    """
    left = shape.joint_layers + shape.parallel_layers + shape.image_layers if state_layers is None else state_layers
    image = min(shape.image_layers, left // 2)
    joint = min(shape.joint_layers, left - image)
    return joint, min(shape.parallel_layers, left - image - joint), image


@dataclass(frozen=True)
class Case:
    """A batch of a model's images or a video with some settings, on the ranks that share its sequence; or on all ranks
    of a job, until these are divided."""

    shape: ModelShape  # sizes of the model
    topology: Topology  # the ranks
    config: Config  # the engine's settings
    segments: Segments  # tokens of one call of the model
    batch: int = 1  # batch rows of one call
    itemsize: int = 2  # bytes of an element
    branches: int = 1  # calls of the model in a step: 2 if guidance calls it twice
    steps: int = 50  # denoising steps
    negative: Segments | None = None  # tokens of the last call of a step (of the negative prompt), if they differ
    stable: float = 0.7  # the fraction of tokens that V-Major does not send, if a threshold decides
    decisions: tuple[Decisions, ...] = ()  # recorded runs of `arrival: adaptive`; (): the shipped ones
    one_peer: bool = False  # True if a rank exchanges with one other rank at a time
    known_mesh: Mesh | None = None  # the mesh of Ulysses and Ring; None: the one that the engine chooses
    job: tuple[int, int] = (1, 1)  # (ranks, nodes) of the whole job

    @property
    def codec(self) -> Codec:
        """The codec that the settings name, for questions alone."""
        return codec_class(self.config)(self.config)

    @cached_property
    def mesh(self) -> Mesh:
        """The division of the ranks into Ulysses groups and rings.

        Raises UserError if ranks and heads do not allow the ring, or if `chunks: auto` or `exchange: auto` has no
        measured table.
        """
        work = AttentionWork(self.shape.heads, self.shape.head_dim)
        mesh = self.known_mesh or mesh_of(self.config, self.topology, work)
        for group in mesh.parts:
            chunking(self.config, group)
        if mesh.ulysses > 1:
            exchange_table(self.config, self.topology)
        return mesh

    @property
    def work(self) -> AttentionWork:
        """The sizes of one attention call over image and text tokens."""
        return AttentionWork(self.shape.heads, self.shape.head_dim, self.segments, self.batch, self.itemsize)

    @property
    def image_only(self) -> Segments:
        """The image's segments without the text's, for layers that attend to the image alone; () if none is named
        so."""
        return tuple(segment for segment in self.segments if segment.name == IMAGE)

    @property
    def tile(self) -> int | None:
        """The bytes of memory that each rank's tile has; None if the machine file does not say."""
        return self.topology.machine.device.memory

    @property
    def latencies(self) -> Latencies:
        """The latencies of the machine's links and kernels, in seconds."""
        return Latencies.of(self.topology.machine)

    @property
    def guides(self) -> bool:
        """True if the model runs with classifier-free guidance: as two calls in a step, or as two halves of one call's
        rows."""
        return self.branches == 2 or self.shape.rows_per_image == 2

    @property
    def calls(self) -> list[Case]:
        """The calls of the model in one step, as cases. Calls that cost the same are one case with several
        `branches`."""
        if self.negative is None or self.branches == 1:
            return [self]
        return [self.of_branch(0), self.of_branch(1)]

    @property
    def alike(self) -> Hashable:
        """A hashable key that is equal for cases of equal cost: equal work, on ranks that are arranged in the same way.

        Ranks with equal keys that are on several nodes also begin at the same tile of their first node, and so share
        NICs in the same way.
        """
        others = (getattr(self, field.name) for field in fields(self) if field.name != "topology")
        return *others, self.topology.machine, self.topology.relative_places

    def tokens(self, name: str) -> int:
        """Return the number of tokens in all segments with a name, such as "image"."""
        return sum(segment.tokens for segment in self.segments if segment.name == name)

    def with_settings(self, **settings: Any) -> Case:
        """Return a copy of the case with some of the engine's settings changed."""
        return replace(self, config=self.config.with_(**settings))

    def of_branch(self, branch: int) -> Case:
        """Return the case of ranks that compute only one branch of classifier-free guidance: half of the calls, or half
        of each call's rows.

        Args:
            branch: index of the branch; 1 is the last call of a step.
        """
        if self.branches == 2:
            segments = self.negative if branch and self.negative else self.segments
            return replace(self, branches=1, segments=segments, negative=None)
        return replace(self, shape=replace(self.shape, rows_per_image=1), batch=self.batch // 2)

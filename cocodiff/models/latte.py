"""Latte: videos by blocks that attend within a frame (spatial) and blocks that attend across frames at each place
(temporal), in turns.

No attention is split. Ranks have whole frames for spatial blocks and whole places for temporal ones, and between two
blocks hidden states are transposed (DSP; in slices: ScaleFusion, sections 4.3 and 4.4; coded).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.config.errors import UserError
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import Adapter, Arguments, Forward
from cocodiff.models.checks import replace_forward, signature_of, stateful_hooks
from cocodiff.models.family import Family
from cocodiff.models.plan import Cut, Gather, Plan, ShardedModel
from cocodiff.topology.layout import Segment, Segments

FRAMES, PLACES = "frames", "places"
TOKENS: Plan = {"": {"hidden_states": Cut(2, tokens=FRAMES)}, "proj_out": Gather(tokens=FRAMES)}
SLICES = 4  # slices of each rank's frames and places with `chunks: auto`: the paper's number
# Settings of attention's exchange, with the only value that is allowed since there is none.
WITHOUT = {"selection": "full", "arrival": "now", "step_cache": "none", "compile": False}


class LatteAdapter(Adapter):
    """The adapter of Latte, a model of videos, by which several ranks run its transformer: hidden states are transposed
    between blocks, and no attention is split."""

    plan = TOKENS
    early = 0.5  # the part of a transpose that is sent while the block before it computes: see `Transposes`
    unsupported: ClassVar = {
        "encoder_attention_mask": "encoder_attention_mask is for the rows of all frames, of which a rank has some: "
        "run without it, as LattePipeline does"
    }

    def exchange_settings(self, settings: Any) -> Any:
        for name, value in (WITHOUT | ({"codec": "none"} if settings.codec == "auto" else {})).items():
            if getattr(settings, name) != value:
                raise UserError(
                    f"{name} {getattr(settings, name)} is about attention's exchange, and LatteTransformer3DModel has "
                    f"none: its hidden states are transposed; choose {name} {value}"
                )
        if settings.ring not in (1, "auto"):
            raise UserError(
                f"ring {settings.ring}: attention of LatteTransformer3DModel is not split between ranks; choose ring 1"
            )
        if settings.codec != "none" and settings.chunks not in (1, "auto"):
            raise UserError(
                f"chunks {settings.chunks}: what LatteTransformer3DModel transposes goes whole with codec "
                f"{settings.codec}; choose chunks 1, or codec none"
            )
        return settings.with_(ring=1, chunks=1)

    def heads(self, model: Any) -> tuple[int, int]:
        """Return the number of places (tokens of a frame), which are divided among ranks as heads are in other models,
        and their channels."""
        config = model.config
        return (config.sample_size // config.patch_size) ** 2, config.num_attention_heads * config.attention_head_dim

    def segments(self, model: Any, arguments: Arguments) -> Segments:
        frames, height, width = arguments["hidden_states"].shape[2:]
        patch = model.config.patch_size
        places = (height // patch) * (width // patch)
        return Segment(FRAMES, frames), Segment(PLACES, places, extras_from="back")

    def attach(self, model: nn.Module, host: Any, kernels: Kernels) -> Callable[[], None]:
        if host.size == 1:
            return lambda: None
        for _, hook in stateful_hooks(model.named_modules()):
            raise UserError(
                f"the cache hook {type(hook).__name__} takes blocks' outputs as they are in one process, and on "
                f"several ranks Latte's are on their way: call transformer.disable_cache() first"
            )
        return LatteModel(self.plan, model, host, self.early).attach()


class LatteModel(ShardedModel):
    """A Latte model on several ranks, while the engine is entered.

    Latte makes videos by spatial blocks, which attend within a frame, and temporal ones, which attend across frames. In
    a call that ranks share, spatial blocks take this rank's frames with all their places (tokens), and temporal blocks
    this rank's places in all frames. Each is [B * own, other, C], where C is channels.
    """

    _model: Any

    def __init__(self, plan: Plan, model: Any, host: Any, early: float) -> None:
        super().__init__(plan, model, host)
        self._early, self._signature = early, signature_of(model)
        # Of the current call: the ranks that share it, its batch, and its transposes (None if there are none).
        self._ranks: Any = None
        self._batch = 0
        self._transposes: Any = None
        self._coming: Any = None  # the transpose whose result the next block takes; None before the first block

    def attach(self) -> Callable[[], None]:
        undo = ExitStack()
        undo.callback(super().attach())
        blocks = (False, self._model.transformer_blocks), (True, self._model.temporal_transformer_blocks)
        for temporal, of_kind in blocks:
            for number, block in enumerate(of_kind):
                compute = partial(self._compute, number, temporal, signature_of(block))
                undo.callback(replace_forward(block, compute))
        undo.callback(replace_forward(self._model, self._forward))
        return undo.close

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, with transposes between blocks if several ranks share it. Return the output.

        Args:
            forward: the model's own forward.
            args: the call's arguments by position.
            kwargs: the call's arguments by name.
        """
        ranks, given = self._host.sequence, self._signature.bind(*args, **kwargs).arguments
        latents_BCFHW = given["hidden_states"]
        self._ranks, self._batch = ranks, len(latents_BCFHW)
        if ranks.size > 1:
            check_shares(ranks)
            if given.get("enable_temporal_attentions", True):
                chunks = self._host.config.chunks
                self._check_room(latents_BCFHW)
                slices = SLICES if chunks == "auto" else int(chunks)
                self._transposes = ranks.transposes(FRAMES, PLACES, slices, self._early)
        try:
            return forward(*args, **kwargs)
        finally:
            self._transposes = self._coming = None

    def _check_room(self, latents_BCFHW: Tensor) -> None:
        """Raise UserError if this rank lacks the memory for what codecs keep between calls.

        For two transposes they keep half of what they keep for an attention call with frames as tokens and places as
        heads.

        Args:
            latents_BCFHW: the call's latents, of F frames.
        """
        frames, places = self._ranks.segments
        shape = len(latents_BCFHW), frames.shares(self._ranks.topology)[self._ranks.rank], places.tokens
        x_BRCD = latents_BCFHW.new_empty(1).expand(*shape, LatteAdapter().heads(self._model)[1])
        qkv = LazyQKV(lambda: x_BRCD, lambda: x_BRCD, lambda: x_BRCD, (frames,), places.tokens)
        self._host.check_room(f"{places.tokens} places", math.ceil(len(self._model.transformer_blocks) / 2), qkv)

    def _gather(self, gather: Gather, x: Tensor, name: str) -> Tensor:
        """Return all frames of the model's output, [B * frames, places, C], gathered from this rank's.

        Args:
            gather: the dimension and the name of the tokens.
            x: this rank's frames.
            name: the output's name, for errors.
        """
        return super()._gather(gather, self._split(x), name).flatten(0, 1)

    def _compute(
        self, number: int, temporal: bool, signature: inspect.Signature, forward: Forward, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a block on this rank's frames or places, and transpose its output for the next block. It replaces its
        forward.

        Return a stand-in for the output, or after the last block the output itself. In a call without transposes only
        run the block.

        Args:
            number: the block's number among its kind.
            temporal: True for a temporal block, False for a spatial one.
            signature: of the block's forward.
            forward: the block's own forward.
            args: the call's arguments by position.
            kwargs: the call's arguments by name.
        """
        if self._transposes is None:
            return forward(*args, **kwargs)
        # The model adds temporal positions to a stand-in for the tokens: they are added to the tokens themselves here.
        positions = self._model.temp_pos_embed if temporal and not number else None
        out = self._in_slices(number, temporal, forward, signature.bind(*args, **kwargs).arguments, positions)
        last = temporal and number == len(self._model.temporal_transformer_blocks) - 1
        return self._arrived() if last else out

    def _in_slices(
        self, block: int, temporal: bool, forward: Forward, given: Arguments, positions: Tensor | None
    ) -> Tensor:
        """Run a block on this rank's frames or places slice by slice, and send the result of each slice on.

        Spatial blocks run on this rank's frames, temporal ones on its places. Each slice is waited for before its run.
        Results travel by the transpose to the next block. So the return value is a stand-in for the model to pass on:
        NaN in the shape of the transposed output.

        Args:
            block: the block's number among its kind.
            temporal: True for a temporal block, False for a spatial one.
            forward: the block's own forward.
            given: its arguments by name; `hidden_states` is removed.
            positions: the positions to add to the tokens; None for none.
        """
        rank, (own, other) = self._ranks.rank, self._transposes.grid[:: -1 if temporal else 1]
        layer = "temporal_transformer_blocks" if temporal else "transformer_blocks"
        self._ranks.transport.arrive(f"the transpose of {layer}")
        layer_key = LayerKey(f"{layer}.{block}", self._host.counter.branch)
        coming, leaving = self._coming, self._transposes.transpose("back" if temporal else "forward", layer_key)
        hidden, whole = given.pop("hidden_states"), None
        conditions = {name: self._split(x) for name, x in given.items() if isinstance(x, Tensor)}
        for number in range(own.cuts):
            slice_ = range(number, number + 1)
            rows = own.own(rank, slice_)
            x = self._split(hidden) if coming is None else turned(coming.take(number), temporal)
            x = x[:, rows].flatten(0, 1)
            x = x if positions is None else x + positions.to(x.dtype)
            # The model makes temporal blocks' conditions for all places, and spatial blocks' for this rank's frames.
            where = own.whole(rank, slice_) if temporal else rows
            y = forward(x, **given | {name: of[:, where].flatten(0, 1) for name, of in conditions.items()})
            y = self._split(y)
            if own.cuts > 1:
                whole = y.new_empty(len(y), own.shares[rank], *y.shape[2:]) if whole is None else whole
                whole[:, rows] = y
            leaving.give(turned(y if whole is None else whole, temporal), number)
        self._coming = leaving
        shape = self._batch * sum(own.shares), other.shares[rank], hidden.shape[-1]
        return torch.full_like(hidden[:1, :1, :1], torch.nan).expand(shape)

    def _arrived(self) -> Tensor:
        """Return the last temporal block's output for this rank's frames: [B * places, frames, C]."""
        for number in range(self._transposes.grid.rows.cuts):
            x_BFPC: Tensor = self._coming.take(number)
        return x_BFPC.transpose(1, 2).flatten(0, 1)

    def _split(self, x: Tensor) -> Tensor:
        """Return a view of a tensor [B * n, ...] as [B, n, ...], where B is the batch of the current call."""
        return x.unflatten(0, (self._batch, -1))


def turned(x: Tensor, temporal: bool) -> Tensor:
    """Return [B, frames, places, C] with frames and places exchanged if it is for a temporal block, else unchanged."""
    return x.transpose(1, 2) if temporal else x


def check_shares(ranks: Any) -> None:
    """Raise UserError if a rank would have no frame or no place of a frame.

    Args:
        ranks: the ranks that share the current call, as `host.sequence`.
    """
    frames, places = (sum(ranks.shares(name)) for name in (FRAMES, PLACES))
    if ranks.size > min(frames, places):
        raise UserError(
            f"{ranks.size} ranks share {frames} frames of {places} places, and each needs one of both: use at most "
            f"{min(frames, places)} ranks, or guidance_parallel 2 for twice as many"
        )


FAMILY = Family(
    transformer="diffusers.LatteTransformer3DModel",
    adapter=LatteAdapter(),
    rows_per_image=2,  # classifier-free guidance puts both halves in one call
    unplanned="plan counts what attention exchanges, and its ranks transpose hidden states instead, whose bytes "
    "engine.bytes() tells",
)

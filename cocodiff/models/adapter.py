"""The seam between a model and the engine. An adapter knows one family of transformers and nothing of communication:
which modules attend, how their q, k and v come about, which segments a sequence has, what is sharded where the tokens
enter and gathered where they leave. `docs/models.md` tells how one is written."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cocodiff.attention.strategy import LazyQKV
from cocodiff.config.errors import UserError
from cocodiff.kernels import Kernels
from cocodiff.models.checks import replace_forward
from cocodiff.models.plan import Plan, ShardedModel
from cocodiff.topology.layout import Segment, Segments

IMAGE, TEXT = "image", "text"


def image_segment(tokens: int) -> Segment:
    """An image's tokens change little from step to step, so V-Major may keep some back. Every rank has some."""
    return Segment(IMAGE, tokens, on_every_rank=True, may_stay=True)


def text_segment(tokens: int) -> Segment:
    """A text's tokens: few, and some ranks may have none."""
    return Segment(TEXT, tokens, extras_from="back")


def image_and_text(image_tokens: int, text_tokens: int, text_first: bool = False) -> tuple[Segment, Segment]:
    """Joint attention over both, in the model's order."""
    image, text = image_segment(image_tokens), text_segment(text_tokens)
    return (text, image) if text_first else (image, text)


NOWHERE: Plan = {}
Arguments = dict[str, Any]
Forward = Callable[..., Any]  # of a module, which is its first argument


class Host(Protocol):
    """What runs a model on several ranks, as its attention processors see it: the engine."""

    @property
    def segments(self) -> Segments:
        """Of the model's current call, as the adapter says them."""
        ...

    def attend(self, qkv: LazyQKV, layer: str) -> Tensor:
        """Attention of this rank's rows to all rows: [B, L, H, D]. layer: the name of the module that attends."""
        ...


class AttentionProcessor:
    """What a family's processors are made from. layer: the name of the module that attends."""

    def __init__(self, host: Host, layer: str, kernels: Kernels, replaced: Any) -> None:
        """replaced: the processor that this one stands in for."""
        self._host, self._layer, self._kernels, self._replaced = host, layer, kernels, replaced

    def _attend(self, qkv: LazyQKV) -> Tensor:
        return self._host.attend(qkv, self._layer)


class Adapter:
    """One model family. What most families share stands here; a family overrides what is different."""

    unsupported: ClassVar[dict[str, str]] = {}  # arguments of a call that shards would misread, and why
    plan: Plan = NOWHERE  # where tokens are cut and gathered, by the names of segments
    attention_kwargs = "joint_attention_kwargs"  # the name of the argument that reaches attention processors

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        """Ours for each of diffusers' processors that does nothing but the family's plain attention."""
        return {}

    def blocks(self) -> dict[type, Forward]:
        """Ours in the place of the forward of diffusers' blocks: what the block does, with `LazyQKV.meanwhile` for what
        it computes beside its attention. A block whose forward somebody else has replaced keeps that one."""
        return {}

    def attention_arguments(self, model: Any) -> set[str]:
        """Arguments for attention that may be passed on: the scale of LoRA layers, which diffusers takes out."""
        return {"scale"}

    def check_call(self, model: Any, arguments: Arguments) -> None:
        """Raises UserError for arguments of the model that its shards would misread."""
        for name, reason in self.unsupported.items():
            if arguments.get(name) is not None:
                raise UserError(reason)
        self._check_residuals(arguments, {one.name: one.tokens for one in self.segments(model, arguments)})
        others = sorted(set(arguments.get(self.attention_kwargs) or {}) - self.attention_arguments(model))
        if others:
            raise UserError(
                f"{self.attention_kwargs} ({', '.join(others)}) reach no parallel attention processor: run without them"
            )

    def _check_residuals(self, arguments: Arguments, tokens: Mapping[str, int]) -> None:
        """Lists that are cut where the model is called are a ControlNet's. tokens: of each segment."""
        for name, cut in self.plan.get("", {}).items():
            given = arguments.get(name)
            for x in given if isinstance(given, list | tuple) else ():
                if x.ndim != 3 or x.shape[1] != tokens[cut.tokens]:
                    raise UserError(
                        f"{name} has a tensor of shape {tuple(x.shape)}, where ranks cut [batch, {tokens[cut.tokens]} "
                        f"{cut.tokens} tokens, channels]: give such ones, or run without a ControlNet"
                    )

    def segments(self, model: Any, arguments: Arguments) -> Segments:
        """What the sequence of joint attention consists of in a call of the model, in the model's order, from the
        call's arguments."""
        image, text = arguments["hidden_states"].shape[1], arguments["encoder_hidden_states"].shape[1]
        return image_and_text(image, text, text_first=True)

    def heads(self, model: Any) -> tuple[int, int]:
        """How many heads attention has, and how wide one is: what a mesh is chosen by."""
        return model.config.num_attention_heads, model.config.attention_head_dim

    def exchange_settings(self, settings: Any) -> Any:
        """The settings by which several ranks exchange what they share. Raises UserError for those with which the
        family has no parallel form."""
        return settings

    def called_with(self, arguments: Arguments) -> tuple[Tensor, Any, Tensor | None]:
        """Of a call: what is denoised, its timestep, and the text, as far as there are any."""
        return arguments["hidden_states"], arguments.get("timestep"), arguments.get("encoder_hidden_states")

    def attach(self, model: nn.Module, host: Any, kernels: Kernels) -> Callable[[], None]:
        """Gives every attention module of a model the family's processor, blocks the family's forward, and modules at
        which tokens are cut and gathered their hooks; the returned function puts the old ones back.

        Raises UserError, with the model as it was, where one does something else than the family's plain attention, in
        one process, with torch's own kernels: it would attend to a shard.
        """
        # Module by module, in one walk: `model.set_attn_processor` walks over the whole model three times.
        attending = [(name, module, module.processor) for name, module in attention_modules(model)]
        ours = self.processors()
        shards = ShardedModel(self.plan, model, host) if host.size > 1 else None
        for name, module, before in attending:
            check_plain(name, module, before, ours)
        undo, placed = ExitStack(), list[tuple[str, Any, Any]]()
        for name, module, before in attending:
            module.set_processor(ours[type(before)](host, name, kernels, before))
            placed.append((name, module, module.processor))
            undo.callback(put_back, module, module.processor, before)
        undo.callback(model.register_forward_pre_hook(partial(check_placed, placed), prepend=True).remove)
        forwards = self.blocks()
        for block in [module for module in model.modules() if type(module) in forwards]:
            undo.callback(replace_forward(block, partial(compute_block, block, forwards[type(block)])))
        if shards is not None:
            undo.callback(shards.attach())
        return undo.close


def attention_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that attend, with their names."""
    return [(name, module) for name, module in model.named_modules() if attends(module)]


def attends(module: nn.Module) -> bool:
    return getattr(module, "processor", None) is not None


def put_back(module: Any, own: Any, before: Any) -> None:
    if module.processor is own:  # and not one that somebody has put there since
        module.set_processor(before)


def compute_block(block: nn.Module, ours: Forward, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    is_plain = forward == MethodType(type(block).forward, block)
    return ours(block, *args, **kwargs) if is_plain else forward(*args, **kwargs)


def check_placed(placed: Iterable[tuple[str, Any, Any]], *_: Any) -> None:
    """Raises UserError where a processor of ours is no longer its module's. placed: names, modules, processors."""
    for name, module, own in placed:
        if module.processor is not own:
            raise UserError(
                f"{name}.processor became a {type(module.processor).__name__} inside the `with` block and would attend "
                f"to a shard: load and unload adapters before the block"
            )


def form_of(value: Any) -> Any:
    """What tells calls of a model apart that attend in another way: arguments' shapes, and whatever is no tensor."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, form_of(x)) for name, x in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(form_of, value))
    return value if isinstance(value, bool | int | str | None) else type(value)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a value, in an order that its form tells."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def check_plain(name: str, module: Any, processor: Any, plain: Container[type]) -> None:
    if type(processor) not in plain:
        raise UserError(
            f"{name}.processor is a {type(processor).__name__}, which has no parallel form (plain joint attention "
            f"has): unload the adapter or unfuse the projections that put it there, then parallelize"
        )
    if getattr(processor, "_parallel_config", None) is not None:
        raise UserError(f"{name} is parallel already, by diffusers' own enable_parallelism: load the model anew")
    backend = getattr(processor, "_attention_backend", None)
    if backend is not None and getattr(backend, "value", backend) != "native":
        raise UserError(
            f"{name} uses the attention backend {getattr(backend, 'value', backend)}, which ranks do not: call "
            f"transformer.reset_attention_backend() first"
        )
    if getattr(module, "fused_projections", False):
        raise UserError(f"{name} has fused projections: call transformer.unfuse_qkv_projections() first")

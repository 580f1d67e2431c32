"""The interface between a model and the engine. An adapter knows one family of transformers and nothing of
communication: the modules that attend, the projection of their q, k and v, the segments of a sequence, and the places
where tokens are cut and gathered. `docs/models.md` explains how to write one."""

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
    """Return the segment of an image. Every rank has some of its tokens. They change little from step to step, so
    V-Major may leave some unsent."""
    return Segment(IMAGE, tokens, on_every_rank=True, may_stay=True)


def text_segment(tokens: int) -> Segment:
    """Return the segment of a text. It has few tokens, and some ranks may have none."""
    return Segment(TEXT, tokens, extras_from="back")


def image_and_text(image_tokens: int, text_tokens: int, text_first: bool = False) -> tuple[Segment, Segment]:
    """Return the segments of joint attention over an image and a text, in the model's order."""
    image, text = image_segment(image_tokens), text_segment(text_tokens)
    return (text, image) if text_first else (image, text)


NOWHERE: Plan = {}
Arguments = dict[str, Any]
Forward = Callable[..., Any]  # a module's forward, with the module as its first argument


class Host(Protocol):
    """The engine, as attention processors see it: it runs a model on several ranks."""

    @property
    def segments(self) -> Segments:
        """The segments of the model's current call, from the adapter."""
        ...

    def attend(self, qkv: LazyQKV, layer: str) -> Tensor:
        """Return attention of this rank's rows to all rows: [B, L, H, D]. layer: name of the module that attends."""
        ...


class AttentionProcessor:
    """The base of the families' attention processors."""

    def __init__(self, host: Host, layer: str, kernels: Kernels, replaced: Any) -> None:
        """Stand in for the processor `replaced`. layer: name of the module that attends."""
        self._host, self._layer, self._kernels, self._replaced = host, layer, kernels, replaced

    def _attend(self, qkv: LazyQKV) -> Tensor:
        return self._host.attend(qkv, self._layer)


class Adapter:
    """One model family's behaviour in parallel. The defaults suit most families; a family overrides what differs."""

    unsupported: ClassVar[dict[str, str]] = {}  # arguments that are wrong for a rank's part of the tokens: the reasons
    # by name of module, the cuts of its arguments and outputs into ranks' tokens, and gathers: see `models.plan`
    plan: Plan = NOWHERE
    attention_kwargs = "joint_attention_kwargs"  # the argument that is passed on to attention processors

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        """Return our processor for each of diffusers' processors that computes just the family's plain attention."""
        return {}

    def blocks(self) -> dict[type, Forward]:
        """Return our forward for some of diffusers' classes of blocks. It computes the same, and gives
        `LazyQKV.meanwhile` the work beside attention. A block whose forward was replaced by others keeps that one."""
        return {}

    def attention_arguments(self, model: Any) -> set[str]:
        """Return the names of arguments that may be passed on to attention: the scale of LoRA layers, which diffusers
        removes."""
        return {"scale"}

    def check_call(self, model: Any, arguments: Arguments) -> None:
        """Raise UserError for arguments of a call that would be wrong for a rank's part of the tokens."""
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
        """Raise UserError for a ControlNet's residuals that cannot be cut. They are the lists that the plan cuts at the
        model's call. tokens: number of each segment."""
        for name, cut in self.plan.get("", {}).items():
            given = arguments.get(name)
            for x in given if isinstance(given, list | tuple) else ():
                if x.ndim != 3 or x.shape[1] != tokens[cut.tokens]:
                    raise UserError(
                        f"{name} has a tensor of shape {tuple(x.shape)}, where ranks cut [batch, {tokens[cut.tokens]} "
                        f"{cut.tokens} tokens, channels]: give such ones, or run without a ControlNet"
                    )

    def segments(self, model: Any, arguments: Arguments) -> Segments:
        """Return the segments of joint attention in a call of the model, in the model's order, from the call's
        arguments."""
        image, text = arguments["hidden_states"].shape[1], arguments["encoder_hidden_states"].shape[1]
        return image_and_text(image, text, text_first=True)

    def heads(self, model: Any) -> tuple[int, int]:
        """Return the number of attention heads and the channels of a head, by which a mesh is chosen."""
        return model.config.num_attention_heads, model.config.attention_head_dim

    def exchange_settings(self, settings: Any) -> Any:
        """Return the settings for an exchange between several ranks. Raise UserError for those without a parallel form
        here."""
        return settings

    def called_with(self, arguments: Arguments) -> tuple[Tensor, Any, Tensor | None]:
        """Return the sample that a call denoises, its timestep, and the text. The latter two may be None."""
        return arguments["hidden_states"], arguments.get("timestep"), arguments.get("encoder_hidden_states")

    def attach(self, model: nn.Module, host: Any, kernels: Kernels) -> Callable[[], None]:
        """Make a model parallel: replace the processor of every attention module and the forward of some blocks, and
        put hooks where tokens are cut and gathered. Return a function that undoes this.

        Raise UserError, with the model as it was, if a module does anything else than the family's plain attention by
        torch's own kernels in one process: it would attend to this rank's tokens alone.
        """
        # Module by module in one pass: `model.set_attn_processor` makes three passes over the whole model.
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
    """Return the modules that attend, with their names."""
    return [(name, module) for name, module in model.named_modules() if attends(module)]


def attends(module: nn.Module) -> bool:
    """Return True if a module has an attention processor."""
    return getattr(module, "processor", None) is not None


def put_back(module: Any, own: Any, before: Any) -> None:
    """Give a module its former processor, unless its processor is no longer ours."""
    if module.processor is own:  # else a caller has replaced it since
        module.set_processor(before)


def compute_block(block: nn.Module, ours: Forward, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run our forward of a block, or the block's own if that is not its class's."""
    is_plain = forward == MethodType(type(block).forward, block)
    return ours(block, *args, **kwargs) if is_plain else forward(*args, **kwargs)


def check_placed(placed: Iterable[tuple[str, Any, Any]], *_: Any) -> None:
    """Raise UserError if a module's processor is no longer ours. placed: name, module and processor of each."""
    for name, module, own in placed:
        if module.processor is not own:
            raise UserError(
                f"{name}.processor became a {type(module.processor).__name__} inside the `with` block and would attend "
                f"to a shard: load and unload adapters before the block"
            )


def form_of(value: Any) -> Any:
    """Return a key for the form of a call: shapes and dtypes of tensors, and values of other arguments. Calls of one
    form attend in the same way."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, form_of(x)) for name, x in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(form_of, value))
    return value if isinstance(value, bool | int | str | None) else type(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in an order that depends only on its structure."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def check_plain(name: str, module: Any, processor: Any, plain: Container[type]) -> None:
    """Raise UserError if a module's processor or projections do not compute plain attention. plain: supported
    processors."""
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

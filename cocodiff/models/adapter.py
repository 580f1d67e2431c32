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
    """Return the description of an image's tokens as a part (segment) of the sequence. Every rank has some of them.

    They change little from step to step, so V-Major, a codec, may leave some unsent.

    Args:
        tokens: their number on all ranks together.
    """
    return Segment(IMAGE, tokens, on_every_rank=True, may_stay=True)


def text_segment(tokens: int) -> Segment:
    """Return the description of a text's tokens as a part (segment) of the sequence.

    They are few, and some ranks may have none. If they do not divide evenly, ranks at the back of the order in which
    ranks get tokens have one more; of image tokens those at the front.

    Args:
        tokens: their number on all ranks together.
    """
    return Segment(TEXT, tokens, extras_from="back")


def image_and_text(image_tokens: int, text_tokens: int, text_first: bool = False) -> tuple[Segment, Segment]:
    """Return the two parts (segments) of a sequence for joint attention over an image and a text, in the model's order.

    The numbers of tokens are those on all ranks together.
    """
    image, text = image_segment(image_tokens), text_segment(text_tokens)
    return (text, image) if text_first else (image, text)


NOWHERE: Plan = {}
Arguments = dict[str, Any]
Forward = Callable[..., Any]  # a module's forward, with the module as its first argument


class Host(Protocol):
    """The engine, as attention processors use it. It runs a model on several ranks."""

    @property
    def segments(self) -> Segments:
        """The parts of the sequence (such as image and text) in the model's current call, as the adapter has named
        them."""
        ...

    def attend(self, qkv: LazyQKV, layer: str) -> Tensor:
        """Return attention of this rank's tokens to the tokens of all ranks: [B, L, H, D].

        Args:
            qkv: this rank's queries, keys and values, computed when they are asked for.
            layer: name of the module that attends.
        """
        ...


class AttentionProcessor:
    """The base of the attention processors that replace diffusers' own in a model that several ranks run.

    They project q, k and v of this rank's tokens, and have the engine compute attention over all ranks' tokens.
    """

    def __init__(self, host: Host, layer: str, kernels: Kernels, replaced: Any) -> None:
        """Stand in for a processor of diffusers.

        Args:
            host: the engine.
            layer: name of the module that attends.
            kernels: the operations to compute with.
            replaced: the processor that this one stands in for.
        """
        self.host, self.layer, self.kernels, self.replaced = host, layer, kernels, replaced

    def attend(self, qkv: LazyQKV) -> Tensor:
        """Return the attention of this rank's queries to all ranks' tokens, [B, L, H, D], as the engine computes it.

        Args:
            qkv: functions that project q, k and v of this rank's tokens.
        """
        return self.host.attend(qkv, self.layer)


class Adapter:
    """The description of one family of transformers, by which several ranks run them: attention to replace, tokens to
    cut.

    The defaults suit most families; a family overrides what differs.
    """

    unsupported: ClassVar[dict[str, str]] = {}  # arguments that are wrong for a rank's part of the tokens: the reasons
    # by name of module; see `models.plan`
    plan: Plan = NOWHERE  # where tokens are cut into each rank's own, and gathered again
    attention_kwargs = "joint_attention_kwargs"  # the argument that is passed on to attention processors

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        """Return, for each class of diffusers' attention processors that this family supports, our class that replaces
        it.

        Diffusers' class has to compute just the family's plain attention.
        """
        return {}

    def blocks(self) -> dict[type, Forward]:
        """Return, for some of diffusers' classes of transformer blocks, a function that replaces the block's forward.

        It computes the same, but leaves work beside attention to `LazyQKV.meanwhile`, which runs while messages are
        sent. A block whose forward was replaced by others keeps that one.
        """
        return {}

    def attention_arguments(self, model: Any) -> set[str]:
        """Return the names of entries of `attention_kwargs`, a call's argument, that may be passed on to attention: the
        scale of LoRA layers, which diffusers removes."""
        return {"scale"}

    def check_call(self, model: Any, arguments: Arguments) -> None:
        """Raise UserError if arguments of a call of the model would give wrong results on a part of the tokens."""
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
        """Raise UserError if a ControlNet's residuals, given as arguments of a call, cannot be cut into each rank's
        tokens.

        They are the lists of tensors that the plan cuts at the model's call.

        Args:
            arguments: those of the call, by name.
            tokens: number of tokens of each segment (image, text), by its name.
        """
        for name, cut in self.plan.get("", {}).items():
            given = arguments.get(name)
            for x in given if isinstance(given, list | tuple) else ():
                if x.ndim != 3 or x.shape[1] != tokens[cut.tokens]:
                    raise UserError(
                        f"{name} has a tensor of shape {tuple(x.shape)}, where ranks cut [batch, {tokens[cut.tokens]} "
                        f"{cut.tokens} tokens, channels]: give such ones, or run without a ControlNet"
                    )

    def segments(self, model: Any, arguments: Arguments) -> Segments:
        """Return the parts of the sequence that joint attention covers in a call of the model, in the model's order,
        with their numbers of tokens.

        Args:
            arguments: those of the call, by name.
        """
        image, text = arguments["hidden_states"].shape[1], arguments["encoder_hidden_states"].shape[1]
        return image_and_text(image, text, text_first=True)

    def heads(self, model: Any) -> tuple[int, int]:
        """Return the number of attention heads and the channels of a head. The division of ranks is chosen by them."""
        return model.config.num_attention_heads, model.config.attention_head_dim

    def exchange_settings(self, settings: Any) -> Any:
        """Return the settings with which several ranks run this family, which may differ from the given ones.

        Raise UserError for settings without a parallel form here. The default returns the given ones.
        """
        return settings

    def called_with(self, arguments: Arguments) -> tuple[Tensor, Any, Tensor | None]:
        """Return from a call's arguments the sample that it denoises, its timestep, and the text. The latter two may be
        None."""
        return arguments["hidden_states"], arguments.get("timestep"), arguments.get("encoder_hidden_states")

    def attach(self, model: nn.Module, host: Any, kernels: Kernels) -> Callable[[], None]:
        """Make a model parallel: replace the processor of every attention module and the forward of some blocks, and
        put hooks where tokens are cut and gathered. Return a function that undoes this.

        Raise UserError, with the model as it was, if a module does anything else than the family's plain attention by
        torch's own kernels in one process: it would attend to this rank's tokens alone.

        Args:
            host: the engine.
            kernels: the operations to compute with.
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
    """Return the name and module of every module in a model that has an attention processor."""
    return [(name, module) for name, module in model.named_modules() if attends(module)]


def attends(module: nn.Module) -> bool:
    """Return True if a module has an attention processor."""
    return getattr(module, "processor", None) is not None


def put_back(module: Any, own: Any, before: Any) -> None:
    """Give an attention module its former processor again, unless someone has replaced ours since.

    Args:
        own: our processor, which was put there.
        before: the former one.
    """
    if module.processor is own:  # else a caller has replaced it since
        module.set_processor(before)


def compute_block(block: nn.Module, ours: Forward, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run our forward of a transformer block; or the block's own, if others have replaced that.

    Args:
        block: the block.
        ours: our function, called with the block first.
        forward: the block's forward as it is.
        args: the call's arguments by position.
        kwargs: the call's arguments by name.
    """
    is_plain = forward == MethodType(type(block).forward, block)
    return ours(block, *args, **kwargs) if is_plain else forward(*args, **kwargs)


def check_placed(placed: Iterable[tuple[str, Any, Any]], *_: Any) -> None:
    """Raise UserError if a module's attention processor is no longer the one that was put there.

    It is a hook that runs before each call of the model.

    Args:
        placed: name, module and our processor of each.
    """
    for name, module, own in placed:
        if module.processor is not own:
            raise UserError(
                f"{name}.processor became a {type(module.processor).__name__} inside the `with` block and would attend "
                f"to a shard: load and unload adapters before the block"
            )


def call_key(value: Any) -> Any:
    """Return a key for the form of a call's arguments: shapes and dtypes of tensors, and values of other arguments.

    Calls with equal keys attend in the same way, so that what was found in the first of them holds for all.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, call_key(x)) for name, x in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(call_key, value))
    return value if isinstance(value, bool | int | str | None) else type(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts, in an order that depends only on the structure."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def check_plain(name: str, module: Any, processor: Any, plain: Container[type]) -> None:
    """Raise UserError if an attention module computes anything else than plain attention.

    Args:
        name: the module's name, for the error.
        module: the module, whose projections must not be fused; None to not check that.
        processor: its processor.
        plain: the supported classes of processors.
    """
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

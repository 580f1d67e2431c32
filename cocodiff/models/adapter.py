"""The seam between a model and the engine. An adapter knows one family of transformers and nothing of communication:
which modules attend, how their q, k and v come about, where text and image tokens sit, what is sharded where the
tokens enter and gathered where they leave. `docs/new-model.md` tells how one is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from cocodiff.attention.strategy import LazyQKV
from cocodiff.errors import UserError


@dataclass(frozen=True)
class Tokens:
    """Tokens of the current model call, over all ranks."""

    image: int
    text: int


class Shard(Protocol):
    """This rank's tokens of the current call, cut out of all tokens along a dimension."""

    def image(self, whole: Tensor, dim: int = 1) -> Tensor: ...

    def text(self, whole: Tensor, dim: int = 1) -> Tensor: ...


Attend = Callable[[LazyQKV, str], Tensor]  # (q, k and v of this rank, layer name) -> out_BLHD
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Hook:
    """Where tokens are cut: a module, and what becomes of the arguments it is called with or of its output."""

    module: nn.Module
    arguments: Callable[[Arguments], Arguments] | None = None
    output: Callable[[Any], Any] | None = None


class Adapter(Protocol):
    """One model family."""

    def matches(self, model: nn.Module) -> bool: ...

    def check_call(self, arguments: Arguments) -> None:
        """Raises UserError for arguments of the model that its shards would misread."""
        ...

    def tokens(self, model: nn.Module, arguments: Arguments) -> Tokens:
        """How many tokens a call of the model has, from its arguments."""
        ...

    def hooks(self, model: nn.Module, shard: Shard) -> Iterable[Hook]:
        """Where image tokens, text tokens and their rotary angles become this rank's own."""
        ...

    def image_exit(self, model: nn.Module) -> nn.Module:
        """The module whose output are the last image tokens [B, L, C]: gathered there."""
        ...

    def processors(self, model: nn.Module, attend: Attend, tokens: Callable[[], Tokens]) -> dict[str, Any]:
        """Our processor for each of the model's attention modules, by diffusers' processor name.

        Raises UserError for a processor that does something else than the family's plain attention.
        """
        ...


def check_processors(model: Any, plain: tuple[type, ...]) -> None:
    """Every attention module must do the family's plain attention, in one process, with torch's own kernels."""
    for name, processor in model.attn_processors.items():
        if type(processor) not in plain:
            raise UserError(
                f"{name} is a {type(processor).__name__}, which has no parallel form (plain joint attention has): "
                f"unload the adapter or unfuse the projections that put it there, then parallelize"
            )
        if getattr(processor, "_parallel_config", None) is not None:
            raise UserError(f"{name} is parallel already, by diffusers' own enable_parallelism: load the model anew")
        backend = getattr(processor, "_attention_backend", None)
        if backend is not None and getattr(backend, "value", backend) != "native":
            raise UserError(
                f"{name} uses the attention backend {getattr(backend, 'value', backend)}, which ranks do not: call "
                f"transformer.reset_attention_backend() first"
            )
    for name, module in model.named_modules():
        if getattr(module, "fused_projections", False):
            raise UserError(f"{name} has fused projections: call transformer.unfuse_qkv_projections() first")


def refuse(arguments: Arguments, reasons: dict[str, str]) -> None:
    """Raises UserError with the reason for the first of the named arguments that is given."""
    for name, reason in reasons.items():
        if arguments.get(name) is not None:
            raise UserError(reason)


def check_attention_kwargs(arguments: Arguments, name: str) -> None:
    """Of a call's attention arguments only the scale of LoRA layers, which diffusers takes out, is ours to pass on."""
    others = sorted(set(arguments.get(name) or {}) - {"scale"})
    if others:
        raise UserError(f"{name} ({', '.join(others)}) reach no parallel attention processor: run without them")

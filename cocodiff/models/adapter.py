"""The seam between a model and the engine. An adapter knows one family of transformers and nothing of communication:
which modules attend, how their q, k and v come about, where text and image tokens sit, what is sharded where the
tokens enter and gathered where they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from cocodiff.attention.strategy import LazyQKV


@dataclass(frozen=True)
class Tokens:
    """Tokens of the current model call, over all ranks."""

    image: int
    text: int


Attend = Callable[[LazyQKV, str], Tensor]  # (q, k and v of this rank, layer name) -> out_BLHD


class Adapter(Protocol):
    """One model family."""

    def matches(self, model: nn.Module) -> bool: ...

    def processors(self, model: nn.Module, attend: Attend, tokens: Callable[[], Tokens]) -> dict[str, Any]:
        """Our processor for each of the model's attention modules, by diffusers' processor name.

        Raises UserError for a processor that does something else than the family's plain attention.
        """
        ...

    def image_entry(self, model: nn.Module) -> nn.Module:
        """The module whose output are the image tokens [B, S, C]: sharded there."""
        ...

    def text_entry(self, model: nn.Module) -> nn.Module:
        """The module whose output are the text tokens [B, S, C]: sharded there."""
        ...

    def image_exit(self, model: nn.Module) -> nn.Module:
        """The module whose output are the last image tokens [B, L, C]: gathered there."""
        ...

    def check_call(self, arguments: dict[str, Any]) -> None:
        """Raises UserError for call arguments that the sharded model would misread."""
        ...

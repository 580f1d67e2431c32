"""Models and calls of them whose numbers of heads, tokens and branches fit no number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import FAMILIES

STEPS = 4


@dataclass(frozen=True)
class Case:
    """A model and a call of it: an image grid of height x width tokens, `text` text tokens."""

    heads: int
    height: int
    width: int
    text: int
    batch: int = 1
    dual: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    family: str = "sd3"

    def model(self) -> Any:
        extra = {"dual": self.dual} if self.dual else {}
        return FAMILIES[self.family][0](self.heads, **extra).to(self.dtype)

    def inputs(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Values that are exact in the case's dtype, so that every precision computes on the same ones."""
        rounded = FAMILIES[self.family][1](self.batch, self.height, self.width, self.text, self.dtype)
        wanted = dtype or self.dtype
        kept = ("img_ids", "txt_ids", "img_shapes", "encoder_hidden_states_mask")
        return {name: value if name in kept else value.to(wanted) for name, value in rounded.items()}


def denoise(model: Any, inputs: dict[str, Any], *modes: Any) -> torch.Tensor:
    """The model's outputs over four steps of an input that moves. modes: of each step the class of a context manager in
    which it is called."""
    outputs = []
    for step, mode in enumerate(modes or (nullcontext,) * STEPS):
        moved = {
            "hidden_states": inputs["hidden_states"] * (1 + 0.1 * step),
            "timestep": torch.full_like(inputs["timestep"], 0.9 - 0.2 * step),
        }
        with mode():
            outputs.append(model(**inputs | moved)[0].clone())
    return torch.stack([output.detach() for output in outputs])

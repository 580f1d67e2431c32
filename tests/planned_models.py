"""Random transformers of classes that run by a plan: few layers and narrow heads, the real numbers of heads, and tokens
that no number of ranks divides. `planned_models.yaml` has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tiny_models import small
from torch import Tensor
from torch.utils import _pytree as pytree


class Planned(NamedTuple):
    """A model and its call; the fields are explained in the file. Inputs that are functions are called with a random
    generator."""

    name: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    in_double: bool = True

    def variant(self, inputs: dict[str, Any], **config: Any) -> Planned:
        return self._replace(inputs=self.inputs | inputs, config=self.config | config)

    def model(self) -> Any:
        torch.manual_seed(0)
        model = small(self.name, self.config).eval()
        for parameter in model.parameters():  # some start at zero, and what they multiply would not be seen
            if parameter.numel() and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    def call(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return cast(pytree.tree_map_only(partial, lambda draw: draw(generator=generator), self.inputs), dtype)


def cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy, whose real numbers are of a dtype."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype, copy=True) if x.is_floating_point() else x.clone(), call)


def noise(*shape: int) -> Callable[..., Tensor]:
    return partial(torch.randn, *shape)


def mask(tokens: int, *lengths: int) -> Tensor:
    """Each row's first tokens are its text."""
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()


def grid(text: int, *sizes: int) -> Tensor:
    """Places of text, which are zero, and of a grid."""
    return torch.cat([torch.zeros(text, len(sizes)), torch.cartesian_prod(*map(torch.arange, sizes)).float()])


MAKERS: dict[str, Callable[..., Any]] = {  # by the tags of the file, of what draws tensors and of tensors
    "!noise": noise,
    "!whole": lambda below, *shape: partial(torch.randint, 0, below, shape),
    "!tensor": lambda *values: torch.tensor(values),
    "!range": torch.arange,
    "!zeros": torch.zeros,
    "!grid": grid,
}


class Loader(yaml.SafeLoader):
    def construct_made(self, node: yaml.SequenceNode) -> Any:
        return MAKERS[node.tag](*self.construct_sequence(node, deep=True))


for tag in MAKERS:
    Loader.add_constructor(tag, Loader.construct_made)
RECORDS = yaml.load(Path(__file__).with_suffix(".yaml").read_text(), Loader)


def planned(name: str) -> Planned:
    record = RECORDS[name]
    like = planned(record["as"]) if "as" in record else Planned("", {}, {}, record.get("in_double", True))
    own = like.variant(record.get("inputs", {}), **record.get("config", {}))
    return own._replace(name=record.get("kind", like.name))


PLANNED = {name: planned(name) for name in RECORDS}

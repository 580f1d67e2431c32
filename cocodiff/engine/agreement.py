"""Whether all ranks call their transformers with the same inputs: only then is what they compute one image.

Each value is compared by its form in words and by a 64-bit digest of its tensors' bits, computed where these lie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocodiff.comm.transport import Transport
from cocodiff.config.errors import UserError
from cocodiff.config.grouping import by_key
from cocodiff.kernels.device import digest
from cocodiff.models.adapter import tensors_in

WHOLE_MODEL = 2**20  # numbers up to which a model's weights are compared whole
SAMPLED = 2**10  # numbers of each tensor of a larger model
ADAPTER_SETTINGS = ("scaling", "scale", "active_adapters", "disable_adapters")  # of peft's layers and IP-Adapters
NAMED_RANKS = 8  # in an error; of more only the number
SHOWN_VALUES = 4  # of a tensor, in an error


class Compared(NamedTuple):
    """A value that ranks call with. told: its name, form and bits, which are compared. words: for the error, should
    another rank have another one."""

    told: tuple[str, str, int]
    words: str


def check_agreement(values: dict[str, Any], transport: Transport, at: str, wandering: Sequence[str] = ()) -> None:
    """Compare what ranks call with. All ranks call it and wait for each other. values: tensors, and numbers, texts and
    containers of them, by the same names on every rank. at: the name of this comparison. wandering: operations that
    give other bits when repeated, on some rank. Raises UserError on every rank, which names what differs and the ranks
    that have something else than most."""
    own = [Compared((name, form(value), _bits(value)), described(value)) for name, value in values.items()]
    message = transport.over_all(own, disagreement, at)
    if message is not None:
        repeated = f"; {', '.join(wandering)} differ when repeated here: send one rank's to all" * bool(wandering)
        raise UserError(message + repeated)


def disagreement(of_ranks: Sequence[Sequence[Compared]]) -> str | None:
    """The line that says who differs, in what rank 0's names tell; None where nobody does."""
    columns = zip_longest(*of_ranks, fillvalue=Compared(("", "", 0), ""))
    differing = [column for column in columns if len({one.told for one in column}) > 1]
    if not differing:
        return None
    names = [column[0].told[0] for column in differing]
    first = differing[0]
    count = Counter(one.told for one in first)
    usual = max(first, key=lambda one: count[one.told])  # rank 0's where as many have another
    others = [rank for rank, one in enumerate(first) if one.told != usual.told]
    ranks = ", ".join(map(str, others[:NAMED_RANKS])) + (", ..." if len(others) > NAMED_RANKS else "")
    other, most = first[others[0]].words, usual.words
    how = f"{other} instead of {most}" if other != most else f"{most} with other values"
    return (
        f"{len(others)} of {len(of_ranks)} ranks ({ranks}) call the transformer with another {', '.join(names)} than "
        f"the rest (on rank {others[0]} {names[0]} is {how}): give every rank the same inputs, seeds, weights and "
        f"settings"
    )


def _bits(value: Any) -> int:
    """The digest of the tensors of a value; it waits for their device."""
    return sum(int(digest(x)) * (2 * number + 1) for number, x in enumerate(tensors_in(value))) % 2**63


def parts_of(pipe: Any) -> dict[str, Any]:
    """Return what computes beside the transformers, by name: the classes, settings and weights of a pipeline's VAE and
    scheduler. What its prompt encoders have computed comes with the transformer's arguments."""
    found: dict[str, Any] = {}
    for name in ("vae", "scheduler"):
        part = getattr(pipe, name, None)
        found |= {name: type(part).__name__, f"digest of {name}": isinstance(part, nn.Module) and weights_digest(part)}
        settings = dict(getattr(part, "config", None) or {})
        found |= {f"{name}.{key}": value for key, value in settings.items() if not key.startswith("_")}
        found |= {f"{name}.{key}": getattr(part, key, None) for key in ("timesteps", "sigmas")}
    return found


def weights_digest(model: nn.Module, blocks: Sequence[Any] = ()) -> str:
    """Return a model's parameters and buffers in one word, with the strength of its adapters: ranks whose weights
    differ, by adapters that each of them initialised at random for instance, would make one mixed image. blocks: whose
    `facts` stand for their `parameters`. It waits for the device."""
    apart = {id(x) for block in blocks for x in block.parameters}
    stored = chain(model.named_parameters(), model.named_buffers())
    adapters = [(name, *(form(getattr(m, of, None)) for of in ADAPTER_SETTINGS)) for name, m in model.named_modules()]
    told = [facts_of((name, x) for name, x in stored if id(x) not in apart), adapters, [one.facts for one in blocks]]
    return blake2b(repr(told).encode(), digest_size=8).digest()[::-1].hex()


def facts_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return names, forms and bits of tensors, of many numbers samples: of every tensor SAMPLED, evenly spread. Tensors
    that stand in for others (quantised, sharded or offloaded ones) are left out."""
    plain = [(name, x.data) for name, x in tensors if type(x.data) is Tensor and not x.is_meta and x.numel()]
    each = SAMPLED if sum(x.numel() for _, x in plain) > WHOLE_MODEL else WHOLE_MODEL
    sampled = by_key(((x.dtype, x.device), x.flatten()[:: -(-x.numel() // each)]) for _, x in plain)
    bits = [int(digest(torch.cat(numbers))) for numbers in sampled.values()]
    return f"{[(name, form(x)) for name, x in plain]} {bits}"


def form(value: Any) -> str:
    """A value in words, without what is in its tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {form(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(form, value)) + "]"
    plain = value is None or isinstance(value, bool | int | float | complex | str)
    return repr(value) if plain else type(value).__name__  # others' texts may hold addresses, which differ


def described(value: Any) -> str:
    """A value's form, and the values of a tensor that has few."""
    if isinstance(value, Tensor) and value.numel() <= SHOWN_VALUES:
        return f"{form(value)} {value.flatten().tolist()}"
    return form(value)
